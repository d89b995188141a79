"""Calls: each runs one job of a queue in lease mode, in a thread or in a task of the event loop.

In lease mode a short transaction claims a job, and the job runs without a transaction: the relay's lease protects it. A
dispatcher claims the jobs for a group of slots, and starts one call for each job, or for the jobs that one call of a
batch handler runs (a window); a call occupies one slot.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Protocol

from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from outboxq.clock import clock
from outboxq.database.defects import is_defect
from outboxq.database.driver import dbapi_connection
from outboxq.database.guard import NoGuard
from outboxq.events import JobCancelled, JobDied, JobDiscarded, JobDone
from outboxq.execution.batch_state import BatchReport, BatchState, Ended
from outboxq.execution.commit import send_left
from outboxq.execution.errors import Abandoned, ConnectionLost, ConnectionSpoiled
from outboxq.execution.invoke import AsyncInvoker, Invoker, SyncInvoker
from outboxq.execution.leased_call import LeasedCall, Lent
from outboxq.execution.leased_window import LeasedWindow, WindowEnd
from outboxq.execution.recovery import recover
from outboxq.execution.runtime import Runtime, is_cancellation
from outboxq.execution.settle import Settlement
from outboxq.forks import call_here
from outboxq.handlers.handler import AnyHandler, BatchHandler, Flavour
from outboxq.relay.connections import CallConnections, Place, SlotConnection
from outboxq.relay.outage import CONNECTION_ERRORS, Outage
from outboxq.relay.rolled_back import recover_here
from outboxq.relay.state import RelayState
from outboxq.relay.threads import BoundedStart
from outboxq.relay.watch import TaskWatch, ThreadWatch, call_soon

# When the relay stops, the outcome of a lost connection's job is queried at this interval, and for this long.
_LAST_TRIES, _LAST_SECONDS = 5, 2.0
_JOIN_SECONDS = 0.01
# Shared, because it has no state.
_SYNC_INVOKER = SyncInvoker()
# The events of jobs that do not run again.
_ENDS = frozenset({JobDone, JobDiscarded, JobDied, JobCancelled})


class CallOwner(Protocol):
    """The part of a dispatcher's interface that its calls use. `Dispatcher` implements this protocol."""

    state: RelayState
    connections: CallConnections

    def receive_result(self, call: "Call", settlement: Settlement) -> None:
        """Receive the outcome of a call that used no connection.

        The dispatcher writes the outcome later, in one transaction with those of other calls.
        """
        ...

    def receive_window(self, call: "Call", end: WindowEnd) -> None:
        """Receive the results of a call of several jobs, and those jobs that are to run again, each alone."""
        ...

    def receive_end(self, call: "Call") -> None:
        """Free the slot of a call that has ended, so that the dispatcher may claim another job for it."""
        ...

    def may_wait(self) -> None:
        """Make the dispatcher claim soon: the call's own job was put back, or the next job of its group may run now."""
        ...

    def cut_off(self, call: "Call") -> None:
        """Free the slot of a call for which the relay no longer waits, although its handler may still run."""
        ...

    @property
    def fail(self) -> Callable[[BaseException], None]:
        """The function to call with an error that is to end the relay."""
        ...


