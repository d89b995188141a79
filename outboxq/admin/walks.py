"""Looking through a large table for the first rows that match, or for how many do: a stretch at a time."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Executable

from outboxq.statements.paging import KindCount
from outboxq.statements.stretches import stretches

Stretch: TypeAlias = Sequence[ColumnElement[bool]]


class FindRows(Protocol):
    """A statement that finds the first `limit` rows of a stretch."""

    def __call__(self, stretch: Stretch, /, *, limit: int) -> Executable: ...


class CountRows(Protocol):
    """A statement that counts the rows of a stretch, by queue and kind; with `most`, up to so many in all."""

    def __call__(self, stretch: Stretch, /, *, most: int | None) -> Executable: ...


def stretches_of(
    connection: Connection,
    ids: Sequence[UUID] | None,
    column: ColumnElement[Any],
    *where: ColumnElement[bool],
    is_backwards: bool = False,
    first: int | None = None,
    give_up_at: float = math.inf,
) -> Iterable[Stretch]:
    """The stretches of a table, as `stretches` has them; if rows are named by their ids, one with all of them."""
    if ids is not None:
        return [where]
    return stretches(connection, column, *where, is_backwards=is_backwards, first=first, give_up_at=give_up_at)


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
