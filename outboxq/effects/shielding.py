"""Writing to its end what was begun, although the task that began it is cancelled."""

import asyncio
from asyncio import Task
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DelayedCancellation:
    """Holds the cancellation of the current task back until what it waits for is done."""

    def __init__(self) -> None:
        self.error: asyncio.CancelledError | None = None

    async def finish(self, begin: Callable[[], Awaitable[T]]) -> T:
        """What the work comes to; a cancellation that comes meanwhile is kept in `error`."""
        while True:
            task = asyncio.ensure_future(begin())
            while not task.done():
                try:
                    # Neither raises what the task raised, nor cancels it.
                    await asyncio.wait((task,))
                except asyncio.CancelledError as error:
                    self.error = self.error or error
            # A loop that ends cancels every task, also this one, which we do not: the work may be repeated.
            if not (task.cancelled() and task.cancelling()):
                return task.result()

    def release(self) -> None:
        """Raise the cancellation that was held back, if there is one."""
        if self.error is not None:
            raise self.error from None


class UncancelledWrites:
    """Runs coroutines in tasks of their own, which go on when the one that waits for them is cancelled.

    A scope of anyio, such as the one of Starlette's BaseHTTPMiddleware, cancels a task again at each of its awaits, so
    that what is to be written may not be written in it.
    """

    def __init__(self) -> None:
        # The event loop itself holds its tasks weakly.
        self._tasks: set[Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> Task[T]:
        """Begin; the answer of the task may be left unread."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Begin and wait."""
        return await asyncio.shield(self.start(work))

    def _finished(self, task: Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Its answer may be left unread; asked for, so that asyncio does not complain.
            task.exception()
