"""Answers of an async session, connection or context: coroutines that a handler cannot forget to await.

`find_job(session, ...)` without `await` does nothing, and Python says so only in a warning, when the job is done. So
the coroutines of this package are counted while an async handler runs: one that was never awaited fails the attempt.
"""

from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outboxq.awaited import awaited
from outboxq.database.sessions import AnAsyncSession, SyncSession

T = TypeVar("T")
SyncTarget: TypeAlias = SyncSession | Connection
AsyncTarget: TypeAlias = AnAsyncSession | AsyncConnection


class Answer(Coroutine[Any, Any, T]):
    """A coroutine that is counted until it is awaited, and refuses to be taken for its result.

    Args:
        call: What was called, for the error: "find_job(...)".
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], call: str) -> None:
        if isinstance(coroutine, Answer):
            # Counted once, by the outer name.
            coroutine.begin()
        else:
            awaited.note(call, coroutine)
        self._coroutine = coroutine
        self._call = call
        # The set is that of the handler that made the answer, also if one of its tasks awaits it.
        self._unawaited = _unawaited.get()
        if self._unawaited is not None:
            self._unawaited.add(self)

    def __await__(self) -> Generator[Any, None, T]:
        self.begin()
        return self._coroutine.__await__()

    def send(self, value: Any, /) -> Any:
        self.begin()
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def begin(self) -> None:
        """Count it no more."""
        if self._unawaited is not None:
            self._unawaited.discard(self)

    def __str__(self) -> str:
        return self._call

    # Not in its type: a checker takes what follows for unreachable, and is silent about it.
    if not TYPE_CHECKING:

        def __bool__(self) -> bool:
            raise TypeError(f"nothing has happened yet: `await {self._call}`")


_unawaited: ContextVar[set[Answer[Any]] | None] = ContextVar("outboxq_unawaited", default=None)


def count_answers() -> set[Answer[Any]]:
    """The set that has each answer made from now on, in this task and those it starts, until it is awaited."""
    answers: set[Answer[Any]] = set()
    _unawaited.set(answers)
    return answers


def run_on(target: SyncTarget | AsyncTarget, work: Callable[[Session | Connection], T], call: str) -> T | Answer[T]:
    """Do work on a session or connection; on an async one, return an answer that does it when it is awaited."""
    plain = target() if isinstance(target, scoped_session | async_scoped_session) else target
    if isinstance(plain, AsyncSession | AsyncConnection):
        # Made at once, so that Python warns of one that is never awaited outside of a handler.
        return Answer(plain.run_sync(work), call)
    return work(plain)
