"""find_job: what a producer whose COMMIT was not answered can learn from the id that it has already."""

import asyncio
import threading
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outboxq import AsyncOutboxSession, Context, FoundJob, Jobs, OutboxSession, RelayConfig, find_job
from outboxq.events import JobDone
from outboxq.postgres import Database
from outboxq.tables import JobRow
from tests.conftest import StartRelay
from tests.support import app
from tests.support.waiting import PATIENCE, wait_until


def test_a_job_is_found_from_its_commit_until_it_is_done(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Waiting, running, gone; never committed looks like gone, and the rows of the same transaction tell which."""
    jobs, entered, leave = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="slow")
    def slow(ctx: Context) -> None:
        entered.set()
        leave.wait(PATIENCE)

    with sessions() as session:
        handle = session.add_job(slow)
        session.flush()
        with engine.connect() as other:
            assert find_job(other, handle) is None
        session.commit()
    with sessions() as session:
        assert find_job(session, handle) == FoundJob(handle.id, "slow", "slow", "waiting", 0)
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        assert entered.wait(PATIENCE)
        with engine.connect() as connection:
            assert find_job(connection, handle.id) == FoundJob(handle.id, "slow", "slow", "running", 0)
        leave.set()
        wait_until(lambda: running.of(JobDone), "the job")
    with engine.connect() as connection:
        assert find_job(connection, handle) is None


def test_dead_and_leased_jobs_are_found_too(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: object, outboxq_database: Database
) -> None:
    """A dead letter was committed; so was what a lease holds; async sessions await the same."""
    with sessions.begin() as session:
        dead = session.add_job(app.fail, name="x")
    drain()
    with sessions.begin() as session:
        leased = session.add_job(app.record, name="y")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid()"))

    async def look() -> list[FoundJob | None]:
        there = create_async_engine(create_engine(outboxq_database.url).url)
        async with AsyncOutboxSession(there) as session:
            found = [await find_job(session, handle) for handle in (dead, leased)]
        await there.dispose()
        return found

    assert asyncio.run(look()) == [
        FoundJob(dead.id, "fail", "ledger", "dead", 3),
        FoundJob(leased.id, "record", "ledger", "running", 0),
    ]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
def test_any_driver_of_a_producer_finds_its_jobs(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], drain: object, driver: str
) -> None:
    """One that waits, one that is done and kept, and one that was never committed."""
    jobs = Jobs()

    @jobs.handler(keep=timedelta(days=1), keep_result=True)
    def count(ctx: Context) -> int:
        return 7

    with sessions.begin() as session:
        done = session.add_job(count)
    drain(jobs)
    with sessions.begin() as session:
        waiting = session.add_job(count)
    wanted = (waiting, done, uuid4())
    url = make_url(outboxq_database.url).set(drivername=f"postgresql+{driver}")

    async def look() -> list[FoundJob | None]:
        there = create_async_engine(url)
        async with AsyncSession(there) as session, there.connect() as connection:
            found = [await find_job(session, each) for each in wanted]
            assert found == [await find_job(connection, each) for each in wanted]
        await there.dispose()
        return found

    if driver == "asyncpg":
        found = asyncio.run(look())
    else:
        there = create_engine(url)
        with Session(there) as session, there.connect() as connection:
            found = [find_job(session, each) for each in wanted]
            assert found == [find_job(connection, each) for each in wanted]
        there.dispose()
    assert found == [
        FoundJob(waiting.id, "count", "default", "waiting", 0),
        FoundJob(done.id, "count", "default", "done", 1, "7"),
        None,
    ]


def test_a_session_with_several_engines_looks_where_its_jobs_go(
    engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """By `binds`, as `add_job` does."""
    with sessions.begin() as session:
        waiting = session.add_job(app.record, name="y")
    with Session(binds={JobRow: engine}) as session:
        assert find_job(session, waiting) == FoundJob(waiting.id, "record", "ledger", "waiting", 0)
        assert find_job(session, uuid4()) is None
