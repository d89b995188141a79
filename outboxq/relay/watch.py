"""The watch on a handler, in a thread or in a task of the event loop, from other threads: its stack, signs of life."""

import asyncio
import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import Any

from outboxq.database.answers import inner_coroutine
from outboxq.execution.failure import Frame, frames_of_stack
from outboxq.execution.invoke import AsyncInvoker, Invoker
from outboxq.handlers.call import HandlerCall


class ThreadWatch:
    """Watches a handler in a thread: it shares no loop, checks `ctx.cancelled`, or has its statement cancelled.

    Attributes:
        thread: The thread's identifier; None while it runs no handler.
    """

    thread: int | None = None

    def ask(self) -> None:
        """Request a sign of life from the event loop, which the handler shares with others."""

    def cancel(self, call: HandlerCall) -> None:
        """Cancel a handler in its own event loop, together with the query that it awaits."""

    def is_held_up(self) -> bool:
        """Return True if no sign of life came, and another handler has the loop."""
        return False

    def is_running(self) -> bool:
        """Return True if the handler has the event loop at this moment."""
        return False

    def stack(self) -> list[Frame]:
        """The call stack of the handler; empty if it has ended."""
        return _stack_of(self.thread)


class TaskWatch(ThreadWatch):
    """Watches one task, and the task of the handler, if that is another one.

    Args:
        invoker: Returns the invoker that calls the handler, if any.

    Attributes:
        is_outside: The loop runs code of the job in no task, in `thread`.
    """

    is_outside = False

    def __init__(self, loop: asyncio.AbstractEventLoop, invoker: Callable[[], Invoker | None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._loop = loop
        self._invoker = invoker
        # The sign of life that was requested last; few calls are ever asked for one.
        self._answered: threading.Event | None = None

    def begin(self, task: "asyncio.Task[None] | None") -> None:
        """Record the task; called in its event loop."""
        self.thread, self.task = threading.get_ident(), task

    def abandon(self) -> None:
        """Cancel the task."""
        if self.task is not None:
            call_soon(self._loop, self.task.cancel)

    def ask(self) -> None:
        self._answered = threading.Event()
        call_soon(self._loop, self._answered.set)

    def cancel(self, call: HandlerCall) -> None:
        invoker = self._invoker()
        if isinstance(invoker, AsyncInvoker):
            call_soon(self._loop, partial(invoker.cancel, call))

    def is_held_up(self) -> bool:
        return self._answered is not None and not self._answered.is_set() and not self.is_running()

    def _coroutines(self) -> "list[CoroutineType[Any, Any, object]]":
        """The coroutines of the task, and of the handler's."""
        invoker = self._invoker()
        attempt = invoker.task if isinstance(invoker, AsyncInvoker) else None
        found: list[object] = [task.get_coro() for task in dict.fromkeys((self.task, attempt)) if task is not None]
        return [coroutine for coroutine in found if inspect.iscoroutine(coroutine)]

    def is_running(self) -> bool:
        return self.is_outside or any(coroutine.cr_running for coroutine in self._coroutines())

    def stack(self) -> list[Frame]:
        if self.task is None or self.is_running():
            return _stack_of(self.thread)
        stack: list[Frame] = []
        for coroutine in self._coroutines():
            awaited: object = coroutine
            # The frame is read once: the loop, in another thread, may end the coroutine at any time.
            while inspect.iscoroutine(awaited) and (frame := awaited.cr_frame) is not None:
                stack.extend(frames_of_stack(frame))
                awaited = inner_coroutine(awaited.cr_await)
        return stack


def _stack_of(thread: int | None) -> list[Frame]:
    frame = None if thread is None else sys._current_frames().get(thread)  # noqa: SLF001  # documented in the library reference
    return [] if frame is None else frames_of_stack(frame)


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call `callback` in the event loop; a closed loop calls nothing."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
