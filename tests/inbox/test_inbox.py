"""Accepting messages, by every driver and kind of session: once, and in the caller's own transaction."""

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outboxq.codec.values import fingerprint
from outboxq.errors import EnqueueError, MessageConflict, SchemaError
from outboxq.inbox import AcceptedBatch, Inbox
from outboxq.migrations.runner import migrate
from outboxq.tables import JobRow
from tests.support.app import Effect
from tests.support.inbox_targets import FLAVOURS, OneTarget, Target, inbox, stored


@pytest.mark.first_and_last
def test_a_message_is_accepted_once(target: Target, engine: Engine) -> None:
    """In the same transaction, and in later ones; what is stored is its id, its fingerprint and its times."""
    assert target.accept("m1", payload={"order": 7}) is True
    assert target.accept("m1", payload={"order": 7}) is False
    assert stored(engine) == {}
    target.commit()
    assert target.accept("m1", payload={"order": 7}) is False
    assert target.accept("m2") is True
    target.commit()
    assert stored(engine) == {"m1": fingerprint({"order": 7}), "m2": None}
    with engine.connect() as connection:
        kept = connection.execute(
            text("SELECT min(expires_at - seen_at), max(expires_at - seen_at) FROM outboxq.inbox")
        )
        assert [round(value.total_seconds()) for value in kept.one()] == [7 * 86_400] * 2


def test_a_message_whose_transaction_rolls_back_was_never_accepted(target: Target, engine: Engine) -> None:
    """The same goes for a savepoint; the next delivery is the first one."""
    assert target.accept("m1") is True
    target.rollback()
    assert target.accept("m1") is True
    savepoint = target.wait(target.session.begin_nested())
    assert target.accept("m2") is True
    target.wait(savepoint.rollback())
    target.commit()
    assert stored(engine) == {"m1": None}
    assert target.accept("m2") is True


@pytest.mark.first_and_last
def test_a_batch_says_what_became_of_each_message(target: Target, engine: Engine) -> None:
    """In the order given; a conflict is returned, and the others of its batch are accepted all the same."""
    assert target.accept_all(["b", "é", "a"]) == AcceptedBatch(("b", "é", "a"), (), ())
    target.commit()
    assert target.accept_all({"z": 1, "b": 2, "Z": 3}) == AcceptedBatch(("z", "Z"), ("b",), ())
    target.commit()
    assert target.accept_all({"y": 1, "z": 2, "Z": 3, "a": 4}) == AcceptedBatch(("y",), ("Z", "a"), ("z",))
    target.commit()
    digests = {key: fingerprint(value) for key, value in {"z": 1, "Z": 3, "y": 1}.items()}
    assert stored(engine) == {"a": None, "b": None, "é": None, **digests}


def test_an_id_that_comes_twice_in_a_batch_is_one_message(target: Target, engine: Engine) -> None:
    """With the same content, or without one; with other content it is a conflict, and nothing is accepted."""
    assert target.accept_all(["a", "b", "a"]) == AcceptedBatch(("a", "b"), (), ())
    pairs = [("c", 1), "d", ("e", 1), ("c", 1), ("d", 2), ("e", 2), ("f", {"x": 1, "y": 2}), ("f", {"y": 2, "x": 1})]
    assert target.accept_all(pairs) == AcceptedBatch(("c", "d", "f"), (), ("e",))
    assert target.accept_all([("e", 1), "e", ("e", 2)]) == AcceptedBatch((), (), ("e",))
    target.commit()
    assert stored(engine).keys() == {"a", "b", "c", "d", "f"}
    assert stored(engine)["d"] == fingerprint(2)


@pytest.mark.first_and_last
def test_a_batch_of_the_full_size_is_one_statement(target: Target, engine: Engine) -> None:
    """10,000 messages, new or not."""
    messages = {f"message {number}": number for number in range(10_000)}
    target.statements.clear()
    assert len(target.accept_all(messages).accepted) == 10_000
    assert target.accept_all(messages).duplicates == tuple(messages)
    assert len(target.statements) == 2
    target.commit()
    assert len(stored(engine)) == 10_000


