"""`outboxq jobs`."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from outboxq.cli.bulk import ChangeOptions, Total, in_groups, sweep, unmarked
from outboxq.cli.options import KindFilter, OneId, QueueFilter, takes
from outboxq.cli.output import notice, print_json
from outboxq.cli.reading import lists, shows
from outboxq.codec.text import several

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from outboxq.admin.jobs import JobFilter
    from outboxq.cli.database import Begin
    from outboxq.statements.paging import Page

app = typer.Typer(help="List, show and cancel jobs that wait or run.", no_args_is_help=True, rich_markup_mode=None)

StateFilter: TypeAlias = Annotated[
    Literal["ready", "running", "scheduled", "due", "leased", "orphaned", "suspect"] | None,
    typer.Option("--state", help="Only in this state.", show_default=False),
]


@app.command("list")
@lists(
    "jobs",
    ("id", "queue", "kind", "state", "attempt", "run_at", "pid", "running_seconds"),
    "--queue, --kind or --state",
)
def list_jobs(
    connection: "Connection",
    running: Annotated[
        bool, typer.Option("--running", help="Only jobs that a relay is running now: running, or leased.")
    ] = False,
    queue: QueueFilter = None,
    kind: KindFilter = None,
    state: StateFilter = None,
    *,
    limit: int,
) -> "Sequence[object]":
    """List jobs that wait or run, the oldest first, in the order in which they came into the table.

    The states are those of `outboxq stats`: ready; scheduled; due (scheduled, and its time has come); running (in a
    transaction; pid is that of its PostgreSQL backend); leased (run by a relay in lease mode); orphaned (leased to a
    relay that has died or cannot be reached: another one takes it back); suspect (its relay died while it ran: it will
    run alone).

    \b
    Examples:
      outboxq jobs list --queue accounts --limit 10
      outboxq jobs list --running
    """
    from outboxq.admin import jobs

    wanted = jobs.JobFilter(queue=queue, kind=kind, state=state)
    return jobs.list_jobs(connection, wanted, running=running, limit=limit)


@app.command("show")
@shows
def show_job(connection: "Connection", job_id: OneId) -> object:
    """Show one job with its arguments and the errors of its earlier attempts.

    \b
    Example:
      outboxq jobs show 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    from outboxq.admin import dead_letters, jobs
    from outboxq.cli.errors import CommandFailed
    from outboxq.errors import JobNotFound

    try:
        return jobs.show_job(connection, job_id)
    except JobNotFound as missing:
        if dead_letters.is_dead(connection, job_id):
            raise CommandFailed(f"{missing}: it is a dead letter, see `outboxq dead show {job_id}`") from missing
        raise CommandFailed(f"{missing}: it is done, was cancelled, or never existed") from missing


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOptions(ChangeOptions):
    """Which jobs are meant."""

    queue: QueueFilter = None
    kind: KindFilter = None
    state: StateFilter = None


@app.command("cancel")
@takes(CancelOptions)
def cancel_jobs(options: CancelOptions) -> None:
    """Delete jobs that wait. They leave no trace, and never run.

    A job that runs in a transaction is neither changed nor waited for: it is reported, and the exit code is 1. One that
    runs under a lease is deleted; its handler goes on to its end, and what it wrote is rolled back. Jobs that are added
    in the meantime stay. Asks before it deletes more than 100 that a filter finds.

    \b
    Examples:
      outboxq jobs cancel 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq jobs cancel --queue mail --kind send_welcome
    """
    from outboxq.admin import jobs
    from outboxq.statements.paging import database_clock

    options.check_selection()
    with options.open() as begin:
        with begin() as connection:
            # Without jobs that are added from now on.
            until = database_clock(connection)
            wanted = jobs.JobFilter(**options.filters, ids=options.distinct_ids, created_before=until)
            counted = jobs.count_matching(connection, wanted)
        options.ask("cancel", "cancelled", "jobs", counted, there=counted)
        total = _cancel_ids(begin, options.ids) if options.ids else _cancel_matching(begin, wanted)
    _report(total, as_json=options.as_json)


def _report(total: Total, *, as_json: bool) -> None:
    if as_json:
        print_json({"cancelled": total.changed, "running": total.held, "not_found": total.not_found})
    else:
        typer.echo(f"cancelled {several(total.changed, 'job', 'jobs')}")
    for job_id in total.not_found:
        notice(f"no job {job_id}")
    for job_id in total.held:
        notice(f"not cancelled, because it is running: {job_id} (see `outboxq jobs list --running`)")
    raise typer.Exit(total.exit_code)


def _cancel_ids(begin: "Begin", ids: "Sequence[UUID]") -> Total:
    from outboxq.admin import jobs

    total = Total()
    for some in in_groups(ids):
        with unmarked(begin, some), begin() as connection:
            result = jobs.cancel_jobs(connection, some)
        total.changed += len(result.cancelled)
        total.held += result.running
        total.not_found += result.not_found
    return total


def _cancel_matching(begin: "Begin", wanted: "JobFilter") -> Total:
    from outboxq.admin import jobs

    def cancel(after: "UUID | None") -> "Page":
        # Found before they are locked: whatever happens from then on, it is known which marks are to be cleared.
        with begin() as connection:
            ids = jobs.find_ids(connection, wanted, after=after)
        with unmarked(begin, ids), begin() as connection:
            page = jobs.cancel_page(connection, replace(wanted, ids=ids))
        return replace(page, last=ids[-1] if ids else None)

    return sweep(cancel, "cancelled")
