"""The loop of a slot, in a thread or in a task of the relay's event loop: it works while something waits, or sleeps.

Written once, for threads and for tasks. A task runs it in a greenlet, as SQLAlchemy does its own code, so that each
wait in the loop is an `await` of the task.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import CoroutineType
from typing import Any

from sqlalchemy import Engine, ExceptionContext, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.util import await_only, greenlet_spawn

from outboxq.clock import clock
from outboxq.config import SlotGroup
from outboxq.database.answers import inner_coroutine
from outboxq.database.defects import is_defect
from outboxq.database.driver import dbapi_connection
from outboxq.database.guard import keep_cancelled
from outboxq.errors import ConfigError, RelayStuck, SchemaError
from outboxq.execution.errors import Abandoned
from outboxq.execution.failure import Frame, frames_of_stack
from outboxq.execution.invoke import AsyncInvoker
from outboxq.forks import call_here
from outboxq.handlers.call import HandlerCall
from outboxq.handlers.handler import Flavour
from outboxq.relay.connections import SlotConnections
from outboxq.relay.idle import UNFLAGGED_PAUSE_SECONDS
from outboxq.relay.slot import CONNECTION_ERRORS, Slot
from outboxq.relay.state import RelayState
from outboxq.relay.threads import BoundedStart

# The next try would fail the same way.
_FINAL = (ConfigError, RelayStuck, SchemaError)
# For a server that drops a connection and accepts the next: if it is down, its jobs are left to the next relay.
_LAST_TRIES, _LAST_PAUSE_SECONDS, _LAST_SECONDS = 5, 0.1, 2.0


class SlotLoop:
    """The loop of one slot; `has_failed`: the loop ended by an error, which the relay raises again."""

    def __init__(
        self,
        state: RelayState,
        group: SlotGroup,
        flavour: Flavour,
        connections: SlotConnections,
        wake_event: "threading.Event | _TaskWakeEvent",
        fail: Callable[[BaseException], None],
    ) -> None:
        self.slot = Slot(state, flavour, group.queues, wake_event.set, group.in_turns)
        self.has_failed = False
        self._state = state
        self._connections = connections
        self._wake_event = wake_event
        self._fail = fail

    def _serve(self) -> None:
        slot, stopping, until_empty = self.slot, self._state.stopping, self._state.until_empty
        work = slot.drain if until_empty else slot.work_all
        while not (stopping.is_set() or slot.is_seized()):
            try:
                is_over = not (until_empty or slot.wants_work())
                if not is_over:
                    with self._connections.borrow() as slot_connection:
                        is_over = call_here(work, slot_connection)
                if is_over and until_empty:
                    break
                if is_over:
                    self._sleep()
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

    def _find_out(self) -> None:
        """Settle jobs whose connection was lost when the relay stopped: only this slot can find out their outcome."""
        slot, ends_at = self.slot, clock() + _LAST_SECONDS
        for _ in range(_LAST_TRIES):
            if not slot.is_in_doubt or slot.is_seized() or clock() > ends_at:
                return
            try:
                with self._connections.borrow() as slot_connection:
                    call_here(slot.settle, slot_connection)
            except Abandoned:
                return
            except Exception as error:
                if _is_final(error):
                    raise
                slot.lost(error)
                self._wake_event.clear()
                self._wake_event.wait(_LAST_PAUSE_SECONDS)

    def _sleep(self) -> None:
        """Sleep until woken, or until a poll finds something; has a connection only to poll."""
        slot, sleep = self.slot, self.slot.sleep
        self._wake_event.clear()
        flagged = False
        while not self._state.stopping.is_set():
            if sleep.needs_connection():
                with self._connections.borrow() as slot_connection:
                    if call_here(slot.work_seen, slot_connection):
                        return
            if not flagged:
                request = sleep.fall_asleep()
                flagged = sleep.is_flagged(None if request is None else self._flagged_since(request))
                # Suspects alone do not count: another slot may run one for long.
                if sleep.is_behind():
                    continue
            if self._wake_event.wait(sleep.pause_seconds(flagged=flagged)):
                sleep.want_poll()
                return

    def _flagged_since(self, request: Future[float | None]) -> float | None:
        """Wait for the listener's answer; None if it takes too long."""
        raise NotImplementedError

    def _outlive(self, error: asyncio.CancelledError) -> None:
        """Go on after a cancellation that is not the relay's own; raise any other."""
        raise error

    def _wait_after(self, error: BaseException) -> None:
        """Report a lost or refused connection, and wait before the next try."""
        raise NotImplementedError

    # Nothing in a thread: its handler shares no loop, checks `ctx.cancelled`, or has its statement cancelled.

    def ask(self) -> None:
        """Request a sign of life from the event loop, which the handler shares with others."""

    def cancel(self, call: HandlerCall) -> None:
        """Cancel a handler in its own event loop, together with the query that it awaits."""

    def is_held_up(self) -> bool:
        """Return True if no sign of life came, and another handler has the loop."""
        return False

    def is_running(self) -> bool:
        """Return True if the slot's handler has the event loop at this moment."""
        return False


def _is_final(error: Exception) -> bool:
    """Return True if an error ends the relay: a defect of ours, but nothing that users' listeners may raise."""
    return isinstance(error, _FINAL) or (not isinstance(error, CONNECTION_ERRORS) and is_defect(error))


