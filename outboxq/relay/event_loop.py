"""The relay's event loop, in its own thread: blocking sync handlers never delay async ones.

If the application's lifespan is async, it is entered there: it opens resources before the first job, and closes them
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
    """An event loop that runs in its own thread, while the block of the context manager `run` lasts.

    `is_blocked`: True if a handler blocks the loop for good, so that nothing else can run in it.
    """

    def __init__(self) -> None:
        self.is_blocked = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop; None if it was not started."""
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
            # A daemon thread: a handler that blocks the loop must not hold up the relay's end.
            thread.join(0.0 if self.is_blocked else _STOP_SECONDS)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop, without waiting for it; return a future for its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, awaitable: Awaitable[T], timeout_seconds: float | None = None) -> T:
        """Run an awaitable in the loop and wait for its result, for `timeout_seconds` at most (None: without limit)."""
        return self.submit(await_here(awaitable)).result(timeout_seconds)

    def call_unless_blocked(self, awaitable: Awaitable[object], timeout_seconds: float) -> None:
        """Run an awaitable in the loop and wait for its end, `timeout_seconds` at most.

        Does nothing if the loop is blocked.
        """
        if not self.is_blocked:
            self.call(awaitable, timeout_seconds)
        elif inspect.iscoroutine(awaitable):
            awaitable.close()

    def answers(self) -> bool:
        """Return True if the loop runs a callback within a second, or if there is no loop."""
        if self._loop is None:
            return True
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(_ANSWER_SECONDS)


def _run_loop(started: Future[asyncio.AbstractEventLoop], ends: threading.Event) -> None:
    """Run an event loop until `ends` is set, outside any task, because a handler could cancel a task.

    A handler can end the loop by a KeyboardInterrupt, a SystemExit, or the loop's stop(): the loop is then run again,
    and the error reaches the code that awaits the handler's task. No signal raises these errors here, because signals
    reach only the main thread.
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
    """Enter the lifespan (in the loop if it is async), have `stack` exit it, and return the state that it yields.

    Args:
        exit_seconds: The longest time to wait for the exit of an async lifespan.
    """
    if isinstance(lifespan, AbstractContextManager):
        state = call_here(lifespan.__enter__)
        stack.push(lambda *error: call_here(lifespan.__exit__, *error))
        return state
    state = loop.call(lifespan.__aenter__())
    stack.callback(lambda: loop.call_unless_blocked(lifespan.__aexit__(None, None, None), exit_seconds))
    return state
