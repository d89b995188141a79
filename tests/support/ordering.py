"""The order in which pytest-xdist's workers begin tests."""

from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def longest_first(items: Sequence[T], seconds: Sequence[float], workers: int) -> list[T]:
    """The items in their order, but for the long ones, of `seconds` above 0, which come first in the workers' shares.

    With `--dist worksteal` each worker begins with a share of the items, one after the other and of the same length.
    The long ones are dealt out to these, the longest first.
    """
    by_length = sorted(range(len(items)), key=lambda place: -seconds[place])
    long = [items[place] for place in by_length if seconds[place] > 0]
    rest = iter([item for item, each in zip(items, seconds, strict=True) if not each])
    ordered: list[T] = []
    for worker in range(workers):
        share, first = (len(items) - len(ordered)) // (workers - worker), long[worker::workers]
        ordered += [*first, *islice(rest, max(0, share - len(first)))]
    return [*ordered, *rest]