class SlotThread(SlotLoop):
    """A slot with sync handlers, in a thread of its own."""

    def __init__(
        self, state: RelayState, group: SlotGroup, connections: SlotConnections, fail: Callable[[BaseException], None]
    ) -> None:
        super().__init__(state, group, "sync", connections, threading.Event(), fail)
        self._detached: DBAPIConnection | None = None
        # A daemon: a handler that exceeds the time to drain must not keep the process alive.
        self._thread = BoundedStart(self._run, "outboxq-slot")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  # raised again by the relay
            self.has_failed = True
            self._fail(error)
        finally:
            if self._detached is not None:
                self._detached.close()

    def _flagged_since(self, request: Future[float | None]) -> float | None:
        try:
            return request.result(UNFLAGGED_PAUSE_SECONDS)
        except TimeoutError:
            return None

    def _wait_after(self, error: BaseException) -> None:
        self._state.stopping.wait(self.slot.lost(error))

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def abandon(self) -> None:
        """Free the slot's place in the pool for its successor. The thread cannot be stopped, and cannot commit."""
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

    def stack(self) -> list[Frame]:
        return stack_of_thread(self._thread.ident)


def stack_of_thread(thread: int | None) -> list[Frame]:
    """The call stack of a thread; empty if it has ended."""
    frame = None if thread is None else sys._current_frames().get(thread)  # noqa: SLF001  # documented in the library reference
    return [] if frame is None else frames_of_stack(frame)


class _TaskWakeEvent:
    """A `threading.Event` for a task: any thread sets it, and the task's greenlet waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        _call_soon(self._loop, self._event.set)

    def clear(self) -> None:
        self._event.clear()

    def wait(self, timeout: float) -> bool:
        try:
            return await_only(asyncio.wait_for(self._event.wait(), timeout))
        except TimeoutError:
            return False


class SlotTask(SlotLoop):
    """A slot with async handlers, in a task of the relay's event loop."""

    def __init__(
        self,
        state: RelayState,
        group: SlotGroup,
        connections: SlotConnections,
        loop: asyncio.AbstractEventLoop,
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__(state, group, "async", connections, _TaskWakeEvent(loop), fail)
        self._loop = loop
        self._loop_thread: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._answered = threading.Event()
        self._future = asyncio.run_coroutine_threadsafe(self._run(connections.engine), loop)

    async def _run(self, engine: Engine) -> None:
        self._loop_thread = threading.get_ident()
        self._task = asyncio.current_task()
        # SQLAlchemy keeps these listeners by dialect, so they are called for all uses of the engine.
        event.listen(engine, "handle_error", self._keep_connection)
        try:
            await greenlet_spawn(self._serve)
        except BaseException as error:
            if self.slot.is_abandoned and isinstance(error, asyncio.CancelledError):
                raise
            self.has_failed = True
            # Raised again by the relay.
            self._fail(error)
        finally:
            event.remove(engine, "handle_error", self._keep_connection)

    def _keep_connection(self, context: ExceptionContext) -> None:
        if (slot_connection := self.slot.connected) is not None:
            keep_cancelled(context, slot_connection.connection)

    def _flagged_since(self, request: concurrent.futures.Future[float | None]) -> float | None:
        try:
            answer = asyncio.shield(asyncio.wrap_future(request))
            return await_only(asyncio.wait_for(answer, UNFLAGGED_PAUSE_SECONDS))
        except TimeoutError:
            return None

    def _outlive(self, error: asyncio.CancelledError) -> None:
        # The relay cancels only when it is done with the slot. Any other cancellation is a handler's, and came after
        # the handler's end.
        if self.slot.is_abandoned or self.slot.is_seized() or self._state.stopping.is_set():
            raise error
        task = asyncio.current_task()
        assert task is not None
        while task.cancelling():
            task.uncancel()
        self.slot.lost(error)

    def _wait_after(self, error: BaseException) -> None:
        # The listener lost its connection too, and set the event: if it stayed set, the slot would spin.
        self._wake_event.clear()
        pause = self.slot.lost(error)
        if not self._state.stopping.is_set():
            self._wake_event.wait(pause)

    def is_alive(self) -> bool:
        return not self._future.done()

    def join(self, timeout_seconds: float) -> None:
        concurrent.futures.wait([self._future], timeout_seconds)

    def abandon(self) -> None:
        """Cancel the handler; its transaction is rolled back as the task ends."""
        # The task and not the future: a cancelled future is done at once, even if its task is not.
        self.slot.is_abandoned = True
        if self._task is not None:
            _call_soon(self._loop, self._task.cancel)

    def ask(self) -> None:
        self._answered.clear()
        _call_soon(self._loop, self._answered.set)

    def cancel(self, call: HandlerCall) -> None:
        slot_connection = self.slot.connected
        if slot_connection is not None and isinstance(slot_connection.invoker, AsyncInvoker):
            _call_soon(self._loop, partial(slot_connection.invoker.cancel, call))

    def is_held_up(self) -> bool:
        return not self._answered.is_set() and not self.is_running()

    def _coroutines(self) -> "list[CoroutineType[Any, Any, object]]":
        """The coroutines of the slot's task, and of the task of the attempt that it waits for."""
        slot_connection = self.slot.connected
        invoker = None if slot_connection is None else slot_connection.invoker
        attempt = invoker.task if isinstance(invoker, AsyncInvoker) else None
        found: list[object] = [task.get_coro() for task in (self._task, attempt) if task is not None]
        return [coroutine for coroutine in found if inspect.iscoroutine(coroutine)]

    def is_running(self) -> bool:
        return any(coroutine.cr_running for coroutine in self._coroutines())

    def stack(self) -> list[Frame]:
        if self._task is None or self.is_running():
            return stack_of_thread(self._loop_thread)
        stack: list[Frame] = []
        for coroutine in self._coroutines():
            awaited: object = coroutine
            # The frame is read once: the loop, in another thread, may end the coroutine at any time.
            while inspect.iscoroutine(awaited) and (frame := awaited.cr_frame) is not None:
                stack.extend(frames_of_stack(frame))
                awaited = inner_coroutine(awaited.cr_await)
        return stack


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    # A closed loop calls nothing.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
