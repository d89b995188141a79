"""The table `audit`: a row for each action of an operator, written in the transaction that makes the action's change.

An action that changes many rows does so in pages, a transaction each; the action's row contains its progress.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Executable,
    FromClause,
    Select,
    Text,
    TextClause,
    cast,
    delete,
    insert,
    null,
    or_,
    select,
    text,
    update,
)

from outboxq.statements.builtin import pg
from outboxq.statements.paging import matching
from outboxq.statements.render import quote_identifier
from outboxq.tables import audit


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """A filter for rows of the audit (operators' actions); without any value, it matches all of them.

    `since`: only rows written at that time or later. `action`: the whole name of an action, such as `dead.retry`, or
    the part of the name before the dot. `actor`: the actor's whole name.
    """

    since: datetime | None = None
    action: str | None = None
    actor: str | None = None

    def conditions(self, entries: FromClause = audit) -> list[ColumnElement[bool]]:
        """Return the filter as conditions on `entries`: the table `audit`, or a subquery of it."""
        found = matching(entries, actor=self.actor)
        if self.since is not None:
            found.append(entries.c.at >= self.since)
        if self.action is not None:
            first = pg.split_part(entries.c.action, ".", 1, type_=audit.c.action.type)
            found.append(or_(entries.c.action == self.action, first == self.action))
        return found


SUMMARY_COLUMNS = (
    "id", "at", "finished_at", "stopped_at", "actor", "role", "via", "db_user", "action", "target", "reason",
    "expected", "changed", "held", "error",
)  # fmt: skip
# The most rows that are searched for one target.
LOOKED_AT = 10_000
# Actions that cannot be resumed after they were cut off.
_NEVER_RESUMED = ("audit.prune", "job.terminate")
DETAIL_COLUMNS = ("position", "resumed", "filter", "change")

# The columns of a new row; the server sets `at` and `db_user`.
WRITTEN_COLUMNS = (
    "id", "actor", "role", "via", "action", "target", "filter", "change", "reason", "expected", "changed", "held",
    "finished_at",
)  # fmt: skip
# The columns that a change of many rows updates while it goes on.
PROGRESS_COLUMNS = ("changed", "held", "position", "resumed", "finished_at", "stopped_at", "error")


def may_read(schema: str) -> TextClause:
    """Select one row: true if the table `audit` exists and this role may read it. Catalogs only; no locks."""
    return text(
        "SELECT coalesce(pg_catalog.has_table_privilege(pg_catalog.to_regclass(:name)::oid, 'SELECT'), false)"
    ).bindparams(name=f"{quote_identifier(schema)}.audit")


def last_on(target: str) -> Select[Any]:
    """Select the newest row of the audit for an action that changed `target`, such as a job's id; at most one row.

    Only the last `LOOKED_AT` actions are searched. Index: audit_at, backwards; no locks.
    """
    latest = select(audit).order_by(audit.c.at.desc()).limit(LOOKED_AT).subquery()
    shown = (latest.c[name] for name in SUMMARY_COLUMNS)
    # An action on several targets has their ids in its filter.
    is_meant = or_(latest.c.target == target, pg.strpos(cast(latest.c.filter, Text), target) > 0)
    return select(*shown).where(is_meant, latest.c.changed > 0).order_by(latest.c.at.desc()).limit(1)


def may_write(schema: str) -> TextClause:
    """Select one row: `yes` if this role may write the audit, `missing` without its table, `forbidden` otherwise.

    Reads the catalog; no locks.
    """
    columns = [(name, "INSERT") for name in WRITTEN_COLUMNS] + [(name, "UPDATE") for name in PROGRESS_COLUMNS]
    rights = " AND ".join(f"pg_catalog.has_column_privilege(audit.oid, '{name}', '{right}')" for name, right in columns)
    name = f"{quote_identifier(schema)}.audit"
    return text(
        "SELECT CASE WHEN audit.oid IS NULL THEN 'missing' "
        f"WHEN pg_catalog.has_table_privilege(audit.oid, 'SELECT') AND {rights} THEN 'yes' ELSE 'forbidden' END "
        "FROM (SELECT pg_catalog.to_regclass(:name)::oid AS oid) AS audit"
    ).bindparams(name=name)


def add_entry(values: Mapping[str, Any], *, finished: bool) -> Executable:
    """Return SQL that adds a row for an operator's action, with these values by column.

    `finished`: False if the row stays open, because the action's changes are still to be made, page by page.
    """
    at = {"finished_at": pg.clock_timestamp()} if finished else {}
    return insert(audit).values(**values, **at)


def lock_entry(entry: UUID, *, skip_locked: bool) -> Executable:
    """Return SQL that locks and selects the audit's row of a change of many rows: one row, with the change's progress.

    Each page of the change locks this row first, so that the pages follow one another. If a page is in progress, the
    statement waits for that page's end, or with `skip_locked` returns no row. Index: the primary key. Locks: the row,
    FOR UPDATE.
    """
    shown = (audit.c[name] for name in (*SUMMARY_COLUMNS, *DETAIL_COLUMNS))
    return select(*shown).where(audit.c.id == entry).with_for_update(skip_locked=skip_locked)


def count_page(entry: UUID, *, changed: int, held: int, position: UUID | None, finished: bool) -> Executable:
    """Return SQL that adds one page's counts, and the next page's start, to the audit's row of a change of many rows.

    Send it after `lock_entry`, in the page's transaction.

    Args:
        changed: The number of rows that the page changed.
        held: The number of rows that the page skipped, because other transactions had locked them.
        position: The last id of the page, after which the next page starts; None leaves the position unchanged.
        finished: True for the last page of the change.

    Index: the primary key.
    """
    values: dict[str, Any] = {"changed": audit.c.changed + changed, "held": audit.c.held + held}
    if position is not None:
        values["position"] = position
    if finished:
        values["finished_at"] = pg.clock_timestamp()
    return update(audit).where(audit.c.id == entry).values(**values)


def note_error(entry: UUID, resumed: int, error: str) -> Executable:
    """Return SQL that records why a change of many rows ended early, unless another process has resumed the change.

    `resumed` is the number of resumptions that this process knows: if the row has a higher one, nothing is written.
    Index: the primary key. Locks: the row, which is skipped if a page of the change is in progress.
    """
    free = select(audit.c.id).where(audit.c.id == entry, audit.c.resumed == resumed, audit.c.finished_at.is_(None))
    locked = free.with_for_update(skip_locked=True).cte("free").prefix_with("MATERIALIZED")
    return update(audit).where(audit.c.id == locked.c.id).values(error=error)


def stop(entry: UUID) -> Executable:
    """Return SQL that stops a change of many rows before its next page: one row if the change was open, otherwise none.

    Waits for the page in progress. Index: the primary key.
    """
    is_open = (audit.c.finished_at.is_(None), audit.c.stopped_at.is_(None))
    stopped = update(audit).where(audit.c.id == entry, *is_open).values(stopped_at=pg.clock_timestamp())
    return stopped.returning(audit.c.id)


def reopen(entry: UUID) -> Executable:
    """Return SQL that marks a change of many rows as open again, so that this process resumes it.

    It returns one row: the number of times that the change was resumed. It is sent after `lock_entry`. Index: the
    primary key.
    """
    values = {"stopped_at": null(), "error": null(), "resumed": audit.c.resumed + 1}
    return update(audit).where(audit.c.id == entry).values(**values).returning(audit.c.resumed)


def delete_entries(moment: datetime, limit: int) -> Executable:
    """Return SQL that deletes up to `limit` rows of ended actions that were written before `moment`, the oldest first.

    Actions that were cut off and cannot be resumed count as ended. Index: audit_at, from its start, past open rows; the
    primary key. Locks: the rows, which nothing else locks.
    """
    is_over = or_(audit.c.finished_at.is_not(None), audit.c.action.in_(_NEVER_RESUMED))
    over = select(audit.c.id).where(audit.c.at < moment, is_over)
    oldest = over.order_by(audit.c.at).limit(limit).cte("oldest").prefix_with("MATERIALIZED")
    return delete(audit).where(audit.c.id == oldest.c.id)


def select_entries(wanted: AuditFilter, *, limit: int) -> Executable:
    """Select the rows of the audit that match the filter, the latest first.

    Index: audit_at, backwards, up to `limit` rows; if few match, to `since`. No locks.
    """
    return (
        select(*(audit.c[name] for name in SUMMARY_COLUMNS))
        .where(*wanted.conditions())
        .order_by(audit.c.at.desc())
        .limit(limit)
    )


def select_entry(entry: UUID) -> Executable:
    """Select one row of the audit with all its columns. Index: the primary key; no locks."""
    return select(*(audit.c[name] for name in (*SUMMARY_COLUMNS, *DETAIL_COLUMNS))).where(audit.c.id == entry)
