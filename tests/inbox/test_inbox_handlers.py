"""The inbox around jobs: messages accepted inside of handlers, and jobs that a message leads to."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outboxq import AsyncContext, AsyncOutboxSession, Backoff, Context, Jobs, OutboxSession, RelayConfig, external
from outboxq.errors import ArgumentError, EnqueueError, MessageConflict
from outboxq.events import Event, JobDied, JobDone, JobRetried
from outboxq.inbox import Inbox
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.support import app
from tests.support.app import Effect
from tests.support.ledger import dead, ledger, waiting
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
inbox = Inbox("handlers")
QUICK = Backoff(max_attempts=3, first_seconds=0.0, jitter=0.0)
ship = external("ship", queue="depot")


def handlers(claim: str) -> tuple[Jobs, dict[str, Any]]:
    """Sync and async handlers that accept a message, write a row, and fail the first time if they are asked to."""
    jobs = Jobs()

    @jobs.handler(queue="sync", claim=claim, retry=QUICK)
    def receive(ctx: Context, message_id: str, content: str, fail_first: bool = False) -> None:
        if inbox.accept(ctx.session, message_id, payload=content):
            ctx.session.add(Effect(name=message_id))
        if fail_first and ctx.job.attempt == 1:
            raise ValueError("no luck")

    @jobs.handler(queue="sync", claim=claim, retry=QUICK)
    def try_to_receive(ctx: Context, message_id: str, content: str, fail_first: bool = False) -> None:
        if inbox.try_accept(ctx.session, message_id, payload=content):
            ctx.session.add(Effect(name=message_id))

    @jobs.handler(queue="async", claim=claim, retry=QUICK)
    async def receive_async(ctx: AsyncContext, message_id: str, content: str, fail_first: bool = False) -> None:
        if await inbox.accept(ctx.session, message_id, payload=content):
            ctx.session.add(Effect(name=message_id))
        if fail_first and ctx.job.attempt == 1:
            raise ValueError("no luck")

    @jobs.handler(queue="async", claim=claim, retry=QUICK)
    async def receive_all_async(ctx: AsyncContext, message_id: str, content: str, fail_first: bool = False) -> None:
        batch = await inbox.accept_all(ctx.session, {message_id: content})
        ctx.session.add_all(Effect(name=accepted) for accepted in batch.accepted)

    return jobs, {kind.kind: kind for kind in (receive, try_to_receive, receive_async, receive_all_async)}


MODES = pytest.mark.parametrize("claim", ["transaction", "lease"])


@pytest.mark.large
@MODES
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_message_that_leads_to_many_jobs_is_accepted_by_one(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, claim: str, batch_size: int
) -> None:
    """Delivered four times by each kind of handler, on slots that run at the same time: one effect, nothing dead."""
    jobs, kinds = handlers(claim)
    names = [f"message {number}" for number in range(10)]
    with sessions.begin() as session:
        for kind in (*kinds.values(), *kinds.values()):
            # In one order: batches that accept one by one in opposite orders would deadlock, and be repeated.
            session.add_jobs(kind.job(message_id=name, content=name) for name in names)
    config = RelayConfig(batch_size=batch_size, poll_seconds=0.1)
    with start_relay(jobs, config) as running:
        wait_until(lambda: waiting(engine) == 0, "the jobs to be done")
        wait_until(lambda: len(running.of(JobDone)) == len(names) * 8, "the relay to know it")
    assert ledger(engine) == dict.fromkeys(names, 1)
    assert dead(engine) == 0


@pytest.mark.first_and_last
@MODES
@pytest.mark.parametrize("kind", ["receive", "receive_async"])
def test_a_failed_attempt_has_accepted_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, claim: str, kind: str
) -> None:
    """The next attempt accepts the message, and a second job with it finds a duplicate."""
    jobs, kinds = handlers(claim)
    for fail_first in (True, False):
        with sessions.begin() as session:
            session.add_job(kinds[kind], message_id="m1", content="x", fail_first=fail_first)
        events = drain(jobs)
        assert len([event for event in events if isinstance(event, JobRetried)]) == fail_first
    assert ledger(engine) == {"m1": 1}


@pytest.mark.first_and_last
@MODES
@pytest.mark.parametrize("kind", ["receive", "receive_async", "try_to_receive"])
def test_a_conflict_is_a_dead_letter_at_once(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, claim: str, kind: str
) -> None:
    """Another attempt could not help; the record names the message, and nothing of its content."""
    jobs, kinds = handlers(claim)
    with sessions.begin() as session:
        assert inbox.accept(session, "m1", payload="what was accepted")
        session.add_job(kinds[kind], message_id="m1", content="what came later")
    assert len([event for event in drain(jobs) if isinstance(event, JobDied)]) == 1
    assert ledger(engine) == {}
    with engine.connect() as connection:
        attempt, errors = connection.execute(text("SELECT attempt, errors::text FROM outboxq.dead_job")).one()
    assert attempt == 1
    assert "MessageConflict" in errors
    assert "what came later" not in errors


def test_a_message_on_its_way_is_seen_by_a_handler(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """try_accept leaves it to the transaction that is accepting it, and the handler's own rows stand."""
    jobs = Jobs()

    @jobs.handler(queue="sync")
    def note(ctx: Context) -> None:
        ctx.session.add(Effect(name=inbox.try_accept(ctx.session, "m1").value))

    with sessions.begin() as session:
        session.add_job(note)
    with Session(engine) as rival:
        assert inbox.accept(rival, "m1")
        drain(jobs)
    assert ledger(engine) == {"in progress": 1}


