"""The loop of a slot or a dispatcher, in a thread or a task: calls it to work, and makes it sleep while no jobs wait.

The same code runs in threads and in tasks of the event loop. A task runs it in a greenlet, as SQLAlchemy runs its own
code, so that each wait in the loop is an `await` of the task.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from sqlalchemy import Engine, ExceptionContext, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.util import await_only, greenlet_spawn

from outboxq.clock import clock
from outboxq.database.defects import is_defect
from outboxq.database.driver import dbapi_connection
from outboxq.database.guard import keep_cancelled
from outboxq.errors import ConfigError, RelayStuck, SchemaError
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.execution.errors import Abandoned
from outboxq.execution.invoke import Invoker
from outboxq.execution.runtime import Runtime
from outboxq.forks import call_here
from outboxq.handlers.handler import Flavour
from outboxq.relay.connections import SlotConnection, SlotConnections
from outboxq.relay.dispatcher import Dispatcher
from outboxq.relay.idle import UNFLAGGED_PAUSE_SECONDS
from outboxq.relay.outage import CONNECTION_ERRORS
from outboxq.relay.slot import Slot
from outboxq.relay.state import RelayState
from outboxq.relay.threads import BoundedStart
from outboxq.relay.watch import TaskWatch, ThreadWatch, call_soon

# The worker: a slot, or the dispatcher of calls.
Worker: TypeAlias = "Slot | Dispatcher"
# Makes the worker; receives the function that wakes its loop.
MakeWorker: TypeAlias = Callable[[Callable[[], None]], "Worker"]
# The next try would fail the same way.
_FINAL = (ConfigError, RelayStuck, SchemaError)
# The time for which lost jobs are settled at the end: for a server that drops a connection and accepts the next. If it
# is down, its jobs are left to the next relay.
_LAST_TRIES, _LAST_PAUSE_SECONDS, _LAST_SECONDS = 5, 0.1, 2.0


class SlotLoop:
    """The loop that runs one worker: a slot, or a dispatcher (which runs jobs in lease mode for several slots).

    Attributes:
        watch: Shows other threads the call stack of the slot's handler, and cancels an async handler.
        has_failed: True if the loop ended with an error, which the relay raises again.
    """

    def __init__(
        self,
        state: RelayState,
        make: MakeWorker,
        connections: SlotConnections,
        wake_event: "threading.Event | _TaskWakeEvent",
        fail: Callable[[BaseException], None],
    ) -> None:
        self.slot = make(wake_event.set)
        self.watch = ThreadWatch()
        self.has_failed = False
        self._state = state
        self._connections = connections
        self._wake_event = wake_event
        self._fail = fail

    def _serve(self) -> None:
        slot = self.slot
        while slot.goes_on():
            try:
                if not slot.wants_work() or self.on_connection(slot.work):
                    if slot.is_drained:
                        break
                    slot.rest(self)
            except Abandoned:
                break
            except asyncio.CancelledError as error:
                self._outlive(error)
            except Exception as error:
                if _is_final(error):
                    raise
                if slot.is_seized():
                    break
                self._wait_after(error)
        self._find_out()

    def on_connection(self, work: Callable[[SlotConnection], bool]) -> bool:
        """Borrow a connection, call `work` with it, and give it back; return the result of `work`."""
        with self._connections.borrow() as slot_connection:
            return call_here(work, slot_connection)

    def clear(self) -> None:
        """Forget earlier wake-ups of the slot, so that `wait` waits for the next one."""
        self._wake_event.clear()

    def wait(self, seconds: float) -> bool:
        """Wait until the slot is woken, and return True; return False after `seconds`."""
        return self._wake_event.wait(seconds)

    def _find_out(self) -> None:
        """Find out and write the outcome of jobs whose connection was lost while they ran, after the loop has ended.

        Only this slot can do so. Tries several times, for about 2 s in all.
        """
        slot, ends_at = self.slot, clock() + _LAST_SECONDS
        for _ in range(_LAST_TRIES):
            if not slot.is_in_doubt or slot.is_seized() or clock() > ends_at:
                return
            try:
                self.on_connection(slot.settle)
            except Abandoned:
                return
            except Exception as error:
                if _is_final(error):
                    raise
                slot.lost(error)
                self._wake_event.clear()
                self._wake_event.wait(_LAST_PAUSE_SECONDS)

    def flagged_since(self, request: Future[float | None]) -> float | None:
        """Wait for the listener's answer to `request`, a second at most, and return it; None if there is none by then.

        The answer is the time (monotonic) since which all of the slot's sleep flags are up (locks that make producers
        notify), or None if they are not.
        """
        raise NotImplementedError

    def _outlive(self, error: asyncio.CancelledError) -> None:
        """Go on after a handler has cancelled the loop's task. If the relay has cancelled it, raise `error` again."""
        raise error

    def _wait_after(self, error: BaseException) -> None:
        """Report a lost or refused connection to the slot, and wait for the time that the slot returns."""
        raise NotImplementedError

    # The part of the interface that deadlines use.

    @property
    def batch(self) -> BatchState | None:
        """The batch of jobs that the slot runs.

        None if it runs none, and always for a dispatcher, whose calls have the batches.
        """
        return self.slot.batch

    @property
    def flavour(self) -> Flavour:
        """The flavour of the handlers: sync or async."""
        return self.slot.flavour

    def is_seized(self) -> bool:
        """Return True if the relay has taken the slot's batch away, so that the slot must not commit it."""
        return self.slot.is_seized()

    def runtime_on(self, connected: SlotConnection) -> Runtime:
        """Make the `Runtime` (all that running a job needs, except the job) by which the slot uses this connection."""
        return self.slot.runtime_on(connected)

    def publish(self, report: BatchReport) -> None:
        """Count committed outcomes and emit their events, after the events of the claims that took the jobs."""
        self.slot.publish(report)

    def end_turn(self) -> None:
        """Give up the slot's turn to run suspects (jobs that ran when their relay died).

        Another slot or dispatcher may then have the turn.
        """
        self.slot.end_turn()


