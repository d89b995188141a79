"""`ctx.once` in the handlers of a relay, and in users' own tests."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import (
    AsyncContext,
    AsyncOutboxSession,
    Backoff,
    CallNotApplied,
    CallRefused,
    Context,
    Jobs,
    OutboxSession,
    Relay,
    RelayConfig,
)
from outboxq.errors import ConfigError, EffectRefused
from outboxq.events import Event, JobDied, JobDone, JobRetried, JobSnoozed
from outboxq.postgres import Database
from outboxq.testing import async_context, sync_context
from outboxq.testing import drain as drain_session
from tests.support.app import Effect
from tests.support.effects import row
from tests.support.ledger import ledger
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
QUICK = Backoff(max_attempts=3, first_seconds=0.0, jitter=0.0)

calls: list[str] = []
plan: list[object] = []


def answer(provider_key: str) -> str:
    calls.append(provider_key)
    planned = plan.pop(0) if plan else "done"
    if isinstance(planned, BaseException):
        raise planned
    return str(planned)


async def answer_async(provider_key: str) -> str:
    await asyncio.sleep(0)
    return answer(provider_key)


@pytest.fixture(autouse=True)
def _forget() -> None:
    calls.clear()
    plan.clear()


def registry(claim: str) -> Jobs:
    """A sync and an async handler that call once, then write; and fail after that as often as `plan` says."""
    jobs = Jobs()

    @jobs.handler(queue="sync", claim=claim, retry=QUICK)
    def charge(ctx: Context, name: str, failures: int = 0) -> None:
        result = ctx.once("charge", key=name, call=answer)
        ctx.session.add(Effect(name=f"{name}: {result}"))
        if ctx.job.attempt <= failures:
            raise RuntimeError("after the call")

    @jobs.handler(queue="async", claim=claim, retry=QUICK)
    async def charge_async(ctx: AsyncContext, name: str, failures: int = 0) -> None:
        result = await ctx.once("charge", key=name, call=answer_async)
        ctx.session.add(Effect(name=f"{name}: {result}"))
        if ctx.job.attempt <= failures:
            raise RuntimeError("after the call")

    return jobs


def enqueue(sessions: sessionmaker[OutboxSession], jobs: Jobs, kind: str, **args: object) -> None:
    with sessions.begin() as session:
        session.add_job(jobs.resolve().find(kind), **args)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["charge", "charge_async"])
@pytest.mark.parametrize("claim", ["lease", "transaction"])
def test_a_handler_that_fails_after_its_call_does_not_call_again(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain, claim: str, kind: str
) -> None:
    """The result outlives the attempt: recorded in a transaction of its own, replayed to the next one."""
    jobs = registry(claim)
    enqueue(sessions, jobs, kind, name="a", failures=2)
    events = drain(jobs)
    assert [type(event) for event in events if isinstance(event, JobRetried | JobDone)] == [JobRetried] * 2 + [JobDone]
    assert len(calls) == 1
    assert ledger(engine) == {"a: done": 1}


@pytest.mark.parametrize("kind", ["charge", "charge_async"])
def test_a_call_under_way_elsewhere_puts_the_job_off_uncounted(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain, kind: str
) -> None:
    """Its predecessor may have been killed in the call: that must not use up attempts."""
    jobs = registry("lease")
    enqueue(sessions, jobs, kind, name="a")
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.effect (scope, key, status, provider_key, lock_token, locked_until) VALUES "
                "('charge', 'a', 'started', gen_random_uuid(), gen_random_uuid(), clock_timestamp() + interval '9 s')"
            )
        )
    [snoozed] = [event for event in drain(jobs) if isinstance(event, JobSnoozed)]
    assert 5 < snoozed.delay_seconds <= 9
    assert calls == []
    with engine.connect() as connection:
        assert connection.execute(text("SELECT attempt, errors::text FROM outboxq.job")).one() == (0, "[]")


@pytest.mark.parametrize("kind", ["charge", "charge_async"])
def test_a_refusal_that_a_handler_lets_out_is_a_dead_letter_at_once(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain, kind: str
) -> None:
    """Another attempt would be refused too; what the other side said stands in the record, without the arguments."""
    plan.append(CallRefused("no such card: 4242-a"))
    jobs = registry("lease")
    enqueue(sessions, jobs, kind, name="4242-a")
    [died] = [event for event in drain(jobs) if isinstance(event, JobDied)]
    assert "EffectFailed" in died.reason
    with engine.connect() as connection:
        errors = connection.execute(text("SELECT errors::text FROM outboxq.dead_job")).scalar_one()
    assert "no such card: <name>" in errors
    assert len(calls) == 1


def test_an_error_that_leaves_no_doubt_is_an_ordinary_failure(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain
) -> None:
    """Backoff, then another call."""
    plan.append(CallNotApplied("busy"))
    jobs = registry("lease")
    enqueue(sessions, jobs, "charge", name="a")
    assert [type(event) for event in drain(jobs) if isinstance(event, JobRetried | JobDone)] == [JobRetried, JobDone]
    assert len(calls) == 2
    assert ledger(engine) == {"a: done": 1}


@pytest.mark.parametrize("kind", ["charge", "charge_async"])
def test_a_call_is_refused_where_jobs_share_a_transaction(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain, kind: str
) -> None:
    """Also where the job happens to be alone in its batch: a handler must not depend on how busy its queue is."""
    jobs = registry("transaction")
    enqueue(sessions, jobs, kind, name="a")
    drain(jobs, batch_size=2)
    assert calls == []
    with engine.connect() as connection:
        errors = connection.execute(text("SELECT errors::text FROM outboxq.dead_job")).scalar_one()
    assert "EffectRefused" in errors
    assert "claim=" in errors


def test_a_leased_job_may_call_whatever_the_batch_size(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain
) -> None:
    """The batches are those of other queues; no other job shares its transaction."""
    jobs = registry("lease")

    @jobs.handler(queue="batches")
    def other(ctx: Context) -> None: ...

    enqueue(sessions, jobs, "charge", name="a")
    drain(jobs, batch_size=50)
    assert ledger(engine) == {"a: done": 1}


def test_a_relay_on_engines_of_the_users_own_calls_through_pools_beside_theirs(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], engine: Engine
) -> None:
    """Two slots on a pool of three connections, two of which they hold, and no third to spare: nothing waits."""
    sync = create_engine(outboxq_database.url, pool_size=3, max_overflow=0, pool_timeout=5)
    asynchronous = create_async_engine(outboxq_database.url, pool_size=3, max_overflow=0, pool_timeout=5)
    jobs = registry("transaction")
    for number in range(6):
        enqueue(sessions, jobs, "charge", name=f"s{number}")
        enqueue(sessions, jobs, "charge_async", name=f"a{number}")
    report = Relay(sync, jobs, RelayConfig(slots_per_queue=2), async_engine=asynchronous).drain()
    assert (report.done, report.failed) == (12, 0)
    sync.dispose()


def test_a_relay_on_a_url_and_an_async_engine_calls_through_that_engine(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], engine: Engine
) -> None:
    """Its way to connect is the user's (tokens, connectors): nothing is made from its URL, which leads nowhere."""
    url = make_url(outboxq_database.url)
    asynchronous = create_async_engine(url.set(port=1), connect_args={"port": url.port})
    jobs = registry("lease")
    enqueue(sessions, jobs, "charge", name="s")
    enqueue(sessions, jobs, "charge_async", name="a")
    report = Relay(outboxq_database.url, jobs, async_engine=asynchronous).drain()
    assert (report.done, report.failed) == (2, 0)


