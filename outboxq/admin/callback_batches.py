"""Open batches (`jobs.batch`), for operators to list and show.

A batch is a set of jobs with a callback, a job that is added when all of the set's jobs have ended. The batch's row is
deleted when its callback is added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from outboxq.errors import BatchNotFound
from outboxq.statements import callback_batches as statements


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch with jobs that have not ended, so that its callback, the job that follows them, was not added yet.

    Attributes:
        id: The batch's id, which will also be the id of the callback.
        queue: The queue of the callback.
        kind: The kind of the callback.
        members: How many of the batch's jobs wait or run; counted up to 10,000.
        failed: How many of the batch's jobs are dead letters; counted up to 10,000.
        parent_id: The id of another batch to which the callback belongs; None if there is no such batch.
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
    """An open batch with its callback and the states of its jobs, as `show_batch` returns it.

    `states`: the number of the batch's remaining jobs in each state; at most 10,000 jobs are counted. `callback`: the
    callback's job, as JSON text.
    """

    batch: OpenBatch
    states: Mapping[str, int]
    callback: str = field(repr=False)


def list_batches(connection: Connection, *, limit: int = 50) -> list[OpenBatch]:
    """Return up to `limit` open batches, the oldest first."""
    return [OpenBatch(*row) for row in connection.execute(statements.select_batches(limit=limit))]


def show_batch(connection: Connection, batch_id: UUID) -> BatchDetail:
    """Return one open batch, with its callback and the states of its jobs.

    Raises:
        BatchNotFound: the batch has finished, or never existed.
    """
    row = connection.execute(statements.select_batch(batch_id)).one_or_none()
    if row is None:
        raise BatchNotFound(batch_id)
    *summary, callback = row
    states = {each.state: each.jobs for each in connection.execute(statements.member_states(batch_id))}
    return BatchDetail(OpenBatch(*summary), states, callback)
