"""`outboxq queues`."""

from typing import Annotated

import typer

from outboxq.cli.options import DEFAULT_SCHEMA, AsJson, DatabaseUrl, Schema

app = typer.Typer(help="List, pause and resume queues.", no_args_is_help=True, rich_markup_mode=None)

Names = Annotated[list[str], typer.Argument(metavar="NAME", show_default=False)]


@app.command("list")
def list_queues(as_json: AsJson = False, schema: Schema = DEFAULT_SCHEMA, database_url: DatabaseUrl = None) -> None:
    """List every queue that has a setting, a job or a dead letter.

    \b
    Example:
      outboxq queues list
    """
    from outboxq import queues
    from outboxq.cli.database import open_database
    from outboxq.cli.output import print_json, print_rows

    with open_database(database_url, schema) as begin, begin() as connection:
        found = queues.list_queues(connection)
    if as_json:
        print_json({"queues": found})
    else:
        print_rows(("queue", "paused_at"), found)


@app.command("pause")
def pause(
    names: Names, as_json: AsJson = False, schema: Schema = DEFAULT_SCHEMA, database_url: DatabaseUrl = None
) -> None:
    """Keep relays from claiming jobs of these queues.

    What runs already goes on; new jobs are still taken in. A queue may be paused before its first job.

    \b
    Example:
      outboxq queues pause accounts mail
    """
    from outboxq import queues
    from outboxq.cli.database import open_database
    from outboxq.cli.output import notice, print_json

    with open_database(database_url, schema) as begin, begin() as connection:
        known = {row.queue for row in queues.list_queues(connection)}
        changed = queues.pause(connection, names)
    wanted = list(dict.fromkeys(names))
    unknown = [name for name in wanted if name not in known]
    if as_json:
        print_json(
            {"paused": changed, "unchanged": [name for name in wanted if name not in changed], "unknown": unknown}
        )
        return
    for name in wanted:
        typer.echo(f"{name!r} is paused" if name in changed else f"{name!r} was paused already")
    for name in unknown:
        notice(f"note: nothing is known of a queue {name!r} yet; it is paused all the same")


@app.command("resume")
def resume(
    names: Names, as_json: AsJson = False, schema: Schema = DEFAULT_SCHEMA, database_url: DatabaseUrl = None
) -> None:
    """Let relays claim jobs of these queues again, at once.

    \b
    Example:
      outboxq queues resume accounts mail
    """
    from outboxq import queues
    from outboxq.cli.database import open_database
    from outboxq.cli.output import notice, print_json

    with open_database(database_url, schema) as begin, begin() as connection:
        known = {row.queue for row in queues.list_queues(connection)}
        changed = queues.resume(connection, names)
    wanted = list(dict.fromkeys(names))
    unknown = [name for name in wanted if name not in known]
    unchanged = [name for name in wanted if name in known and name not in changed]
    if as_json:
        print_json({"resumed": changed, "unchanged": unchanged, "unknown": unknown})
    else:
        for name in wanted:
            if name in changed:
                typer.echo(f"{name!r} is resumed")
        for name in unchanged:
            typer.echo(f"{name!r} was not paused")
    for name in unknown:
        notice(f"Error: no queue {name!r} (known: {', '.join(sorted(known)) or 'none'})")
    if unknown:
        raise typer.Exit(1)
