"""Search a large table for the first rows that match, or count matching rows, by stretches.

A stretch is a bounded part of a table, given as SQL conditions. One short query for each stretch replaces one long
query of the whole table.
"""

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

# By an index each row may cost a block of its own, and one more to find the end of its stretch. So a list reads only
# the first stretches of a table by index: 12,700 rows (more for a limit over 100). After that it reads the table by its
# blocks, each once.
STRETCHES_BY_INDEX = 7
_FIRST_STRETCH_ROWS = 100


class FindRows(Protocol):
    """A function that makes a statement for the first `limit` matching rows of a stretch (a bounded part of a table).

    Callers of `first_rows` and `of_blocks` pass it, with their filter in it.
    """

    def __call__(self, stretch: Stretch, /, *, limit: int) -> Executable: ...


class SelectRows(Protocol):
    """A function that makes a SELECT of the first `limit` matching rows of a stretch (a bounded part of a table).

    Callers of `latest_rows` pass it. The rows are in the order of one column, and contain that column.
    """

    def __call__(self, stretch: Stretch, /, *, limit: int) -> Select[Any]: ...


class CountRows(Protocol):
    """A function that makes a statement that counts the matching rows of a stretch (a bounded part of a table).

    Callers of `count_rows` pass it. The statement returns rows of queue, kind and number; with `most`, it counts at
    most that many rows.
    """

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
    """Divide a table into stretches, bounded parts in the order of `column`; return their SQL conditions one by one.

    Args:
        ids: The wanted ids, if the caller searches by id: then the only stretch is `where`, and the caller's query
            selects by the ids.
        where: Conditions that every stretch includes.
        first: The number of rows in the first stretch; later ones are larger.
        give_up_at: The time of `time.monotonic()` at which to raise `TimeoutError`.
    """
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
    """Return the first `STRETCHES_BY_INDEX` stretches of `stretches_of`, for a list of `limit` rows.

    A stretch is a bounded part of a table; stretches are in the order of the indexed `column`. Reading by an index is
    fast if matches are frequent. If these stretches have too few matches, use `of_blocks` next: to read the whole table
    by its blocks is cheaper than by the index.
    """
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
    """Return the first `limit` matching rows of a table in the order of `key`, by reading each block of the table once.

    A row that is updated in the meantime may move to another block, and be missing or appear twice: use this for lists,
    not to find rows to change.

    Args:
        find: Makes the statement for the first `limit` rows of a part of the table, in the order of `key`.
        key: Returns the value of a row to sort by.
        is_backwards: True to return the rows with the greatest keys, the greatest first.
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
    """Return the `limit` matching rows with the greatest values of a column, the greatest first.

    Reads a first part of the table (12,700 rows, more for a `limit` over 100) by an index. If that has too few matches,
    each block of the table is read once, so that even a rare match costs no more than one pass over the table.

    Args:
        where: Conditions of every query; `select` receives them, and adds those of its own filter.
        select: Makes the query for the rows of a part of the table.
        ids: The ids of the wanted rows, if the caller names them; `select` has to filter by them itself.
        indexed: The indexed expression with the order of `column`, if the index is not on the column itself.
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
    """Query one stretch (a bounded part of a table) after the other, until `limit` rows were found; return these.

    `find` makes the statement for a stretch.
    """
    found: list[Any] = []
    for stretch in stretches:
        found += connection.execute(find(stretch, limit=limit - len(found))).all()
        if len(found) == limit:
            break
    return found


def count_rows(
    connection: Connection, stretches: Iterable[Stretch], count: CountRows, most: int | None
) -> tuple[KindCount, ...]:
    """Count the matching rows of all stretches (bounded parts of a table), by queue and kind.

    `count` makes the statement for a stretch. With `most`, counting ends at that many rows in total.
    """
    counts = Counter[tuple[str, str]]()
    for stretch in stretches:
        left = None if most is None else most - counts.total()
        for queue, kind, number in connection.execute(count(stretch, most=left)):
            counts[queue, kind] += number
        if most is not None and counts.total() >= most:
            break
    return tuple(KindCount(queue, kind, counts[queue, kind]) for queue, kind in sorted(counts))
