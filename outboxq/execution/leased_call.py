"""A call under a lease: one job's handler, with a connection only from its session's first use to COMMIT.

If the handler used the session, its job is settled (its row removed or put back) in the transaction of the handler's
rows. Otherwise no connection was needed: the job's result is returned, and the caller settles it together with those of
other jobs.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeAlias

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InvalidRequestError

from outboxq.execution.attempt import Attempt, AttemptResult
from outboxq.execution.batch_state import BatchState, Ended
from outboxq.execution.commit import commit
from outboxq.execution.errors import Abandoned
from outboxq.execution.invoke import IS_OVER, AsyncInvoker, HandlerEnd, HandlerSession
from outboxq.execution.run import attempt, run, settle_alone
from outboxq.execution.runtime import Runtime
from outboxq.execution.settle import Settlement, settlement_of
from outboxq.handlers.handler import AnyHandler
from outboxq.job import THEN_HEADER

_TWO = (
    "ctx.session waits for its connection, and another task or thread of the handler uses it: a session serves one at "
    "a time"
)
# A connection that is lent to a call until the stack is closed, and the connection's runtime.
Lent: TypeAlias = tuple[Connection, Runtime]
Lend: TypeAlias = Callable[[ExitStack], Lent]


class LeasedCall:
    """The run of one leased job, from its handler's call to its settlement or COMMIT.

    Args:
        runtime: The runtime of a call without a connection.
        lend: Borrows a connection, and waits until one is free; called in the handler's task or thread, with an exit
            stack that gives it back.

    Attributes:
        lent: The connection and its runtime; None until the handler uses its session, and after `give_back`.
    """

    def __init__(self, batch: BatchState, handler: AnyHandler, runtime: Runtime, engine: Engine, lend: Lend) -> None:
        self.batch = batch
        self.job = batch.jobs[0]
        self.engine = engine
        self.lent: Lent | None = None
        self._handler = handler
        self._runtime = runtime
        self._lend = lend
        self._stack: ExitStack | None = None
        self._transaction = ExitStack()
        self._thread = 0
        self._is_lending = threading.Lock()
        # Held for a moment by code that sets or takes the connection.
        self._lock = threading.Lock()
        self._is_over = False
        self._started: _LeasedAttempt | None = None

    def start(self) -> Coroutine[Any, Any, None] | None:
        """Begin the run of an async handler; return its coroutine, for a task of its own. After that task, call `run`.

        Return None if there is nothing to await: `run` may be called at once.
        """
        try:
            self._begin()
        except Abandoned:
            # `run` raises the error again.
            return None
        started = self._started = _LeasedAttempt(self, self._handler, self._runtime)
        return started.start()

    def needs_connection(self) -> bool:
        """Return True if `run` may need a connection after the handler's end, and must thus be called in a greenlet."""
        return self._started is not None and self._started.needs_connection()

    def run(self) -> Settlement | Ended:
        """Run the handler, unless `start` did; then settle the job and commit, or return the change that settles it.

        The change is returned if no connection was needed, for example because the handler did not use its session: the
        caller sends such changes of several jobs together. After a commit, the end of the batch is returned.

        Raises:
            Abandoned: the relay has taken the job away.
            BaseException: any error of `run` and `commit`; `lent` is the connection, if there is one.
        """
        if self._started is None:
            self._begin()
        # Leaving the block also ends, for SQLAlchemy, the transaction that the last script began.
        with self._transaction:
            return self._run()

    def _begin(self) -> None:
        self._thread, running = threading.get_ident(), self.batch.running
        if self.batch.owner.is_seized:
            raise Abandoned("the relay has given the job back before its handler began")
        running.timeout_seconds = self._handler.timeout_seconds
        running.begin()
        running.begin_deadline()

    def _run(self) -> Settlement | Ended:
        batch = self.batch
        result = attempt(batch, self._runtime, self._attempt)
        if self.lent is None:
            settlement = settlement_of(self.job, result, self._runtime, batch.running.end())
            if settlement is not None:
                # From here on the relay cannot take the job away.
                batch.owner.begin_commit()
                return settlement
        connection, runtime = self.lent or self.borrow()
        handlers = {self.job.kind: self._handler}
        settle_alone(connection, batch, self.job, runtime, result)
        ended = commit(connection, batch, runtime, None)
        # The result is None if COMMIT was refused, and all is undone.
        while ended is None:
            run(connection, batch, runtime, handlers, shared=False)
            ended = commit(connection, batch, runtime, None)
        return ended

    def borrow(self) -> Lent:
        """Return the job's connection and its runtime; borrow them and begin a transaction at the first call.

        Raises:
            InvalidRequestError: the handler has ended, or two of its tasks or threads want the connection at once.
        """
        if self.lent is not None:
            return self.lent
        if not self._is_lending.acquire(blocking=False):
            raise InvalidRequestError(_TWO)
        try:
            stack = ExitStack()
            lent = self._lend(stack)
            with self._lock:
                if not self._is_over:
                    guard = lent[1].guard
                    # The call's own context: the session may first be used in another thread of the handler.
                    guard.thread = self._thread
                    guard.is_altered, guard.added, guard.collects = False, {}, True
                    # BEGIN is sent with the first statement.
                    self._transaction.enter_context(lent[0].begin())
                    self.lent, self._stack = lent, stack
                    return lent
            # The caller is a task or thread that the handler left behind.
            stack.close()
            raise InvalidRequestError(IS_OVER)
        finally:
            self._is_lending.release()

    def begin(self) -> str:
        """Begin the job's transaction on the connection, unless it has begun; return its inner savepoint's name."""
        return self.batch.begin(self.borrow()[0]).inner_savepoint

    def give_back(self, error: BaseException | None = None) -> None:
        """Give the borrowed connection back, if there is one; from now on none can be borrowed.

        Args:
            error: The error that ended the call, if any; the connection is then closed.
        """
        with self._lock:
            lent, self.lent, self._is_over = self.lent, None, True
        if lent is not None:
            guard = lent[1].guard
            guard.collects = False
            guard.take_back()
        if self._stack is not None:
            self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _attempt(self) -> "_LeasedAttempt":
        started, self._started = self._started, None
        return started or _LeasedAttempt(self, self._handler, self._runtime)


