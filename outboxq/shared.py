"""Shared batches: jobs of batchable kinds in one session, on one savepoint, with one flush.

Whatever goes wrong, or ends otherwise than done, takes all of them back to the savepoint; then each runs by itself,
where a failure is its own.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.deferred import Deferred, take_writes
from outboxq.driver import driver_connection, is_lost, run_script, sqlstate_of, transaction_status
from outboxq.enqueue import OURS, WAITING
from outboxq.errors import HandlerError, HandlerRolledBack, SharedRunEnded, TransactionEndedByHandler
from outboxq.events import JobDone
from outboxq.execute import ConnectionLost, TransactionEscaped, Work
from outboxq.failure import describe_failure
from outboxq.fault_points import fault_point
from outboxq.guard import Savepoint
from outboxq.invoke import Run
from outboxq.job import Job
from outboxq.progress import Progress
from outboxq.retry import Done
from outboxq.settle import check_shared, current_xid
from outboxq.shared_session import Loaded, SharedSession

# With more than so many changes pending they are flushed: after each job all of them are looked at.
_FLUSHED_AT = 100
_DEADLOCKS = ("40001", "40P01")


class SharedSavepoint:
    """A savepoint for several jobs in the claim's transaction, and the way back to it.

    The claim's own seal stands for it: nothing is sent for the first jobs of a batch.

    Args:
        first: The place of the first of them in the batch.
    """

    def __init__(self, connection: Connection, work: Work, batch: Progress, first: int) -> None:
        assert batch.anchor is not None
        seal = batch.anchor.seal
        if first > 0:
            # Set anew: what other jobs wrote must stay, whatever becomes of these.
            run_script(connection, f"RELEASE SAVEPOINT {seal}; SAVEPOINT {seal}")
        self._connection = connection
        self._guard = work.guard
        self._batch = batch
        self._root = connection.get_transaction()
        # Asked after each job.
        self._libpq = driver_connection(connection).pgconn
        work.guard.begin_savepoint(seal)
        self.savepoint: Savepoint | None = work.guard.savepoint

    @property
    def is_whole(self) -> bool:
        """Whether it is the innermost one still, in a transaction that works. No I/O."""
        savepoint = self.savepoint
        return (
            savepoint is not None
            and savepoint.is_active
            and self._connection.get_nested_transaction() is savepoint
            and self._libpq.transaction_status == TransactionStatus.INTRANS
        )

    def is_same_transaction(self) -> bool:
        """Whether the server still runs the claim's transaction."""
        anchor = self._batch.anchor
        return anchor is not None and current_xid(self._connection) == anchor.xid

    def keep(self) -> None:
        """Keep what lies behind it, with every deferred constraint checked, now or by the certificate.

        Raises:
            psycopg.Error, TransactionEndedByHandler: see `check_shared`.
        """
        assert self._batch.anchor is not None
        assert self.savepoint is not None
        if self._batch.one_run is None:
            check_shared(self._connection, self._batch.anchor.xid)
        self.savepoint.commit()

    def undo(self, error: BaseException, *, closed: bool) -> None:
        """Go back to it, after `error`.

        Raises:
            ConnectionLost: the transaction is gone with its connection.
            TransactionEscaped: a handler ended the transaction.
        """
        self._batch.deadlocked |= sqlstate_of(error) in _DEADLOCKS
        if is_lost(self._connection):
            raise ConnectionLost("the connection was lost while a batch ran") from error
        if not (closed and self._rolled_back() and self.is_same_transaction()):
            job = self._batch.jobs[self._batch.position]
            raise TransactionEscaped(job, describe_failure(TransactionEndedByHandler(), job)) from error

    def _rolled_back(self) -> bool:
        savepoint, root = self.savepoint, self._root
        is_ours = root is not None and root.is_active and self._connection.get_transaction() is root
        # Released, its rows stand: were it taken for undone, the jobs would run on top of them.
        if (
            savepoint is None
            or savepoint.is_released
            or not is_ours
            or transaction_status(self._connection) == TransactionStatus.IDLE
        ):
            return False
        try:
            savepoint.undo()
        except (psycopg.Error, SQLAlchemyError) as error:
            if is_lost(self._connection):
                raise ConnectionLost("the connection was lost while a batch was undone") from error
            return False
        return transaction_status(self._connection) == TransactionStatus.INTRANS


