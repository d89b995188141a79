"""Detection of outboxq's coroutines that a test made and never awaited: they look like a call, and do nothing.

`outboxq.pytest_plugin` counts the coroutines of each phase of a test (setup, call, teardown). If one of them was not
awaited, the phase fails with an error that shows its call.
"""

import inspect
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Awaited:
    """Collects the coroutines that outboxq makes in one phase of a test, to find those that were never awaited.

    Between two phases it collects nothing.
    """

    def __init__(self) -> None:
        self._made: dict[Coroutine[Any, Any, Any], str] | None = None

    def note(self, call: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Collect a coroutine, if a phase is under way; `call` is the text of the call that made it, for the error."""
        if self._made is not None:
            self._made[coroutine] = call

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Collect the coroutines that outboxq makes in the block, and fail at its end if one was not awaited.

        Raises:
            AssertionError: a coroutine was not awaited.
        """
        before, self._made = self._made, {}
        try:
            yield
        finally:
            made, self._made = self._made, before
            forgotten = close_unawaited(made)
        if forgotten:
            raise AssertionError(f"{forgotten}: called with what is async, and not awaited, so nothing has happened")


def close_unawaited(made: Mapping[Coroutine[Any, Any, Any], str]) -> str:
    """Close the coroutines that were never awaited; return the texts of their calls, or "" if there are none."""
    forgotten = [each for each in made if inspect.getcoroutinestate(each) == inspect.CORO_CREATED]
    if not forgotten:
        return ""
    for coroutine in forgotten:
        # Otherwise Python warns of the coroutine at the place where it is collected.
        coroutine.close()
    return ", ".join(sorted({made[each] for each in forgotten}))


awaited = Awaited()
