"""The call of a handler within its arounds: context managers that users register to wrap handlers' calls.

The arounds are entered first, from the outermost inwards. Then the handler's arguments and entities are loaded, under
the arounds' settings; then the handler is called. Arounds that were entered are always left again, and cannot suppress
the attempt's error.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, NamedTuple, Protocol

from outboxq.errors import HandlerError
from outboxq.forks import await_here, call_here
from outboxq.handlers.around import Around, Arounds
from outboxq.handlers.context import AsyncBatchContext, AsyncContext, BatchContext, JobContext
from outboxq.job import Job


class HasSession(Protocol):
    """An object whose attribute `made` is the session of one job's attempt, or None before the session's first use.

    `Surrounded.of` reads it.
    """

    @property
    def made(self) -> object: ...


class Surrounded(NamedTuple):
    """The arounds of a handler's call, and a function that makes the handler's arguments after the arounds are entered.

    An invoker's `call` receives this object in place of the arguments.

    Attributes:
        arounds: The arounds, the outermost first.
        load: Makes the arguments; synchronous code, which may send statements.
        batch: The jobs of a batch handler's call; None for any other handler.
    """

    arounds: Sequence[Around]
    load: Callable[[], dict[str, object]]
    batch: Sequence[Job] | None = None

    @classmethod
    def of(
        cls,
        arounds: Arounds,
        attempt: HasSession,
        load: Callable[[], dict[str, object]],
        batch: Sequence[Job] | None = None,
    ) -> "Surrounded":
        """Return the object for one job's attempt.

        Its `load` makes the arguments, and first records in `arounds` if one of the arounds has used the job's session.
        """

        def note_and_load() -> dict[str, object]:
            arounds.use_sessions |= attempt.made is not None
            return load()

        return cls(arounds.all, note_and_load, batch)

    def context_of(self, ctx: JobContext[Any, Any]) -> object:
        """Return the context that the arounds receive: the handler's, or for a batch handler one with all its jobs."""
        if self.batch is None:
            return ctx
        kind: Any = AsyncBatchContext if isinstance(ctx, AsyncContext) else BatchContext
        return kind(ctx.state, ctx.session, tuple(self.batch), ctx.call)


def call_within(arounds: Sequence[Around], ctx: object, call: Callable[[], object]) -> object:
    """Call a sync handler within these arounds; return its value, or the outcome that an around gave instead."""
    if not arounds:
        return call()
    around, *inner = arounds
    wrapping = around.checked(call_here(around.make, ctx))
    if wrapping is None:
        return call_within(inner, ctx, call)
    if not isinstance(wrapping, AbstractContextManager | AbstractAsyncContextManager):
        return wrapping
    if not isinstance(wrapping, AbstractContextManager):
        raise HandlerError(
            f"around {around.name} returned an async context manager, and the handler is sync: return a sync one, or "
            'register it with @jobs.around(flavour="async")'
        )
    call_here(wrapping.__enter__)
    try:
        returned = call_within(inner, ctx, call)
    except BaseException as error:
        # Raised again even if the around returns True: a failed job must not count as done.
        call_here(wrapping.__exit__, type(error), error, error.__traceback__)
        raise
    call_here(wrapping.__exit__, None, None, None)
    return returned


async def await_within(arounds: Sequence[Around], ctx: object, call: Callable[[], Awaitable[object]]) -> object:
    """Await an async handler within these arounds; return its value, or the outcome that an around gave instead."""
    if not arounds:
        return await call()
    around, *inner = arounds
    made = call_here(around.make, ctx)
    # A context manager may also be awaitable, and must be entered.
    if inspect.isawaitable(made) and not isinstance(made, AbstractContextManager | AbstractAsyncContextManager):
        made = await await_here(made)
    wrapping = around.checked(made)
    if wrapping is None:
        return await await_within(inner, ctx, call)
    if not isinstance(wrapping, AbstractContextManager | AbstractAsyncContextManager):
        return wrapping
    # Entered as an async one, if it is both.
    if isinstance(wrapping, AbstractAsyncContextManager):
        await await_here(wrapping.__aenter__())
    else:
        call_here(wrapping.__enter__)
    try:
        returned = await await_within(inner, ctx, call)
    except BaseException as error:
        # Raised again even if the around returns True: a failed job must not count as done.
        await _leave(wrapping, type(error), error, error.__traceback__)
        raise
    await _leave(wrapping, None, None, None)
    return returned


async def _leave(wrapping: AbstractContextManager[object] | AbstractAsyncContextManager[object], *said: Any) -> None:
    if isinstance(wrapping, AbstractAsyncContextManager):
        await await_here(wrapping.__aexit__(*said))
    else:
        call_here(wrapping.__exit__, *said)