def run_shared(
    connection: Connection, batch: Progress, work: Work, jobs: range, arguments: Sequence[Mapping[str, object]]
) -> bool:
    """Run jobs of batchable kinds; False where nothing of them stands, and each is to run by itself.

    Args:
        jobs: Their places among the jobs of the batch, one after the other.
        arguments: The decoded arguments of each.

    Raises:
        ConnectionLost, TransactionEscaped: see `execute`.
    """
    events = len(batch.events)
    run = _SharedRun(connection, batch, work, jobs, arguments)
    try:
        run.run()
    except BaseException as error:
        if not work.is_failure(error):
            raise
        # It will show again when each runs alone.
        failed = error
    else:
        return True
    finally:
        batch.deadline = None
        work.guard.let_go()
        run.end()
    run.undo(failed)
    del batch.events[events:]
    return False


class _SharedRun:
    """Before a job sends anything by itself, all rows of the jobs before it are sent: their events stand for that.

    So should it end the transaction, what stands is known: the rows of all jobs with an event, none of the others'
    but its own.
    """

    def __init__(
        self,
        connection: Connection,
        batch: Progress,
        work: Work,
        jobs: range,
        arguments: Sequence[Mapping[str, object]],
    ) -> None:
        self._connection = connection
        self._batch = batch
        self._work = work
        self._jobs = jobs
        self._arguments = arguments
        self._seconds: list[float] = []
        self._sent = 0
        self._is_over = False
        self._deferred = Deferred()
        self._place = SharedSavepoint(connection, work, batch, jobs.start)
        session = work.invoker.open_session(connection, self._catch_up, SharedSession)
        assert isinstance(session, SharedSession)
        self._session = session

    def run(self) -> None:
        """Run all of them, up to the release of their savepoint."""
        self._batch.position = self._jobs.start
        self._work.guard.opener = self._session.touch
        self._work.guard.watcher = self._session
        loaded = Loaded(self._session, self._arguments)
        for position, arguments in zip(self._jobs, self._arguments, strict=True):
            self._batch.position = position
            self._run_one(self._batch.jobs[position], arguments, loaded)
        self._flush()
        self._session.commit()
        self._session.close()
        if self._session.ended_by is not None:
            raise SharedRunEnded(self._session.ended_by)
        # Last: once the savepoint is released nothing may send the jobs on their way again.
        self._is_over = True
        self._place.keep()

    def end(self) -> None:
        """Whoever still has the session has no turn any more."""
        self._session.end_turns()

    def undo(self, error: BaseException) -> None:
        """Back to before the first of them. Raises: as `SharedSavepoint.undo`."""
        try:
            self._place.undo(error, closed=self._closed())
        except TransactionEscaped:
            if self._is_over:
                # Nobody saw whose handler it was, nor whose rows stand.
                self._batch.blame_all(self._jobs)
            else:
                self._set_aside_unsent()
            raise

    def _set_aside_unsent(self) -> None:
        """Behind the job that ended the transaction: of what was not sent before it, nothing stands."""
        batch, first = self._batch, self._jobs.start + self._sent
        if first > batch.position:
            # Nothing was unsent but the end of the transaction: its own event is not one of a job that is done.
            del batch.events[batch.position - first :]
            return
        jobs, position = batch.jobs, batch.position
        batch.jobs = (*jobs[:first], jobs[position], *jobs[first:position], *jobs[position + 1 :])
        batch.position = first

    def _run_one(self, job: Job, arguments: Mapping[str, object], loaded: Loaded) -> None:
        begun, session = time.perf_counter(), self._session
        handler = self._work.registry.find(job.kind)
        given, entities = loaded.arguments(arguments)
        if entities and self._deferred:
            # What an earlier job deferred may be for this very row.
            self._send()
            given, entities = loaded.arguments(arguments)
        session.meet(entities)
        fault_point("before-handler")
        seconds = handler.timeout_seconds
        self._batch.deadline = None if seconds is None else time.monotonic() + seconds
        run = Run(job, self._work.state, partial(self._work.permit, handler, job))
        session.begin_turn(job)
        try:
            returned = self._work.call(self._connection, handler, lambda: session, run, given)
        finally:
            session.end_turn()
        self._batch.deadline = None
        outcome = handler.returned.outcome(returned)
        if not isinstance(outcome, Done):
            raise HandlerError(f"the handler returned a {type(outcome).__name__}")
        self._look()
        self._seconds.append(time.perf_counter() - begun)
        if self._has_to_send():
            self._send()
        self._tidy_up()
        fault_point("after-handler")

    def _look(self) -> None:
        """Whether the handler left everything to the others as it was.

        Raises:
            SharedRunEnded, HandlerRolledBack, TransactionEndedByHandler: it did not.
        """
        session = self._session
        if session.in_nested_transaction():
            # The handler's own, left open: its rows count, as where it runs alone.
            session.commit()
        if session.ended_by is not None:
            raise SharedRunEnded(session.ended_by)
        if not self._place.is_whole:
            raise HandlerRolledBack("the handler undid its session, or swallowed a database error")
        if (session.exposed or session.suspicious) and not self._place.is_same_transaction():
            raise TransactionEndedByHandler
        if writes := take_writes(session):
            self._deferred.add_job(writes)
        if session.has_lost_changes():
            raise SharedRunEnded("what takes the changes of other jobs out of the session")

    def _tidy_up(self) -> None:
        """The next job finds the session as if it were fresh."""
        session = self._session
        if session.info.get(WAITING):
            raise SharedRunEnded("a job for an entity that left the session")
        session.info.clear()
        session.autoflush = True

    def _has_to_send(self) -> bool:
        session = self._session
        return (
            session.touched
            or session.exposed
            or session.stale
            or bool(session.info.get(WAITING))
            # Theirs, for hooks of theirs at the flush.
            or not session.info.keys() <= OURS
            or session.has_deletions()
            or session.pending > _FLUSHED_AT
            or session.has_expressions
        )

    def _send(self) -> None:
        """Send all rows of the jobs that have run, and load anew what others may have changed."""
        session = self._session
        self._flush()
        if session.exposed or session.stale:
            session.expire_all()
            session.stale = False

    def _catch_up(self) -> None:
        """A handler is about to send something: first whatever the jobs before it have not sent."""
        session = self._session
        try:
            if not (session.pending or self._deferred):
                self._mark_sent()
                return
            if self._deferred and session.has_met():
                session.end_shared("rows in hand that an earlier job deferred a write to, perhaps,")
            with session.ours():
                self._flush()
        except BaseException:
            # It is raised in the handler, which may swallow it: what was not sent is gone.
            session.ended_by = session.ended_by or "an error while the rows of others were sent"
            raise

    def _flush(self) -> None:
        session = self._session
        session.flush()
        # They may write rows that are loaded here.
        session.stale |= bool(self._deferred)
        self._deferred.send(self._connection)
        self._mark_sent()

    def _mark_sent(self) -> None:
        for seconds in self._seconds[self._sent :]:
            self._batch.events.append(JobDone(self._batch.jobs[self._jobs.start + self._sent], seconds))
            self._sent += 1

    def _closed(self) -> bool:
        try:
            with self._session.turn_of_batch():
                self._session.close()
        except Exception:  # noqa: BLE001  # whatever it is, the transaction below is not as it was
            return False
        return True
