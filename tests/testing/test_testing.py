"""What users' tests use: assert_enqueued, drain inside the test's own transaction, contexts, fixtures."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Engine, create_engine, make_url, select, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from outboxq import (
    AsyncContext,
    AsyncOutboxSession,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    Jobs,
    OutboxSession,
    external,
)
from outboxq.errors import ConfigError
from outboxq.events import JobDied, JobRetried, JobsParked
from outboxq.postgres import Database
from outboxq.testing import assert_enqueued, async_context, drain, sync_context
from tests.support import app
from tests.support.app import Account, Effect

T = TypeVar("T")


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


def test_a_batch_handler_in_lease_mode_has_no_session_in_a_drain_either(session: OutboxSession) -> None:
    """A test fails where a relay would fail."""
    jobs = Jobs()

    @dataclass
    class Named:
        name: str

    @jobs.batch_handler(Named, claim="lease", retry=Backoff(max_attempts=1))
    def write(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
        ctx.session.add(Effect(name=items[0].args.name))

    session.add_job(write, name="a")
    with pytest.raises(AssertionError, match="SessionRefused"):
        drain(session, jobs)


def test_drain_runs_each_job_of_a_key(session: OutboxSession) -> None:
    """Also those that a relay would coalesce: a test counts on every job that it has added."""
    session.add_jobs(app.record.options(coalesce="key").job(name=name) for name in ("a", "b", "c"))
    report = drain(session, app.jobs)
    assert (report.done, report.others) == (3, ())


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


@pytest.mark.wide
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
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
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


def test_a_session_does_not_leave_jobs_of_async_handlers_without_a_word(session: OutboxSession) -> None:
    """Nothing was run, and a test that goes on would have tested nothing."""
    session.add_job(app.record, name="sync")
    session.add_job(app.record_async, name="async")
    with pytest.raises(AssertionError, match=r"jobs of async handlers wait \(record_async\)(?s:.*)AsyncSession"):
        drain(session, app.jobs)


def test_a_job_of_an_async_handler_that_is_due_later_may_be_left(session: OutboxSession) -> None:
    """An async session would leave it too."""
    session.add_job(app.record_async.options(delay=timedelta(hours=1)), name="async")
    assert drain(session, app.jobs).done == 0


def with_async_session(url: str, work: Callable[[AsyncOutboxSession], Coroutine[Any, Any, T]]) -> T:
    """What `work` returns, given an async session inside a transaction that is rolled back."""

    async def run() -> T:
        engine = create_async_engine(url)
        async with engine.connect() as connection, connection.begin() as transaction:
            async with AsyncOutboxSession(bind=connection, join_transaction_mode="create_savepoint") as session:
                result = await work(session)
            await transaction.rollback()
        await engine.dispose()
        return result

    return asyncio.run(run())


def test_an_async_session_runs_sync_handlers_too(outboxq_database: Database) -> None:
    """One drain for an application of both: a job of either flavour adds one of the other."""
    jobs = Jobs()

    @jobs.handler(queue="sync")
    def first(ctx: Context, name: str) -> None:
        assert ctx.session.scalars(select(Effect.name)).all() == []
        ctx.session.add(Effect(name=name))
        ctx.session.add_job(second, name="second")

    @jobs.handler(queue="async")
    async def second(ctx: AsyncContext, name: str) -> None:
        assert (await ctx.session.scalars(select(Effect.name))).all() == ["first"]
        ctx.session.add(Effect(name=name))
        ctx.session.add_job(third, name="third")

    @jobs.handler(queue="sync")
    def third(ctx: Context, name: str) -> None:
        assert ctx.once("scope", key="k", call=lambda _: "called") == "called"
        ctx.session.add(Effect(name=name))

    async def work(session: AsyncOutboxSession) -> list[str]:
        session.add_job(first, name="first")
        assert (await drain(session, jobs)).done == 3
        return list(await session.scalars(select(Effect.name).order_by(Effect.row)))

    assert with_async_session(outboxq_database.url, work) == ["first", "second", "third"]


class Opened:
    """A lifespan in four forms, and what became of it."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    @contextlib.contextmanager
    def sync(self) -> Iterator[str]:
        self.steps.append("entered")
        yield "state"
        self.steps.append("left")

    @contextlib.asynccontextmanager
    async def asynchronous(self) -> AsyncIterator[str]:
        await asyncio.sleep(0)
        self.steps.append("entered")
        yield "state"
        await asyncio.sleep(0)
        self.steps.append("left")


