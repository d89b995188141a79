"""Coroutines of ours that a test made and never awaited: each looks like a check or a call, and does nothing.

Counted while pytest runs one phase of a test (`outboxq.pytest_plugin`), which then fails and names them.
"""

import inspect
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Awaited:
    """The coroutines made since a phase of a test began; outside of one they are not counted."""

    def __init__(self) -> None:
        self._made: dict[Coroutine[Any, Any, Any], str] | None = None

    def note(self, call: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Count a coroutine, by the call that made it."""
        if self._made is not None:
            self._made[coroutine] = call

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the coroutines that are made in the block.

        Raises:
            AssertionError: at its end, if one of them was not begun.
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
    """Close the coroutines that were not begun; the calls that made them, in words."""
    forgotten = [each for each in made if inspect.getcoroutinestate(each) == inspect.CORO_CREATED]
    if not forgotten:
        return ""
    for coroutine in forgotten:
        # Otherwise Python warns of it wherever it is collected.
        coroutine.close()
    return ", ".join(sorted({made[each] for each in forgotten}))


awaited = Awaited()
