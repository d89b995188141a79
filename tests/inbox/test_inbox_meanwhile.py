"""Deliveries that meet: what waits, what does not, and what each of them is told."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outboxq.codec.values import fingerprint
from outboxq.database.errors import sqlstate_of
from outboxq.errors import MessageConflict
from outboxq.inbox import Acceptance, AcceptedBatch
from tests.support.inbox_targets import OneTarget, Target, inbox, stored, waiting_for_a_transaction
from tests.support.waiting import PATIENCE, wait_until

OpenRival = Callable[..., Session]


@pytest.fixture
def rival(engine: Engine) -> Iterator[OpenRival]:
    """Opens a transaction that has accepted messages and not yet ended."""
    with ExitStack() as stack:

        def begin(*message_ids: str, payload: object = None) -> Session:
            session = stack.enter_context(Session(engine))
            for message_id in message_ids:
                assert inbox.accept(session, message_id, payload=payload)
            return session

        yield begin


@pytest.fixture
def meanwhile(engine: Engine) -> Iterator[Callable[..., Future[Any]]]:
    """Runs what has to wait for another transaction in a thread; returns when it waits."""
    with ThreadPoolExecutor(1) as threads:

        def begin(work: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
            future = threads.submit(work, *arguments, **named)
            wait_until(lambda: future.done() or waiting_for_a_transaction(engine), "the delivery to wait")
            assert not future.done()
            return future

        yield begin


Meanwhile = Callable[..., Future[Any]]


@pytest.mark.first_and_last
def test_a_delivery_that_comes_meanwhile_waits_and_is_a_duplicate(
    target: Target, rival: OpenRival, meanwhile: Meanwhile
) -> None:
    """It sees what the first one committed after the snapshot of its statement, by one statement more."""
    first = rival("m1", payload={"x": 1})
    target.execute("SELECT 1")
    target.statements.clear()
    second = meanwhile(target.accept, "m1", payload={"x": 1})
    first.commit()
    assert second.result(PATIENCE) is False
    assert len(target.statements) == 2


@pytest.mark.first_and_last
def test_a_delivery_that_comes_meanwhile_with_other_content_is_a_conflict(
    target: Target, rival: OpenRival, meanwhile: Meanwhile
) -> None:
    """Also where the first one's content became visible only after the wait."""
    first = rival("m1", payload={"x": 1})
    second = meanwhile(target.accept, "m1", payload={"x": 2})
    first.commit()
    with pytest.raises(MessageConflict):
        second.result(PATIENCE)


@pytest.mark.first_and_last
def test_a_delivery_that_comes_meanwhile_takes_over_from_one_that_rolls_back(
    target: Target, engine: Engine, rival: OpenRival, meanwhile: Meanwhile
) -> None:
    """With its own content, and without another statement."""
    first = rival("m1", payload={"x": 1})
    target.execute("SELECT 1")
    target.statements.clear()
    second = meanwhile(target.accept, "m1", payload={"x": 2})
    first.rollback()
    assert second.result(PATIENCE) is True
    assert len(target.statements) == 1
    target.commit()
    assert stored(engine) == {"m1": fingerprint({"x": 2})}


@pytest.mark.first_and_last
def test_a_batch_waits_for_its_messages_and_sees_what_became_of_them(
    target: Target, rival: OpenRival, meanwhile: Meanwhile
) -> None:
    """Each is asked for again only where the first look could not tell."""
    first = rival("a", "d", payload=1)
    target.execute("SELECT 1")
    target.statements.clear()
    batch = meanwhile(target.accept_all, {"d": 1, "c": 1, "b": 1, "a": 2})
    first.commit()
    assert batch.result(PATIENCE) == AcceptedBatch(("c", "b"), ("d",), ("a",))
    assert len(target.statements) == 2


def test_a_message_that_is_forgotten_right_after_the_wait_is_accepted(
    engine: Engine, open_target: OneTarget, rival: OpenRival, meanwhile: Meanwhile
) -> None:
    """Neither inserted nor to be found: it is tried again and not taken for a duplicate."""
    first, target = rival("m1"), open_target()

    @event.listens_for(target.session.get_bind(), "after_cursor_execute", once=True)
    def forget(*_: object) -> None:
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outboxq.inbox"))

    second = meanwhile(target.accept, "m1")
    first.commit()
    assert second.result(PATIENCE) is True
    target.commit()
    assert stored(engine) == {"m1": None}


@pytest.mark.first_and_last
def test_try_accept_never_waits(target: Target, engine: Engine, rival: OpenRival) -> None:
    """A message on its way is in progress; the transaction goes on, and a later try finds what became of it."""
    committed, rolled_back = rival("m1"), rival("m2")
    assert target.try_accept("m0") is Acceptance.ACCEPTED
    assert target.try_accept("m0") is Acceptance.DUPLICATE
    assert target.try_accept("m1") is Acceptance.IN_PROGRESS
    assert target.try_accept("m2") is Acceptance.IN_PROGRESS
    committed.commit()
    rolled_back.rollback()
    assert target.try_accept("m1") is Acceptance.DUPLICATE
    assert target.try_accept("m2") is Acceptance.ACCEPTED
    target.commit()
    assert stored(engine).keys() == {"m0", "m1", "m2"}


@pytest.mark.first_and_last
def test_a_lock_on_the_table_is_in_progress_too(target: Target, engine: Engine) -> None:
    """As a migration takes it: nobody knows what comes of it, and nobody waits."""
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE outboxq.inbox IN ACCESS EXCLUSIVE MODE"))
        assert target.try_accept("m1") is Acceptance.IN_PROGRESS
    assert target.try_accept("m1") is Acceptance.ACCEPTED


@pytest.mark.first_and_last
@pytest.mark.parametrize("setting", [None, "SET lock_timeout = '7s'", "SET LOCAL lock_timeout = '7s'"])
def test_try_accept_leaves_the_lock_timeout_as_it_was(target: Target, rival: OpenRival, setting: str | None) -> None:
    """Whatever it answers: for the rest of the transaction, and after it."""
    expected = "0" if setting is None else "7s"
    on_its_way = rival("m1")
    target.execute("SELECT 1" if setting is None else setting)
    for message_id, payload in (("m0", 1), ("m0", 1), ("m1", None), ("m0", 2)):
        try:
            target.try_accept(message_id, payload=payload)
        except MessageConflict:
            assert payload == 2
        assert target.execute("SHOW lock_timeout").scalar_one() == expected
    target.commit()
    assert target.execute("SHOW lock_timeout").scalar_one() == ("7s" if setting and "LOCAL" not in setting else "0")
    on_its_way.rollback()


@pytest.mark.first_and_last
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("flavour", ["session-psycopg", "session-psycopg2", "async-session-asyncpg"])
def test_a_snapshot_older_than_the_first_delivery_is_a_serialization_failure(
    open_target: OneTarget, rival: OpenRival, level: str, flavour: str
) -> None:
    """On these levels nobody can tell a duplicate from within: 40001, and the transaction that tries again knows."""
    target = open_target(flavour, isolation_level=level)
    methods = (target.accept, target.try_accept, lambda message_id: target.accept_all([message_id]))
    for message_id, method in zip("abc", methods, strict=True):
        target.execute("SELECT 1 FROM outboxq.inbox")
        rival(message_id).commit()
        with pytest.raises(DBAPIError) as caught:
            method(message_id)
        assert sqlstate_of(caught.value) == "40001"
        target.rollback()
        assert method(message_id) in (False, Acceptance.DUPLICATE, AcceptedBatch((), (message_id,), ()))
        target.commit()
