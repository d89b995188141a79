"""Progress: what handlers that run have noted of how far they are, for those who look from outside."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from outboxq.statements import progress as statements
from outboxq.tables import mapped_schema


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is that runs, as its handler noted it last: a fraction from 0 to 1, a text, and when that was."""

    fraction: float
    note: str
    noted_at: datetime


def progress_of(connection: Connection, job_ids: Collection[UUID]) -> dict[UUID, Progress]:
    """The progress of jobs that run, as far as their handlers note any and this role may read it."""
    if not job_ids or not connection.execute(statements.may_read_progress(mapped_schema(connection))).scalar_one():
        return {}
    return {job_id: Progress(*noted) for job_id, *noted in connection.execute(statements.select_progress(job_ids))}