def test_an_async_engine_of_another_driver_is_refused_beside_a_url(outboxq_database: Database) -> None:
    """As it is beside an engine."""
    asynchronous = create_async_engine(make_url(outboxq_database.url).set(drivername="postgresql+asyncpg"))
    with pytest.raises(ConfigError, match="the relay needs psycopg, and this engine uses asyncpg"):
        Relay(outboxq_database.url, registry("lease"), async_engine=asynchronous)


def test_a_relay_on_an_async_engine_alone_calls_through_it(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], engine: Engine
) -> None:
    """No sync engine is needed for an async handler's calls."""
    jobs = Jobs()

    @jobs.handler(queue="async", claim="lease", retry=QUICK)
    async def charge(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=await ctx.once("charge", key=name, call=answer_async)))

    enqueue(sessions, jobs, "charge", name="a")
    report = Relay(create_async_engine(outboxq_database.url), jobs).drain()
    assert (report.done, report.failed) == (1, 0)


def test_no_connection_of_a_relay_is_left_behind(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain
) -> None:
    """The pools of both flavours are closed with the relay."""
    jobs = registry("lease")
    enqueue(sessions, jobs, "charge", name="a")
    enqueue(sessions, jobs, "charge_async", name="b")
    drain(jobs)
    # Each look in a transaction of its own: within one, pg_stat_activity stays as it was first read.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        others = text(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outboxq effects' "
            "AND datname = current_database()"
        )
        # Closed on this side; the server notices when it next looks.
        wait_until(lambda: connection.execute(others).scalar_one() == 0, "the end of their sessions")