def _is_final(error: Exception) -> bool:
    """Return True if an error ends the relay, because the next try would fail in the same way.

    Such errors are a wrong configuration or schema, a stuck handler, and a defect of outboxq itself. An error of a
    user's SQLAlchemy listener does not end the relay.
    """
    return isinstance(error, _FINAL) or (not isinstance(error, CONNECTION_ERRORS) and is_defect(error))


class SlotThread(SlotLoop):
    """The loop of a slot or dispatcher with sync handlers, in a thread of its own."""

    def __init__(
        self, state: RelayState, make: MakeWorker, connections: SlotConnections, fail: Callable[[BaseException], None]
    ) -> None:
        super().__init__(state, make, connections, threading.Event(), fail)
        self._detached: DBAPIConnection | None = None
        # A daemon, because a handler that exceeds the time to drain must not keep the process alive.
        self._thread = BoundedStart(self._run, "outboxq-slot")
        self._thread.start()

    def _run(self) -> None:
        self.watch.thread = threading.get_ident()
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  # raised again by the relay
            self.has_failed = True
            self._fail(error)
        finally:
            # From now on another thread may have its identifier.
            self.watch.thread = None
            if self._detached is not None:
                self._detached.close()

    def flagged_since(self, request: Future[float | None]) -> float | None:
        try:
            return request.result(UNFLAGGED_PAUSE_SECONDS)
        except TimeoutError:
            return None

    def _wait_after(self, error: BaseException) -> None:
        pause = self.slot.lost(error)
        if self._state.stopping.is_set() and self.slot.goes_on():
            # Calls still run, and must be settled.
            self._wake_event.clear()
            self._wake_event.wait(pause)
        else:
            self._state.stopping.wait(pause)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def abandon(self) -> None:
        """Detach the slot's connection from the pool, which then has room for the slot's successor.

        The thread itself cannot be stopped, but it cannot commit any more. It closes the connection when it ends.
        """
        slot_connection = self.slot.connected
        if slot_connection is None or self._detached is not None:
            return
        connection = slot_connection.connection
        if connection.closed or connection.invalidated:
            return
        # The slot's thread may be closing the connection at this moment.
        with contextlib.suppress(SQLAlchemyError):
            self._detached = dbapi_connection(connection)
            connection.detach()


