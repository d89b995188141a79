"""What operators see of accepted messages, and how they make the inbox forget some."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from outboxq.admin.messages import Forgotten, MessageFilter, forget_messages, list_messages, show_message
from outboxq.codec.values import fingerprint
from outboxq.errors import InvalidKey, MessageNotFound
from outboxq.inbox import Inbox

orders, mails = Inbox("orders"), Inbox("mails", retention=timedelta(hours=1))


@pytest.fixture
def accepted(engine: Engine) -> Iterator[Engine]:
    """Three messages of one consumer, then two of another, each in a transaction of its own."""
    for inbox, message_id in ((orders, "a"), (orders, "b"), (orders, "c"), (mails, "a"), (mails, "z")):
        with Session(engine) as session, session.begin():
            assert inbox.accept(session, message_id, payload=None if message_id == "z" else message_id)
    return engine


def listed(engine: Engine, wanted: MessageFilter | None = None, *, limit: int = 50) -> list[tuple[str, str]]:
    with engine.connect() as connection:
        return [(message.consumer, message.message_id) for message in list_messages(connection, wanted, limit=limit)]


def test_messages_are_listed_by_how_long_they_are_kept(accepted: Engine) -> None:
    """Of one consumer that is the latest first."""
    everything = [("orders", "c"), ("orders", "b"), ("orders", "a"), ("mails", "z"), ("mails", "a")]
    assert listed(accepted) == everything
    assert listed(accepted, limit=2) == everything[:2]
    assert listed(accepted, MessageFilter(consumer="mails")) == everything[3:]
    assert listed(accepted, MessageFilter(message_id="a")) == [("orders", "a"), ("mails", "a")]
    assert listed(accepted, MessageFilter(consumer="orders", message_id="a")) == [("orders", "a")]
    assert listed(accepted, MessageFilter(consumer="nobody")) == []
    with accepted.connect() as connection:
        latest = show_message(connection, "orders", "c").seen_at
    assert listed(accepted, MessageFilter(since=latest)) == [("orders", "c"), ("mails", "z"), ("mails", "a")]


def test_the_list_of_a_large_inbox_is_not_sorted(engine: Engine) -> None:
    """The index has its order: the page costs the same however much was accepted."""
    sent: list[tuple[str, object]] = []
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.inbox (consumer, message_id, expires_at) "
                "SELECT 'orders', n, clock_timestamp() + interval '1 day' FROM generate_series(1, 20000) n"
            )
        )
        connection.execute(text("ANALYZE outboxq.inbox"))
    with engine.connect() as connection:
        event.listen(connection, "before_cursor_execute", lambda *arguments: sent.append(arguments[2:4]))
        list_messages(connection)
        list_messages(connection, MessageFilter(consumer="orders"))
    with engine.connect() as connection:
        for statement, parameters in sent:
            plan = "\n".join(row[0] for row in connection.exec_driver_sql(f"EXPLAIN {statement}", parameters))
            assert "Scan Backward using inbox_expires" in plan
            assert "Sort" not in plan


def test_a_message_is_shown_with_what_is_stored_of_it(accepted: Engine) -> None:
    """Its fingerprint in hex, or none, and its times."""
    with accepted.connect() as connection:
        message = show_message(connection, "mails", "a")
        assert message.fingerprint == fingerprint("a").hex()
        assert round((message.expires_at - message.seen_at).total_seconds()) == 3_600
        assert show_message(connection, "mails", "z").fingerprint is None
        with pytest.raises(MessageNotFound, match="consumer 'mails' has no message 'b'") as caught:
            show_message(connection, "mails", "b")
    assert (caught.value.consumer, caught.value.message_id) == ("mails", "b")


def test_a_message_that_was_forgotten_is_accepted_again(accepted: Engine) -> None:
    """Only of this consumer, and only if the command is committed."""
    with accepted.connect() as connection:
        assert forget_messages(connection, "orders", ["c", "x", "a", "c"]) == Forgotten(("c", "a"), (), ("x",))
        connection.rollback()
    assert len(listed(accepted)) == 5
    with accepted.begin() as connection:
        assert forget_messages(connection, "orders", ["a"]) == Forgotten(("a",), (), ())
        assert forget_messages(connection, "orders", []) == Forgotten((), (), ())
    assert listed(accepted, MessageFilter(message_id="a")) == [("mails", "a")]
    with Session(accepted) as session:
        assert [orders.accept(session, message_id) for message_id in "ab"] == [True, False]


def test_forgetting_never_waits(accepted: Engine) -> None:
    """What another transaction holds is told, and stays; what it is only accepting is not there yet."""
    with Session(accepted) as other, accepted.begin() as connection:
        other.execute(text("SELECT 1 FROM outboxq.inbox WHERE message_id = 'b' FOR UPDATE"))
        orders.accept(other, "on its way")
        # A wait would fail at once instead of standing still.
        connection.execute(text("SET LOCAL lock_timeout = '1ms'"))
        ids = ["on its way", "b", "a"]
        assert forget_messages(connection, "orders", ids) == Forgotten(("a",), ("b",), ("on its way",))


def test_ids_that_no_message_can_have_are_refused(accepted: Engine) -> None:
    """Before anything is deleted."""
    with accepted.begin() as connection:
        for consumer, ids in (("orders", ["a", ""]), ("orders", ["a", "b\0"]), ("", ["a"]), ("orders", "abc")):
            with pytest.raises(InvalidKey):
                forget_messages(connection, consumer, ids)
    assert len(listed(accepted)) == 5
