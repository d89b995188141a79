"""Bugs to plant into the mechanism of shared batches, which the fuzzer has to find.

A bug is planted by patching the mechanism in this process, before the lanes' relays start:

    @plant("the buffer is sent in the opposite order")
    def backwards() -> AbstractContextManager[object]:
        return mock.patch.object(WriteBuffer, "take", lambda self: list(reversed(...)))

The function's name is the bug's. It patches what the relay's threads look up at each call (a method, or a function
that is called as `module.function`), and undoes that when its block ends. `python -m tests.fuzz --plant all` plants
each in turn and ends with 1 if one is not found within 500 batches.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

Planting: TypeAlias = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Plant:
    """A bug, and what it breaks."""

    name: str
    what: str
    planted: Planting


PLANTS: dict[str, Plant] = {}


def plant(what: str) -> Callable[[Planting], Planting]:
    """Register a bug under its function's name."""

    def register(function: Planting) -> Planting:
        PLANTS[function.__name__] = Plant(function.__name__, what, function)
        return function

    return register
