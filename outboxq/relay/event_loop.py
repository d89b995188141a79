"""The relay's event loop, in its own thread: blocking sync handlers never delay async ones.

The application's lifespan is entered there if it is async: resources that it opens before the first job and closes
after the last one.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Any, TypeAlias, TypeVar

from outboxq.errors import ConfigError
from outboxq.forks import await_here, call_here, runs_here
from outboxq.handlers.resolved import Lifespan

_STOP_SECONDS = 5.0
# A loop that does not answer within this time is blocked by a handler.
_ANSWER_SECONDS = 1.0

T = TypeVar("T")
AnyLifespan: TypeAlias = AbstractContextManager[object] | AbstractAsyncContextManager[object]


class LoopThread:
    """An event loop in a thread, for as long as `run` lasts.

    `is_blocked`: a handler blocks the loop and is not waited for, so nothing more runs in it.
    """

    def __init__(self) -> None:
        self.is_blocked = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop | None:
        """The loop; None if it was not started."""
        return self._loop

    @contextmanager
    def run(self) -> Iterator[None]:
        started, ends = Future[asyncio.AbstractEventLoop](), threading.Event()
        thread = threading.Thread(target=_run_loop, args=(started, ends), name="outboxq-loop", daemon=True)
        thread.start()
        self._loop = started.result()
        try:
            yield
        finally:
            ends.set()
            self._loop.call_soon_threadsafe(self._loop.stop)
            # A handler that blocks the loop must not hold up the relay's end: its thread is a daemon.
            thread.join(0.0 if self.is_blocked else _STOP_SECONDS)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop; does not wait for it."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, awaitable: Awaitable[T], timeout_seconds: float | None = None) -> T:
        """Run an awaitable in the loop and wait for its result."""
        return self.submit(await_here(awaitable)).result(timeout_seconds)

    def call_unless_blocked(self, awaitable: Awaitable[object], timeout_seconds: float) -> None:
        """Run an awaitable in the loop and wait for its end; do nothing if the loop is blocked."""
        if not self.is_blocked:
            self.call(awaitable, timeout_seconds)
        elif inspect.iscoroutine(awaitable):
            awaitable.close()

    def answers(self) -> bool:
        """Return True if the loop still runs callbacks, or if there is none."""
        if self._loop is None:
            return True
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(_ANSWER_SECONDS)


def _run_loop(started: Future[asyncio.AbstractEventLoop], ends: threading.Event) -> None:
    """Run an event loop until `ends` is set. It runs in no task of ours, which a handler could cancel.

    Handlers can end the loop by a KeyboardInterrupt, a SystemExit, or its stop(): it then runs again, and the error
    reaches the code that awaits the handler's task. Signals reach the main thread alone.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        runs_here(loop)
        started.set_result(loop)
        while not ends.is_set():
            with suppress(KeyboardInterrupt, SystemExit):
                loop.run_forever()


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
    stack.callback(lambda: loop.call_unless_blocked(lifespan.__aexit__(None, None, None), exit_seconds))
    return state