class _TaskWakeEvent:
    """A `threading.Event` for a task: any thread sets it, and only the task waits for it, in its greenlet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_set = False
        # The thread of the loop, after the task has waited once.
        self._thread = 0
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        # Calls that end before an earlier end is noticed need not set it again.
        if not self._is_set:
            self._is_set = True
            if self._waiter is None:
                return
            if threading.get_ident() == self._thread:
                self._wake()
            else:
                call_soon(self._loop, self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        self._thread, self._waiter = threading.get_ident(), self._loop.create_future()
        timer = self._loop.call_later(timeout, self._wake)
        try:
            # Another thread may have set it before it saw the waiter.
            if not self._is_set:
                await_only(self._waiter)
        finally:
            timer.cancel()
            self._waiter = None
        return self._is_set


class SlotTask(SlotLoop):
    """The loop of a slot or dispatcher with async handlers, in a task of the relay's event loop."""

    def __init__(
        self,
        state: RelayState,
        make: MakeWorker,
        connections: SlotConnections,
        loop: asyncio.AbstractEventLoop,
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__(state, make, connections, _TaskWakeEvent(loop), fail)
        self._loop = loop
        self._watch = self.watch = TaskWatch(loop, self._invoker)
        self._future = asyncio.run_coroutine_threadsafe(self._run(connections.engine), loop)

    async def _run(self, engine: Engine) -> None:
        self._watch.begin(asyncio.current_task())
        # SQLAlchemy keeps these listeners by dialect, so they apply to all uses of the engine.
        event.listen(engine, "handle_error", self._keep_connection)
        try:
            await greenlet_spawn(self._serve)
        except BaseException as error:
            if self.slot.is_abandoned and isinstance(error, asyncio.CancelledError):
                raise
            self.has_failed = True
            # The relay raises it again.
            self._fail(error)
        finally:
            event.remove(engine, "handle_error", self._keep_connection)

    def _invoker(self) -> Invoker | None:
        return None if self.slot.connected is None else self.slot.connected.invoker

    def _keep_connection(self, context: ExceptionContext) -> None:
        keep_cancelled(context)

    def flagged_since(self, request: concurrent.futures.Future[float | None]) -> float | None:
        try:
            answer = asyncio.shield(asyncio.wrap_future(request))
            return await_only(asyncio.wait_for(answer, UNFLAGGED_PAUSE_SECONDS))
        except TimeoutError:
            return None

    def _outlive(self, error: asyncio.CancelledError) -> None:
        # The relay cancels only when it has given up the slot. Any other cancellation comes from a handler, after that
        # handler's end.
        if self.slot.is_abandoned or self.slot.is_seized() or self._state.stopping.is_set():
            raise error
        task = asyncio.current_task()
        assert task is not None
        while task.cancelling():
            task.uncancel()
        self.slot.lost(error)

    def _wait_after(self, error: BaseException) -> None:
        # The listener lost its connection too, and set the event: if it stayed set, the slot would loop without pause.
        self._wake_event.clear()
        pause = self.slot.lost(error)
        if not self._state.stopping.is_set() or self.slot.goes_on():
            self._wake_event.wait(pause)

    def is_alive(self) -> bool:
        return not self._future.done()

    def join(self, timeout_seconds: float) -> None:
        concurrent.futures.wait([self._future], timeout_seconds)

    def abandon(self) -> None:
        """Cancel the slot's task, and with it the handler. The transaction is rolled back as the task ends."""
        # The task and not the future: a cancelled future is done at once, even if its task is not.
        self.slot.is_abandoned = True
        self._watch.abandon()
