"""One attempt: a handler runs inside the relay's transaction, isolated by a session and a savepoint of its own.

If the handler fails, the savepoint undoes all of its rows, and the claim of its job stays in the transaction. Jobs that
run together share a savepoint.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, RootTransaction
from sqlalchemy.exc import SQLAlchemyError

from outboxq.codec.entities import EntityKey
from outboxq.database.driver import is_lost, run_script
from outboxq.database.errors import QUERY_CANCELED, sqlstate_of
from outboxq.database.guard import Guard, Savepoint
from outboxq.errors import (
    EffectInProgress,
    HandlerError,
    HandlerRolledBack,
    HandlerTimedOut,
    TransactionEndedByHandler,
)
from outboxq.execution.batch_state import BatchState, Running
from outboxq.execution.chain import follower_of
from outboxq.execution.errors import ROLLED_BACK, SWALLOWED, ConnectionLost, ConnectionSpoiled, TransactionEscaped
from outboxq.execution.failure import TRANSIENT, Failed, describe_failure
from outboxq.execution.invoke import Args, HandlerSession, JobSession, Run, hand_over
from outboxq.execution.job_entities import send_before
from outboxq.execution.preload import RowsMayBeLate, load_alone, watch_unlocked
from outboxq.execution.runtime import CancelledResult, Runtime
from outboxq.execution.settle import check_shared, current_xid
from outboxq.execution.surround import Surrounded
from outboxq.execution.write_buffer import send_changes
from outboxq.fault_points import fault_point
from outboxq.handlers.call import HandlerCall
from outboxq.handlers.handler import AnyHandler, BatchHandler
from outboxq.job import THEN_HEADER, Job
from outboxq.outcomes import Done, Outcome, Snooze

_SHORTEST_SNOOZE_SECONDS = 0.05
_NOT_AT_REST = (
    "the handler left the driver's connection in the middle of something: a COPY or a stream that it had not finished, "
    "pipeline mode, or a statement of a thread or task of its own"
)
_CANCELLED, _DONE = CancelledResult(), Done()

AttemptResult: TypeAlias = Outcome | Failed | CancelledResult


def is_intact(connection: Connection, root: RootTransaction | None) -> bool:
    """Return True if, as far as SQLAlchemy knows, `root` is still the connection's open transaction."""
    return root is not None and root.is_active and connection.get_transaction() is root


def undo(
    connection: Connection, guard: Guard, savepoint: Savepoint | None, *, intact: bool, in_transaction: bool = True
) -> bool:
    """Undo a handler's rows by going back to its savepoint; return False if the transaction has ended or was changed.

    Args:
        guard: The watcher of the relay's connection, which reads the transaction's status from the driver.
        savepoint: The handler's savepoint; None if it was never set.
        intact: True if, as far as SQLAlchemy knows, the transaction is as the relay left it.
        in_transaction: True if the server was in the relay's transaction when the handler began, or the savepoint was
            set.

    Raises:
        ConnectionLost: the transaction is gone with its connection.
    """
    if is_lost(connection):
        raise ConnectionLost("the connection was lost while a handler ran")
    status = guard.transaction_status
    if savepoint is None and in_transaction:
        return intact and status == TransactionStatus.INTRANS
    if savepoint is None:
        if status != TransactionStatus.IDLE:
            # The handler began a transaction on the driver's own connection, which must not be committed with the job.
            run_script(connection, "ROLLBACK")
        return intact
    # If the handler released the savepoint, its rows would be committed in spite of its failure.
    if not intact or savepoint.is_released or status == TransactionStatus.IDLE:
        return False
    try:
        savepoint.undo()
    except (psycopg.Error, SQLAlchemyError) as error:
        if is_lost(connection):
            raise ConnectionLost("the connection was lost while a handler was undone") from error
        return False
    return guard.transaction_status == TransactionStatus.INTRANS


def check_rest(runtime: Runtime, job: Job, error: BaseException | None = None) -> None:
    """Close the driver's connection, and raise an error, if a handler left something unfinished on it, such as a COPY.

    Args:
        error: The error that the handler raised, if any.

    Raises:
        ConnectionSpoiled: the connection was closed: nothing could be sent on it, not even to undo the handler.
    """
    guard = runtime.guard
    # Without an error, nothing can be under way if no job took the driver's connection, and this job sent nothing.
    is_untouched = guard.left is None and (guard.on_first_use is not None or not guard.lent)
    if (error is None and is_untouched) or guard.is_at_rest():
        return
    guard.give_up()
    if error is None:
        raise ConnectionSpoiled(runtime.describe(HandlerError(_NOT_AT_REST), job))
    if runtime.is_failure(error):
        raise ConnectionSpoiled(runtime.describe(error, job)) from error