def test_a_scope_declared_for_other_kinds_is_refused(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain
) -> None:
    """Its window was held against their retries, not against this handler's."""
    jobs = registry("lease")
    jobs.scope("charge", retention=timedelta(days=1), kinds=("charge_async",))
    enqueue(sessions, jobs, "charge", name="a")
    drain(jobs)
    assert calls == []
    with engine.connect() as connection:
        assert (
            "declared for other kinds"
            in connection.execute(text("SELECT errors::text FROM outboxq.dead_job")).scalar_one()
        )


def test_a_job_with_more_attempts_than_its_effect_is_remembered_for_is_refused(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain
) -> None:
    """A late attempt would call again: refused before the first call."""
    jobs = Jobs()

    @jobs.handler(claim="lease", retry=Backoff(max_attempts=2, first_seconds=0.0), timeout_seconds=1)
    def charge(ctx: Context, name: str) -> None:
        ctx.once("charge", key=name, call=answer)

    jobs.scope("charge", retention=timedelta(seconds=10))
    with sessions.begin() as session:
        session.add_job(charge.options(max_attempts=20), name="a")
        session.add_job(charge, name="b")
    events = drain(jobs)
    assert len(calls) == 1
    assert any("EffectRefused" in event.error_type for event in events if isinstance(event, JobRetried))


def test_what_is_remembered_how_long_is_the_scopes_to_say(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain
) -> None:
    """As declared."""
    jobs = registry("lease")
    jobs.scope("charge", retention=timedelta(days=400))
    enqueue(sessions, jobs, "charge", name="a")
    drain(jobs)
    stored = row(engine, "a")
    assert (stored["expires_at"] - stored["changed_at"]).days in (399, 400)


# In users' tests


def test_a_users_test_drains_handlers_that_call(engine: Engine) -> None:
    """Recorded in the test's own transaction, and gone with it."""
    jobs = registry("lease")
    with OutboxSession(engine) as session:
        session.add_job(jobs.resolve().find("charge"), name="a")
        assert drain_session(session, jobs).done == 1
        assert session.execute(text("SELECT status FROM outboxq.effect")).scalar_one() == "done"
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.effect")).scalar_one() == 0


def test_a_users_test_drains_async_handlers_that_call(outboxq_database: Database, engine: Engine) -> None:
    """As the sync ones."""
    jobs = registry("lease")

    async def main() -> None:
        async_engine = create_async_engine(outboxq_database.url)
        async with AsyncOutboxSession(async_engine) as session:
            session.add_job(jobs.resolve().find("charge_async"), name="a")
            assert (await drain_session(session, jobs)).done == 1
        await async_engine.dispose()

    asyncio.run(main())
    assert len(calls) == 1


def test_a_handler_that_is_called_like_a_function_calls_once(outboxq_database: Database, engine: Engine) -> None:
    """With the contexts for unit tests."""
    jobs = registry("lease")
    with OutboxSession(engine) as session:
        for _ in range(2):
            jobs.resolve().find("charge")(sync_context(session), name="a")

    async def main() -> None:
        async_engine = create_async_engine(outboxq_database.url)
        async with AsyncOutboxSession(async_engine) as session:
            for _ in range(2):
                await jobs.resolve().find("charge_async")(async_context(session), name="b")
        await async_engine.dispose()

    asyncio.run(main())
    assert len(calls) == 2


def test_a_context_without_a_database_for_effects_says_so(engine: Engine) -> None:
    """One that a user made by hand."""
    with OutboxSession(engine) as session, pytest.raises(EffectRefused, match="sync_context"):
        Context(sync_context(session).job, None, session).once("charge", key="1", call=answer)