def test_accepting_takes_one_statement(target: Target) -> None:
    """New, a duplicate, a conflict: the fingerprint is compared by the statement that inserts."""
    target.execute("SELECT 1")
    for message_id, payload in (("m1", None), ("m1", {"x": 1}), ("m2", {"x": 1}), ("m2", {"x": 1})):
        target.statements.clear()
        target.accept(message_id, payload=payload)
        assert len(target.statements) == 1
    target.statements.clear()
    with pytest.raises(MessageConflict):
        target.accept("m2", payload={"x": 2})
    assert len(target.statements) == 1


def test_a_large_inbox_is_looked_into_by_its_primary_key(engine: Engine) -> None:
    """For one message and for many: what was accepted before is not read through."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.inbox (consumer, message_id, expires_at) "
                "SELECT 'orders', n, clock_timestamp() + interval '1 day' FROM generate_series(1, 50000) n"
            )
        )
        connection.execute(text("ANALYZE outboxq.inbox"))
    sent: list[tuple[str, object]] = []
    with engine.connect() as connection:
        event.listen(connection, "before_cursor_execute", lambda *arguments: sent.append(arguments[2:4]))
        assert inbox.accept(connection, "7") is False
        assert len(inbox.accept_all(connection, map(str, range(10_000))).accepted) == 1
    with engine.connect() as connection:
        for statement, parameters in sent:
            plan = "\n".join(row[0] for row in connection.exec_driver_sql(f"EXPLAIN {statement}", parameters))
            assert "Index Scan using inbox_pkey" in plan
            assert "Seq Scan" not in plan


@pytest.mark.first_and_last
def test_a_message_with_other_content_is_a_conflict(target: Target, engine: Engine) -> None:
    """An error and no duplicate, of a text that does not quote the content; the transaction goes on."""
    target.accept("m1", payload={"secret": "first"})
    target.commit()
    for accept in (target.accept, target.try_accept):
        with pytest.raises(
            MessageConflict, match="message 'm1' of consumer 'orders' was accepted with other content"
        ) as it:
            accept("m1", payload={"secret": "second"})
        assert (it.value.consumer, it.value.message_id) == ("orders", "m1")
        assert "second" not in str(it.value)
    assert target.accept("m2") is True
    target.commit()
    assert stored(engine) == {"m1": fingerprint({"secret": "first"}), "m2": None}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1, "b": [1.5, None]}, {"b": [1.5, None], "a": 1}),
        (b"raw bytes", bytearray(b"raw bytes")),
        (None, {"a": 1}),
        ({"a": 1}, None),
    ],
)
def test_contents_that_do_not_differ_are_no_conflict(open_target: OneTarget, first: object, second: object) -> None:
    """The order of keys is no content, and nothing is compared where either came without."""
    target = open_target()
    assert target.accept("m1", payload=first) is True
    assert target.accept("m1", payload=second) is False


def test_consumers_accept_apart_from_each_other(engine: Engine) -> None:
    """One message, two consumers: each accepts it once."""
    with Session(engine) as session:
        consumers = [Inbox("mails"), Inbox("invoices")]
        assert [each.accept(session, "m1", payload=each.consumer) for each in consumers] == [True, True]
        assert [each.accept(session, "m1", payload=each.consumer) for each in consumers] == [False, False]


def test_an_expired_message_is_a_duplicate_until_it_is_pruned(engine: Engine, open_target: OneTarget) -> None:
    """Remembered for the retention at least."""
    target = open_target()
    assert target.accept("m1") is True
    target.execute("UPDATE outboxq.inbox SET expires_at = clock_timestamp() - interval '1 day'")
    target.commit()
    assert target.accept("m1") is False


def test_nothing_of_the_session_is_flushed(engine: Engine) -> None:
    """Accepting goes beside the unit of work, in its transaction."""
    with Session(engine) as session:
        row = Effect(name="pending")
        session.add(row)
        assert inbox.accept(session, "m1")
        assert inbox.try_accept(session, "m2")
        assert inbox.accept_all(session, ["m3"]).accepted
        assert row in session.new


def test_the_message_goes_where_the_sessions_jobs_go(engine: Engine) -> None:
    """A session of many databases: the one that its binds name for the outbox."""
    with Session(binds={JobRow: engine}) as session:
        assert inbox.accept(session, "m1")
        assert inbox.try_accept(session, "m2")
        session.commit()
    assert stored(engine).keys() == {"m1", "m2"}


def test_a_schema_of_another_name_is_honoured(engine: Engine, open_target: OneTarget) -> None:
    """By way of the engine's schema_translate_map."""
    with engine.begin() as connection:
        migrate(connection, schema="elsewhere")
    for flavour in ("session-psycopg", "async-session-asyncpg"):
        target = open_target(flavour, schema_translate_map={"outboxq": "elsewhere"})
        assert target.accept(flavour) is True
        target.commit()
    assert stored(engine) == {}
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM elsewhere.inbox")).scalar_one() == 2


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_autocommit_is_refused(open_target: OneTarget, engine: Engine, flavour: str) -> None:
    """The message would not be one with the caller's rows: nothing is written."""
    target = open_target(flavour, isolation_level="AUTOCOMMIT")
    for accept in (target.accept, target.try_accept, lambda message_id: target.accept_all([message_id])):
        with pytest.raises(EnqueueError, match="in AUTOCOMMIT"):
            accept("m1")
    assert stored(engine) == {}