class SharedSavepoint:
    """The savepoint of several jobs that run together: jobs of batchable kinds, or those of a batch handler's call.

    Every claim already sets two savepoints. This object uses the inner of the two, so the first jobs of a batch need no
    further statement.

    Args:
        first: The place in the batch of the first of these jobs.
    """

    def __init__(self, connection: Connection, guard: Guard, batch: BatchState, first: int) -> None:
        assert batch.transaction is not None
        inner = batch.transaction.inner_savepoint
        if first > 0:
            # Set again, so that the rows of earlier jobs stay if these jobs are undone.
            run_script(connection, f"RELEASE SAVEPOINT {inner}; SAVEPOINT {inner}")
        self.xid = batch.transaction.xid
        self._batch = batch
        self._connection = connection
        self.guard = guard
        self._root = connection.get_transaction()
        self.savepoint = guard.begin_savepoint(inner)

    def check(self, *, closed: bool) -> None:
        """Check that this is still the innermost savepoint of a working transaction, without sending a statement.

        Args:
            closed: False if closing the handler's session failed.

        Raises:
            HandlerError: a handler returned normally although its rows were undone, or it left another transaction
                open.
        """
        status = self.guard.transaction_status
        if not self.savepoint.is_active:
            raise HandlerRolledBack(ROLLED_BACK)
        if status == TransactionStatus.INERROR:
            raise HandlerError(SWALLOWED)
        is_innermost = self._connection.get_nested_transaction() is self.savepoint
        if not (closed and is_innermost and status == TransactionStatus.INTRANS):
            raise HandlerRolledBack("the handler left its session's transaction in another one than it was given")

    def is_same_transaction(self) -> bool:
        """Return True if the open transaction is still the one of the claim; sends a query for its id."""
        return current_xid(self._connection) == self.xid

    def keep_all(self) -> None:
        """Release the savepoint: the rows of these jobs stay in the transaction.

        First check the deferred constraints, unless all jobs of the batch run together: then COMMIT checks them.

        Raises:
            psycopg.Error: a deferred constraint is violated.
            TransactionEndedByHandler: this is no longer the claim's transaction.
        """
        if not self._batch.tries.together:
            check_shared(self._connection, self.xid)
        self.savepoint.commit()

    def undo_all(self, error: BaseException, *, closed: bool) -> None:
        """Undo the rows of all these jobs, because of `error`, by going back to the savepoint.

        Args:
            closed: True if the handlers' sessions were closed without an error.

        Raises:
            ConnectionLost: the transaction is gone with its connection.
            TransactionEscaped: a handler ended the transaction.
        """
        self._batch.tries.has_deadlocked |= sqlstate_of(error) in TRANSIENT
        intact = closed and is_intact(self._connection, self._root)
        is_undone = undo(self._connection, self.guard, self.savepoint, intact=intact)
        if not (is_undone and self.is_same_transaction()):
            job = self._batch.job
            # If SQLAlchemy noticed the end of the transaction, its error says more than TransactionEscaped.
            reason = TransactionEndedByHandler() if intact else error
            # A job's writes may be sent while another job runs.
            args = [each.args for each in self._batch.jobs]
            raise TransactionEscaped(job, describe_failure(reason, job, args=args)) from error