def test_a_message_and_its_job_are_one(engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain) -> None:
    """Committed together, or neither; a later delivery adds no second job."""
    job = app.record.job(name="m1")
    with sessions() as session:
        assert inbox.accept_job(session, "m1", job, payload=b"body") is not None
        session.rollback()
    assert (waiting(engine), accepted(engine)) == (0, 0)
    with sessions.begin() as session:
        handle = inbox.accept_job(session, "m1", job, payload=b"body")
        assert handle is not None
        assert (handle.kind, handle.queue) == ("record", "ledger")
        assert inbox.accept_job(session, "m1", job, payload=b"body") is None
    with engine.connect() as connection:
        assert connection.execute(text("SELECT id FROM outboxq.job")).scalars().all() == [handle.id]
    drain()
    with sessions.begin() as session:
        assert inbox.accept_job(session, "m1", job, payload=b"body") is None
        with pytest.raises(MessageConflict):
            inbox.accept_job(session, "m1", job, payload=b"another body")
    assert ledger(engine) == {"m1": 1}
    assert (waiting(engine), accepted(engine)) == (0, 1)


def test_every_session_that_holds_jobs_can_accept_one(engine: Engine, outboxq_database: Database) -> None:
    """A scoped session, an async one, one without `add_job`; a connection has no unit of work for it."""
    scoped = scoped_session(sessionmaker(engine))
    assert inbox.accept_job(scoped, "m1", app.record.job(name="m1"))
    scoped.commit()
    scoped.remove()
    with Session(engine) as session:
        assert inbox.accept_job(session, "m2", app.record.job(name="m2"))
        session.commit()

    async def accept_async() -> None:
        url = make_url(outboxq_database.url).set(drivername="postgresql+asyncpg")
        async_engine = create_async_engine(url)
        async with AsyncOutboxSession(async_engine) as session:
            assert await inbox.accept_job(session, "m3", app.record.job(name="m3"))
            assert await inbox.accept_job(session, "m2", app.record.job(name="m2")) is None
            await session.commit()
        await async_engine.dispose()

    asyncio.run(accept_async())
    with engine.connect() as connection, pytest.raises(ArgumentError, match="takes a session and not a connection"):
        inbox.accept_job(connection, "m4", app.record.job(name="m4"))  # type: ignore[call-overload]
    assert (waiting(engine), accepted(engine)) == (3, 3)


def test_a_message_whose_job_is_refused_is_not_accepted(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """Also where the transaction is committed all the same: the next delivery gets its job."""
    account = app.Account()
    with sessions.begin() as session:
        with pytest.raises(EnqueueError, match="is not in this session"):
            inbox.accept_job(session, "m1", ship.job(account=account))
        assert inbox.accept_job(session, "m2", ship.job(order_id=1))
    assert (waiting(engine), accepted(engine)) == (1, 1)
    with sessions.begin() as session:
        session.add(account)
        assert inbox.accept_job(session, "m1", ship.job(account=account))
    assert (waiting(engine), accepted(engine)) == (2, 2)


def accepted(engine: Engine) -> int:
    """Committed messages."""
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM outboxq.inbox")).scalar_one()
