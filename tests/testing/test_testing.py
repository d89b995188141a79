"""What users' tests use: assert_enqueued, drain inside the test's own transaction, contexts, fixtures."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from outboxq import AsyncContext, AsyncOutboxSession, Backoff, Context, Jobs, OutboxSession, external
from outboxq.events import JobDied, JobRetried, JobsParked
from outboxq.postgres import Database
from outboxq.testing import assert_enqueued, async_context, drain, sync_context
from tests.support import app
from tests.support.app import Account, Effect


@pytest.fixture
def session(engine: Engine) -> Iterator[OutboxSession]:
    """A session inside an outer transaction that is rolled back, as SQLAlchemy's documentation recommends for tests."""
    with engine.connect() as connection, connection.begin() as transaction:
        with OutboxSession(bind=connection, join_transaction_mode="create_savepoint") as session:
            yield session
        transaction.rollback()


def names(session: Session) -> list[str]:
    return list(session.scalars(select(Effect.name).order_by(Effect.row)))


def test_assert_enqueued_finds_a_job_by_kind_and_some_of_its_arguments(session: OutboxSession) -> None:
    """Also before the flush; entities compare by key."""
    account = Account(id=7)
    session.add(account)
    handle = session.add_job(app.credit, account=account, cents=5)
    assert assert_enqueued(session, app.credit, cents=5) == handle
    assert assert_enqueued(session, "credit", account=account) == handle
    assert assert_enqueued(session, app.credit) == handle


def test_assert_enqueued_says_what_waits_instead(session: OutboxSession) -> None:
    """A failing test shows the jobs that there are."""
    session.add_job(app.record, name="other")
    with pytest.raises(AssertionError, match=r'no job record with \{"name":"mine"\}(?s:.*)record \{"name": "other"\}'):
        assert_enqueued(session, app.record, name="mine")
    with pytest.raises(AssertionError, match="no job fail"):
        assert_enqueued(session, app.fail)


def test_drain_runs_jobs_inside_the_tests_own_transaction(engine: Engine, session: OutboxSession) -> None:
    """The test sees their rows, no other session ever does."""
    account = Account(id=1, balance=1)
    session.add(account)
    session.add_job(app.credit, account=account, cents=9)
    session.add_jobs(app.record.job(name=name) for name in ("a", "b"))
    report = drain(session, app.jobs)
    assert (report.done, report.others) == (3, ())
    assert account.balance == 10
    assert names(session) == ["a", "b"]
    with Session(engine) as elsewhere:
        assert names(elsewhere) == []


def test_drain_survives_the_tests_own_commit_and_rollback(session: OutboxSession) -> None:
    """Under "create_savepoint" both act on the session's savepoint."""
    session.add_job(app.record, name="committed")
    session.commit()
    session.add_job(app.record, name="rolled back")
    session.flush()
    session.rollback()
    assert drain(session, app.jobs).done == 1
    assert names(session) == ["committed"]
    session.commit()
    assert names(session) == ["committed"]


def test_drain_raises_for_a_failed_handler_unless_told_otherwise(session: OutboxSession) -> None:
    """A test must not pass because its failures were not looked at."""
    session.add_job(app.fail, name="value")
    with pytest.raises(AssertionError, match=r"fail: ValueError: no luck with <name> \(.*app.py:\d+ in fail\)"):
        drain(session, app.jobs)
    session.add_job(app.fail, name="value")
    report = drain(session, app.jobs, allow_failures=True)
    assert [type(event) for event in report.others] == [JobRetried, JobRetried, JobDied]
    assert names(session) == []


def test_drain_contains_misbehaving_handlers(session: OutboxSession) -> None:
    """The same containment as under a relay."""
    session.add_job(app.misbehave, how="raw-commit")
    session.add_job(app.misbehave, how="rollback")
    session.add_job(app.orphan, parent_id=404)
    session.add_job(app.record, name="good")
    report = drain(session, app.jobs, allow_failures=True)
    assert report.done == 1
    assert names(session) == ["good"]


