"""The audit: a table of who did what, when and why.

Each row is written in the transaction of the action, so it exists if and only if the change does. Only the row of an
action that no rollback can undo is committed before the action. A row names the changed things, and contains no
arguments, results, headers or error texts of jobs.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias, get_args
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Row

from outboxq.admin.marks import Begin
from outboxq.clock import uuid7s
from outboxq.database.errors import missing_tables_explained
from outboxq.errors import ArgumentError, AuditNotFound
from outboxq.names import MAX_SCOPE_BYTES, check_key
from outboxq.statements import audit as statements
from outboxq.statements.audit import AuditFilter as AuditFilter
from outboxq.statements.paging import database_clock
from outboxq.tables import mapped_schema

logger = logging.getLogger("outboxq.audit")

Via: TypeAlias = Literal["cli", "web", "api"]
Action: TypeAlias = Literal[
    "audit.prune", "bulk.resume", "bulk.stop", "dead.discard", "dead.retry", "done.run_again", "effect.resolve",
    "installation.renew", "job.cancel", "job.cancel_running", "job.change", "job.terminate", "kind.pause",
    "kind.resume", "message.forget", "queue.keep_dead", "queue.pause", "queue.resume", "queue.set", "schedule.adopt",
    "schedule.pause", "schedule.put", "schedule.remove", "schedule.resume", "schedule.run_now",
]  # fmt: skip
ACTIONS: tuple[Action, ...] = get_args(Action)
MAX_REASON_BYTES = 2_000
# How many rows a transaction of `prune` deletes.
PAGE_ROWS = 1_000

_UNWRITTEN = {
    "missing": "the table is missing: run `outboxq migrate`",
    "forbidden": "the role may not write it: run what `outboxq roles --sql` prints",
}


@dataclass(frozen=True, slots=True)
class Actor:
    """The person or program that does operators' actions; the audit records it in the row of each action.

    Attributes:
        role: The actor's role in the application, if it has roles.
        via: The interface: "cli" (command line), "web" (dashboard) or "api" (code).

    Raises:
        InvalidKey: a name or a role that is empty, over 255 bytes, or has control characters.
        ArgumentError: `via` is not "cli", "web" or "api".
    """

    name: str
    role: str | None = None
    via: Via = "api"

    def __post_init__(self) -> None:
        check_key("actor's name", self.name, MAX_SCOPE_BYTES)
        if self.role is not None:
            check_key("actor's role", self.role, MAX_SCOPE_BYTES)
        if self.via not in get_args(Via):
            raise ArgumentError(f"via takes 'cli', 'web' or 'api', got {self.via!r}")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A row of the audit: an action that an operator did or began.

    Attributes:
        finished_at: When the action ended. None for a change of many rows that goes on, was stopped or was cut off, and
            for an action of which only the beginning was recorded.
        action: The name of the action, such as `dead.retry`.
        target: The changed thing, such as a job's id; None for several things, which are in `AuditDetail.filter`.
        expected: How many rows the preview counted; None without a preview.
        changed: How many rows were changed.
        held: How many rows were left unchanged, because another transaction had locked them.
        error: Why a change of many rows ended early, if it did: the type of the error and its SQLSTATE.
    """

    id: UUID
    at: datetime
    finished_at: datetime | None
    stopped_at: datetime | None
    actor: str
    role: str | None
    via: str
    db_user: str
    action: str
    target: str | None
    reason: str | None
    expected: int | None
    changed: int
    held: int
    error: str | None


@dataclass(frozen=True, slots=True)
class AuditDetail:
    """A row of the audit with all of its columns, as `show_audit` returns it; `filter` and `change` are JSON text.

    Attributes:
        position: The id of the last row that a change of many rows has read; a resumed change goes on after it.
        resumed: How many times the change was resumed.
        filter: The filter, ids or names by which the operator chose the changed things.
        change: The new values; in place of new arguments of jobs there is a note that they are not kept.
    """

    entry: AuditEntry
    position: UUID | None
    resumed: int
    filter: str | None
    change: str | None


