"""The application's lifespan: resources that it opens before the first job and closes after the last one."""

import inspect
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import TypeAlias

from outboxq.errors import ConfigError
from outboxq.forks import call_here
from outboxq.handlers.resolved import Lifespan
from outboxq.relay.event_loop import LoopThread

AnyLifespan: TypeAlias = AbstractContextManager[object] | AbstractAsyncContextManager[object]


def make_lifespan(lifespan: Lifespan | None) -> AnyLifespan:
    """Make the context manager of the application's lifespan, not entered yet.

    Raises:
        ConfigError: the lifespan is neither a context manager nor a generator function.
    """
    if lifespan is None:
        return nullcontext()
    if inspect.isasyncgenfunction(lifespan):
        return asynccontextmanager(lifespan)()
    if inspect.isgeneratorfunction(lifespan):
        return contextmanager(lifespan)()
    opened = lifespan()
    if isinstance(opened, AbstractContextManager | AbstractAsyncContextManager):
        return opened
    raise ConfigError(
        "a lifespan returns a context manager, sync or async, or is a generator function that yields the state once, "
        f"got {type(opened).__name__}"
    )


def enter_lifespan(stack: ExitStack, lifespan: AnyLifespan, loop: LoopThread, exit_seconds: float) -> object:
    """Enter the lifespan, an async one in the loop, and have `stack` leave it; returns its state."""
    if isinstance(lifespan, AbstractContextManager):
        state = call_here(lifespan.__enter__)
        stack.push(lambda *error: call_here(lifespan.__exit__, *error))
        return state
    state = loop.call(lifespan.__aenter__())
    stack.callback(_leave_in_loop, lifespan, loop, exit_seconds)
    return state


def _leave_in_loop(lifespan: AbstractAsyncContextManager[object], loop: LoopThread, exit_seconds: float) -> None:
    loop.call_unless_blocked(lifespan.__aexit__(None, None, None), exit_seconds)
