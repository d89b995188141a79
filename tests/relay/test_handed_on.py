"""Connections that a relay opens for one thing and hands on to the next: none is opened in vain, and none is left."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from psycopg.pq import TransactionStatus
from sqlalchemy import Engine, NullPool, QueuePool, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.database import engines
from outboxq.database.engines import HandedOn, make_engine
from outboxq.postgres import Database
from tests.support.waiting import wait_until

NAMED = {"application_name": "handed on"}
HELD = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'handed on'"
)


def counted(engine: Engine) -> list[object]:
    """The connections that the engine opens from now on."""
    opened: list[object] = []
    event.listen(engine, "connect", lambda connection, _record: opened.append(connection))
    return opened


def one_queue(flavour: str, lifespan: Callable[[], AbstractContextManager[None]] | None = None) -> Jobs:
    jobs = Jobs(lifespan=lifespan)

    def work(ctx: Context) -> None: ...
    async def work_async(ctx: AsyncContext) -> None: ...

    jobs.handler(queue="one", kind="work")(work if flavour == "sync" else work_async)
    return jobs


def held(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(HELD).scalar_one())


@pytest.mark.parametrize("pool", [NullPool, QueuePool])
@pytest.mark.parametrize(("flavour", "expected"), [("sync", 2), ("async", 3)])
def test_a_drain_opens_few_connections_and_leaves_none(
    flavour: str,
    expected: int,
    pool: type[NullPool | QueuePool],
    outboxq_database: Database,
    sessions: sessionmaker[OutboxSession],
) -> None:
    """The check's becomes the lease's, and that of a sync slot does what is left to do at the end."""
    jobs = one_queue(flavour)
    with sessions.begin() as session:
        session.add_jobs(jobs.resolve().find("work").job() for _ in range(3))
    engine: Engine | AsyncEngine
    if flavour == "sync":
        engine = create_engine(outboxq_database.url, poolclass=pool, connect_args=NAMED)
        opened = counted(engine)
    else:
        engine = create_async_engine(
            outboxq_database.url, poolclass=None if pool is QueuePool else pool, connect_args=NAMED
        )
        opened = counted(engine.sync_engine)
    report = Relay(engine, jobs, RelayConfig(slots_per_queue=1, stats_seconds=0)).drain()
    assert report.done == 3
    assert len(opened) == expected
    looker = make_engine(outboxq_database.url)
    wait_until(lambda: held(looker) == 0, "the end of its connections")


@pytest.mark.parametrize("has_schedule", [False, True])
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_the_lease_begins_outside_a_transaction(
    flavour: str, has_schedule: bool, outboxq_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks at the database leaves one open, of which SQLAlchemy need not know; and all would be undone."""
    jobs = Jobs()

    def remind(ctx: Context) -> None: ...
    async def remind_async(ctx: AsyncContext) -> None: ...

    handler = jobs.handler(queue="one")(remind if flavour == "sync" else remind_async)
    if has_schedule:
        jobs.schedule("0 0 1 1 *", name="yearly")(handler)
    kept: list[TransactionStatus] = []

    keeps = HandedOn.keep

    def keep(handed_on: HandedOn, connection: engines.DriverConnection) -> None:
        kept.append(TransactionStatus(connection.pgconn.transaction_status))
        keeps(handed_on, connection)

    monkeypatch.setattr(HandedOn, "keep", keep)
    make = create_engine if flavour == "sync" else create_async_engine
    Relay(make(outboxq_database.url), jobs, RelayConfig(slots_per_queue=1)).drain()
    assert set(kept) == {TransactionStatus.IDLE}


def test_what_was_opened_is_closed_if_the_relay_ends_before_it_works(outboxq_database: Database) -> None:
    @contextmanager
    def lifespan() -> Iterator[None]:
        raise LookupError("nothing to live on")
        yield

    jobs = one_queue("sync", lifespan)
    engine = create_engine(outboxq_database.url, connect_args=NAMED)
    opened = counted(engine)
    with pytest.raises(LookupError):
        Relay(engine, jobs).drain()
    assert len(opened) == 1
    looker = make_engine(outboxq_database.url)
    wait_until(lambda: held(looker) == 0, "the end of its connection")


def test_a_connection_that_was_silent_for_long_is_closed_and_not_used(
    outboxq_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been dropped on the way, and then only a time-out would tell."""
    engine = create_engine(outboxq_database.url, poolclass=NullPool)

    def connect() -> engines.DriverConnection:
        return engines.listen_connector(
            engines.Engines(engine, None, owns_sync=False, owns_asynchronous=False), None, lambda: None
        )()

    handed_on, first = HandedOn(connect), connect()
    handed_on.keep(first)
    assert handed_on() is first
    monkeypatch.setattr(engines, "_FRESH_SECONDS", 0.0)
    handed_on.keep(first)
    second = handed_on()
    assert first.closed
    assert not second.closed
    second.pgconn.finish()
