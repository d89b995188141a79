"""Stretches: parts of a large table, in the order of an index, each of which is read by a statement of its own.

A stretch has 20,000 rows, plus rows with the same value as its last one. Even if few rows match a filter, each
statement ends soon, holds its snapshot only for a moment, and has the same plan, which does not depend on the planner's
estimate for the filter.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, Executable, Integer, Select, Table, cast, literal, select
from sqlalchemy import literal_column as as_written
from sqlalchemy.types import UserDefinedType

from outboxq.statements.builtin import pg
from outboxq.statements.render import quote_identifier
from outboxq.tables import StoredText, mapped_schema

STRETCH_ROWS = 20_000
STRETCH_BLOCKS = 1_000
_TOO_LONG = "the look took too long: it reads all rows, as few of them match"


class _Tid(UserDefinedType[str]):
    """The SQL type of the place of a row, as in the system column `ctid`."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "tid"


def stretches(
    connection: Connection,
    column: ColumnElement[Any],
    *where: ColumnElement[bool],
    is_backwards: bool = False,
    first: int | None = None,
    give_up_at: float = math.inf,
) -> Iterator[list[ColumnElement[bool]]]:
    """Yield the conditions that select each part ("stretch") of a table, one after the other, in the order of a column.

    Each row that exists during the whole walk meets the conditions of one stretch; rows with equal values are in one
    stretch. A row that is added or changed during the walk may be read once, twice or not at all, as with any sequence
    of statements.

    Args:
        column: A column with an index; never NULL in rows that `where` selects.
        where: Conditions on all wanted rows, such as that of a partial index, or the place to begin.
        first: The number of rows in the first stretch, for a caller that may need no more; each next stretch is
            twice as long, up to `STRETCH_ROWS`.
        give_up_at: A time of the monotonic clock at which the walk gives up; it is checked before each stretch,
            because no statement's time-out ends a walk.

    Raises:
        TimeoutError: the walk has not ended at that time.
    """
    rest, rows = list(where), STRETCH_ROWS if first is None else max(1, min(first, STRETCH_ROWS))
    while True:
        if time.monotonic() > give_up_at:
            raise TimeoutError(_TOO_LONG)
        end: Any = connection.execute(end_of_stretch(column, rest, rows, is_backwards=is_backwards)).scalar()
        rows = min(2 * rows, STRETCH_ROWS)
        if end is None:
            yield rest
            return
        yield [*rest, column >= end if is_backwards else column <= end]
        rest = [*where, column < end if is_backwards else column > end]


def end_of_stretch(
    column: ColumnElement[Any], where: Sequence[ColumnElement[bool]], rows: int, *, is_backwards: bool
) -> Executable:
    """Select the column's value in the last of the next `rows` rows: a stretch ends there; no row if fewer are left.

    Index: the column's; no locks.
    """
    order = column.desc() if is_backwards else column.asc()
    return select(column).where(*where).order_by(order).offset(rows - 1).limit(1)


def stretches_of_blocks(
    connection: Connection, table: Table, *, give_up_at: float = math.inf
) -> Iterator[list[ColumnElement[bool]]]:
    """Yield the conditions that select each part of a table in its stored order: `STRETCH_BLOCKS` blocks at a time.

    So each block is read once; by an index, each row of an unordered table costs a block, and two if it was not
    vacuumed. Rows after the table's present end are not read. No sort, and no locks.

    Args:
        give_up_at: A time of the monotonic clock, which is checked before each part.

    Raises:
        TimeoutError: the walk has not ended at `give_up_at`.
    """
    blocks: int = connection.execute(count_blocks(mapped_schema(connection), table.name)).scalar_one()
    for start in range(0, blocks, STRETCH_BLOCKS):
        if time.monotonic() > give_up_at:
            raise TimeoutError(_TOO_LONG)
        place = as_written(f"{table.name}.ctid", _Tid())
        yield [place >= _first_of(start), place < _first_of(start + STRETCH_BLOCKS)]


def sorted_apart(found: Select[Any], greatest: str, limit: int) -> Select[Any]:
    """Return a query of the `limit` rows of `found` with the greatest values of the column `greatest`.

    It reads all rows of `found`, which selects from some blocks of a table, and then sorts them: if `found` had the
    order and the limit itself, the planner might walk through an index instead. No locks.
    """
    # MATERIALIZED, so that it is planned by itself, without the order and the limit.
    rows = found.order_by(None).limit(None).cte("rows").prefix_with("MATERIALIZED")
    return select(rows).order_by(rows.c[greatest].desc()).limit(limit)


def count_blocks(schema: str, name: str) -> Executable:
    """Select the number of a table's blocks. Reads only its files' sizes; no locks."""
    table = pg.to_regclass(literal(quote_identifier(schema, name), StoredText()))
    size: ColumnElement[int] = pg.pg_relation_size(table, type_=BigInteger())
    block = cast(pg.current_setting(literal("block_size", StoredText())), Integer())
    return select(size.op("/", return_type=BigInteger())(block))


def _first_of(block: int) -> ColumnElement[str]:
    return cast(literal(f"({block},0)", StoredText()), _Tid())
