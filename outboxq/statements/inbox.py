"""The inbox: accept messages in the transaction of the rows they lead to, and list accepted ones."""

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

# Long enough for another backend to add a page to the table, whose lock counts too.
_TRY_MILLISECONDS = 10

_now = pg.clock_timestamp


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """A choice of messages; without any value, all of them. `message_id` is a whole id."""

    consumer: str | None = None
    message_id: str | None = None
    since: datetime | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """The filter as conditions on the table `inbox`."""
        found = matching(inbox, consumer=self.consumer, message_id=self.message_id)
        if self.since is not None:
            # The condition on expires_at follows from the other one, and ends the walk of the index inbox_expires.
            found += [inbox.c.seen_at >= self.since, inbox.c.expires_at > self.since]
        return found


@cache
def accept_messages() -> Executable:
    """Accept the messages that were not accepted before: one row for each id, in no order, with its `Outcome`.

    Built once, because building takes longer than executing; `accept_parameters` has its parameters.
    Index: the primary key, one descent for each id. Bound: the ids given.
    Locks: the new rows, always in bytewise order, so that overlapping batches cannot deadlock. Waits for a transaction
    that is accepting one of these ids, and accepts it itself if that rolls back.
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
    # A subquery for each id: a join may be planned as a walk through all messages of the consumer.
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
    # As hex: not every driver sends an array of bytea with NULLs in it.
    pairs = unnest(_texts("message_ids"), _texts("digests"))
    row = pairs.table_valued(column("message_id", Text), column("digest", Text)).render_derived()
    digest = pg.decode(row.c.digest, "hex", type_=inbox.c.fingerprint.type).label("digest")
    return select(row.c.message_id, digest).cte("given").prefix_with("MATERIALIZED")


def _texts(name: str, values: Sequence[str] | None = None) -> ColumnElement[Any]:
    # Cast, for the drivers that send an array as a list of literals.
    return cast(bindparam(name, values, type_=ARRAY(Text), required=values is None), ARRAY(Text))


def accept_parameters(
    consumer: str, fingerprints: Mapping[str, bytes | None], retention: timedelta
) -> dict[str, object]:
    """The parameters of `accept_messages`."""
    return {
        "consumer": consumer,
        "message_ids": list(fingerprints),
        "digests": [None if digest is None else digest.hex() for digest in fingerprints.values()],
        "retention": retention,
    }


def shorten_lock_timeout() -> Executable:
    """Set lock_timeout to 10 ms, until the savepoint is rolled back or `set_lock_timeout`; returns the former value."""
    # MATERIALIZED: read before it is set.
    before = select(pg.current_setting("lock_timeout").label("value")).cte("before").prefix_with("MATERIALIZED")
    set_now = pg.set_config("lock_timeout", f"{_TRY_MILLISECONDS}ms", True)
    return select(before.c.value, set_now)


def set_lock_timeout(value: str) -> Executable:
    """Set lock_timeout to `value` for the rest of the transaction."""
    return select(pg.set_config("lock_timeout", value, True))


MESSAGE_COLUMNS = ("consumer", "message_id", "fingerprint", "seen_at", "expires_at")


def select_messages(wanted: MessageFilter, stretch: Sequence[ColumnElement[bool]] = (), *, limit: int) -> Select[Any]:
    """The messages of a stretch that match, the last to expire first: of one consumer, the latest.

    Index: inbox_expires backwards, whose order needs no sort; the primary key for a consumer and an id. No locks.
    """
    return (
        select(*(inbox.c[name] for name in MESSAGE_COLUMNS))
        .where(*wanted.conditions(), *stretch)
        .order_by(inbox.c.expires_at.desc())
        .limit(limit)
    )


def select_message(consumer: str, message_id: str) -> Executable:
    """One message. Index: the primary key; no locks; one row."""
    found = select(*(inbox.c[name] for name in MESSAGE_COLUMNS))
    return found.where(inbox.c.consumer == consumer, inbox.c.message_id == message_id)


def forget_messages(consumer: str, message_ids: Sequence[str]) -> Executable:
    """Delete messages that no transaction holds; a row for each that exists, with true if it was deleted.

    Index: the primary key. Locks: the rows, FOR UPDATE SKIP LOCKED, never waited for. Bound: the ids given.
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