class Call:
    """The run of one leased job, from its handler's start until its outcome is committed or passed to the dispatcher.

    A call of a batch handler runs several jobs.

    Attributes:
        batch: The job, or the jobs.
        watch: Shows other threads the handler's call stack, and cancels an async handler.
    """

    has_failed = False

    def __init__(
        self,
        owner: CallOwner,
        batch: BatchState,
        handler: AnyHandler,
        invoker: Invoker = _SYNC_INVOKER,
        watch: ThreadWatch | None = None,
    ) -> None:
        state = owner.state
        self.batch = batch
        self.flavour: Flavour = invoker.flavour
        self.watch = watch or ThreadWatch()
        self._owner = owner
        self._state = state
        self._invoker = invoker
        self._is_done = False
        self._detached: DBAPIConnection | None = None
        self._place = Place(invoker.flavour == "async", batch.owner)
        runtime = state.runtime(self.flavour, invoker, NoGuard(), frozenset(), self._is_interruption)
        self._leased: LeasedCall | LeasedWindow
        if isinstance(handler, BatchHandler):
            self._leased = LeasedWindow(batch, handler, runtime)
        else:
            self._leased = LeasedCall(batch, handler, runtime, owner.connections.engine, self._lend)

    @property
    def queue(self) -> str:
        """The job's queue."""
        return self.batch.queue

    @property
    def is_suspect(self) -> bool:
        """Return True if the job is a suspect: it ran when its last relay died, and may have caused that."""
        return self.batch.claimed.request.sort.is_suspect

    def run(self) -> None:
        """Run the job, and pass its outcome to the dispatcher. Never raises: an unexpected error ends the relay."""
        try:
            outcome = call_here(self._outcome)
            if isinstance(outcome, Ended):
                if outcome.report is not None:
                    self.publish(outcome.report)
            elif isinstance(outcome, WindowEnd):
                self._owner.receive_window(self, outcome)
            else:
                self._owner.receive_result(self, outcome)
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again by the relay
            if not self._is_interruption(error):
                self.has_failed = True
                self._owner.fail(error)
        finally:
            if self._detached is not None:
                self._detached.close()
            # `_leased` refers to this call: without the reference cycle both are freed at once, not by the garbage
            # collector.
            del self._leased
            self._is_done = True
            self._owner.receive_end(self)

    def _outcome(self) -> Settlement | Ended | WindowEnd:
        if isinstance(self._leased, LeasedWindow):
            # It uses no connection that could be lost.
            return self._leased.run()
        try:
            return self._outcome_here(self._leased)
        except BaseException as error:  # noqa: BLE001  # what does not come from the connection is raised again
            return self._recover_elsewhere(error)

    def _outcome_here(self, leased: LeasedCall) -> Settlement | Ended:
        """Run the job; return a `Settlement` for the dispatcher to write, or an `Ended` if the call wrote it itself.

        After an error on the connection that the handler used, the same connection finds out what was committed. If
        that is impossible (the connection is lost, for example), the error is raised, and another connection must find
        out.
        """
        failure = None
        try:
            try:
                outcome = leased.run()
            except BaseException as error:  # an error that cannot be handled here is raised again
                if leased.lent is None:
                    raise
                connection, runtime = leased.lent
                outcome = recover_here(self._state, connection, self.batch, error, runtime, 1)
                if outcome.report is None:
                    raise
            if isinstance(outcome, Ended) and outcome.left and leased.lent is not None:
                for event in send_left(leased.lent[0], outcome.left):
                    self._state.emit(event)
            return outcome
        except BaseException as error:
            failure = error
            raise
        finally:
            leased.give_back(failure)

    def _recover_elsewhere(self, error: BaseException) -> Ended:
        """Find out on another connection the outcome of a job whose connection failed; try until the database answers.

        Raises errors that do not come from a connection, and `Abandoned` if the relay stops and the database does not
        answer within 2 s.
        """
        outage, lost = Outage(self._state), ConnectionLost("the connection was lost while the job ran")
        tries, ends_at = _LAST_TRIES, float("inf")
        while True:
            if isinstance(error, Abandoned) or self._is_interruption(error):
                raise error
            # A defect of outboxq, or an error with which users' code ends a process.
            is_final = not isinstance(error, Exception) or is_defect(error)
            if is_final and not isinstance(error, CONNECTION_ERRORS):
                raise error
            if isinstance(error, asyncio.CancelledError):
                _uncancel()
            if isinstance(error, ConnectionSpoiled):
                lost, seconds = error, 0.0
            else:
                seconds = outage.lost(error)
            if self._state.stopping.is_set():
                tries, ends_at = tries - 1, min(ends_at, clock() + _LAST_SECONDS)
                if tries < 0 or clock() > ends_at:
                    raise Abandoned("the relay stops, and the database is away: the lease's end shows the outcome")
            self._place.pause(seconds)
            try:
                with ExitStack() as stack:
                    connection, runtime = self._lend(stack)
                    outage.connected()
                    ended = recover(connection, self.batch, lost, runtime)
                    for event in send_left(connection, ended.left):
                        self._state.emit(event)
                return ended
            except BaseException as again:  # noqa: BLE001  # the loop decides
                error = again

    def _lend(self, stack: ExitStack) -> Lent:
        connected = stack.enter_context(self._owner.connections.borrow(self._place))
        return connected.connection, self.runtime_on(connected, self._invoker)

    def _is_interruption(self, error: BaseException) -> bool:
        return self.is_abandoned and is_cancellation(error)

    # The methods below are called by the relay's deadlines, in other threads.

    def runtime_on(self, connected: SlotConnection, invoker: Invoker | None = None) -> Runtime:
        """Make the `Runtime` (all that executing a job needs, except the job) for this connection."""
        return self._state.runtime(
            self.flavour,
            invoker or connected.invoker,
            connected.guard,
            frozenset(),
            self._is_interruption,
            connected,
        )

    def publish(self, report: BatchReport) -> None:
        """Count the job's committed outcome and emit its events.

        Make the dispatcher claim if a job may have become claimable: this one, or the next of its group.
        """
        self._state.publish(report)
        if self._state.flow.restricts:
            self._state.admission.ended(self.queue)
        # There is no notification for a job that waits again, or that is the next of its group.
        if self.batch.jobs[0].group_key is not None or not _ENDS.issuperset(map(type, report.events)):
            self._owner.may_wait()

    def is_seized(self) -> bool:
        """Return True if the relay has taken the job away from this call, which then must not write its outcome."""
        return self.batch.owner.is_seized

    def end_turn(self) -> None:
        """Do nothing: the dispatcher, not its call, has the turn to run suspects (jobs that ran when their relay died).

        `DeadlineEnforcer` calls this method of slots and calls alike; a slot then gives up its turn.
        """

    @property
    def is_abandoned(self) -> bool:
        """Return True if the relay no longer waits for the end of this call."""
        return self._place.is_abandoned

    @property
    def is_waiting(self) -> bool:
        """Return True while the call waits until it may use one of the limited number of connections."""
        return self._place.is_waiting

    def is_alive(self) -> bool:
        """Return True while the call runs."""
        return not self._is_done

    def join(self, timeout_seconds: float) -> None:
        """Wait for the call's end, for `timeout_seconds` at most."""
        until = time.monotonic() + timeout_seconds
        while not self._is_done and time.monotonic() < until:
            time.sleep(_JOIN_SECONDS)

    def cut_off(self) -> None:
        """Make the dispatcher free the call's slot: the relay has taken the job away, but the handler does not end."""
        self._owner.cut_off(self)

    def abandon(self) -> None:
        """Stop waiting for the call: detach its connection from the pool, and let another call have one instead.

        The call's thread or task closes the detached connection when its handler ends at last.
        """
        self._place.is_abandoned = True
        connected = self._place.connected
        self._place.free()
        if connected is not None and not (connected.connection.closed or connected.connection.invalidated):
            # Its place in the engine's pool is in use again. Its thread may be closing the connection at this moment.
            with suppress(SQLAlchemyError):
                self._detached = dbapi_connection(connected.connection)
                connected.connection.detach()