class Journal:
    """Writes the actions of one actor into the audit, for `Actions` and for changes of many rows.

    If the table `audit` is missing, or the database role may not write it, `warn` is called once, and actions are done
    without a record.

    Args:
        reason: Why, in the actor's words: up to 2,000 bytes.
        warn: Called with the reason why nothing is written.

    Raises:
        ArgumentError: a reason that cannot be stored.
    """

    def __init__(self, actor: Actor, reason: str | None = None, warn: Callable[[str], None] = logger.warning) -> None:
        self._actor = actor
        self._reason = None if reason is None else _check_reason(reason)
        self._warn = warn
        self._may_write: bool | None = None

    def may_write(self, connection: Connection) -> bool:
        """Return True if this role may write the audit.

        The first call queries the database, and calls `warn` if the role may not.
        """
        if self._may_write is None:
            found: str = connection.execute(statements.may_write(mapped_schema(connection))).scalar_one()
            self._may_write = found == "yes"
            if not self._may_write:
                self._warn(f"this is not written into the audit: {_UNWRITTEN[found]}")
        return self._may_write

    def record(
        self,
        connection: Connection,
        action: Action,
        target: str | None = None,
        *,
        changed: int,
        held: int = 0,
        filter: Mapping[str, object] | None = None,  # noqa: A002  # the column's name
        change: Mapping[str, object] | None = None,
    ) -> None:
        """Write a finished action into the audit, in the caller's transaction, which also does the action.

        Does nothing if this role cannot write the audit.
        """
        if self.may_write(connection):
            counts = {"changed": changed, "held": held}
            self.write(connection, new_entry_id(), action, target, filter, change, counts, finished=True)

    def announce(
        self, connection: Connection, action: Action, target: str | None, change: Mapping[str, object] | None = None
    ) -> UUID | None:
        """Write the row of an unfinished action, such as one that no rollback can undo; `finish` completes the row.

        Returns:
            The id of the audit's row, for `finish`; None if this role cannot write the audit.
        """
        if not self.may_write(connection):
            return None
        entry = new_entry_id()
        self.write(connection, entry, action, target, None, change, {}, finished=False)
        return entry

    def finish(self, connection: Connection, entry: UUID, *, changed: int) -> None:
        """Complete the row that `announce` wrote: set its `finished_at`, and the number of changed things."""
        connection.execute(statements.count_page(entry, changed=changed, held=0, position=None, finished=True))

    def write(
        self,
        connection: Connection,
        entry: UUID,
        action: Action,
        target: str | None,
        filter: Mapping[str, object] | None,  # noqa: A002  # the column's name
        change: Mapping[str, object] | None,
        counts: Mapping[str, int | None],
        *,
        finished: bool,
    ) -> None:
        """Add a row with the id `entry` to the audit.

        Args:
            filter: The filter, ids or names by which the changed things were chosen.
            change: The new values.
            counts: Values of the columns `expected`, `changed` and `held`.
            finished: False for an action that goes on in later transactions.
        """
        values = {
            "id": entry,
            "actor": self._actor.name,
            "role": self._actor.role,
            "via": self._actor.via,
            "action": action,
            "target": target,
            "filter": _json(filter),
            "change": _json(change),
            "reason": self._reason,
            **counts,
        }
        given = {name: value for name, value in values.items() if value is not None}
        connection.execute(statements.add_entry(given, finished=finished))


def new_entry_id() -> UUID:
    """Make a new id, a UUIDv7, for a row of the audit."""
    return UUID(uuid7s(1)[0])


@missing_tables_explained()
def list_audit(connection: Connection, wanted: AuditFilter | None = None, *, limit: int = 50) -> list[AuditEntry]:
    """Return the actions in the audit that match, the latest first, `limit` at most."""
    rows = connection.execute(statements.select_entries(wanted or AuditFilter(), limit=limit))
    return [AuditEntry(*row) for row in rows]


def last_action_on(connection: Connection, target: str) -> AuditEntry | None:
    """Return the latest action that changed `target` (the id or name of a thing), alone or with others.

    None if there is none among the last 10,000 actions, or if this role may not read the audit.
    """
    if not connection.execute(statements.may_read(mapped_schema(connection))).scalar_one():
        return None
    row = connection.execute(statements.last_on(target)).one_or_none()
    return None if row is None else AuditEntry(*row)


@missing_tables_explained()
def show_audit(connection: Connection, entry: UUID) -> AuditDetail:
    """Return the audit's row with this id, with its filter and its new values.

    Raises:
        AuditNotFound: no action has this id.
    """
    row = connection.execute(statements.select_entry(entry)).one_or_none()
    if row is None:
        raise AuditNotFound(entry)
    return detail_of(row)


@missing_tables_explained()
def prune(begin: Begin, journal: Journal, age: timedelta) -> int:
    """Delete rows of the audit that are older than `age`, 1,000 in a transaction; return the number of deleted rows.

    Rows of changes that have not ended stay, because these changes can be resumed. The deletion is recorded in the
    audit too, with the number of deleted rows.
    """
    with begin() as connection:
        before = database_clock(connection) - age
    entry: UUID | None = None
    deleted = 0
    while True:
        with begin() as connection:
            page = connection.execute(statements.delete_entries(before, PAGE_ROWS)).rowcount
            if deleted == 0:
                entry = journal.announce(connection, "audit.prune", None, {"before": before})
            is_last = page < PAGE_ROWS
            if entry is not None:
                connection.execute(statements.count_page(entry, changed=page, held=0, position=None, finished=is_last))
        deleted += page
        if is_last:
            return deleted


def detail_of(row: Row[Any]) -> AuditDetail:
    """Make an `AuditDetail` from a row that `select_entry` or `lock_entry` returned."""
    summary = len(statements.SUMMARY_COLUMNS)
    return AuditDetail(AuditEntry(*row[:summary]), *row[summary:])


def _check_reason(reason: str) -> str:
    try:
        size_bytes = len(reason.encode())
    except (AttributeError, UnicodeEncodeError):
        raise ArgumentError("a reason is a text in UTF-8") from None
    if "\0" in reason or not reason.strip():
        raise ArgumentError("a reason says something, without NUL")
    if size_bytes > MAX_REASON_BYTES:
        raise ArgumentError(f"a reason takes up to {MAX_REASON_BYTES:,} bytes, got {size_bytes:,}")
    return reason


def _json(given: Mapping[str, object] | None) -> str | None:
    """Return the JSON of these values, without those that are None."""
    if given is None:
        return None
    return msgspec.json.encode({name: value for name, value in given.items() if value is not None}).decode()
