"""A slot with async handlers, in a task of the relay's event loop."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import Any

from sqlalchemy import Engine, ExceptionContext, event
from sqlalchemy.util import await_only, greenlet_spawn

from outboxq.config import SlotGroup
from outboxq.database.answers import inner_coroutine
from outboxq.database.guard import keep_cancelled
from outboxq.execution.frames import Frame, frames_of_stack
from outboxq.execution.invoke import AsyncInvoker
from outboxq.handlers.call import HandlerCall
from outboxq.relay.connections import SlotConnections
from outboxq.relay.idle import UNFLAGGED_PAUSE_SECONDS
from outboxq.relay.slot_loop import SlotLoop
from outboxq.relay.slot_thread import stack_of_thread
from outboxq.relay.state import RelayState


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
        """Request a sign of life from the event loop, which other slots share."""
        self._answered.clear()
        _call_soon(self._loop, self._answered.set)

    def cancel(self, call: HandlerCall) -> None:
        """Cancel the handler's task, together with the query that it awaits."""
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
