"""Open batches (`jobs.batch`), for operators to list and show. A batch that is over is gone, and its callback a job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from outboxq.errors import BatchNotFound
from outboxq.statements import callback_batches as statements


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch whose callback was not added yet.

    Attributes:
        id: Also the id that the callback's job will have.
        queue: That of the callback.
        kind: That of the callback.
        members: How many of its jobs wait or run; 10,000 for more.
        failed: How many of its jobs are dead letters; 10,000 for more.
        parent_id: The batch that the callback is a member of.
    """

    id: UUID
    queue: str
    kind: str
    members: int
    failed: int
    parent_id: UUID | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class BatchDetail:
    """A batch, its callback as JSON text, and its members by their states: up to 10,000 of those that are left."""

    batch: OpenBatch
    states: Mapping[str, int]
    callback: str = field(repr=False)


def list_batches(connection: Connection, *, limit: int = 50) -> list[OpenBatch]:
    """The oldest open batches."""
    return [OpenBatch(*row) for row in connection.execute(statements.select_batches(limit=limit))]


def show_batch(connection: Connection, batch_id: UUID) -> BatchDetail:
    """One open batch.

    Raises:
        BatchNotFound: it is over, or was never there.
    """
    row = connection.execute(statements.select_batch(batch_id)).one_or_none()
    if row is None:
        raise BatchNotFound(batch_id)
    *summary, callback = row
    states = {each.state: each.jobs for each in connection.execute(statements.member_states(batch_id))}
    return BatchDetail(OpenBatch(*summary), states, callback)
