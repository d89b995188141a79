"""The step of callback batches (`jobs.batch`): after the COMMIT of members, those that have ended get their callbacks.

Nothing depends on it: if it fails, or its relay dies before it, the pruner's sweep comes to the batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

import msgspec

from outboxq.database.driver import Rows
from outboxq.events import BatchFinished
from outboxq.execution.step import Step
from outboxq.job import Job
from outboxq.statements.callback_batches import finish_batches

_FOUND = list[tuple[UUID, str, str, int]]


@dataclass(frozen=True, slots=True)
class FinishBatches(Step):
    """Adds the callbacks of the batches that these were the last members of."""

    schema: str
    ids: frozenset[UUID]
    name = "callback batches"

    def after_commit(self) -> tuple[str, ...]:
        """A transaction of its own: before COMMIT two members that end at the same time would each see the other."""
        return finish_batches(self.schema, self.ids)

    def committed(self, rows: Rows) -> tuple[BatchFinished, ...]:
        """The batches that have ended; none if the look failed."""
        return tuple(BatchFinished(*found) for (text,) in rows for found in msgspec.json.decode(str(text), type=_FOUND))


def batch_ids(jobs: Iterable[Job]) -> frozenset[UUID]:
    """The batches that these jobs are members of."""
    return frozenset(job.batch_id for job in jobs if job.batch_id is not None)