class TaskCall(Call):
    """A call in a task of the relay's event loop."""

    def __init__(
        self, owner: CallOwner, batch: BatchState, handler: AnyHandler, loop: asyncio.AbstractEventLoop
    ) -> None:
        engine = owner.connections.given
        assert isinstance(engine, AsyncEngine)
        invoker = self._async_invoker = AsyncInvoker(engine)
        # The watch refers to the invoker and not to the call, so that the call is freed at its end without the garbage
        # collector.
        self._loop, self._watch = loop, TaskWatch(loop, lambda: invoker)
        super().__init__(owner, batch, handler, invoker, self._watch)

    def start(self) -> None:
        """Start the handler in a task of the event loop; `_go_on` finishes the call when the handler has ended.

        The handler's task needs no greenlet. A call that uses a connection needs one, from that use on.
        """
        context, watch = copy_context(), self._watch
        self._async_invoker.base = context.copy()
        watch.thread, watch.is_outside = threading.get_ident(), True
        try:
            running = context.run(self._leased.start)
        finally:
            watch.is_outside = False
        if running is None:
            self._loop.call_soon(self._go_on, context=context)
            return
        task = self._async_invoker.task = asyncio.Task(running, loop=self._loop, context=context)
        watch.begin(task)
        if self.is_abandoned:
            # The thread that abandoned the call found no task yet.
            task.cancel()
        task.add_done_callback(self._go_on, context=context)

    def _go_on(self, _: "asyncio.Task[None] | None" = None) -> None:
        """Finish the call after its handler has ended: write the outcome, or pass it to the dispatcher.

        If finishing may need a connection, it happens in a new task and greenlet.
        """
        if self._leased.needs_connection():
            # The loop alone would keep no reference to the task.
            self._rest_task = asyncio.Task(self._rest(), loop=self._loop)
            return
        self._watch.is_outside = True
        self.run()
        self._watch.is_outside = False

    async def _rest(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._watch.begin(task)
        if self.is_abandoned:
            # The thread that abandoned the call only knew the handler's task. Here and not earlier, because a task that
            # is cancelled before its first step never calls `run`, which frees the slot.
            task.cancel()
        await greenlet_spawn(self.run)

    def _is_interruption(self, error: BaseException) -> bool:
        # After the handler's end no task is cancelled any more.
        return self.is_abandoned and isinstance(error, asyncio.CancelledError)

    def abandon(self) -> None:
        self._place.is_abandoned = True
        # A handler that swallows its cancellation loses its place, and its connection's place in the pool.
        call_soon(self._loop, super().abandon)
        self._watch.abandon()


class CallThreads:
    """The threads in which the calls of one dispatcher run; a thread runs one call after the other."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Call | None]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, call: Call) -> None:
        """Run a call in a thread that has no call now, or in a new thread."""
        with self._lock:
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = SimpleQueue()
            # A daemon, because a handler that exceeds the time to drain must not keep the process alive.
            BoundedStart(_running(self, calls), "outboxq-call").start()
        calls.put(call)

    def free(self, calls: "SimpleQueue[Call | None]") -> None:
        """Keep a thread whose call has ended, so that it runs a later call. After `close`, end the thread instead.

        Args:
            calls: The queue from which the thread takes its calls.
        """
        with self._lock:
            if not self._is_closed:
                self._idle.append(calls)
                return
        calls.put(None)

    def close(self) -> None:
        """End the threads that have no call now at once, and each of the others when its call ends."""
        with self._lock:
            self._is_closed, idle, self._idle = True, self._idle, []
        for calls in idle:
            calls.put(None)


def _running(threads: CallThreads, calls: "SimpleQueue[Call | None]") -> Callable[[], None]:
    def run() -> None:
        while (call := calls.get()) is not None:
            call.watch.thread = threading.get_ident()
            call.run()
            call.watch.thread = None
            if call.is_abandoned:
                # Another thread has taken its place.
                return
            del call
            threads.free(calls)

    return run


def _uncancel() -> None:
    """Withdraw cancellations of the current task that its handler, not the relay, has caused; the handler has ended."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