def test_drain_leaves_kinds_of_others_waiting(session: OutboxSession) -> None:
    """They are parked, as a relay would."""
    session.add_job(external("ship", queue="ledger"), order=1)
    report = drain(session, app.jobs)
    assert [type(event) for event in report.others] == [JobsParked]
    assert_enqueued(session, "ship", order=1)


def test_an_async_session_is_asserted_and_drained_by_awaiting(outboxq_database: Database) -> None:
    """The same two calls, awaited."""

    async def run() -> None:
        engine = create_async_engine(outboxq_database.url)
        async with engine.connect() as connection, connection.begin() as transaction:
            async with AsyncOutboxSession(bind=connection, join_transaction_mode="create_savepoint") as session:
                handle = session.add_job(app.record_async, name="a")
                assert await assert_enqueued(session, app.record_async, name="a") == handle
                assert (await drain(session, app.jobs)).done == 1
                assert (await session.scalars(select(Effect.name))).all() == ["a"]
                await app.record_async(async_context(session), name="called")
                assert len((await session.scalars(select(Effect.name))).all()) == 2
            await transaction.rollback()
        await engine.dispose()

    asyncio.run(run())


def test_a_handler_is_a_plain_function_in_a_unit_test(session: OutboxSession) -> None:
    """Call it with a context of the test's own session."""
    app.record(sync_context(session), "called")
    session.flush()
    assert names(session) == ["called"]


def test_every_test_gets_a_database_of_its_own(outboxq_database: Database) -> None:
    """A copy of the prepared template, with outboxq's tables and nothing in them."""
    engine = create_engine(outboxq_database.url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar() == 0
    engine.dispose()


@pytest.mark.large
def test_the_fixtures_serve_a_users_own_test_suite(tmp_path: Path) -> None:
    """Nothing to configure: installing outboxq brings them, and the summary says which PostgreSQL it was."""
    (tmp_path / "test_mine.py").write_text(
        "from sqlalchemy import create_engine, text\n"
        "def test_mine(outboxq_database):\n"
        "    engine = create_engine(outboxq_database.url)\n"
        "    with engine.begin() as connection:\n"
        "        assert connection.execute(text(\"SELECT outboxq.add_job('k')\")).scalar()\n"
        "    engine.dispose()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "1 passed" in result.stdout, result.stdout + result.stderr
    assert "outboxq: PostgreSQL" in result.stdout


def test_drain_runs_lease_mode_handlers_too(session: OutboxSession) -> None:
    """In the test's own transaction there is no other relay to hold a lease against."""
    jobs = Jobs()

    @jobs.handler(queue="lease", claim="lease")
    def leased(ctx: Context) -> None:
        ctx.session.add(Effect(name="leased"))

    session.add_job(leased)
    assert drain(session, jobs).done == 1
    assert names(session) == ["leased"]


def test_a_coroutine_s_own_time_out_costs_the_test_no_connection(outboxq_database: Database) -> None:
    """As under a relay: its query is cancelled, its savepoint undone, and it goes on."""
    jobs = Jobs()

    @jobs.handler(queue="q", retry=Backoff(max_attempts=1))
    async def note(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        await ctx.session.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2), ctx.session.begin_nested():
                await ctx.session.execute(text("SELECT pg_sleep(60)"))
        ctx.session.add(Effect(name=f"{name} goes on"))

    async def run() -> list[str]:
        engine = create_async_engine(outboxq_database.url)
        try:
            async with engine.connect() as connection, AsyncOutboxSession(bind=connection) as session:
                session.add_job(note, name="a")
                await drain(session, jobs)
                return sorted((await session.scalars(select(Effect.name))).all())
        finally:
            await engine.dispose()

    assert asyncio.run(run()) == ["a", "a goes on"]
