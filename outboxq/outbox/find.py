"""Find a job again by what `add_job` returned: for a producer whose COMMIT was not answered, and for tests."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal, overload
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from outboxq.new_job import JobHandle
from outboxq.statements import jobs as statements


@dataclass(frozen=True, slots=True)
class FoundJob:
    """Where a job is: it waits (for its time or a relay), it runs, or it is among the dead letters.

    `attempt` counts the attempts that have ended; in lease mode also the one that runs.
    """

    id: UUID
    kind: str
    queue: str
    state: Literal["waiting", "running", "dead"]
    attempt: int


@overload
def find_job(connection: Session | Connection, job: JobHandle | UUID) -> FoundJob | None: ...


@overload
def find_job(connection: AsyncSession | AsyncConnection, job: JobHandle | UUID) -> Awaitable[FoundJob | None]: ...


def find_job(
    connection: Session | Connection | AsyncSession | AsyncConnection, job: JobHandle | UUID
) -> FoundJob | Awaitable[FoundJob | None] | None:
    """Look for a job, in a transaction that began after the one that added it; await the result if that is async.

    A job that is found was committed. None means that it was never committed, or that it is done: the rows that you
    wrote in the transaction that added it tell which, because the job existed if and only if they do.

    Needs SELECT on the tables `job` and `dead_job`.
    """
    job_id = job.id if isinstance(job, JobHandle) else job
    if isinstance(connection, AsyncSession | AsyncConnection):
        return connection.run_sync(_find, job_id)
    return _find(connection, job_id)


def _find(connection: Session | Connection, job_id: UUID) -> FoundJob | None:
    row = connection.execute(statements.find_job(job_id)).one_or_none()
    return None if row is None else FoundJob(*row)