class Attempt(JobSession):
    """One run of a job's handler: opens its session and savepoint at their first use, and keeps or undoes its rows.

    Args:
        shared_xid: The id of the claim's transaction if other jobs share this transaction, else None. In a shared
            transaction the deferred constraints are checked after this job, so that a violation fails only this job;
            for a lone job COMMIT checks them.
        begin: Begins the relay's transaction, unless it has begun. Returns the name of an existing savepoint for the
            attempt to use, or None if the attempt is to set one of its own.
        running: The batch's record of the job that runs now. The handler's call is entered there, so that an operator
            can cancel it.
    """

    # True if the handler has started, in a task of its own.
    has_started = False
    # An operator's cancellation counts until the attempt has ended.
    _may_be_cancelled = True
    _runtime: Runtime
    _connection: Connection
    _root: RootTransaction | None
    _call: HandlerCall
    _run: Run

    def __init__(
        self,
        handler: AnyHandler,
        job: Job,
        runtime: Runtime,
        shared_xid: str | None,
        begin: Callable[[], str | None],
        running: Running,
    ) -> None:
        super().__init__(runtime)
        self._handler = handler
        self._job = job
        self.guard = runtime.guard
        self._shared_xid = shared_xid
        self._begin = begin
        self._running = running
        self._arounds = runtime.registry.arounds.get(job.kind)
        self._began = time.monotonic()
        self._in_transaction = False
        self._savepoint: Savepoint | None = None

    def join(self, connection: Connection, runtime: Runtime) -> "Attempt":
        """Use this connection and its runtime for the attempt; return the attempt itself.

        In lease mode the connection is known only when the handler first uses its session.
        """
        guard = runtime.guard
        self._connection, self._runtime, self.guard = connection, runtime, guard
        # Without a lease the attempt is in the claim's own transaction.
        self._in_transaction = self._job.lease_token is None or guard.transaction_status == TransactionStatus.INTRANS
        self._root = connection.get_transaction()
        guard.savepoint, guard.on_first_use = None, self.open
        return self

    def run(self) -> AttemptResult:
        """Run the handler; afterwards the transaction holds all of its rows if the job is done, and none otherwise.

        Raises:
            ConnectionLost: the transaction is gone with its connection.
            TransactionEscaped: the handler ended the transaction.
        """
        self._call = self._running.begin_call((self._job,), self._runtime.notes)
        if self._in_transaction and self._runtime.invoker.flavour == "async":
            # Begun now: a coroutine cannot send anything at the moment when it first names its session.
            try:
                self.open()
            except BaseException:
                self.guard.let_go()
                raise
        try:
            returned = self._runtime.invoker.call(self._handler, self.session, *self._inputs())
        except BaseException as error:  # noqa: BLE001  # judged by `_end`
            return self._end(None, error)
        return self._end(returned, None)

    def _inputs(self) -> tuple[Run, Args]:
        """Return the handler's context without its session, as a `Run`, and the handler's arguments.

        Normally the arguments are decoded and their entities loaded now. This is done later, by a `Surrounded` object
        that is returned in place of the arguments, in two cases: the handler has arounds (users' context managers
        around its call), or it takes entities and runs in a task of its own.
        """
        runtime, job = self._runtime, self._job
        if THEN_HEADER in job.headers:
            # Checked before the handler runs: if the follower cannot be read, the handler's rows would have no
            # follower.
            follower_of(job)
        run = self._run = Run(job, runtime.state, partial(runtime.effect_access, self._handler, job), [], self._call)
        arguments: Args
        if self._arounds is not None:
            jobs = (job,) if isinstance(self._handler, BatchHandler) else None
            arguments = Surrounded.of(self._arounds, self, self._arguments, jobs)
        elif self.has_started and runtime.registry.signatures[job.kind].takes_entities:
            # Only the handler's own task may wait for a connection.
            arguments = Surrounded((), self._arguments)
        else:
            arguments = self._arguments()
        fault_point("before-handler")
        return run, arguments

    def _end(self, returned: object, error: BaseException | None) -> AttemptResult:
        """Keep or undo the rows of a handler that has returned, or raised `error`; return the attempt's result."""
        runtime, job = self._runtime, self._job
        result: AttemptResult = _DONE
        try:
            try:
                check_rest(runtime, job, error)
                if error is None:
                    if self._call.is_cancelled and self._may_be_cancelled:
                        # The handler may be half done even if it returned: none of its rows are kept.
                        result = _CANCELLED
                    elif returned is not None or self._handler.keeps_result:
                        result = self._handler.returned.outcome(returned)
                    if isinstance(result, Done):
                        if self._run.deferred:
                            hand_over(self._run.deferred, self.session())
                        if self.made is not None or self._savepoint is not None:
                            self._keep()
                        # Last: an error after the rows were kept would be a failure that has rows.
                        fault_point("after-handler")
            except BaseException as another:  # noqa: BLE001  # judged below
                error = another
            if error is not None:
                if not runtime.is_failure(error):
                    self.is_over = True
                    raise error
                is_cancelled = self._call.is_cancelled and self._may_be_cancelled
                result = _CANCELLED if is_cancelled else self._result_of(error)
        finally:
            # The traceback of the error may refer to this frame, and would keep it alive.
            error = None
            self._running.end_handler()
            self.guard.let_go()
        closed = True
        try:
            closed = self.close()
        except BaseException as raised:
            if not runtime.is_failure(raised):
                raise
            # A user's listener raised this. The handler's own error says more.
            result = result if isinstance(result, Failed) else runtime.describe(raised, job)
        self.guard.take_back()
        if not (closed and isinstance(result, Done)):
            self._undo(result, closed=closed)
        return result

    def open(self) -> None:
        """Begin the transaction and set the savepoint, unless both were done.

        Called when the handler first reads `ctx.session`. Under a lease it is called later, when the session is first
        used, so that a long call outside the database holds no transaction open. A handler that never uses its session
        needs neither statement.
        """
        if self._savepoint is not None:
            return
        # First, because the statements below go through the guarded connection too.
        self.guard.on_first_use = None
        try:
            inner_savepoint = self._begin()
            self._in_transaction = True
            self._savepoint = self.guard.begin_savepoint(inner_savepoint)
        except BaseException:
            # The handler may swallow the error, and must not go on without a savepoint.
            self.guard.on_first_use = self.open
            raise

    def open_session(self, make: Callable[..., HandlerSession]) -> HandlerSession:
        """Return a new session for the job, made by `make`.

        The savepoint is set now if the transaction has begun, otherwise when the session is first used.
        """
        session = super().open_session(make)
        if self._savepoint is None and self._in_transaction:
            # Now: statements that bypass the session, on the driver's cursor, must follow the savepoint too.
            self.open()
        elif self._savepoint is None:
            session.on_first_use = self.open
        return session

    def _arguments(self) -> dict[str, object]:
        """Return the job's decoded arguments, with loaded entities in place of their keys."""
        signature = self._runtime.registry.signatures[self._job.kind]
        arguments = signature.decode(self._job.args)
        if not signature.takes_entities:
            return arguments
        keys = {name: value for name, value in arguments.items() if isinstance(value, EntityKey)}
        if keys:
            self.open()
            load = partial(load_alone, self, self._connection, absent=self._absent)
            arguments |= {name: load(name, key) for name, key in keys.items()}
            loaded = [(key, arguments[name]) for name, key in keys.items()]
            watch_unlocked(self, self._handler.unlocked_changes, loaded)
        return arguments

    def _absent(self) -> None:
        self._runtime.absent(self._connection, self._job)

    def _keep(self) -> None:
        """Send the unsent changes of a handler that returned normally, and release its savepoint: its rows stay.

        Raises:
            HandlerError: the rows were undone.
            psycopg.Error: a deferred constraint is violated.
            TransactionEndedByHandler: this is no longer the claim's transaction.
        """
        session, savepoint = self.made, self._savepoint
        is_session_gone = session is not None and session.is_rolled_back
        if is_session_gone or (savepoint is not None and not savepoint.is_active):
            raise HandlerRolledBack(ROLLED_BACK)
        if self.guard.transaction_status == TransactionStatus.INERROR:
            raise HandlerError(SWALLOWED)
        if self.made is None and self.entities is None:
            return
        if self.entities is None or not send_before(self, self._connection):
            session = self.session()
            if self._savepoint is not None and session.identity_map._modified:  # noqa: SLF001  # `dirty` builds a set
                session.look()
                send_changes(session, self._connection)
            # commit() and not flush(): it also ends the handler's open savepoints, and flushes until no change is left.
            # A session joined by "rollback_only" commits nothing.
            session.commit()
        # Read again: under a lease the flush may set it.
        if self._savepoint is not None:
            if self._shared_xid is not None:
                check_shared(self._connection, self._shared_xid)
            self._savepoint.commit()

    def _result_of(self, error: BaseException) -> Outcome | Failed:
        if type(error) is EffectInProgress or type(error) is RowsMayBeLate:
            # Not counted: waiting for a killed predecessor's lock could use up the job's attempts.
            return Snooze(timedelta(seconds=max(error.retry_after_seconds, _SHORTEST_SNOOZE_SECONDS)))
        limit, seconds = self._handler.timeout_seconds, time.monotonic() - self._began
        if limit is not None and sqlstate_of(error) == QUERY_CANCELED and seconds >= limit * 0.99:
            # The server cancelled a statement at the handler's deadline.
            error = HandlerTimedOut(limit).with_traceback(error.__traceback__)
        return self._runtime.describe(error, self._job)

    def _undo(self, result: AttemptResult, *, closed: bool) -> None:
        """Go back to the savepoint, which undoes the handler's rows; send nothing if no savepoint was set.

        Args:
            result: The attempt's result, which `TransactionEscaped` reports.
            closed: True if the session was closed without an error.

        Raises:
            ConnectionLost: the transaction is gone with its connection.
            TransactionEscaped: the handler ended the transaction.
        """
        intact = closed and is_intact(self._connection, self._root)
        is_undone = undo(
            self._connection, self.guard, self._savepoint, intact=intact, in_transaction=self._in_transaction
        )
        if is_undone and self._shared_xid is not None:
            is_undone = current_xid(self._connection) == self._shared_xid
        if not is_undone:
            # If SQLAlchemy noticed the end of the transaction, its error says more than TransactionEscaped.
            if intact or not isinstance(result, Failed):
                result = self._runtime.describe(TransactionEndedByHandler(), self._job)
            raise TransactionEscaped(self._job, result)
