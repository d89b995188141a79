"""Reading a large table a stretch at a time, in the order of an index: 20,000 rows, and those of the last one's value.

However few rows match a filter, each statement is over soon, holds its snapshot for a moment only, and is the same walk
whatever the planner believes of the filter.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, select

STRETCH_ROWS = 20_000


def stretches(
    connection: Connection,
    column: ColumnElement[Any],
    *where: ColumnElement[bool],
    is_backwards: bool = False,
    first: int | None = None,
    give_up_at: float = math.inf,
) -> Iterator[list[ColumnElement[bool]]]:
    """Conditions by which a table is read, one after the other, in the order of a column.

    Each row that is there all the while meets one of them; rows of one value are in one stretch. One that is added or
    changed meanwhile may be read once, twice or not at all, as by any statements that follow each other.

    Args:
        column: With an index; never NULL where `where` holds.
        where: What holds for all rows that are meant, such as the condition of a partial index, or where to begin.
        first: How many rows the first stretch has, for a caller that may need no more; the next are ten times as long.
        give_up_at: A time of the monotonic clock. No time-out of a statement ends a walk.

    Raises:
        TimeoutError: it is not over at that time.
    """
    rest, rows = list(where), STRETCH_ROWS if first is None else max(1, min(first, STRETCH_ROWS))
    while True:
        if time.monotonic() > give_up_at:
            raise TimeoutError("the look took too long: it reads all rows, as few of them match")
        end: Any = connection.execute(end_of_stretch(column, rest, rows, is_backwards=is_backwards)).scalar()
        rows = min(10 * rows, STRETCH_ROWS)
        if end is None:
            yield rest
            return
        yield [*rest, column >= end if is_backwards else column <= end]
        rest = [*where, column < end if is_backwards else column > end]


def end_of_stretch(
    column: ColumnElement[Any], where: Sequence[ColumnElement[bool]], rows: int, *, is_backwards: bool
) -> Executable:
    """The column's value in the last of so many rows; no row if fewer are left. Index: the column's; no locks."""
    order = column.desc() if is_backwards else column.asc()
    return select(column).where(*where).order_by(order).offset(rows - 1).limit(1)
