"""How processor time grows with the input: a ratio, which other load on the machine does not change."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FACTOR = 32
# What is linear grows 32 times, what is quadratic 1,024 times: between the two there is room for caches and clocks.
LINEAR = 5 * FACTOR
_REPEATS = 5


def growth(work: Callable[[T], object], build: Callable[[int], T], size: int) -> float:
    """How many times longer the work takes on an input of `FACTOR` times the size."""
    return _least_seconds(work, build(FACTOR * size)) / _least_seconds(work, build(size))


def _least_seconds(work: Callable[[T], object], given: T) -> float:
    return min(_seconds(work, given) for _ in range(_REPEATS))


def _seconds(work: Callable[[T], object], given: T) -> float:
    began = time.thread_time()
    work(given)
    return time.thread_time() - began
