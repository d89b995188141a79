"""Looking through a large table for the first rows that match, or for how many do: a stretch at a time."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from sqlalchemy import ColumnElement, Connection, Executable

from outboxq.statements.paging import KindCount

Stretch: TypeAlias = Sequence[ColumnElement[bool]]


class FindRows(Protocol):
    """A statement that finds the first `limit` rows of a stretch."""

    def __call__(self, stretch: Stretch, /, *, limit: int) -> Executable: ...


class CountRows(Protocol):
    """A statement that counts the rows of a stretch, by queue and kind; with `most`, up to so many in all."""

    def __call__(self, stretch: Stretch, /, *, most: int | None) -> Executable: ...


def first_rows(connection: Connection, stretches: Iterable[Stretch], find: FindRows, limit: int) -> list[Any]:
    """The first `limit` rows of all stretches."""
    found: list[Any] = []
    for stretch in stretches:
        found += connection.execute(find(stretch, limit=limit - len(found))).all()
        if len(found) == limit:
            break
    return found


def count_rows(
    connection: Connection, stretches: Iterable[Stretch], count: CountRows, most: int | None
) -> tuple[KindCount, ...]:
    """How many rows of all stretches there are, by queue and kind; with `most`, up to so many in all."""
    counts = Counter[tuple[str, str]]()
    for stretch in stretches:
        left = None if most is None else most - counts.total()
        for queue, kind, number in connection.execute(count(stretch, most=left)):
            counts[queue, kind] += number
        if most is not None and counts.total() >= most:
            break
    return tuple(KindCount(queue, kind, counts[queue, kind]) for queue, kind in sorted(counts))
