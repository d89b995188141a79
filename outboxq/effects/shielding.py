"""Writes that run to their end even if the task that waits for them is cancelled."""

import asyncio
from asyncio import Task
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DelayedCancellation:
    """Holds back the cancellation of the current task while it awaits a write, so that the write is completed."""

    def __init__(self) -> None:
        self.error: asyncio.CancelledError | None = None

    async def finish(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Run the work to its end and return its result; a cancellation that arrives before its end is kept in `error`.

        If the event loop ends and cancels the work itself, `begin` is called again.
        """
        while True:
            task = asyncio.ensure_future(begin())
            while not task.done():
                try:
                    # wait() neither raises the task's error nor cancels the task.
                    await asyncio.wait((task,))
                except asyncio.CancelledError as error:
                    self.error = self.error or error
            # Only an event loop that ends cancels this task, with all others: begin again, because the work may be
            # repeated.
            if not (task.cancelled() and task.cancelling()):
                return task.result()

    def release(self) -> None:
        """Raise the cancellation that `finish` has held back, if there is one."""
        if self.error is not None:
            raise self.error from None


class UncancelledWrites:
    """Runs coroutines in tasks of their own, which go on when the task that waits for them is cancelled.

    A scope of anyio, such as the one of Starlette's BaseHTTPMiddleware, cancels a task again at each of its awaits: a
    write inside that task might never finish.
    """

    def __init__(self) -> None:
        # The event loop itself holds its tasks weakly.
        self._tasks: set[Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> Task[T]:
        """Start a task for this work, and keep a reference until it ends; its result or error need not be read."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Start a task for this work, and wait for its result; if the waiting task is cancelled, the work goes on."""
        return await asyncio.shield(self.start(work))

    def _finished(self, task: Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # The result may never be read: reading the exception keeps asyncio from logging it.
            task.exception()
