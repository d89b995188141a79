"""Pages: an operator's changes of many rows, a bounded number per transaction, without waiting for a lock.

A page is the next `limit` matching rows in the order of the primary key. Rows that another transaction holds are
skipped and reported; the next page starts after the last row seen, so that all pages cost one walk of the index.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CTE, ColumnElement, Connection, Executable, FromClause, Row, Table, false, select

from outboxq.statements.builtin import count, pg
from outboxq.tables import Instant

# The most rows that an operator's transaction changes; after a rollback, as many rows have marks to clear.
MAX_PAGE_ROWS = 200


def matching(rows: FromClause, **wanted: object) -> list[ColumnElement[bool]]:
    """Return the conditions that the columns of these names equal these values; a value of None adds no condition."""
    return [rows.c[name] == value for name, value in wanted.items() if value is not None]


@dataclass(frozen=True, slots=True)
class Page:
    """The outcome of one page of an operator's change of many rows, by the ids of the rows; `read_page` makes it.

    Attributes:
        changed: The changed rows.
        held: The rows that other transactions had locked, and which were skipped.
        refused: The rows that cannot be changed in this way.
        key_taken: Dead letters whose unique key a living job has.
        requested: Those of the changed jobs that run, and that their relays are to end.
        last: The id after which the next page starts; None if no row matched.
    """

    changed: tuple[UUID, ...]
    held: tuple[UUID, ...]
    refused: tuple[UUID, ...] = ()
    key_taken: tuple[UUID, ...] = ()
    requested: tuple[UUID, ...] = ()
    last: UUID | None = None


def pick_page(
    table: Table, conditions: Sequence[ColumnElement[bool]], after: UUID | None, limit: int
) -> tuple[CTE, CTE]:
    """Return two CTEs for the statement that changes a page: the page's ids, and those whose rows could be locked.

    Index: the primary key, walked in order from `after`. Locks: the picked rows, FOR UPDATE SKIP LOCKED, never waited
    for. Bound: `limit` rows. Both CTEs contain the conditions, because the lock rechecks these on a row's newest
    version.
    """
    start = [] if after is None else [table.c.id > after]
    # MATERIALIZED, so that neither is merged into a plan that runs its LIMIT or its locks more than once.
    rows = select(table.c.id).where(*conditions, *start).order_by(table.c.id).limit(limit)
    page = rows.cte("page").prefix_with("MATERIALIZED")
    locked = (
        select(table.c.id)
        .join(page, page.c.id == table.c.id)
        .where(*conditions)
        .with_for_update(of=table, skip_locked=True)
    )
    return page, locked.cte("picked").prefix_with("MATERIALIZED")


def page_outcome(page: CTE, picked: CTE, changed: CTE, key_taken: CTE | None = None) -> Executable:
    """Return the SELECT that ends the statement of a page of changes: a row for each id of the page, in order.

    The row has the id, and three columns that are true or false: `picked`, the row could be locked; `changed`; and
    `key_taken`, the id is in that CTE.
    """
    rows = page.outerjoin(picked, picked.c.id == page.c.id).outerjoin(changed, changed.c.id == page.c.id)
    columns = [picked.c.id.is_not(None).label("picked"), changed.c.id.is_not(None).label("changed")]
    if key_taken is None:
        return select(page.c.id, *columns, false().label("key_taken")).select_from(rows).order_by(page.c.id)
    columns.append(key_taken.c.id.is_not(None).label("key_taken"))
    with_keys = rows.outerjoin(key_taken, key_taken.c.id == page.c.id)
    return select(page.c.id, *columns).select_from(with_keys).order_by(page.c.id)


def read_page(rows: Iterable[Row[Any]]) -> Page:
    """Read the rows of `page_outcome` as a `Page`."""
    seen = list(rows)
    return Page(
        changed=tuple(row.id for row in seen if row.changed),
        held=tuple(row.id for row in seen if not row.picked),
        refused=tuple(row.id for row in seen if row.picked and not row.changed and not row.key_taken),
        key_taken=tuple(row.id for row in seen if row.key_taken),
        last=seen[-1].id if seen else None,
    )


@dataclass(frozen=True, slots=True)
class KindCount:
    """The number of rows of one kind in one queue."""

    queue: str
    kind: str
    count: int


def count_kinds(rows: FromClause, conditions: Sequence[ColumnElement[bool]], most: int | None = None) -> Executable:
    """Count the rows that match the conditions, by queue and kind; with `most`, only the first `most` of them.

    No locks.
    """
    if most is not None:
        rows = select(rows.c.queue, rows.c.kind).where(*conditions).limit(most).subquery("some")
        conditions = ()
    by = (rows.c.queue, rows.c.kind)
    return select(*by, count()).where(*conditions).group_by(*by).order_by(*by)


_CLOCK = select(pg.clock_timestamp(type_=Instant()))


def database_clock(connection: Connection) -> datetime:
    """Return the database's time.

    A command that changes page after page reads this time first, and leaves out rows that are written later.
    """
    return connection.execute(_CLOCK).scalar_one()
