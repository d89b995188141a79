"""Progress of running jobs, as their handlers report it."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from outboxq.statements import progress as statements
from outboxq.tables import mapped_schema


@dataclass(frozen=True, slots=True)
class Progress:
    """The newest progress that a running job's handler reported: a fraction from 0 to 1, a text, and its time."""

    fraction: float
    note: str
    noted_at: datetime


def progress_of(connection: Connection, job_ids: Collection[UUID]) -> dict[UUID, Progress]:
    """Return the newest progress of running jobs by their ids, if handlers report any and this role may read it."""
    if not job_ids or not connection.execute(statements.may_read_progress(mapped_schema(connection))).scalar_one():
        return {}
    return {job_id: Progress(*noted) for job_id, *noted in connection.execute(statements.select_progress(job_ids))}
