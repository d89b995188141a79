"""Reading a large table a stretch at a time, in the order of an index: no statement reads more than 20,000 of its rows.

However few rows match a filter, each statement is over soon, holds its snapshot for a moment only, and is the same walk
whatever the planner believes of the filter.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, select

STRETCH_ROWS = 20_000


def stretches(
    connection: Connection,
    column: ColumnElement[Any],
    *where: ColumnElement[bool],
    is_backwards: bool = False,
) -> Iterator[list[ColumnElement[bool]]]:
    """Conditions by which a table is read, one after the other, in the order of a column.

    Each row that is there all the while meets one of them; rows of one value are in one stretch. One that is added or
    changed meanwhile may be read once, twice or not at all, as by any statements that follow each other.

    Args:
        column: With an index; never NULL where `where` holds.
        where: What holds for all rows that are meant, such as the condition of a partial index, or where to begin.
    """
    rest = list(where)
    while True:
        end: Any = connection.execute(end_of_stretch(column, rest, is_backwards=is_backwards)).scalar()
        if end is None:
            yield rest
            return
        yield [*rest, column >= end if is_backwards else column <= end]
        rest = [*where, column < end if is_backwards else column > end]


def end_of_stretch(
    column: ColumnElement[Any], where: Sequence[ColumnElement[bool]], *, is_backwards: bool
) -> Executable:
    """The column's value in the last row of a stretch; no row if fewer are left. Index: the column's; no locks."""
    order = column.desc() if is_backwards else column.asc()
    return select(column).where(*where).order_by(order).offset(STRETCH_ROWS - 1).limit(1)
