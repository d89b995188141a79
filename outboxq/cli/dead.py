"""`outboxq dead`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.bulk import ChangeOptions, Total, in_groups, sweep
from outboxq.cli.help import Commands
from outboxq.cli.options import KindFilter, OneId, QueueFilter, takes
from outboxq.cli.output import notice, print_json
from outboxq.cli.reading import lists, shows
from outboxq.cli.tables import Column
from outboxq.codec.text import several

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from outboxq.cli.database import Begin
    from outboxq.statements.paging import Page

app = Commands(help="List, show, retry and discard dead letters: jobs that were given up.")

ReasonFilter = Annotated[
    str | None,
    typer.Option("--reason", metavar="TEXT", help="Only those whose reason contains this text.", show_default=False),
]


@app.command("list")
@lists(
    "dead",
    (
        Column("id", "id"),
        Column("queue", "name"),
        Column("kind", "name"),
        Column("attempt", rank=2),
        Column("died_at", rank=1),
        Column("crashes", rank=3),
        Column("max_attempts", rank=4),
        Column("created_at", rank=5),
        Column("reason", "text"),
    ),
    "--queue, --kind or --reason",
    things="dead letters",
)
def list_dead(
    connection: "Connection",
    queue: QueueFilter = None,
    kind: KindFilter = None,
    reason: ReasonFilter = None,
    *,
    limit: int,
) -> "Sequence[object]":
    """List dead letters, the latest first.

    \b
    Examples:
      outboxq dead list --queue accounts
      outboxq dead list --reason timeout --json
    """
    from outboxq.admin import dead_letters

    wanted = dead_letters.DeadFilter(queue=queue, kind=kind, reason=reason)
    return dead_letters.list_dead(connection, wanted, limit=limit)


@app.command("show")
@shows
def show_dead(connection: "Connection", job_id: OneId) -> object:
    """Show one dead letter with its arguments and every error.

    \b
    Example:
      outboxq dead show 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    from outboxq.admin import dead_letters

    return dead_letters.show_dead(connection, job_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadOptions(ChangeOptions):
    """Which dead letters are meant."""

    queue: QueueFilter = None
    kind: KindFilter = None
    reason: ReasonFilter = None


@app.command("retry")
@takes(DeadOptions)
def retry_dead(options: DeadOptions) -> None:
    """Make dead letters ready jobs again, with all their attempts before them.

    They keep their id, arguments and errors. If a job already has the id or the unique key, the dead letter stays, and
    is reported. Asks before it changes more than 100 that a filter finds.

    \b
    Examples:
      outboxq dead retry 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq dead retry --queue accounts --reason OperationalError --dry-run
      outboxq dead retry --queue accounts --reason OperationalError --yes
    """
    from outboxq.admin import dead_letters

    _change(options, dead_letters.retry_page, "retry", "retried")


@app.command("discard")
@takes(DeadOptions)
def discard_dead(options: DeadOptions) -> None:
    """Delete dead letters for good. Asks before it deletes more than 100 that a filter finds.

    \b
    Examples:
      outboxq dead discard 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq dead discard --kind send_welcome --dry-run
    """
    from outboxq.admin import dead_letters

    _change(options, dead_letters.discard_page, "discard", "discarded")


def _change(options: DeadOptions, run_page: "Callable[..., Page]", verb: str, done: str) -> None:
    from outboxq.admin.dead_letters import DeadFilter, count_matching
    from outboxq.statements.paging import database_clock

    options.check_selection()
    with options.open() as begin:
        with begin() as connection:
            # Without jobs that die from now on.
            until = database_clock(connection)
            wanted = DeadFilter(**options.filters, ids=options.distinct_ids, died_before=until)
            counted = count_matching(connection, wanted, to_retry=verb == "retry")
            is_asked_for = options.dry_run and options.ids
            there = count_matching(connection, DeadFilter(ids=options.distinct_ids)) if is_asked_for else counted
        options.ask(verb, done, "dead letters", counted, there)

        def run_next(after: "UUID | None") -> "Page":
            with begin() as connection:
                return run_page(connection, wanted, after=after)

        total = _change_ids(begin, options.ids, run_page) if options.ids else sweep(run_next, done)
    _report(total, done, as_json=options.as_json)


def _change_ids(begin: "Begin", ids: "Sequence[UUID]", run_page: "Callable[..., Page]") -> Total:
    from outboxq.admin.dead_letters import DeadFilter

    total = Total()
    for some in in_groups(ids):
        with begin() as connection:
            page = run_page(connection, DeadFilter(ids=tuple(some)))
        total.add(page)
        found = {*page.changed, *page.held, *page.refused, *page.key_taken}
        total.not_found += [job_id for job_id in some if job_id not in found]
    return total


def _report(total: Total, verb: str, *, as_json: bool) -> None:
    if as_json:
        refused = {"refused": total.refused, "key_taken": total.key_taken} if verb == "retried" else {}
        print_json({verb: total.changed, "held": total.held, "not_found": total.not_found, **refused})
    else:
        typer.echo(f"{verb} {several(total.changed, 'dead letter', 'dead letters')}")
    for job_id in total.not_found:
        notice(f"no dead letter {job_id}")
    for job_id in total.held:
        notice(f"not {verb}, because another transaction holds it: {job_id}")
    for job_id in total.refused:
        notice(
            f"not {verb}, because a job with its id waits or runs already, or it is longer than a job may be: {job_id}"
        )
    for job_id in total.key_taken:
        notice(f"not {verb}, because another job with its unique key waits or runs: {job_id}")
    raise typer.Exit(total.exit_code)
