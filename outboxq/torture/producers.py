"""The producers: threads that commit jobs with their business rows, and record the answer to each COMMIT.

A transaction that certainly failed is repeated with new jobs; one with an unanswered COMMIT is not repeated, and its
business rows show its outcome later.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from outboxq import OutboxSession
from outboxq.outbox.kinds import JobKind
from outboxq.torture.app import USES
from outboxq.torture.faults import PlannedTransaction
from outboxq.torture.history import SCHEMA
from outboxq.torture.lanes import Lanes

PRODUCERS = 4
_RETRY_SECONDS = 0.1

Outcome: TypeAlias = Literal["ok", "failed", "unknown"]

_REQUEST = text(f"INSERT INTO {SCHEMA}.request (job_id, key, number) VALUES (:job_id, :key, :number)")
_FORGET = text(f"DELETE FROM {SCHEMA}.enqueue WHERE job_id = ANY (:ids)")
_NOTE = text(f"INSERT INTO {SCHEMA}.enqueue (job_id, outcome) VALUES (:job_id, :outcome)")


class Journal:
    """The outcomes of producers' transactions, by job, kept in memory until `flush` writes them into the database."""

    def __init__(self) -> None:
        self.told: dict[Outcome, int] = {"ok": 0, "failed": 0, "unknown": 0}
        self._lock = threading.Lock()
        self._pending: list[tuple[UUID, Outcome]] = []

    @property
    def enqueued(self) -> int:
        """The number of jobs that were committed, or may have been because COMMIT was not answered."""
        return self.told["ok"] + self.told["unknown"]

    def note(self, job_ids: Sequence[UUID], outcome: Outcome) -> None:
        """Record the outcome of a transaction or savepoint for the jobs that were added in it."""
        with self._lock:
            self._pending.extend((job_id, outcome) for job_id in job_ids)
            self.told[outcome] += len(job_ids)

    def flush(self, connection: Connection) -> None:
        """Write the outcomes that were not written yet, and commit.

        The call may be repeated after an error: rows that it wrote already are replaced.
        """
        with self._lock:
            pending = list(self._pending)
        if not pending:
            return
        connection.execute(_FORGET, {"ids": [job_id for job_id, _ in pending]})
        connection.execute(_NOTE, [{"job_id": job_id, "outcome": outcome} for job_id, outcome in pending])
        connection.commit()
        with self._lock:
            del self._pending[: len(pending)]


class Producers:
    """The threads that execute the planned transactions. They pause when as many jobs are enqueued as `allow` permits.

    This limit keeps producers from finishing before the last faults, and bounds the backlog.

    Args:
        starts: The directory in which handlers of mode `calls` record their starts.
    """

    def __init__(
        self, url: str, transactions: Iterator[PlannedTransaction], kinds: Sequence[JobKind[...]], starts: str
    ) -> None:
        self._lanes = Lanes(USES, starts)
        self.journal = Journal()
        self.rolled_back = 0
        self._engine: Engine = create_engine(url, pool_size=PRODUCERS, hide_parameters=True)
        self._transactions = transactions
        self._kinds = kinds
        self._limit = 0
        self._allowed = threading.Condition()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PRODUCERS, thread_name_prefix="producer")
        self._ends: list[Future[None]] = [self._pool.submit(self._produce) for _ in range(PRODUCERS)]

    def allow(self, limit: int) -> None:
        """Permit the threads to enqueue jobs until there have been `limit` of them since the start."""
        with self._allowed:
            self._limit = limit
            self._allowed.notify_all()

    def have_finished(self) -> bool:
        """Return True if all threads have executed their transactions. If a thread has failed, raise its error."""
        for end in self._ends:
            if end.done():
                end.result()
        return all(end.done() for end in self._ends)

    def close(self) -> None:
        """End the threads; each finishes the transaction that it is executing."""
        self._stopping.set()
        with self._allowed:
            self._allowed.notify_all()
        self._pool.shutdown()
        self._engine.dispose()

    def _produce(self) -> None:
        while self._may_go_on():
            with self._lock:
                planned = next(self._transactions, None)
            if planned is None:
                return
            while not self._is_over(planned) and not self._stopping.wait(_RETRY_SECONDS):
                pass

    def _may_go_on(self) -> bool:
        with self._allowed:
            self._allowed.wait_for(lambda: self._stopping.is_set() or self.journal.enqueued < self._limit)
        return not self._stopping.is_set()

    def _is_over(self, planned: PlannedTransaction) -> bool:
        """Execute a planned transaction once; return False if it has to be executed again.

        A transaction has to be executed again if it was planned to be committed, and certainly was not.
        """
        job_ids: list[UUID] = []
        committing = False
        try:
            with OutboxSession(self._engine) as session:
                self._fill(session, planned, job_ids)
                if planned.fate == "roll back":
                    session.rollback()
                    self._note_failed(job_ids)
                    return True
                committing = True
                session.commit()
        except DBAPIError:
            # An error instead of an answer to COMMIT: without deferred triggers, it means that the connection was lost.
            self.journal.note(job_ids, "unknown" if committing else "failed")
            return committing or planned.fate == "roll back"
        self.journal.note(job_ids, "ok")
        return True

    def _fill(self, session: OutboxSession, planned: PlannedTransaction, job_ids: list[UUID]) -> None:
        for behaviour, number in zip(planned.behaviours, planned.queue_numbers, strict=True):
            job_ids += self._request(session, number, behaviour)
        session.flush()
        if planned.fate == "roll back a savepoint":
            undone: list[UUID] = []
            with session.begin_nested() as savepoint:
                undone += self._request(session, 0, "plain")
                session.flush()
                savepoint.rollback()
            self._note_failed(undone)

    def _request(self, session: OutboxSession, number: int, behaviour: str) -> list[UUID]:
        added = self._lanes.add(session, self._kinds[number], behaviour)
        for each in added:
            session.execute(_REQUEST, {"job_id": each.id, "key": each.key, "number": each.place})
        return [each.id for each in added]

    def _note_failed(self, job_ids: list[UUID]) -> None:
        self.journal.note(job_ids, "failed")
        with self._lock:
            self.rolled_back += len(job_ids)
