"""When a slot looks at the batches (`jobs.batch`) of its jobs: behind their COMMIT, and never before it."""

from collections.abc import Collection, Iterable
from uuid import UUID

from sqlalchemy import Connection

from outboxq.database.driver import is_listened_to, is_lost
from outboxq.emitter import Emitter
from outboxq.execution.batch_state import BatchState
from outboxq.execution.claim import ClaimRequest
from outboxq.execution.commit import Committed, commit
from outboxq.execution.job_batches import batch_ids, look_at_batches
from outboxq.execution.runtime import Runtime
from outboxq.job import Job


class BatchLooks:
    """The looks of one slot: most go with a COMMIT; the others are made when no transaction is open.

    If users' code listens to the engine, it sets up each transaction, and no look goes with a COMMIT. None goes with
    one that adds unique jobs either: its answer says whether they were added, and would be lost if the look failed.
    """

    def __init__(self, schema: str, emit: Emitter) -> None:
        self._schema = schema
        self._emit = emit
        self._waiting: set[UUID] = set()

    def commit(
        self, connection: Connection, batch: BatchState, runtime: Runtime, next_claim: ClaimRequest | None
    ) -> Committed | None:
        """Commit a batch, and look at the batches of its jobs, in the same round trip if it may be."""
        if batch.is_plain or not (batch.unique_adds or is_listened_to(connection)):
            return commit(connection, batch, runtime, next_claim)
        committed = commit(connection, batch, runtime, next_claim, looks=False)
        self.add(batch.jobs)
        return committed

    def behind(self, connection: Connection, jobs: Iterable[Job]) -> None:
        """Look at the batches of leased jobs that were just removed together, and told; no transaction is open."""
        if is_listened_to(connection):
            self.add(jobs)
        elif ids := batch_ids(jobs):
            self._look(connection, ids)

    def add(self, jobs: Iterable[Job]) -> None:
        """Look at the batches of these jobs later: no look went along when they were removed."""
        self._waiting |= batch_ids(jobs)

    def make(self, connection: Connection) -> None:
        """Make the looks that wait, if any do; SQLAlchemy has no transaction open."""
        if not self._waiting or is_lost(connection):
            return
        ids, self._waiting = self._waiting, set()
        with connection.begin():
            self._look(connection, ids)

    def _look(self, connection: Connection, ids: Collection[UUID]) -> None:
        for event in look_at_batches(connection, self._schema, ids):
            self._emit(event)
