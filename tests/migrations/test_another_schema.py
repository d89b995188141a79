"""A whole installation under another name, next to one under the usual name."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig, Snooze
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from tests.support.waiting import PATIENCE, wait_until

SCHEMA = 'The "billing" jobs'
QUOTED = '"The ""billing"" jobs"'

jobs = Jobs()


@jobs.handler(queue="sync", retry=Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0))
def fail(ctx: Context) -> None:
    raise ValueError("always")


@jobs.handler(queue="sync")
def chain(ctx: Context) -> None:
    ctx.session.add_job(later)


@jobs.handler(queue="async")
async def chain_async(ctx: AsyncContext) -> None:
    ctx.session.add_job(later)


@jobs.handler(queue="sync")
def later(ctx: Context) -> Snooze:
    return Snooze(timedelta(hours=1))


@jobs.handler(queue="async", retry=Backoff(max_attempts=1))
async def fail_async(ctx: AsyncContext) -> None:
    raise ValueError("always")


@pytest.fixture
def installations(empty_engine: Engine) -> Engine:
    """Both schemas in one database: what went to the wrong one would be found there."""
    with empty_engine.begin() as connection:
        migrate(connection)
        migrate(connection, schema=SCHEMA)
    return empty_engine


@pytest.fixture
def sessions(installations: Engine) -> sessionmaker[OutboxSession]:
    """Sessions that write to the other schema."""
    return sessionmaker(installations.execution_options(schema_translate_map={"outboxq": SCHEMA}), class_=OutboxSession)


def test_a_relay_keeps_what_it_writes_in_its_own_installation(
    database: Database, installations: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Retries, snoozes, dead letters and chained jobs of both kinds of handlers stay in the schema that was named."""
    with sessions.begin() as session:
        for kind in (fail, chain, chain_async, fail_async):
            session.add_job(kind)
    Relay(database.url, jobs, RelayConfig(schema=SCHEMA)).drain()
    with installations.connect() as connection:
        assert _kinds(connection, f"{QUOTED}.job WHERE state = 'scheduled'") == ["later", "later"]
        assert _kinds(connection, f"{QUOTED}.dead_job") == ["fail", "fail_async"]
        assert _kinds(connection, "outboxq.job") == _kinds(connection, "outboxq.dead_job") == []


def test_an_engine_that_maps_other_schemas_keeps_its_map(
    database: Database, installations: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """The relay adds its own schema to the user's schema_translate_map, for the sync and the async engine."""
    with sessions.begin() as session:
        for kind in (fail, fail_async):
            session.add_job(kind)
    mapped = {"schema_translate_map": {"tenant": "tenant_7", "outboxq": "outboxq"}}
    engine = create_engine(database.url, execution_options=mapped)
    async_engine = create_async_engine(database.url, execution_options=mapped)
    Relay(engine, jobs, RelayConfig(schema=SCHEMA), async_engine=async_engine).drain()
    engine.dispose()
    with installations.connect() as connection:
        assert _kinds(connection, f"{QUOTED}.dead_job") == ["fail", "fail_async"]


def test_a_sleeping_relay_wakes_for_its_own_installation(
    database: Database, installations: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """The trigger of the other schema and the listener of its relay agree on flag and channel."""
    relay = Relay(database.url, jobs, RelayConfig(schema=SCHEMA, poll_seconds=3600))
    running = threading.Thread(target=relay.run)
    running.start()
    flags = text(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        "AND classid::bigint = hashtext(:channel)::bigint & 4294967295"
    )
    dead = text(f"SELECT count(*) FROM {QUOTED}.dead_job")
    try:
        with installations.execution_options(isolation_level="AUTOCOMMIT").connect() as watcher:
            wait_until(
                lambda: watcher.execute(flags, {"channel": f"outboxq_{SCHEMA}"}).scalar() == 2, "both queues to sleep"
            )
            with sessions.begin() as session:
                session.add_job(fail_async)
            wait_until(lambda: watcher.execute(dead).scalar() == 1, "the job to run long before the next poll")
    finally:
        relay.stop()
        running.join(PATIENCE)
    assert not running.is_alive()


def test_each_installation_has_an_id_of_its_own(installations: Engine) -> None:
    """Providers are given keys made from it, so that two installations never use the same; migrating again keeps it."""
    ids = text(f"SELECT id FROM outboxq.deployment UNION ALL SELECT id FROM {QUOTED}.deployment")
    with installations.begin() as connection:
        before = connection.execute(ids).scalars().all()
        migrate(connection)
        migrate(connection, schema=SCHEMA)
        assert connection.execute(ids).scalars().all() == before
    assert len(before) == len(set(before)) == 2


def _kinds(connection: Connection, source: str) -> list[str]:
    query = text(f"SELECT kind FROM {source}")
    return sorted(connection.execute(query).scalars())
