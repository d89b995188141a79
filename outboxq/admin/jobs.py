"""Jobs that wait or run, for operators to list, show, change and cancel.

Every function reads or changes in the caller's transaction. None waits for a row lock: a job that a relay runs is
locked by that relay's transaction, and is reported instead. Reading locks nothing.

A cancellation or a change that is rolled back leaves marks in the jobs' rows, as a relay that dies with them does: each
would run by itself, once. `clear_marks` takes them away, if it is committed.
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
    """A job in the table.

    Attributes:
        state: `ready`; `grouped`, if it waits for its turn in its group; `scheduled`; `due`, if the time of a scheduled
            one has come; `running`, if a transaction has it; `leased`; `orphaned`, if the relay that leased it is not
            alive; `suspect`. The names of `QueueStats`.
        pid: The backend whose transaction runs it; None if it only waits.
        expires_at: It is dropped if its handler is not called before; None for never.
        running_seconds: How long that transaction has been open; None also if the role may not read it.
        progress: How far its handler is, from 0 to 1, by the last note of its `ctx.progress`; `note` is the text of it.
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
    """Everything that is stored of a job; `args`, `headers` and `errors` are JSON text.

    Attributes:
        waits_behind: The first job of its group, if that is another one.
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
    """The jobs to be cancelled: gone, held by the transaction that runs them, or not there."""

    cancelled: tuple[UUID, ...]
    running: tuple[UUID, ...]
    not_found: tuple[UUID, ...]


def list_jobs(
    connection: Connection, wanted: JobFilter | None = None, *, running: bool = False, limit: int = 50
) -> list[WaitingJob]:
    """The oldest jobs that match; with `running`, only those that a transaction or a living relay's lease holds.

    Jobs that relays hold are searched among the first 10,000 that they would claim, of each queue and each index, as
    `collect_stats` does. Others are searched among the oldest 12,700 (more for a `limit` over 100), and if that does
    not suffice in the whole table, each block of which is then read once. One that is changed while the table is read
    may be missing.
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
    """The same filter with the ids of the jobs in these states, or in its own if few jobs are in it at a time."""
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
    """One job, its arguments included.

    Raises:
        JobNotFound: done, cancelled, dead, or never there.
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
    """Delete jobs by id; 200 a transaction are a good measure.

    A job in transaction mode that runs is not cancelled: only its relay, or the end of its backend, can stop it. One
    under a lease is: its handler runs to its end, and what it wrote is refused and rolled back.
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
    """The ids of the next jobs that match; continue with `after` the last one.

    In the order of the ids, which no change of a job alters, so that none is missed. All pages together cost one walk
    through the table in that order: up to three blocks a job, if jobs lie in another order than their ids.
    """
    start = [] if after is None else [job.c.id > after]
    behind = stretches_of(connection, wanted.ids, job.c.id, *start, first=limit)
    return tuple(row.id for row in first_rows(connection, behind, partial(statements.select_ids, wanted), limit))


def clear_marks(connection: Connection, ids: Sequence[UUID]) -> bool:
    """Take away the marks that a cancellation which was rolled back left in these jobs' rows, if any.

    Returns:
        True if all were taken away; False while a transaction still holds some: the cancelling one, or a relay's.
    """
    cleared = run_script(connection, clearing(mapped_schema(connection), [str(job_id) for job_id in ids]))
    waiting: object = connection.execute(statements.select_waiting(ids)).scalar_one()
    return cleared == [(waiting,)]


def count_matching(
    connection: Connection, wanted: JobFilter, *, most: int | None = None, give_up_at: float = math.inf
) -> tuple[KindCount, ...]:
    """Count the jobs that match, by queue and kind, running ones included; with `most`, up to so many in all.

    Args:
        give_up_at: A time of the monotonic clock.

    Raises:
        TimeoutError: it was not done at that time.
    """
    return count_rows(
        connection, _all_jobs(connection, wanted, give_up_at), partial(statements.count_matching, wanted), most
    )


def sample(connection: Connection, wanted: JobFilter, limit: int) -> list[WaitingJob]:
    """Some of the jobs that match: of an unordered table not the oldest, for which all of it would be read by ids."""
    some = first_rows(connection, _all_jobs(connection, wanted), partial(statements.select_some, wanted), limit)
    return list_jobs(connection, replace(wanted, ids=tuple(row.id for row in some)), limit=limit)


def _all_jobs(connection: Connection, wanted: JobFilter, give_up_at: float = math.inf) -> Iterable[Stretch]:
    """The table by its blocks; if jobs are named by their ids, one stretch with all of them."""
    return [[]] if wanted.ids is not None else stretches_of_blocks(connection, job, give_up_at=give_up_at)


def cancel_page(
    connection: Connection, wanted: JobFilter, *, after: UUID | None = None, limit: int = MAX_PAGE_ROWS
) -> Page:
    """Delete the next jobs that match; continue with `after=page.last` until that is None."""
    return read_page(connection.execute(statements.cancel_page(wanted, after=after, limit=limit)))


def change_page(
    connection: Connection,
    wanted: JobFilter,
    change: JobChange,
    *,
    after: UUID | None = None,
    limit: int = MAX_PAGE_ROWS,
) -> Page:
    """Change the next jobs that match and wait; continue with `after=page.last` until that is None.

    Jobs keep their place among those of their priority, and the keys that they were added with. Relays are woken when
    the transaction commits.

    Returns:
        `held` are the jobs that run, which stay as they are; `refused` those of a group, if a priority or a time is
        given: a group's jobs run in the order in which they were added.

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
