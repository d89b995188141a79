"""Writing to its end what was begun, whoever is cancelled meanwhile."""

import asyncio
from asyncio import Task
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class UncancelledWrites:
    """Runs coroutines in tasks of their own.

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

    async def wait(self, task: Task[T]) -> T:
        """Its answer; the task itself goes on where we are cancelled."""
        return await asyncio.shield(task)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Begin and wait."""
        return await self.wait(self.start(work))

    def _finished(self, task: Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Nobody may be left to read it; asked for, so that asyncio does not complain.
            task.exception()