class _LeasedAttempt(Attempt):
    """An attempt that takes its connection when its session is first used."""

    def __init__(self, of: LeasedCall, handler: AnyHandler, runtime: Runtime) -> None:
        super().__init__(handler, of.job, runtime, None, of.begin, of.batch.running)
        self._of = of
        self._no_guard = runtime.guard
        # The end of a handler that `start` has started.
        self._ended: list[HandlerEnd] = []
        if of.lent is not None:
            self.join(*of.lent)

    def start(self) -> Coroutine[Any, Any, None] | None:
        """Return the coroutine that runs the handler, to await before `run`; None if the handler cannot be called."""
        invoker, self.has_started = self._runtime.invoker, True
        assert isinstance(invoker, AsyncInvoker)
        self._call = self._running.begin_call((self._job,), self._runtime.notes)
        try:
            return invoker.begin(self._handler, self.session, *self._inputs(), self._ended)
        except BaseException as error:  # noqa: BLE001  # judged by `_end`
            self._ended.append((None, error))
            return None

    def needs_connection(self) -> bool:
        """Return True if ending the attempt may need a connection; called once, after the handler's end.

        If none is needed, the result is fixed: a cancellation of the job that comes later has no effect.
        """
        is_followed = THEN_HEADER in self._job.headers
        has_written = self.made is not None or self.entities is not None
        # A failed handler may be called again at once: see `attempt`.
        has_failed = not self._ended or self._ended[0][1] is not None
        is_needed = has_failed or has_written or is_followed or self._call.is_cancelled or bool(self._run.deferred)
        # A later cancellation has no effect: its request cannot be read without a connection.
        self._may_be_cancelled = is_needed
        return is_needed

    def run(self) -> AttemptResult:
        """Run the handler, unless `start` did; then keep or undo its rows, and return the attempt's result."""
        if not self.has_started:
            return super().run()
        # A task that was cancelled before its first step has appended nothing.
        ended = self._ended[0] if self._ended else (None, asyncio.CancelledError())
        # The error is removed, because its traceback refers to this attempt; an entry stays, because the handler has
        # ended.
        self._ended[:] = [(None, None)]
        return self._end(*ended)

    def open(self) -> None:
        """Borrow the call's connection, begin the transaction and set the savepoint, unless that was done."""
        if self.is_over:
            raise InvalidRequestError(IS_OVER)
        if self.guard is self._no_guard:
            lent = self._of.borrow()
            if self.is_over:
                raise InvalidRequestError(IS_OVER)
            self.join(*lent)
            if self.made is not None:
                self._runtime.invoker.bind_session(self.made, self.guard.lend())
        super().open()

    def open_session(self, make: Callable[..., HandlerSession]) -> HandlerSession:
        """Return a new session for the job, made by `make`; it has no connection before its first use."""
        if self.guard is not self._no_guard:
            return super().open_session(make)
        session = self._runtime.invoker.open_session(None, make)
        session.on_first_use, session.engine = self.open, self._of.engine
        return session

    def _undo(self, result: AttemptResult, *, closed: bool) -> None:
        if self.guard is not self._no_guard:
            super()._undo(result, closed=closed)
