"""Calls: the slots of a dispatcher. Each runs one leased job, in a thread or in a task of the event loop."""

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
from outboxq.execution.recovery import recover
from outboxq.execution.runtime import Runtime, is_cancellation
from outboxq.execution.settle import Settlement
from outboxq.forks import call_here
from outboxq.handlers.handler import AnyHandler, Flavour
from outboxq.relay.connections import CallConnections, Place, SlotConnection
from outboxq.relay.outage import CONNECTION_ERRORS, Outage
from outboxq.relay.rolled_back import recover_here
from outboxq.relay.state import RelayState
from outboxq.relay.threads import BoundedStart
from outboxq.relay.watch import TaskWatch, ThreadWatch, call_soon

# When the relay stops, the outcome of a lost connection's job is asked for so often, and for so long.
_LAST_TRIES, _LAST_SECONDS = 5, 2.0
_JOIN_SECONDS = 0.01
# It has no state.
_SYNC_INVOKER = SyncInvoker()
# The events of jobs that do not come back.
_ENDS = frozenset({JobDone, JobDiscarded, JobDied, JobCancelled})


class CallOwner(Protocol):
    """The dispatcher of a call."""

    state: RelayState
    connections: CallConnections

    def receive_result(self, call: "Call", settlement: Settlement) -> None:
        """Receive the outcome of a call that held no connection, to settle it with others."""
        ...

    def receive_end(self, call: "Call") -> None:
        """Receive the end of a call: its slot is free."""
        ...

    def may_wait(self) -> None:
        """Receive that a job may be claimed again, or another one of its group."""
        ...

    def cut_off(self, call: "Call") -> None:
        """Receive that a call is waited for no more: its slot is free."""
        ...

    @property
    def fail(self) -> Callable[[BaseException], None]:
        """The function that ends the relay by an error."""
        ...


