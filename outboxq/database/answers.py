"""Coroutines that outboxq returns for an async session, connection or context: no handler can forget to await them.

`find_job(session, ...)` without `await` does nothing, and Python says so only in a warning after the job is done. So
outboxq counts its own coroutines while an async handler runs: one that was never awaited fails the attempt.
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


# The limit: beyond it, coroutines that were begun are forgotten.
_MOST_NOTED = 1_000


class Answer(Coroutine[Any, Any, T]):
    """The coroutine that a call of outboxq's async API returns; it is recorded, so that a forgotten `await` is noticed.

    Its use as a truth value raises TypeError, for the same reason.

    Args:
        coroutine: The coroutine that does the work.
        call: The text of the call, for the error: "find_job(...)".
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], call: str) -> None:
        note(coroutine, call)
        self.coroutine = coroutine
        self._call = call

    def __await__(self) -> Generator[Any, None, T]:
        # A local variable, so that the coroutine that a task waits for can be found.
        inner = self.coroutine
        return (yield from inner.__await__())

    def send(self, value: Any, /) -> Any:
        return self.coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self.coroutine.throw(*error)

    def close(self) -> None:
        self.coroutine.close()

    # Hidden from the type: a type checker would silently treat the code after `if answer:` as unreachable.
    if not TYPE_CHECKING:

        def __bool__(self) -> bool:
            # Python 3.12 reads it from a task's coroutine to print the task, as asyncio.run does.
            if sys._getframe(1).f_globals.get("__name__") == "asyncio.base_tasks":  # noqa: SLF001  # who asks
                return True
            raise TypeError(f"nothing has happened yet: `await {self._call}`")


_made: ContextVar[dict[Coroutine[Any, Any, Any], str] | None] = ContextVar("outboxq_made", default=None)


def count_coroutines() -> Mapping[Coroutine[Any, Any, Any], str]:
    """Begin to record outboxq's coroutines in this task and those that it starts; return the mapping that gets them.

    The mapping has the text of each coroutine's call, such as "find_job(...)". After a handler has returned, the code
    that called it looks there for coroutines that were never begun.
    """
    made: dict[Coroutine[Any, Any, Any], str] = {}
    _made.set(made)
    return made


def note(coroutine: Coroutine[Any, Any, Any], call: str) -> None:
    """Record a coroutine with the text of its call, to find out later if it was ever begun.

    A later text for the same coroutine replaces the earlier one. Once 1,000 coroutines are recorded, those that were
    begun are dropped.
    """
    awaited.note(call, coroutine)
    made = _made.get()
    if made is None:
        return
    if len(made) >= _MOST_NOTED:
        for each in [each for each in made if inspect.getcoroutinestate(each) != inspect.CORO_CREATED]:
            del made[each]
    made[coroutine] = call


def inner_coroutine(waited_for: object) -> object:
    """Return the coroutine inside an `Answer`, or inside an `Answer`'s running `await`; any other object unchanged.

    Code that follows what a task waits for cannot see through an `Answer` otherwise.
    """
    if isinstance(waited_for, Answer):
        return waited_for.coroutine
    if isinstance(waited_for, GeneratorType) and waited_for.gi_frame is not None:
        return waited_for.gi_frame.f_locals.get("inner", waited_for)
    return waited_for


def run_on(target: SyncTarget | AsyncTarget, work: Callable[[Session | Connection], T], call: str) -> T | Answer[T]:
    """Call `work` with a plain session or connection; for an async one, return an `Answer` that calls it when awaited.

    Args:
        call: The text of this call, for an error about a forgotten `await`: "find_job(...)".
    """
    plain = target() if isinstance(target, scoped_session | async_scoped_session) else target
    if isinstance(plain, AsyncSession | AsyncConnection):
        # Made at once, so that Python warns of an answer that is never awaited outside of a handler.
        return Answer(plain.run_sync(work), call)
    return work(plain)
