"""What sessions, inboxes and effects tell the hooks of their engine."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import (
    AsyncEffects,
    AsyncOutboxSession,
    CallRefused,
    Context,
    Effects,
    Jobs,
    OutboxSession,
    Relay,
)
from outboxq.errors import EffectConflict, EffectFailed, MessageConflict, RegistryError
from outboxq.events import EffectCalled, Event, JobsEnqueued, MessageSeen
from outboxq.inbox import Inbox
from outboxq.postgres import Database
from tests.support import app
from tests.support.ledger import enqueue

Told = list[Event]
MESSAGES = Inbox("orders")


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def telling(outboxq_database: Database, told: Told) -> Iterator[Engine]:
    """An engine with a hook."""
    engine = create_engine(outboxq_database.url, execution_options={"outboxq_hooks": [told.append]})
    yield engine
    engine.dispose()


def test_jobs_are_told_once_they_are_committed(telling: Engine, told: Told) -> None:
    """Those of a savepoint that stands too; those of one that was rolled back are not."""
    session = OutboxSession(telling)
    session.add_job(app.record, name="a")
    with session.begin_nested():
        session.add_job(app.record, name="b")
    with session.begin_nested() as undone:
        session.add_job(app.record, name="c")
        session.flush()
        undone.rollback()
    with session.begin_nested() as outer:
        with session.begin_nested():
            session.add_job(app.record, name="d")
        outer.rollback()
    session.add_job(app.record_async, name="e")
    session.flush()
    assert told == []
    session.commit()
    assert told == [JobsEnqueued("ledger", "record", 1)] * 2 + [JobsEnqueued("ledger-async", "record_async", 1)]
    session.add_job(app.record, name="f")
    session.rollback()
    session.commit()
    assert len(told) == 3
    session.close()


def test_a_job_whose_key_is_taken_is_not_told(telling: Engine, told: Told) -> None:
    """Of two jobs of one key one is."""
    with sessionmaker(telling, class_=OutboxSession).begin() as session:
        session.add_job(app.record.options(unique="k"), name="a")
        session.add_job(app.record.options(unique="k"), name="b")
    assert told == [JobsEnqueued("ledger", "record", 1)]


def test_messages_are_told_when_it_is_certain(telling: Engine, told: Told) -> None:
    """One that is accepted at COMMIT, a duplicate and a conflict at once."""
    sessions = sessionmaker(telling, class_=OutboxSession)
    with sessions() as session:
        assert MESSAGES.accept(session, "m", payload="1")
        assert told == []
    with sessions.begin() as session:
        assert MESSAGES.accept(session, "m", payload="1")
    assert told == [MessageSeen("orders", "accepted")]
    with sessions() as session:
        assert not MESSAGES.accept(session, "m", payload="1")
        with pytest.raises(MessageConflict):
            MESSAGES.accept(session, "m", payload="2")
    assert told[1:] == [MessageSeen("orders", "duplicate"), MessageSeen("orders", "conflict")]
    with sessions.begin() as session:
        MESSAGES.accept_all(session, ["m", "n", "o"])
    assert sorted(event.outcome for event in told[3:]) == ["accepted", "accepted", "duplicate"]


def test_effects_tell_how_each_call_has_ended(telling: Engine, told: Told) -> None:
    """Whether it was made, replayed, refused, or what else."""
    effects = Effects(telling)

    def refuse(_: str) -> None:
        raise CallRefused("no")

    assert effects.once("mail", key="1", call=lambda _: 7, payload="a") == 7
    assert effects.once("mail", key="1", call=lambda _: 8, payload="a") == 7
    with pytest.raises(EffectConflict):
        effects.once("mail", key="1", call=lambda _: 8, payload="b")
    with pytest.raises(EffectFailed):
        effects.once("mail", key="2", call=refuse)
    effects.dispose()
    assert told == [EffectCalled("mail", outcome) for outcome in ("called", "replayed", "conflict", "refused")]


def test_async_sessions_and_effects_tell_too(outboxq_database: Database, told: Told) -> None:
    """With an async engine that has the option."""

    async def act() -> None:
        engine = create_async_engine(outboxq_database.url, execution_options={"outboxq_hooks": [told.append]})
        async with async_sessionmaker(engine, class_=AsyncOutboxSession).begin() as session:
            session.add_job(app.record, name="a")
        effects = AsyncEffects(engine)
        assert await effects.once("mail", key="1", call=_seven) == 7
        await effects.dispose()
        await engine.dispose()

    asyncio.run(act())
    assert told == [JobsEnqueued("ledger", "record", 1), EffectCalled("mail", "called")]


async def _seven(_: str) -> int:
    return 7


def test_a_hook_that_raises_breaks_nothing(outboxq_database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the others are told."""
    told = list[Event]()

    def fail(_: Event) -> None:
        raise ValueError

    engine = create_engine(outboxq_database.url, execution_options={"outboxq_hooks": [fail, told.append]})
    with caplog.at_level(logging.ERROR, "outboxq.hooks"):
        enqueue(engine, ["a"])
    engine.dispose()
    assert len(told) == 1
    assert caplog.messages == ["a hook failed: event=JobsEnqueued"]


def test_handlers_tell_nothing_to_the_hooks_of_their_engine(telling: Engine, told: Told) -> None:
    """Their sessions' COMMIT commits nothing yet. The relay's own hooks are told of the effects that they call."""
    jobs, effects = Jobs(), list[Event]()

    @jobs.handler(queue="q", claim="lease")
    def more(ctx: Context) -> None:
        ctx.session.add_job(app.record, name="x")
        MESSAGES.accept(ctx.session, "m")
        ctx.once("mail", key="1", call=lambda _: 7)

    jobs.on(EffectCalled)(effects.append)
    with sessionmaker(telling, class_=OutboxSession).begin() as session:
        session.add_job(more)
    del told[:]
    assert Relay(telling, jobs, hooks=[]).drain().done == 1
    assert told == []
    assert effects == [EffectCalled("mail", "called")]


def test_a_registry_refuses_events_that_no_relay_tells() -> None:
    """With where they are told."""
    with pytest.raises(RegistryError, match="outboxq_hooks"):
        Jobs().on(JobsEnqueued)
