"""The inbox: accept each message once, in the transaction of the rows that it leads to, and list accepted messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Literal, TypeAlias

from sqlalchemy import (
    CTE,
    ColumnElement,
    Executable,
    Interval,
    Select,
    Text,
    bindparam,
    case,
    cast,
    collate,
    column,
    func,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from outboxq.statements.builtin import pg, unnest
from outboxq.statements.paging import matching
from outboxq.tables import StoredText, inbox

# 'unseen': accepted by a transaction that this statement waited for, so that its snapshot misses the row.
Outcome: TypeAlias = Literal["accepted", "duplicate", "conflict", "unseen"]

# Long enough for another backend to extend the table by a page, whose lock counts too.
_TRY_MILLISECONDS = 10

_now = pg.clock_timestamp


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """A filter for accepted messages; without any value, it matches all of them. `message_id` is a whole id."""

    consumer: str | None = None
    message_id: str | None = None
    since: datetime | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the filter as conditions on the table `inbox`."""
        found = matching(inbox, consumer=self.consumer, message_id=self.message_id)
        if self.since is not None:
            # The condition on expires_at follows from the other one, and bounds the walk of the index inbox_expires.
            found += [inbox.c.seen_at >= self.since, inbox.c.expires_at > self.since]
        return found


@cache
def accept_messages() -> Executable:
    """Return SQL that accepts those of the given messages that were not accepted before.

    It returns a row for each id, in no order, with its `Outcome`, such as "accepted" or "duplicate".
    `accept_parameters` has its parameters: the statement is built once, because building takes longer than executing.
    Index: the primary key, one descent for each id. Bound: the ids given. Locks: the new rows, always in bytewise
    order, so that overlapping calls cannot deadlock. Waits for a transaction that is accepting one of these ids, and
    accepts the message itself if that transaction rolls back.
    """
    given = _given_messages()
    consumer = bindparam("consumer", type_=StoredText)
    expires_at = _now() + bindparam("retention", type_=Interval)
    rows = select(consumer, given.c.message_id, given.c.digest, expires_at).order_by(collate(given.c.message_id, "C"))
    inserted = (
        insert(inbox)
        .from_select(["consumer", "message_id", "fingerprint", "expires_at"], rows, include_defaults=False)
        .on_conflict_do_nothing(index_elements=[inbox.c.consumer, inbox.c.message_id])
        .returning(inbox.c.message_id)
        .cte("inserted")
    )
    differs = inbox.c.fingerprint != given.c.digest
    # A subquery for each id, because a join may be planned as a walk through all messages of the consumer.
    standing = (
        select(case((differs, "conflict"), else_="duplicate"))
        .where(inbox.c.consumer == consumer, inbox.c.message_id == given.c.message_id)
        .correlate(given)
        .scalar_subquery()
    )
    outcome = case((inserted.c.message_id.is_not(None), "accepted"), else_=func.coalesce(standing, "unseen"))
    return select(given.c.message_id, outcome.label("outcome")).select_from(
        given.outerjoin(inserted, inserted.c.message_id == given.c.message_id)
    )


def _given_messages() -> CTE:
    # As hex, because not every driver can send an array of bytea with NULLs in it.
    pairs = unnest(_texts("message_ids"), _texts("digests"))
    row = pairs.table_valued(column("message_id", Text), column("digest", Text)).render_derived()
    digest = pg.decode(row.c.digest, "hex", type_=inbox.c.fingerprint.type).label("digest")
    return select(row.c.message_id, digest).cte("given").prefix_with("MATERIALIZED")


def _texts(name: str, values: Sequence[str] | None = None) -> ColumnElement[Any]:
    # A cast, for drivers that send an array as a list of literals.
    return cast(bindparam(name, values, type_=ARRAY(Text), required=values is None), ARRAY(Text))


def accept_parameters(
    consumer: str, fingerprints: Mapping[str, bytes | None], retention: timedelta
) -> dict[str, object]:
    """Return the parameters of `accept_messages`, for messages of one consumer, given as fingerprints by their ids."""
    return {
        "consumer": consumer,
        "message_ids": list(fingerprints),
        "digests": [None if digest is None else digest.hex() for digest in fingerprints.values()],
        "retention": retention,
    }


def shorten_lock_timeout() -> Executable:
    """Return SQL that sets lock_timeout to 10 ms, so as not to wait for a message that another session is accepting.

    It returns one row, the old value, for `set_lock_timeout`. The setting ends with the transaction, or with a rollback
    of the savepoint in which it was made.
    """
    # MATERIALIZED, so that it is read before it is set.
    before = select(pg.current_setting("lock_timeout").label("value")).cte("before").prefix_with("MATERIALIZED")
    set_now = pg.set_config("lock_timeout", f"{_TRY_MILLISECONDS}ms", True)
    return select(before.c.value, set_now)


def set_lock_timeout(value: str) -> Executable:
    """Return SQL that sets lock_timeout to `value` until the transaction ends."""
    return select(pg.set_config("lock_timeout", value, True))


MESSAGE_COLUMNS = ("consumer", "message_id", "fingerprint", "seen_at", "expires_at")


def select_messages(wanted: MessageFilter, stretch: Sequence[ColumnElement[bool]] = (), *, limit: int) -> Select[Any]:
    """Select the messages that match `wanted`, the last to expire first: for one consumer, the latest first.

    `stretch`: conditions from `stretches` that limit the query to one part of the table; empty for all of it. Index:
    inbox_expires backwards, whose order needs no sort; the primary key for a consumer and an id. No locks.
    """
    return (
        select(*(inbox.c[name] for name in MESSAGE_COLUMNS))
        .where(*wanted.conditions(), *stretch)
        .order_by(inbox.c.expires_at.desc())
        .limit(limit)
    )


def select_message(consumer: str, message_id: str) -> Executable:
    """Select one message. Index: the primary key; no locks; one row."""
    found = select(*(inbox.c[name] for name in MESSAGE_COLUMNS))
    return found.where(inbox.c.consumer == consumer, inbox.c.message_id == message_id)


def forget_messages(consumer: str, message_ids: Sequence[str]) -> Executable:
    """Return SQL that deletes messages: a row for each that exists, its id and true if it was deleted.

    A message that another transaction has locked is not deleted. Index: the primary key. Locks: the rows, FOR UPDATE
    SKIP LOCKED, never waited for. Bound: the ids given.
    """
    ours = (
        inbox.c.consumer == consumer,
        inbox.c.message_id == func.any(_texts("message_ids", list(message_ids))),
    )
    there = select(inbox.c.message_id).where(*ours).cte("there").prefix_with("MATERIALIZED")
    picked = (
        select(inbox.c.message_id)
        .where(*ours)
        .with_for_update(skip_locked=True)
        .cte("picked")
        .prefix_with("MATERIALIZED")
    )
    forgotten = (
        inbox.delete()
        .where(inbox.c.consumer == consumer, inbox.c.message_id == picked.c.message_id)
        .returning(inbox.c.message_id)
        .cte("forgotten")
    )
    return select(there.c.message_id, forgotten.c.message_id.is_not(None).label("forgotten")).select_from(
        there.outerjoin(forgotten, forgotten.c.message_id == there.c.message_id)
    )
