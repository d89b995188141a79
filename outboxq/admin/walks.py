"""Search a large table for the first rows that match, or count them: a stretch at a time."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol, TypeAlias
from uuid import UUID

from sqlalchemy import Column, ColumnElement, Connection, Executable, Select, Table

from outboxq.statements.paging import KindCount
from outboxq.statements.stretches import sorted_apart, stretches, stretches_of_blocks

Stretch: TypeAlias = Sequence[ColumnElement[bool]]

# By an index each row may cost a block of its own, and one more to find the end of its stretch: a list reads the first
# stretches of a table so, 12,700 rows (more for a limit over 100), and then the table by its blocks, each of them once.
STRETCHES_BY_INDEX = 7
_FIRST_STRETCH_ROWS = 100


class FindRows(Protocol):
    """A statement that finds the first `limit` rows of a stretch."""

    def __call__(self, stretch: Stretch, /, *, limit: int) -> Executable: ...


class SelectRows(Protocol):
    """A statement that selects the first `limit` rows of a stretch in the order of a column, with that column."""

    def __call__(self, stretch: Stretch, /, *, limit: int) -> Select[Any]: ...


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


def stretches_by_index(
    connection: Connection,
    ids: Sequence[UUID] | None,
    column: ColumnElement[Any],
    *where: ColumnElement[bool],
    limit: int,
    is_backwards: bool = False,
) -> Iterable[Stretch]:
    """The stretches with which a list of `limit` rows begins: if it needs all of these, `of_blocks` has the others."""
    first = max(limit, _FIRST_STRETCH_ROWS)
    return islice(
        stretches_of(connection, ids, column, *where, is_backwards=is_backwards, first=first), STRETCHES_BY_INDEX
    )


def of_blocks(
    connection: Connection,
    table: Table,
    find: FindRows,
    limit: int,
    key: Callable[[Any], Any],
    *,
    is_backwards: bool = False,
) -> list[Any]:
    """The first `limit` rows of a table in the order of a key. Reads each block once.

    A row that is moved in the table in the meantime may be missing, or be there twice: good for lists, and not for
    finding rows that are to be changed.

    Args:
        find: The first rows of a stretch, in the same order.
    """
    found: list[Any] = []
    for stretch in stretches_of_blocks(connection, table):
        found += connection.execute(find(stretch, limit=limit))
        found = sorted(found, key=key, reverse=is_backwards)[:limit]
    return found


def latest_rows(
    connection: Connection,
    column: Column[Any],
    *where: ColumnElement[bool],
    select: SelectRows,
    limit: int,
    ids: Sequence[UUID] | None = None,
    indexed: ColumnElement[Any] | None = None,
) -> list[Any]:
    """The `limit` rows that match with the greatest values of a column.

    Reads the table as `STRETCHES_BY_INDEX` has it, so that a rare match costs no more than the table's size.

    Args:
        where: As `stretches` takes it; `select` has it in addition to what it is to match.
        ids: Rows that are named by these, if they are; `select` has them too.
        indexed: The expression that has an index in the column's order, if that is not the column itself.
    """
    by = column if indexed is None else indexed
    found: list[Any] = []
    looks = 0
    for stretch in stretches_by_index(connection, ids, by, *where, limit=limit, is_backwards=True):
        found += connection.execute(select(stretch, limit=limit - len(found))).all()
        looks += 1
        if len(found) == limit:
            return found
    if looks < STRETCHES_BY_INDEX:
        return found

    def select_apart(stretch: Stretch, /, *, limit: int) -> Executable:
        return sorted_apart(select([*where, *stretch], limit=limit), column.name, limit)

    key = attrgetter(column.name, *(each.name for each in column.table.primary_key))
    return of_blocks(connection, column.table, select_apart, limit, key, is_backwards=True)


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
    """Count the rows of all stretches, by queue and kind; with `most`, up to so many in all."""
    counts = Counter[tuple[str, str]]()
    for stretch in stretches:
        left = None if most is None else most - counts.total()
        for queue, kind, number in connection.execute(count(stretch, most=left)):
            counts[queue, kind] += number
        if most is not None and counts.total() >= most:
            break
    return tuple(KindCount(queue, kind, counts[queue, kind]) for queue, kind in sorted(counts))
