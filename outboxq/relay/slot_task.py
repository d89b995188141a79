"""A slot with async handlers, in a task of the relay's event loop: its loop, and how it is given up."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable
from types import CoroutineType
from typing import Any

from sqlalchemy import ExceptionContext, event

from outboxq.config import SlotGroup
from outboxq.database.guard import keep_cancelled
from outboxq.execution.attempt import Abandoned
from outboxq.execution.invoke import AsyncInvoker
from outboxq.relay.connections import AsyncSlotConnections
from outboxq.relay.idle import UNFLAGGED_PAUSE_SECONDS
from outboxq.relay.slot import Slot
from outboxq.relay.slot_thread import CONNECTION_ERRORS, stack_of_thread
from outboxq.relay.state import RelayState


class SlotTask:
    """A slot with async handlers, in a task of the relay's event loop."""

    def __init__(
        self,
        state: RelayState,
        group: SlotGroup,
        connections: AsyncSlotConnections,
        loop: asyncio.AbstractEventLoop,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._wake_event = asyncio.Event()
        self.slot = Slot(state, "async", group.queues, self._wake, group.in_turns)
        self.has_failed = False
        self._state = state
        self._connections = connections
        self._fail = fail
        self._loop = loop
        self._loop_thread: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._answered = threading.Event()
        self._future = asyncio.run_coroutine_threadsafe(self._run(), loop)

    async def _run(self) -> None:
        self._loop_thread = threading.get_ident()
        self._task = asyncio.current_task()
        # SQLAlchemy keeps these by dialect, so for all who use the engine.
        engine = self._connections.engine.sync_engine
        event.listen(engine, "handle_error", self._keep_connection)
        try:
            await self._serve()
        except BaseException as error:
            if self.slot.is_abandoned and isinstance(error, asyncio.CancelledError):
                raise
            self.has_failed = True
            # Raised again by the relay.
            self._fail(error)
        finally:
            event.remove(engine, "handle_error", self._keep_connection)

    def _keep_connection(self, context: ExceptionContext) -> None:
        if (slot_connection := self.slot.line) is not None:
            keep_cancelled(context, slot_connection.connection)

    async def _serve(self) -> None:
        slot, stopping, until_empty = self.slot, self._state.stopping, self._state.until_empty
        work = slot.drain if until_empty else slot.work_all
        while not (stopping.is_set() or slot.is_seized()):
            try:
                is_over = not (until_empty or slot.wants_work())
                if not is_over:
                    async with self._connections.borrow() as slot_connection:
                        is_over = await slot_connection.run(work)
                if is_over and until_empty:
                    return
                if is_over:
                    await self._sleep()
            except Abandoned:
                return
            except asyncio.CancelledError as error:
                self._outlive(error)
            except CONNECTION_ERRORS as error:
                if slot.is_seized():
                    return
                # The listener, which lost its connection too, has woken it: without this the slot would spin.
                self._wake_event.clear()
                pause = slot.lost(error)
                if not stopping.is_set():
                    await self._is_woken_within(pause)

    def _outlive(self, error: asyncio.CancelledError) -> None:
        """Go on after a cancellation, unless it is the relay's own, which comes when it is done with the slot.

        Any other is of a handler that had its task cancelled later, and had ended by then.
        """
        if self.slot.is_abandoned or self.slot.is_seized() or self._state.stopping.is_set():
            raise error
        task = asyncio.current_task()
        assert task is not None
        while task.cancelling():
            task.uncancel()
        self.slot.lost(error)

    async def _sleep(self) -> None:
        """Sleep until woken, or until a poll found something; without a connection except to poll."""
        slot, sleep = self.slot, self.slot.sleep
        self._wake_event.clear()
        flagged = False
        while not self._state.stopping.is_set():
            if sleep.needs_connection():
                async with self._connections.borrow() as slot_connection:
                    if await slot_connection.run(slot.work_seen):
                        return
            if not flagged:
                flagged = sleep.is_flagged(await self._flagged_since())
                if sleep.needs_connection():
                    continue
            if await self._is_woken_within(slot.pause_seconds(flagged=flagged)):
                sleep.want_poll()
                return

    async def _flagged_since(self) -> float | None:
        request = self.slot.sleep.fall_asleep()
        if request is None:
            return None
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(request)), UNFLAGGED_PAUSE_SECONDS)
        except TimeoutError:
            return None

    async def _is_woken_within(self, seconds: float) -> bool:
        try:
            return await asyncio.wait_for(self._wake_event.wait(), seconds)
        except TimeoutError:
            return False

    def _wake(self) -> None:
        self._call_soon(self._wake_event.set)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        # A closed loop calls nothing any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def is_alive(self) -> bool:
        return not self._future.done()

    def join(self, timeout_seconds: float) -> None:
        concurrent.futures.wait([self._future], timeout_seconds)

    def abandon(self) -> None:
        """Cancel the handler; its transaction is rolled back as the task ends."""
        # Not the future: cancelled, it would be done at once, whatever the task does.
        self.slot.is_abandoned = True
        if self._task is not None:
            self._call_soon(self._task.cancel)

    def ask(self) -> None:
        """Ask whether the event loop, which other slots share, still runs."""
        self._answered.clear()
        self._call_soon(self._answered.set)

    def is_held_up(self) -> bool:
        return not self._answered.is_set() and not self.is_running()

    def _coroutines(self) -> "list[CoroutineType[Any, Any, object]]":
        """Those of the slot's task, and of the task of the attempt that it waits for."""
        slot_connection = self.slot.line
        invoker = None if slot_connection is None else slot_connection.invoker
        attempt = invoker.task if isinstance(invoker, AsyncInvoker) else None
        found: list[object] = [task.get_coro() for task in (self._task, attempt) if task is not None]
        return [coroutine for coroutine in found if inspect.iscoroutine(coroutine)]

    def is_running(self) -> bool:
        return any(coroutine.cr_running for coroutine in self._coroutines())

    def stack(self) -> list[traceback.FrameSummary]:
        if self._task is None or self.is_running():
            return stack_of_thread(self._loop_thread)
        stack: list[traceback.FrameSummary] = []
        for coroutine in self._coroutines():
            awaited: object = coroutine
            while inspect.iscoroutine(awaited) and awaited.cr_frame is not None:
                stack.extend(traceback.extract_stack(awaited.cr_frame))
                awaited = awaited.cr_await
        return stack
