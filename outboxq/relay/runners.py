"""Runners: a slot in a thread, or in a task of the relay's event loop, and how it is given up."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import Any

from sqlalchemy import ExceptionContext, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.config import SlotGroup
from outboxq.database.driver import dbapi_connection
from outboxq.database.guard import keep_cancelled
from outboxq.execution.invoke import AsyncInvoker
from outboxq.relay.connections import AsyncSlotConnections, SlotConnections
from outboxq.relay.serve import serve_in_loop, serve_in_thread
from outboxq.relay.slot import Slot
from outboxq.relay.state import RelayState
from outboxq.relay.threads import BoundedStart


class SlotThread:
    """A slot with sync handlers, in a thread of its own."""

    def __init__(
        self, shared: RelayState, group: SlotGroup, lines: SlotConnections, failed: Callable[[BaseException], None]
    ) -> None:
        bell = threading.Event()
        self.slot = Slot(shared, "sync", group.queues, bell.set, group.in_turns)
        self.has_failed = False
        self._failed = failed
        self._detached: DBAPIConnection | None = None
        # A daemon: a handler that outlives the time to drain must not keep the process alive.
        self._thread = BoundedStart(partial(self._run, lines, bell), "outboxq-slot")
        self._thread.start()

    def _run(self, lines: SlotConnections, bell: threading.Event) -> None:
        try:
            serve_in_thread(self.slot, lines, bell)
        except BaseException as error:  # noqa: BLE001  # raised again by the relay
            self.has_failed = True
            self._failed(error)
        finally:
            if self._detached is not None:
                self._detached.close()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def abandon(self) -> None:
        """Nothing can stop a thread, and it cannot commit; its place in the pool is for the slot that follows."""
        line = self.slot.connected
        if line is None or self._detached is not None:
            return
        connection = line.connection
        if connection.closed or connection.invalidated:
            return
        # Its thread may be closing it at this moment.
        with contextlib.suppress(SQLAlchemyError):
            self._detached = dbapi_connection(connection)
            connection.detach()

    def ask(self) -> None:
        """A thread is its own."""

    def is_held_up(self) -> bool:
        return False

    def is_running(self) -> bool:
        """No event loop has anything to do with it."""
        return False

    def stack(self) -> list[traceback.FrameSummary]:
        return _stack_of_thread(self._thread.ident)


class SlotTask:
    """A slot with async handlers, a task in the relay's event loop."""

    def __init__(
        self,
        shared: RelayState,
        group: SlotGroup,
        engine: AsyncEngine,
        lines: AsyncSlotConnections,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._bell = asyncio.Event()
        self._loop = loop
        self._loop_thread: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._answered = threading.Event()
        self.has_failed = False
        self._failed = failed
        self.slot = Slot(shared, "async", group.queues, self._wake, group.in_turns)
        self._future = asyncio.run_coroutine_threadsafe(self._run(engine, lines), loop)

    def _keep_connection(self, context: ExceptionContext) -> None:
        if (line := self.slot.connected) is not None:
            keep_cancelled(context, line.connection)

    async def _run(self, engine: AsyncEngine, lines: AsyncSlotConnections) -> None:
        self._loop_thread = threading.get_ident()
        self._task = asyncio.current_task()
        # SQLAlchemy keeps these by dialect, so for all who use the engine.
        event.listen(engine.sync_engine, "handle_error", self._keep_connection)
        try:
            await serve_in_loop(self.slot, lines, self._bell)
        except BaseException as error:
            if self.slot.is_abandoned and isinstance(error, asyncio.CancelledError):
                raise
            self.has_failed = True
            # Raised again by the relay.
            self._failed(error)
        finally:
            event.remove(engine.sync_engine, "handle_error", self._keep_connection)

    def _wake(self) -> None:
        self._call_soon(self._bell.set)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        # A closed loop has no one left to call.
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
        """Whether the event loop, which others share, still runs."""
        self._answered.clear()
        self._call_soon(self._answered.set)

    def is_held_up(self) -> bool:
        return not self._answered.is_set() and not self.is_running()

    def _coroutines(self) -> "list[CoroutineType[Any, Any, object]]":
        """Of the slot's task, and of the one of the attempt that it waits for."""
        line = self.slot.connected
        attempt = line.invoker.task if line is not None and isinstance(line.invoker, AsyncInvoker) else None
        found: list[object] = [task.get_coro() for task in (self._task, attempt) if task is not None]
        return [coroutine for coroutine in found if inspect.iscoroutine(coroutine)]

    def is_running(self) -> bool:
        return any(coroutine.cr_running for coroutine in self._coroutines())

    def stack(self) -> list[traceback.FrameSummary]:
        if self._task is None or self.is_running():
            return _stack_of_thread(self._loop_thread)
        stack: list[traceback.FrameSummary] = []
        for coroutine in self._coroutines():
            awaited: object = coroutine
            while inspect.iscoroutine(awaited) and awaited.cr_frame is not None:
                stack.extend(traceback.extract_stack(awaited.cr_frame))
                awaited = awaited.cr_await
        return stack


def _stack_of_thread(thread: int | None) -> list[traceback.FrameSummary]:
    frame = None if thread is None else sys._current_frames().get(thread)  # noqa: SLF001  # documented in the library reference
    return [] if frame is None else list(traceback.extract_stack(frame))
