"""Finds a job by its handle or id: for a producer whose COMMIT was not answered, and for tests."""

from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outboxq.database.answers import AsyncTarget, SyncTarget, run_on
from outboxq.database.errors import missing_tables_explained
from outboxq.database.sessions import transaction_connection
from outboxq.outbox.handle import JobHandle, job_id_of
from outboxq.outbox.progress import Progress as Progress
from outboxq.outbox.progress import progress_of
from outboxq.statements import done
from outboxq.statements import jobs as statements
from outboxq.tables import mapped_schema


@dataclass(frozen=True, slots=True)
class FoundJob:
    """The state of a job: it waits (for its time or a relay), it runs, it is a dead letter, or it has finished.

    A finished job is found if its kind keeps finished jobs (`keep=`): done, discarded by its handler, cancelled while
    it ran, or expired.

    `attempt` counts the attempts that have ended; in lease mode also the running one. `result` is the value that a
    handler with `keep_result=True` returned, as JSON text. `progress` is the newest that the handler of a running job
    has reported by `ctx.progress`.
    """

    id: UUID
    kind: str
    queue: str
    state: Literal["waiting", "running", "dead", "done", "discarded", "cancelled", "expired"]
    attempt: int
    result: str | None = field(default=None, repr=False)
    progress: Progress | None = None


@overload
def find_job(connection: SyncTarget, job: JobHandle | UUID | str) -> FoundJob | None: ...


@overload
def find_job(connection: AsyncTarget, job: JobHandle | UUID | str) -> Coroutine[Any, Any, FoundJob | None]: ...


def find_job(
    connection: SyncTarget | AsyncTarget, job: JobHandle | UUID | str
) -> FoundJob | Coroutine[Any, Any, FoundJob | None] | None:
    """Find a job, in a transaction that began after the one that added it; await the result on an async session.

    A job that is found was committed. None means that the job was never committed, or that it has finished and its kind
    keeps no finished jobs: rows that the same transaction wrote show which is true, because the job existed if and only
    if those rows do.

    Needs SELECT on the tables `job` and `dead_job`; on `done_job` too, or finished jobs are not found; and for the
    progress of jobs that run, on `progress`.

    Args:
        job: Its handle, or its id, also as text.

    Raises:
        ArgumentError: the text is no id.
        SchemaError: the tables are missing, or older than this outboxq.
    """
    job_id = job_id_of(job)
    return run_on(connection, lambda target: _find(target, job_id), "find_job(...)")


def _find(connection: Session | Connection, job_id: UUID) -> FoundJob | None:
    # The connection for jobs, even if the session has several engines; of any driver.
    below = connection if isinstance(connection, Connection) else transaction_connection(connection)
    with missing_tables_explained():
        return _find_below(below, job_id)


def _find_below(below: Connection, job_id: UUID) -> FoundJob | None:
    row = below.execute(statements.find_job(job_id)).one_or_none()
    if row is None and below.execute(done.may_read(mapped_schema(below))).scalar_one():
        # After the first query, so that a job that ended between the two is found.
        row = below.execute(done.find_finished(job_id)).one_or_none()
    if row is None:
        return None
    found = FoundJob(*row)
    return replace(found, progress=progress_of(below, [job_id]).get(job_id)) if found.state == "running" else found
