"""`outboxq queues`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.options import DatabaseOptions, takes
from outboxq.cli.output import notice, print_json, print_rows

if TYPE_CHECKING:
    from sqlalchemy import Connection

app = typer.Typer(help="List, pause and resume queues.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
@takes(DatabaseOptions)
def list_queues(options: DatabaseOptions) -> None:
    """List every queue that has a setting, a job or a dead letter.

    \b
    Example:
      outboxq queues list
    """
    from outboxq.admin import queues

    with options.transaction() as connection:
        found = queues.list_queues(connection)
    if options.as_json:
        print_json({"queues": found})
    else:
        print_rows(("queue", "paused_at"), found)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuesOptions(DatabaseOptions):
    """A field per option of the commands that change queues."""

    names: Annotated[list[str], typer.Argument(metavar="NAME", show_default=False)]


@app.command("pause")
@takes(QueuesOptions)
def pause(options: QueuesOptions) -> None:
    """Keep relays from claiming jobs of these queues.

    Jobs that run already go on, and new jobs can still be added. A queue without any job, dead letter or setting is
    paused too, before its first job comes, and reported in case its name was mistyped.

    \b
    Example:
      outboxq queues pause accounts mail
    """
    from outboxq.admin import queues

    _change(options, queues.pause, "paused", "paused already")


@app.command("resume")
@takes(QueuesOptions)
def resume(options: QueuesOptions) -> None:
    """Let relays claim jobs of these queues again, at once.

    A queue without any job, dead letter or setting was not paused, and is reported in case its name was mistyped.

    \b
    Example:
      outboxq queues resume accounts mail
    """
    from outboxq.admin import queues

    _change(options, queues.resume, "resumed", "not paused")


def _change(
    options: QueuesOptions, change: "Callable[[Connection, Sequence[str]], tuple[str, ...]]", done: str, before: str
) -> None:
    """Pause or resume queues, and print for each what it is now, or was already."""
    from outboxq.admin import queues

    with options.transaction() as connection:
        known = {row.queue for row in queues.list_queues(connection)}
        changed = change(connection, options.names)
    wanted = list(dict.fromkeys(options.names))
    unchanged = [name for name in wanted if name not in changed]
    unknown = [name for name in wanted if name not in known]
    if options.as_json:
        print_json({done: changed, "unchanged": unchanged, "unknown": unknown})
    else:
        for name in wanted:
            typer.echo(f"{name!r} is {done}" if name in changed else f"{name!r} was {before}")
    for name in unknown:
        others = ", ".join(sorted(known)) or "none"
        notice(f"note: queue {name!r} has no job, no dead letter and no setting (known: {others}): was it meant?")
