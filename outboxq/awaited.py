"""Coroutines of outboxq that a test made and never awaited: each looks like a check or a call, and does nothing.

They are counted while pytest runs one phase of a test (`outboxq.pytest_plugin`); then the test fails and names them.
"""

import inspect
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Awaited:
    """The coroutines that outboxq has made since the present phase of a test began; between phases none is counted."""

    def __init__(self) -> None:
        self._made: dict[Coroutine[Any, Any, Any], str] | None = None

    def note(self, call: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Count a coroutine until the phase ends; `call` is the text of the call that made it, for the error."""
        if self._made is not None:
            self._made[coroutine] = call

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the coroutines that are made in the block.

        Raises:
            AssertionError: one of them was not awaited; raised at the end of the block.
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
