"""Jobs that wait or run, for operators to list, show and cancel.

Every function reads or changes in the caller's transaction. None waits for a row lock: a job that a relay runs is
locked by that relay's transaction, and is reported instead. Reading locks nothing.

A cancellation that is rolled back leaves marks in the jobs' rows, as a relay that dies with them does: each would run
by itself, once. `clear_marks` takes them away, if it is committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from outboxq.database.driver import run_script
from outboxq.errors import JobNotFound
from outboxq.statements import jobs as statements
from outboxq.statements.claim import clear_marks as clearing
from outboxq.statements.jobs import STATES as STATES
from outboxq.statements.jobs import JobFilter as JobFilter
from outboxq.statements.paging import MAX_PAGE_ROWS, KindCount, Page, read_page
from outboxq.tables import mapped_schema


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job in the table.

    Attributes:
        state: `ready`; `scheduled`; `due`, if the time of a scheduled one has come; `running`, if a transaction has it;
            `leased`; `orphaned`, if the relay that leased it is not alive; `suspect`. The names of `QueueStats`.
        pid: The backend whose transaction runs it; None if it only waits.
        running_seconds: How long that transaction has been open; None also if the role may not read it.
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
    pid: int | None
    running_seconds: float | None


@dataclass(frozen=True, slots=True)
class JobDetail:
    """Everything that is stored of a job; `args`, `headers` and `errors` are JSON text."""

    job: WaitingJob
    unique_key: str | None
    group_key: str | None
    args: str = field(repr=False)
    headers: str = field(repr=False)
    errors: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What became of the jobs to be cancelled: gone, held by the transaction that runs them, or not there."""

    cancelled: tuple[UUID, ...]
    running: tuple[UUID, ...]
    not_found: tuple[UUID, ...]


def list_jobs(
    connection: Connection, wanted: JobFilter | None = None, *, running: bool = False, limit: int = 50
) -> list[WaitingJob]:
    """The oldest jobs that match; with `running`, only those that a transaction or a living relay's lease holds."""
    rows = connection.execute(statements.select_jobs(wanted or JobFilter(), running=running, limit=limit))
    return [WaitingJob(*row) for row in rows]


def show_job(connection: Connection, job_id: UUID) -> JobDetail:
    """One job, its arguments included.

    Raises:
        JobNotFound: done, cancelled, dead, or never there.
    """
    row = connection.execute(statements.select_job(job_id)).one_or_none()
    if row is None:
        raise JobNotFound(job_id, "job")
    named = row._mapping  # noqa: SLF001  # SQLAlchemy's public name
    job = WaitingJob(*(named[name] for name in (*statements.SUMMARY_COLUMNS, "pid", "running_seconds")))
    return JobDetail(job, *(named[name] for name in statements.DETAIL_COLUMNS))


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
    """The ids of the next jobs that match; continue with `after` the last one."""
    return tuple(connection.execute(statements.select_ids(wanted, after=after, limit=limit)).scalars())


def clear_marks(connection: Connection, ids: Sequence[UUID]) -> bool:
    """Take away the marks that a cancellation which was rolled back left in these jobs' rows, if any.

    Returns:
        Whether all were taken away; False while a transaction still holds some: the cancelling one, or a relay's.
    """
    cleared = run_script(connection, clearing(mapped_schema(connection), [str(job_id) for job_id in ids]))
    waiting: object = connection.execute(statements.select_waiting(ids)).scalar_one()
    return cleared[0].rows[0] == (waiting,)


def count_matching(connection: Connection, wanted: JobFilter) -> tuple[KindCount, ...]:
    """How many jobs match, by queue and kind, those that run included."""
    return tuple(KindCount(*row) for row in connection.execute(statements.count_matching(wanted)))


def cancel_page(
    connection: Connection, wanted: JobFilter, *, after: UUID | None = None, limit: int = MAX_PAGE_ROWS
) -> Page:
    """Delete the next jobs that match; continue with `after=page.last` until that is None."""
    return read_page(connection.execute(statements.cancel_page(wanted, after=after, limit=limit)))
