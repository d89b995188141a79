"""Callback batches (`jobs.batch`): when all jobs of a callback batch have ended, its callback jobs are added.

This is a step (statements that other features send with a COMMIT), executed right after COMMIT. If the step fails, or
the relay dies before it, the pruner's periodic sweep finds the callback batch.
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
    """The step that adds the callback jobs of those callback batches in `ids` that have no unfinished job."""

    schema: str
    ids: frozenset[UUID]
    name = "callback batches"

    def after_commit(self) -> tuple[str, ...]:
        """Return a transaction, as statements: it adds the callbacks of all these callback batches that have ended.

        It comes after COMMIT: before, two jobs that end at once would each see the other as unfinished, and neither
        would add the callbacks.
        """
        return finish_batches(self.schema, self.ids)

    def committed(self, rows: Rows) -> tuple[BatchFinished, ...]:
        """Return an event for each callback batch that has ended; none if the transaction sent after COMMIT failed."""
        return tuple(BatchFinished(*found) for (text,) in rows for found in msgspec.json.decode(str(text), type=_FOUND))


def batch_ids(jobs: Iterable[Job]) -> frozenset[UUID]:
    """Return the ids of the callback batches of these jobs."""
    return frozenset(job.batch_id for job in jobs if job.batch_id is not None)
