"""The step of callback batches (`jobs.batch`): after the COMMIT of members, those that have ended get their callbacks.

If it fails, or its relay dies before it, the pruner's sweep finds the callback batch.
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
    """Add the callbacks of the callback batches that have ended."""

    schema: str
    ids: frozenset[UUID]
    name = "callback batches"

    def after_commit(self) -> tuple[str, ...]:
        """Check in a transaction of its own: before COMMIT two members that end at once would each see the other."""
        return finish_batches(self.schema, self.ids)

    def committed(self, rows: Rows) -> tuple[BatchFinished, ...]:
        """Return the callback batches that have ended; none if the check failed."""
        return tuple(BatchFinished(*found) for (text,) in rows for found in msgspec.json.decode(str(text), type=_FOUND))


def batch_ids(jobs: Iterable[Job]) -> frozenset[UUID]:
    """Ids of the callback batches of these jobs."""
    return frozenset(job.batch_id for job in jobs if job.batch_id is not None)
