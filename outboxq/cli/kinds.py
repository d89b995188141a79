"""`outboxq kinds`: list, pause and resume kinds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.help import Commands
from outboxq.cli.options import ActingOptions, takes
from outboxq.cli.output import notice, print_json
from outboxq.cli.reading import lists
from outboxq.cli.tables import Column
from outboxq.codec.text import several

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection

    from outboxq.cli.database import Begin

app = Commands(help="Pause and resume kinds of jobs, while the other kinds of their queue go on.")


@app.command("list")
@lists(
    "kinds", (Column("queue", "name"), Column("kind", "name"), Column("paused_at"), Column("jobs")), "--limit",
    things="paused kinds",
)  # fmt: skip
def list_kinds(connection: "Connection", *, limit: int) -> "Sequence[object]":
    """List the kinds that are paused.

    `jobs` counts those that wait or run.

    \b
    Example:
      outboxq kinds list
    """
    from outboxq.admin import kinds

    return kinds.list_paused(connection)[:limit]


@dataclass(frozen=True, kw_only=True, slots=True)
class KindsOptions(ActingOptions):
    """The options of the commands that change kinds."""

    names: Annotated[list[str], typer.Argument(metavar="KIND", help="The names of kinds.", show_default=False)]
    queue: Annotated[str, typer.Option("--queue", metavar="NAME", help="The queue of the kinds.", show_default=False)]


@app.command("pause")
@takes(KindsOptions)
def pause(options: KindsOptions) -> None:
    """Keep relays from running jobs of these kinds.

    Jobs that run already go on, and new jobs can still be added. Relays that listen know at once, others within some
    seconds.

    \b
    Example:
      outboxq kinds pause send_welcome --queue mail
    """
    from outboxq.admin.relays import kinds_nobody_knows

    with options.transaction() as connection:
        changed = options.actions().pause_kinds(connection, options.queue, options.names)
        unknown = kinds_nobody_knows(connection, options.queue, changed)
    _report(options, changed, "paused", "paused already")
    for name in unknown:
        notice(f"note: no relay that serves queue {options.queue!r} knows the kind {name!r}: was it meant?")


@app.command("resume")
@takes(KindsOptions)
def resume(options: KindsOptions) -> None:
    """Resume these kinds: relays run their jobs again, and those that were put off at once.

    \b
    Example:
      outboxq kinds resume send_welcome --queue mail
    """
    with options.open() as begin:
        with begin() as connection:
            changed = options.actions().resume_kinds(connection, options.queue, options.names)
        # Committed: relays that received the resumption no longer put these jobs off.
        brought = _bring_back(begin, options)
    _report(options, changed, "resumed", "not paused", brought)


def _bring_back(begin: "Begin", options: KindsOptions) -> int:
    from outboxq.admin import kinds
    from outboxq.admin.actions import unmarked

    brought = 0
    after: UUID | None = None
    while True:
        with begin() as connection:
            ids = kinds.put_off_ids(connection, options.queue, options.names, after=after)
        if not ids:
            return brought
        with unmarked(begin, ids, notice), begin() as connection:
            brought += len(kinds.bring_back(connection, options.queue, options.names, ids).changed)
        after = ids[-1]


def _report(
    options: KindsOptions, changed: "Sequence[str]", done: str, before: str, brought: int | None = None
) -> None:
    wanted = list(dict.fromkeys(options.names))
    if options.as_json:
        unchanged = [name for name in wanted if name not in changed]
        back = {} if brought is None else {"brought_back": brought}
        print_json({done: changed, "unchanged": unchanged, **back})
        return
    for name in wanted:
        typer.echo(f"{name!r} is {done}" if name in changed else f"{name!r} was {before}")
    if brought:
        notice(f"{several(brought, 'job that was put off runs', 'jobs that were put off run')} now")
