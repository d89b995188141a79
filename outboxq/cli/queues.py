"""`outboxq queues`, and `outboxq stats`, which counts what is in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.options import DatabaseOptions, takes
from outboxq.cli.output import notice, print_json, print_rows
from outboxq.codec.text import several

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
    """Pause or resume queues, and print for each whether that changed it."""
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


@takes(DatabaseOptions)
def stats(options: DatabaseOptions) -> None:
    """Count the jobs that wait, run and died, per queue.

    The states are those of `outboxq jobs list`. Parked jobs, which are also counted as scheduled or due, were postponed
    because no relay that saw them knows their kind: start one that does. Effects whose outcome is unknown are counted
    too. Reads the whole table of jobs.

    \b
    Example:
      outboxq stats --json | jq '.queues[] | select(.dead > 0)'
    """
    from outboxq.admin.jobs import STATES
    from outboxq.admin.stats import collect_stats

    with options.transaction() as connection:
        found = collect_stats(connection)
    if options.as_json:
        print_json(found)
        return
    columns = ("queue", *STATES, "parked", "dead", "oldest_waiting_seconds", "paused_at")
    print_rows(columns, found.queues)
    if found.parked_kinds:
        kinds = ("queue", "kind", "jobs", "next_look_at")
        print_rows(kinds, found.parked_kinds, title="Kinds that no relay knows:")
    if found.unknown_effects:
        effects = several(found.unknown_effects, "effect waits", "effects wait")
        notice(f"{effects} for an operator: see `outboxq effects list --status unknown`")
