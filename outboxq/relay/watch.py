"""The watch on a handler, by which other threads read its call stack, and see if it runs and its event loop answers."""

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
    """Watches a handler that runs in a thread. Methods that concern an event loop do nothing here, or return False.

    A handler in a thread cannot be cancelled: it ends when it reads `ctx.cancelled`, or when its SQL statement is
    cancelled.

    Attributes:
        thread: The thread's identifier; None while it runs no handler.
    """

    thread: int | None = None

    def ask(self) -> None:
        """Request a sign of life from the event loop in which the handler runs. `is_held_up` uses it.

        Does nothing for a handler in a thread.
        """

    def cancel(self, call: HandlerCall) -> None:
        """Cancel an async handler in its event loop, with the query that it awaits.

        Does nothing for a handler in a thread.
        """

    def is_held_up(self) -> bool:
        """Return True if other code than this handler blocks the event loop, so that the handler is not to blame.

        That is so if the loop gave no sign of life after `ask`, and the handler is not executing. False for a handler
        in a thread.
        """
        return False

    def is_running(self) -> bool:
        """Return True if the handler's code is executing in the event loop at this moment.

        False while it awaits something, and for a handler in a thread.
        """
        return False

    def stack(self) -> list[Frame]:
        """Return the call stack of the handler; empty if it has ended."""
        return _stack_of(self.thread)


class TaskWatch(ThreadWatch):
    """Watches a handler in the event loop: the slot's or call's task, and the handler's own task, if it has one.

    Args:
        invoker: Returns the object that calls the handler; None if there is none now.

    Attributes:
        is_outside: True while the loop runs code of the job outside any task, in `thread`.
    """

    is_outside = False

    def __init__(self, loop: asyncio.AbstractEventLoop, invoker: Callable[[], Invoker | None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._loop = loop
        self._invoker = invoker
        # The sign of life that was requested last; few calls are ever requested to give one.
        self._answered: threading.Event | None = None

    def begin(self, task: "asyncio.Task[None] | None") -> None:
        """Record the task to watch. Called in the thread of its event loop."""
        self.thread, self.task = threading.get_ident(), task

    def abandon(self) -> None:
        """Cancel the task of the slot or call, which also ends the handler that it awaits."""
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
        """Return the coroutines of the watched task and of the handler's own task; empty if both tasks are missing."""
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
            # The frame is read once, because the loop, in another thread, may end the coroutine at any time.
            while inspect.iscoroutine(awaited) and (frame := awaited.cr_frame) is not None:
                stack.extend(frames_of_stack(frame))
                awaited = inner_coroutine(awaited.cr_await)
        return stack


def _stack_of(thread: int | None) -> list[Frame]:
    frame = None if thread is None else sys._current_frames().get(thread)  # noqa: SLF001  # documented in the library reference
    return [] if frame is None else frames_of_stack(frame)


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call `callback` in the event loop; do nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