class Call:
    """One call: the run of a leased job, from its start to its result or its COMMIT.

    Attributes:
        batch: The job, as a batch of one.
        watch: The watch on its handler.
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
        self._leased = LeasedCall(batch, handler, runtime, owner.connections.engine, self._lend)

    @property
    def queue(self) -> str:
        """The job's queue."""
        return self.batch.queue

    @property
    def is_suspect(self) -> bool:
        """Return True if the job ran when its relay died."""
        return self.batch.claimed.request.sort.is_suspect

    def run(self) -> None:
        """Run the job; never raises."""
        try:
            outcome = call_here(self._outcome)
            if isinstance(outcome, Ended):
                if outcome.report is not None:
                    self.publish(outcome.report)
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
            # `_leased` refers to this call: without the circle both are freed at once, by no garbage collector.
            del self._leased
            self._is_done = True
            self._owner.receive_end(self)

    def _outcome(self) -> Settlement | Ended:
        try:
            return self._outcome_here()
        except BaseException as error:  # noqa: BLE001  # what does not come from the connection is raised again
            return self._recover_elsewhere(error)

    def _outcome_here(self) -> Settlement | Ended:
        """Run the job, and settle it on its connection, if it has one and that works."""
        leased, failure = self._leased, None
        try:
            try:
                outcome = leased.run()
            except BaseException as error:  # what is not settled here is raised again
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
        """Find out the outcome of a job whose connection was lost, on others."""
        outage, lost = Outage(self._state), ConnectionLost("the connection was lost while the job ran")
        tries, ends_at = _LAST_TRIES, float("inf")
        while True:
            if isinstance(error, Abandoned) or self._is_interruption(error):
                raise error
            # A defect of ours, or what users' code raises to end a process.
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

    # The relay's deadlines, in other threads.

    def runtime_on(self, connected: SlotConnection, invoker: Invoker | None = None) -> Runtime:
        """Make the runtime of handlers on this connection."""
        return self._state.runtime(
            self.flavour,
            invoker or connected.invoker,
            connected.guard,
            frozenset(),
            self._is_interruption,
            connected,
        )

    def publish(self, report: BatchReport) -> None:
        """Count what was committed, and emit it."""
        self._state.publish(report)
        if self._state.flow.restricts:
            self._state.admission.ended(self.queue)
        # Nothing notifies of a job that comes back, or that is the next of its group.
        if self.batch.jobs[0].group_key is not None or not _ENDS.issuperset(map(type, report.events)):
            self._owner.may_wait()

    def is_seized(self) -> bool:
        """Return True if the relay has taken the job away."""
        return self.batch.owner.is_seized

    def end_turn(self) -> None:
        """Do nothing: the dispatcher ends the turns of its suspects."""

    @property
    def is_abandoned(self) -> bool:
        """Return True if the relay does not wait for it any more."""
        return self._place.is_abandoned

    @property
    def is_waiting(self) -> bool:
        """Return True while the handler waits for a connection."""
        return self._place.is_waiting

    def is_alive(self) -> bool:
        """Return True while it runs."""
        return not self._is_done

    def join(self, timeout_seconds: float) -> None:
        """Wait for its end."""
        until = time.monotonic() + timeout_seconds
        while not self._is_done and time.monotonic() < until:
            time.sleep(_JOIN_SECONDS)

    def cut_off(self) -> None:
        """Free its slot: the relay has taken its job away, and its handler does not end."""
        self._owner.cut_off(self)

    def abandon(self) -> None:
        """Wait for it no more."""
        self._place.is_abandoned = True
        connected = self._place.connected
        self._place.free()
        if connected is not None and not (connected.connection.closed or connected.connection.invalidated):
            # Its place in the engine's pool is another's. Its thread may be closing it at this moment.
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
        # The watch refers to the invoker and not to the call, which is freed at its end without the garbage collector.
        self._loop, self._watch = loop, TaskWatch(loop, lambda: invoker)
        super().__init__(owner, batch, handler, invoker, self._watch)

    def start(self) -> None:
        """Start the handler in a task, in the event loop. Only a call that uses its session needs more than that."""
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
            # The thread that abandoned the call knew no task yet.
            task.cancel()
        task.add_done_callback(self._go_on, context=context)

    def _go_on(self, _: "asyncio.Task[None] | None" = None) -> None:
        """Go on after the handler's end, in its context: in a greenlet if a connection may be needed."""
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
            # The thread that abandoned the call knew the handler's task alone. Here and not earlier, as a task that is
            # cancelled before its first step never calls `run`, which frees the slot.
            task.cancel()
        await greenlet_spawn(self.run)

    def _is_interruption(self, error: BaseException) -> bool:
        # No task is cancelled any more when the handler's has ended.
        return self.is_abandoned and isinstance(error, asyncio.CancelledError)

    def abandon(self) -> None:
        self._place.is_abandoned = True
        # A handler that swallows its cancellation keeps neither its place nor that of its connection in the pool.
        call_soon(self._loop, super().abandon)
        self._watch.abandon()


class CallThreads:
    """The threads of the calls of one dispatcher; each runs one call after the other."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Call | None]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, call: Call) -> None:
        """Run a call in a thread that is free, or in a new one."""
        with self._lock:
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = SimpleQueue()
            # A daemon: a handler that exceeds the time to drain must not keep the process alive.
            BoundedStart(_running(self, calls), "outboxq-call").start()
        calls.put(call)

    def free(self, calls: "SimpleQueue[Call | None]") -> None:
        """Receive a thread's queue, when its call has ended."""
        with self._lock:
            if not self._is_closed:
                self._idle.append(calls)
                return
        calls.put(None)

    def close(self) -> None:
        """End the threads that are free, and others when their calls end."""
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
                # Another thread has its place.
                return
            del call
            threads.free(calls)

    return run


def _uncancel() -> None:
    """Go on after a cancellation that is not the relay's own, but a handler's, and came after the handler's end."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
