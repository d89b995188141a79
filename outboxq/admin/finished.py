"""Finished jobs, for operators to list, show and run again: rows that are kept if the job's kind has `keep=`."""

from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin.walks import latest_rows
from outboxq.clock import uuid7s
from outboxq.database.errors import missing_tables_explained
from outboxq.errors import ArgsNotKept, JobNotFound
from outboxq.statements import done as statements
from outboxq.statements.done import OUTCOMES as OUTCOMES
from outboxq.statements.done import DoneFilter as DoneFilter
from outboxq.tables import done_job, mapped_schema


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A finished job whose row is kept, as lists show it.

    Attributes:
        outcome: `done`, `discarded`, `cancelled` (while it ran) or `expired`.
        attempt: The number of the attempt that finished the job, from 1.
        seconds: How long its handler ran.
    """

    id: UUID
    queue: str
    kind: str
    outcome: str
    attempt: int
    created_at: datetime
    claimed_at: datetime | None
    finished_at: datetime
    seconds: float


@dataclass(frozen=True, slots=True)
class FinishedDetail:
    """A finished job with all that is kept of it; `args`, `headers` and `result` are JSON text, or None if not kept.

    Attributes:
        relay: The id of the relay that ran the job.
        expires_at: The time after which relays delete the row.
        stands_for: The ids of older jobs with the same coalescing key, for which this job ran too.
    """

    finished: FinishedJob
    relay: UUID | None
    expires_at: datetime
    stands_for: tuple[UUID, ...]
    args: str | None = field(repr=False)
    headers: str | None = field(repr=False)
    result: str | None = field(repr=False)


@missing_tables_explained()
def list_finished(
    connection: Connection, wanted: DoneFilter | None = None, *, before: UUID | None = None, limit: int = 50
) -> list[FinishedJob]:
    """Return up to `limit` finished jobs that match, the last added first; continue with `before=` the last one's id.

    The newest rows are searched by an index; if too few of them match, the whole table is read once.
    """
    start = [] if before is None else [done_job.c.id < before]
    select = partial(statements.select_done, wanted or DoneFilter())
    found = latest_rows(connection, done_job.c.id, *start, select=select, limit=limit)
    return [FinishedJob(*row) for row in found]


@missing_tables_explained()
def show_finished(connection: Connection, job_id: UUID) -> FinishedDetail:
    """Return one finished job, with the data that is kept of it.

    Raises:
        JobNotFound: no finished job of this id is kept: its kind keeps none, the row has expired, or the job waits,
            runs or is dead.
    """
    row = connection.execute(statements.select_finished(job_id)).one_or_none()
    if row is None:
        raise JobNotFound(job_id, "finished job")
    summary = len(statements.SUMMARY_COLUMNS)
    relay, expires_at, stands_for, *texts = row[summary:]
    return FinishedDetail(FinishedJob(*row[:summary]), relay, expires_at, tuple(stands_for or ()), *texts)


def outcome_of(connection: Connection, job_id: UUID) -> str | None:
    """Return the outcome of a finished job; None if no row is kept of it, or if this role may not read the rows."""
    if not connection.execute(statements.may_read(mapped_schema(connection))).scalar_one():
        return None
    return connection.execute(statements.select_outcome(job_id)).scalar_one_or_none()


def run_again(connection: Connection, job_id: UUID) -> UUID:
    """Add a new job with the kind, queue, arguments and headers of a finished one; return the new job's id.

    The new job has no unique key and is in no group or batch, and no chained job follows it.

    Raises:
        JobNotFound: no finished job has this id.
        ArgsNotKept: the job's kind keeps no arguments.
    """
    found = show_finished(connection, job_id)
    if found.args is None:
        raise ArgsNotKept(job_id, found.finished.kind)
    new_id = UUID(uuid7s(1)[0])
    # It may have been pruned since it was read.
    if connection.execute(statements.add_again(job_id, new_id)).scalar_one_or_none() is None:
        raise JobNotFound(job_id, "finished job")
    return new_id
