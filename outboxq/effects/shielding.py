"""Writes that run to their end although the task that waits for them is cancelled."""

import asyncio
from asyncio import Task
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DelayedCancellation:
    """Holds the cancellation of the current task back until the work that it awaits is done."""

    def __init__(self) -> None:
        self.error: asyncio.CancelledError | None = None

    async def finish(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the work; a cancellation that comes while it runs is kept in `error`."""
        while True:
            task = asyncio.ensure_future(begin())
            while not task.done():
                try:
                    # wait() neither raises the task's error, nor cancels the task.
                    await asyncio.wait((task,))
                except asyncio.CancelledError as error:
                    self.error = self.error or error
            # Only an event loop that ends cancels this task, as it does all: begin again, for work may be repeated.
            if not (task.cancelled() and task.cancelling()):
                return task.result()

    def release(self) -> None:
        """Raise the cancellation that was held back, if there is one."""
        if self.error is not None:
            raise self.error from None


class UncancelledWrites:
    """Runs coroutines in tasks of their own, which go on when the one that waits for them is cancelled.

    A scope of anyio, such as the one of Starlette's BaseHTTPMiddleware, cancels a task again at each of its awaits: a
    write inside of that task might never finish.
    """

    def __init__(self) -> None:
        # The event loop itself holds its tasks weakly.
        self._tasks: set[Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> Task[T]:
        """Start a task, whose result may be left unread."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Start a task and wait for its result."""
        return await asyncio.shield(self.start(work))

    def _finished(self, task: Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # The result may be left unread: reading the exception keeps asyncio from logging it.
            task.exception()
