"""Answers of an async session, connection or context: coroutines that a handler cannot forget to await.

`find_job(session, ...)` without `await` does nothing, and Python says so only in a warning, when the job is done. So
the coroutines of this package are counted while an async handler runs: one that was never awaited fails the attempt.
"""

import inspect
import sys
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar
from types import GeneratorType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outboxq.awaited import awaited
from outboxq.database.sessions import AnAsyncSession, SyncSession

T = TypeVar("T")
SyncTarget: TypeAlias = SyncSession | Connection
AsyncTarget: TypeAlias = AnAsyncSession | AsyncConnection


# If a handler makes more of them, those that were begun are forgotten.
_MOST_NOTED = 1_000


class Answer(Coroutine[Any, Any, T]):
    """A coroutine that is counted until it is awaited, and refuses to be taken for its result.

    Args:
        call: The call, for the error: "find_job(...)".
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], call: str) -> None:
        note(coroutine, call)
        self.coroutine = coroutine
        self._call = call

    def __await__(self) -> Generator[Any, None, T]:
        # A local variable, by which the coroutine that a task waits for is found.
        inner = self.coroutine
        return (yield from inner.__await__())

    def send(self, value: Any, /) -> Any:
        return self.coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self.coroutine.throw(*error)

    def close(self) -> None:
        self.coroutine.close()

    # Not in its type: a checker would silently take the code after a test of it for unreachable.
    if not TYPE_CHECKING:

        def __bool__(self) -> bool:
            # Python 3.12 calls it on a task's coroutine when it prints the task, as asyncio.run does.
            if sys._getframe(1).f_globals.get("__name__") == "asyncio.base_tasks":  # noqa: SLF001  # who asks
                return True
            raise TypeError(f"nothing has happened yet: `await {self._call}`")


_made: ContextVar[dict[Coroutine[Any, Any, Any], str] | None] = ContextVar("outboxq_made", default=None)


def count_coroutines() -> Mapping[Coroutine[Any, Any, Any], str]:
    """The coroutines that are made from now on, in this task and those that it starts, with their calls."""
    made: dict[Coroutine[Any, Any, Any], str] = {}
    _made.set(made)
    return made


def note(coroutine: Coroutine[Any, Any, Any], call: str) -> None:
    """Count a coroutine until it is begun; the last name counts."""
    awaited.note(call, coroutine)
    made = _made.get()
    if made is None:
        return
    if len(made) >= _MOST_NOTED:
        for each in [each for each in made if inspect.getcoroutinestate(each) != inspect.CORO_CREATED]:
            del made[each]
    made[coroutine] = call


def inner_coroutine(waited_for: object) -> object:
    """The coroutine inside of an answer, or of the `await` of one; anything else as it is."""
    if isinstance(waited_for, Answer):
        return waited_for.coroutine
    if isinstance(waited_for, GeneratorType) and waited_for.gi_frame is not None:
        return waited_for.gi_frame.f_locals.get("inner", waited_for)
    return waited_for


def run_on(target: SyncTarget | AsyncTarget, work: Callable[[Session | Connection], T], call: str) -> T | Answer[T]:
    """Do work on a session or connection; on an async one, return an answer that does it when it is awaited."""
    plain = target() if isinstance(target, scoped_session | async_scoped_session) else target
    if isinstance(plain, AsyncSession | AsyncConnection):
        # Made at once, so that Python warns of one that is never awaited outside of a handler.
        return Answer(plain.run_sync(work), call)
    return work(plain)
