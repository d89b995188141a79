"""`outboxq jobs`."""

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.bulk import Total, check_selection, confirm, in_groups, report_dry_run, sweep, unmarked
from outboxq.cli.options import (
    DEFAULT_SCHEMA,
    AsJson,
    DatabaseUrl,
    DryRun,
    Everything,
    Ids,
    KindFilter,
    Limit,
    OneId,
    QueueFilter,
    Schema,
    State,
    StateFilter,
    Yes,
    takes,
)
from outboxq.cli.output import notice, print_detail, print_json, print_list
from outboxq.codec.text import several

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from outboxq.admin.jobs import JobFilter
    from outboxq.cli.database import Begin
    from outboxq.statements.paging import KindCount, Page

app = typer.Typer(help="List, show and cancel jobs that wait or run.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_jobs(
    running: Annotated[
        bool, typer.Option("--running", help="Only jobs that a relay is running now: running, or leased.")
    ] = False,
    queue: QueueFilter = None,
    kind: KindFilter = None,
    state: StateFilter = None,
    limit: Limit = 50,
    as_json: AsJson = False,
    schema: Schema = DEFAULT_SCHEMA,
    database_url: DatabaseUrl = None,
) -> None:
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
    from outboxq.cli.database import open_database

    wanted = _filter(queue, kind, state)
    with open_database(database_url, schema) as begin, begin() as connection:
        found = jobs.list_jobs(connection, wanted, running=running, limit=limit + 1)
    columns = ("id", "queue", "kind", "state", "attempt", "run_at", "pid", "running_seconds")
    print_list("jobs", found, limit, columns, "--queue, --kind or --state", as_json=as_json)


@app.command("show")
def show_job(
    job_id: OneId, as_json: AsJson = False, schema: Schema = DEFAULT_SCHEMA, database_url: DatabaseUrl = None
) -> None:
    """Show one job with its arguments and the errors of its earlier attempts.

    \b
    Example:
      outboxq jobs show 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    from outboxq.admin import dead_letters, jobs
    from outboxq.cli.database import open_database
    from outboxq.cli.errors import CommandFailed
    from outboxq.errors import JobNotFound

    with open_database(database_url, schema) as begin, begin() as connection:
        try:
            detail = jobs.show_job(connection, job_id)
        except JobNotFound as missing:
            if dead_letters.is_dead(connection, job_id):
                raise CommandFailed(f"{missing}: it is a dead letter, see `outboxq dead show {job_id}`") from missing
            raise CommandFailed(f"{missing}: it is done, was cancelled, or never existed") from missing
    fields = asdict(detail.job) | {"unique_key": detail.unique_key, "group_key": detail.group_key}
    print_detail(fields, {"args": detail.args, "headers": detail.headers, "errors": detail.errors}, as_json=as_json)


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOptions:
    """A field per option."""

    ids: Ids = None
    queue: QueueFilter = None
    kind: KindFilter = None
    state: StateFilter = None
    everything: Everything = False
    yes: Yes = False
    dry_run: DryRun = False
    as_json: AsJson = False
    schema: Schema = DEFAULT_SCHEMA
    database_url: DatabaseUrl = field(default=None, repr=False)


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
    from outboxq.cli.database import open_database

    filters = {"--queue": options.queue, "--kind": options.kind, "--state": options.state}
    asks = not (options.yes or options.dry_run)
    check_selection(options.ids, filters, everything=options.everything, asks=asks)
    with open_database(options.database_url, options.schema) as begin:
        wanted, counted = _select(begin, options)
        if options.dry_run:
            missing = len(set(options.ids)) - sum(kind.count for kind in counted) if options.ids else 0
            report_dry_run("cancelled", "jobs", counted, missing, as_json=options.as_json)
        if not (options.ids or options.yes):
            confirm("cancel", "jobs", counted, everything=options.everything)
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


def _select(begin: "Begin", options: CancelOptions) -> "tuple[JobFilter, tuple[KindCount, ...]]":
    """What the command is to change, without jobs that are added from now on, and how many that are."""
    from outboxq.admin import jobs
    from outboxq.statements.paging import database_clock

    ids = tuple(options.ids) if options.ids else None
    with begin() as connection:
        filtered = _filter(options.queue, options.kind, options.state)
        wanted = replace(filtered, ids=ids, created_before=database_clock(connection))
        return wanted, jobs.count_matching(connection, wanted)


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


def _filter(queue: str | None, kind: str | None, state: State | None) -> "JobFilter":
    from outboxq.admin.jobs import JobFilter

    return JobFilter(queue=queue, kind=kind, state=state.value if state else None)
