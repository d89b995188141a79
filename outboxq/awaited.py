"""Coroutines of ours that a test made and never awaited: each looks like a check or a call, and does nothing.

Counted while pytest runs one phase of a test (`outboxq.pytest_plugin`), which then fails and names them.
"""

import inspect
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


class Awaited:
    """The coroutines that were made since a phase of a test began; outside of one they are counted nowhere."""

    def __init__(self) -> None:
        self._made: list[tuple[str, Coroutine[Any, Any, Any]]] | None = None

    def note(self, call: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Count a coroutine, by what was called."""
        if self._made is not None:
            self._made.append((call, coroutine))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the coroutines that are made in the block.

        Raises:
            AssertionError: at its end, if one of them was not begun.
        """
        before, self._made = self._made, []
        try:
            yield
        finally:
            made, self._made = self._made, before
            forgotten = [each for each in made if inspect.getcoroutinestate(each[1]) == inspect.CORO_CREATED]
            for _, coroutine in forgotten:
                # Otherwise Python warns of it wherever it is collected.
                coroutine.close()
        if forgotten:
            names = ", ".join(sorted({call for call, _ in forgotten}))
            raise AssertionError(f"{names}: called with what is async, and not awaited, so nothing has happened")


awaited = Awaited()