@pytest.mark.first_and_last
@pytest.mark.parametrize("form", ["sync", "asynchronous"])
@pytest.mark.parametrize("given", [False, True])
def test_drain_enters_the_lifespan_unless_a_state_is_given(
    session: OutboxSession, outboxq_database: Database, form: str, given: bool
) -> None:
    """Handlers see what a relay would give them."""
    opened = Opened()
    jobs, seen = Jobs(lifespan=getattr(opened, form)), []

    @jobs.handler(queue="sync")
    def look(ctx: Context) -> None:
        seen.append((ctx.state, *opened.steps))

    @jobs.handler(queue="async")
    async def look_async(ctx: AsyncContext) -> None:
        seen.append((ctx.state, *opened.steps))

    state = {"state": "mine"} if given else {}

    async def work(session: AsyncOutboxSession) -> None:
        session.add_job(look_async)
        assert (await drain(session, jobs, **state)).done == 1

    session.add_job(look)
    assert drain(session, jobs, **state).done == 1
    with_async_session(outboxq_database.url, work)
    if given:
        assert (seen, opened.steps) == ([("mine",)] * 2, [])
    else:
        assert seen == [("state", "entered"), ("state", "entered", "left", "entered")]
        assert opened.steps == ["entered", "left"] * 2


def test_drain_says_which_driver_it_takes(outboxq_database: Database) -> None:
    """Another connection would not see the rows of the test's transaction."""
    url = make_url(outboxq_database.url)
    engine = create_engine(url.set(drivername="postgresql+psycopg2"))
    with OutboxSession(engine) as session:
        session.add_job(app.record, name="a")
        assert_enqueued(session, app.record)
        with pytest.raises(ConfigError, match=r"is on psycopg2\. (?s:.*)postgresql\+psycopg://"):
            drain(session, app.jobs)
    engine.dispose()

    async def work(session: AsyncOutboxSession) -> None:
        session.add_job(app.record_async, name="a")
        await assert_enqueued(session, app.record_async)
        with pytest.raises(ConfigError, match=r"is on asyncpg\. "):
            await drain(session, app.jobs)

    asyncpg = url.set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)
    with_async_session(asyncpg, work)


FORGOTTEN = """\
import asyncio
import pytest
from outboxq import AsyncOutboxSession, Jobs, find_job
from outboxq.testing import assert_enqueued, drain
from sqlalchemy.ext.asyncio import create_async_engine

async def use(url, how):
    engine = create_async_engine(url)
    async with engine.connect() as connection, AsyncOutboxSession(bind=connection) as session:
        if how == "assert":
            assert_enqueued(session, "nothing")
        elif how == "drain":
            drain(session, Jobs())
        elif how == "find":
            find_job(session, "01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10")
        elif how == "task":
            with pytest.raises(AssertionError, match="no job nothing"):
                await asyncio.create_task(assert_enqueued(session, "nothing"))
    await engine.dispose()

@pytest.mark.parametrize("how", ["assert", "drain", "find", "task"])
def test_mine(outboxq_database, how):
    asyncio.run(use(outboxq_database.url, how))

@pytest.fixture
def forgetful(outboxq_database):
    yield
    asyncio.run(use(outboxq_database.url, "assert"))

def test_with_a_fixture(forgetful):
    pass
"""


@pytest.mark.wide
def test_a_helper_that_is_not_awaited_fails_its_test(tmp_path: Path) -> None:
    """Of the test, of its setup and of its teardown; what is awaited by a task is awaited."""
    (tmp_path / "test_mine.py").write_text(FORGOTTEN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "3 failed, 2 passed, 1 error" in result.stdout, result.stdout + result.stderr
    assert "AssertionError: assert_enqueued(...): called with what is async, and not awaited" in result.stdout
    assert "AssertionError: drain(...): called with what is async, and not awaited" in result.stdout
    assert "never awaited" not in result.stdout
