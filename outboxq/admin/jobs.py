"""Jobs that wait or run, for operators to list, show, change and cancel.

Every function reads or changes in the caller's transaction. None waits for a row lock: a job that a relay runs is
locked by that relay's transaction, and is reported instead. Reading locks nothing.

A cancellation or a change that is rolled back leaves marks in the jobs' rows, as if a relay had died while it ran them:
each job would run alone the next time, to find out if it kills relays. `clear_marks` removes the marks, if the caller
commits it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin.stats import COUNTED_MOST
from outboxq.admin.walks import (
    STRETCHES_BY_INDEX,
    Stretch,
    count_rows,
    first_rows,
    of_blocks,
    stretches_by_index,
    stretches_of,
)
from outboxq.codec.values import check_args_size
from outboxq.database.driver import run_script
from outboxq.database.settings import our_settings
from outboxq.errors import ArgumentError, JobNotFound
from outboxq.outbox.options import MAX_PRIORITY
from outboxq.outbox.progress import progress_of
from outboxq.statements import job_changes, wake
from outboxq.statements import jobs as statements
from outboxq.statements.job_changes import JobChange as JobChange
from outboxq.statements.jobs import STATES as STATES
from outboxq.statements.jobs import JobFilter as JobFilter
from outboxq.statements.paging import MAX_PAGE_ROWS, KindCount, Page, read_page
from outboxq.statements.park import clear_marks as clearing
from outboxq.statements.stats import first_ids
from outboxq.statements.stretches import stretches_of_blocks
from outboxq.tables import job, mapped_schema

# States in which relays hold jobs, or held them: of a large table, few at a time.
_HELD = ("running", "leased", "orphaned", "suspect")
# The bits of an id after its 48 of milliseconds.
_BEHIND_MILLISECOND = 80


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that waits or runs, as a row of the table `job`.

    Attributes:
        state: `ready`; `grouped`, if it waits for its turn in its group; `scheduled`, if it waits for its time; `due`,
            if that time has come; `running`, if a transaction runs it; `leased`, if a living relay runs it in lease
            mode; `orphaned`, if the relay that leased it is not alive; `suspect`, if a relay died while it had the job,
            so that it runs alone the next time.
        expires_at: The time at which the job is dropped if its handler was not called before; None if it never expires.
        pid: The backend whose transaction runs the job; None if it only waits.
        running_seconds: How long the transaction of `pid` has been open; None without a transaction, or if this role
            may not read it.
        progress: The progress that its handler has last reported with `ctx.progress`, from 0 to 1.
        note: The text of that report.
    """

    id: UUID
    queue: str
    kind: str
    state: str
    priority: int
    attempt: int
    max_attempts: int | None
    crashes: int
    parked: int
    run_at: datetime
    created_at: datetime
    expires_at: datetime | None
    pid: int | None
    running_seconds: float | None
    progress: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class JobDetail:
    """A job with all of its columns; `args`, `headers` and `errors` are JSON text.

    Attributes:
        waits_behind: The id of the first job of the job's group, for which this job waits; None if this job is the
            first, or in no group.
    """

    job: WaitingJob
    unique_key: str | None
    group_key: str | None
    args: str = field(repr=False)
    headers: str = field(repr=False)
    errors: str = field(repr=False)
    waits_behind: UUID | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The outcome of `cancel_jobs`, as ids.

    `cancelled`: jobs that were deleted. `running`: jobs that run, and were left. `not_found`: ids without a job.
    """

    cancelled: tuple[UUID, ...]
    running: tuple[UUID, ...]
    not_found: tuple[UUID, ...]


def list_jobs(
    connection: Connection, wanted: JobFilter | None = None, *, running: bool = False, limit: int = 50
) -> list[WaitingJob]:
    """Return up to `limit` jobs that match, the oldest first; with `running`, only those that a relay runs.

    Running jobs are searched among the first 10,000 jobs of each queue in the orders in which relays claim them. Other
    jobs are searched among the oldest 12,700 (more for a `limit` over 100). If too few of these match, the whole table
    is read once; a job that is changed during that may be missing.
    """
    wanted = _of_few(connection, wanted or JobFilter(), ("running", "leased") if running else ())
    found: dict[UUID, Any] = {}
    looks = 0
    for stretch in stretches_by_index(connection, wanted.ids, statements.listed.c.id, limit=limit):
        rows = connection.execute(statements.select_jobs(wanted, stretch, running=running, limit=limit))
        # A millisecond that goes on in the next stretch is read with either.
        found |= {row.id: row for row in rows}
        looks += 1
        if len(found) >= limit:
            break
    if len(found) < limit and looks == STRETCHES_BY_INDEX:
        some = of_blocks(connection, job, partial(statements.oldest_of_blocks, wanted), limit, _age)
        named = replace(wanted, ids=tuple(row.id for row in some))
        found = {
            row.id: row for row in connection.execute(statements.select_jobs(named, [], running=running, limit=limit))
        }
    oldest = sorted(found.values(), key=_age)[:limit]
    # In the order in which they came into the table.
    return _with_progress(connection, [WaitingJob(*row[:-1]) for row in sorted(oldest, key=attrgetter("seq"))])


def _age(row: Any) -> tuple[int, int]:
    return row.id.int >> _BEHIND_MILLISECOND, row.seq


def _of_few(connection: Connection, wanted: JobFilter, states: Sequence[str]) -> JobFilter:
    """Replace a filter for a rare state, such as running, by a filter for the ids of the jobs in that state.

    An index finds these jobs, so the search is fast even in a large table. A filter with ids, or for other states,
    stays as it is.

    Args:
        states: The states to look for; if empty, the filter's own state decides.
    """
    states = states or ((wanted.state,) if wanted.state in _HELD else ())
    if not states or wanted.ids is not None:
        return wanted
    with our_settings(connection):
        found = connection.execute(first_ids(states, COUNTED_MOST, wanted.queue)).all()
        return replace(wanted, ids=tuple(row.id for row in found))


def _with_progress(connection: Connection, jobs: list[WaitingJob]) -> list[WaitingJob]:
    noted = progress_of(connection, [job.id for job in jobs if job.state in ("running", "leased")])
    return [
        replace(job, progress=noted[job.id].fraction, note=noted[job.id].note) if job.id in noted else job
        for job in jobs
    ]


def show_job(connection: Connection, job_id: UUID) -> JobDetail:
    """Return one job, with its arguments and errors.

    Raises:
        JobNotFound: the job is done, cancelled or dead, or never existed.
    """
    row = connection.execute(statements.select_job(job_id)).one_or_none()
    if row is None:
        raise JobNotFound(job_id, "job")
    named = row._mapping  # noqa: SLF001  # SQLAlchemy's public name
    summary = WaitingJob(*(named[name] for name in (*statements.SUMMARY_COLUMNS, "pid", "running_seconds")))
    (job,) = _with_progress(connection, [summary])
    group: str | None = named["group_key"]
    first = None if group is None else connection.execute(statements.first_of_group(job.queue, group)).scalar()
    details = {name: named[name] for name in statements.DETAIL_COLUMNS}
    return JobDetail(job, **details, waits_behind=None if first == job.id else first)


def cancel_jobs(connection: Connection, ids: Sequence[UUID]) -> Cancelled:
    """Cancel jobs by id, by deleting their rows; pass about 200 ids in a transaction.

    A job that a transaction runs is not cancelled: only its relay, or the end of its backend, can stop it. A leased job
    is cancelled: its handler runs to its end, and its writes are refused and rolled back.
    """
    first = cancel_page(connection, JobFilter(ids=tuple(ids)), limit=len(ids))
    # Once more, because a job may have been done, or put back to be retried, while the first statement ran.
    held = JobFilter(ids=first.held)
    second = cancel_page(connection, held, limit=len(first.held)) if first.held else Page((), ())
    cancelled = (*first.changed, *second.changed)
    not_found = tuple(job_id for job_id in dict.fromkeys(ids) if job_id not in {*cancelled, *second.held})
    return Cancelled(cancelled, second.held, not_found)


def find_ids(
    connection: Connection, wanted: JobFilter, *, after: UUID | None = None, limit: int = MAX_PAGE_ROWS
) -> tuple[UUID, ...]:
    """Return the next ids of jobs that match, up to `limit`, in order; continue with `after=` the last one.

    No change of a job alters its id, so no job is missed. All pages together read the table once.
    """
    start = [] if after is None else [job.c.id > after]
    behind = stretches_of(connection, wanted.ids, job.c.id, *start, first=limit)
    return tuple(row.id for row in first_rows(connection, behind, partial(statements.select_ids, wanted), limit))


def clear_marks(connection: Connection, ids: Sequence[UUID]) -> bool:
    """Remove marks that a rolled back cancellation or change left in these jobs' rows: a marked job runs alone once.

    Returns:
        True if no mark is left; False while the transaction that is being rolled back, or a relay's, has locked some of
        the rows.
    """
    cleared = run_script(connection, clearing(mapped_schema(connection), [str(job_id) for job_id in ids]))
    waiting: object = connection.execute(statements.select_waiting(ids)).scalar_one()
    return cleared == [(waiting,)]


def count_matching(
    connection: Connection, wanted: JobFilter, *, most: int | None = None, give_up_at: float = math.inf
) -> tuple[KindCount, ...]:
    """Count the jobs that match, by queue and kind, running ones included; with `most`, at most that many in total.

    Args:
        give_up_at: The time of `time.monotonic()` at which to raise `TimeoutError`.

    Raises:
        TimeoutError: the count was not finished at that time.
    """
    return count_rows(
        connection, _all_jobs(connection, wanted, give_up_at), partial(statements.count_matching, wanted), most
    )


def sample(connection: Connection, wanted: JobFilter, limit: int) -> list[WaitingJob]:
    """Return up to `limit` jobs that match, as examples.

    They are not the oldest ones, because finding those could read the whole table.
    """
    some = first_rows(connection, _all_jobs(connection, wanted), partial(statements.select_some, wanted), limit)
    return list_jobs(connection, replace(wanted, ids=tuple(row.id for row in some)), limit=limit)


def _all_jobs(connection: Connection, wanted: JobFilter, give_up_at: float = math.inf) -> Iterable[Stretch]:
    """Divide the table `job` into parts of some blocks each; return the SQL conditions of each part.

    If the filter has ids, there is one part without a condition, because a query by ids is fast.
    """
    return [[]] if wanted.ids is not None else stretches_of_blocks(connection, job, give_up_at=give_up_at)


def cancel_page(
    connection: Connection, wanted: JobFilter, *, after: UUID | None = None, limit: int = MAX_PAGE_ROWS
) -> Page:
    """Cancel up to `limit` jobs that match, by deleting them; continue with `after=page.last` until it is None."""
    return read_page(connection.execute(statements.cancel_page(wanted, after=after, limit=limit)))


def change_page(
    connection: Connection,
    wanted: JobFilter,
    change: JobChange,
    *,
    after: UUID | None = None,
    limit: int = MAX_PAGE_ROWS,
) -> Page:
    """Change up to `limit` waiting jobs that match; continue with `after=page.last` until it is None.

    A changed job keeps its place among the jobs of its priority, and its unique, group and coalescing keys. Relays are
    woken up when the transaction commits.

    Returns:
        The page. `held`: jobs that run, which stay as they are. `refused`: jobs of groups, if a priority or a time is
        given, because a group's jobs run in the order in which they were added.

    Raises:
        ArgumentError: nothing is to be changed, or a value that no job can have.
    """
    _check_change(change)
    page = read_page(connection.execute(job_changes.change_page(wanted, change, after=after, limit=limit)))
    if page.refused:
        leased = set(connection.execute(job_changes.select_leased(page.refused)).scalars())
        refused = tuple(job_id for job_id in page.refused if job_id not in leased)
        page = replace(page, held=(*page.held, *leased), refused=refused)
    if page.changed:
        # An UPDATE wakes no relay: the trigger is one of INSERT.
        queues = sorted(connection.execute(job_changes.select_queues(page.changed)).scalars())
        run_script(connection, "; ".join(wake.notify(mapped_schema(connection), queue) for queue in queues))
    return page


def _check_change(change: JobChange) -> None:
    if change == JobChange():
        raise ArgumentError("a change takes a priority, run_at, run_now or args")
    if change.run_now and change.run_at is not None:
        raise ArgumentError("a change takes run_at or run_now, not both")
    if change.priority is not None and abs(change.priority) > MAX_PRIORITY:
        raise ArgumentError(f"priority takes an int from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {change.priority}")
    if change.run_at is not None and (change.run_at.utcoffset() is None or not 2 <= change.run_at.year <= 9998):
        raise ArgumentError(f"run_at takes a datetime with a time zone, in the years 2 to 9998, got {change.run_at}")
    if change.args is not None:
        check_args_size(change.args)