@pytest.mark.each_value
@pytest.mark.parametrize("missing", ["DROP TABLE outboxq.inbox", "DROP SCHEMA outboxq CASCADE"])
def test_missing_tables_are_explained(target: Target, engine: Engine, missing: str) -> None:
    """By what to do about it."""
    with engine.begin() as connection:
        connection.execute(text(missing))
    for accept in (target.accept, target.try_accept, lambda message_id: target.accept_all([message_id])):
        with pytest.raises(SchemaError, match="run `outboxq migrate`"):
            accept("m1")
        target.rollback()


def test_other_errors_of_the_database_stay_what_they_are(engine: Engine, open_target: OneTarget) -> None:
    """A transaction that has failed before is not explained away."""
    target = open_target()
    with pytest.raises(DBAPIError):
        target.execute("SELECT 1 / 0")
    for accept in (target.accept, target.try_accept):
        with pytest.raises(DBAPIError, match="current transaction is aborted"):
            accept("m1")


def test_messages_that_a_policy_hides_are_no_endless_search(engine: Engine) -> None:
    """What can neither be inserted nor be seen is an error, and nobody's duplicate."""
    with engine.begin() as connection:
        role = connection.execute(text("SELECT 'hidden_' || current_database()")).scalar_one()
        assert inbox.accept(connection, "m1", payload="hidden")
        connection.execute(text(f'CREATE ROLE "{role}"'))
        connection.execute(text(f'GRANT USAGE ON SCHEMA outboxq TO "{role}"'))
        connection.execute(text(f'GRANT SELECT, INSERT ON outboxq.inbox TO "{role}"'))
        connection.execute(text("ALTER TABLE outboxq.inbox ENABLE ROW LEVEL SECURITY"))
        connection.execute(text("CREATE POLICY come_in ON outboxq.inbox FOR INSERT WITH CHECK (true)"))
        connection.execute(text("CREATE POLICY see_new ON outboxq.inbox FOR SELECT USING (fingerprint IS NULL)"))
        connection.execute(text(f'SET LOCAL ROLE "{role}"'))
        with pytest.raises(SchemaError, match="row security"):
            inbox.accept(connection, "m1")
        # With the transaction goes the role, which belongs to the whole server.
        connection.rollback()
