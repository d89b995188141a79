"""Accepted messages, for operators to list and to forget.

The table `inbox` records messages that a consumer has accepted, so that a repeated delivery is recognized.

Every function is one query or one change in the caller's transaction, and none waits for a row lock. A message that is
forgotten is accepted again if it is delivered again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from sqlalchemy import Connection

from outboxq.admin.walks import latest_rows
from outboxq.errors import InvalidKey, MessageNotFound
from outboxq.names import check_key
from outboxq.statements import inbox as statements
from outboxq.statements.inbox import MessageFilter as MessageFilter
from outboxq.tables import inbox


@dataclass(frozen=True, slots=True)
class Message:
    """A message that a consumer has accepted, and the time until which its record is kept at least.

    `fingerprint` is the SHA-256 of its content in hex, or None if it was accepted without one.
    """

    consumer: str
    message_id: str
    fingerprint: str | None
    seen_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The outcome of `forget_messages`, as ids in the given order.

    `forgotten`: the record was deleted. `held`: it was not, because another transaction has locked it. `not_found`:
    there is no record.
    """

    forgotten: tuple[str, ...]
    held: tuple[str, ...]
    not_found: tuple[str, ...]


def list_messages(connection: Connection, wanted: MessageFilter | None = None, *, limit: int = 50) -> list[Message]:
    """Return up to `limit` accepted messages that match, those with the latest `expires_at` first.

    Messages are searched among the first 12,700 (more for a `limit` over 100). If too few of these match, the whole
    table is read once.
    """
    wanted = wanted or MessageFilter()
    select = partial(statements.select_messages, wanted)
    if wanted.consumer is not None and wanted.message_id is not None:
        return [_message(*row) for row in connection.execute(select(limit=limit))]
    since = [] if wanted.since is None else [inbox.c.expires_at > wanted.since]
    return [_message(*row) for row in latest_rows(connection, inbox.c.expires_at, *since, select=select, limit=limit)]


def show_message(connection: Connection, consumer: str, message_id: str) -> Message:
    """Return the record of one accepted message.

    Raises:
        MessageNotFound: the message was forgotten, has expired and was pruned, or was never accepted.
    """
    row = connection.execute(statements.select_message(consumer, message_id)).one_or_none()
    if row is None:
        raise MessageNotFound(consumer, message_id)
    return _message(*row)


def forget_messages(connection: Connection, consumer: str, message_ids: Sequence[str]) -> Forgotten:
    """Delete the records of accepted messages, so that these are accepted again if they are delivered again.

    A record that another transaction has locked stays. A message that an open transaction is accepting counts as not
    found.

    Raises:
        InvalidKey: an id that no message can have, or one id instead of a sequence; nothing was deleted.
    """
    if isinstance(message_ids, str):
        raise InvalidKey("forget_messages takes a sequence of ids, got one str: [message_id]")
    ids = list(dict.fromkeys(check_key("message id", message_id) for message_id in message_ids))
    rows = connection.execute(statements.forget_messages(check_key("consumer", consumer), ids))
    fate: dict[str, bool] = {row.message_id: row.forgotten for row in rows}
    return Forgotten(
        forgotten=tuple(message_id for message_id in ids if fate.get(message_id) is True),
        held=tuple(message_id for message_id in ids if fate.get(message_id) is False),
        not_found=tuple(message_id for message_id in ids if message_id not in fate),
    )


def _message(
    consumer: str, message_id: str, fingerprint: bytes | None, seen_at: datetime, expires_at: datetime
) -> Message:
    digest = None if fingerprint is None else fingerprint.hex()
    return Message(consumer, message_id, digest, seen_at, expires_at)
