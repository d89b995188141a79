"""Producers with few rights, and producers whose transactions are prepared; with and without a relay that sleeps."""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import psycopg.errors
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outboxq import Context, Jobs, add_job
from outboxq.postgres import Database

jobs = Jobs()


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "enqueue_producer_user"
    id: Mapped[int] = mapped_column(primary_key=True)


@jobs.handler(queue="accounts")
def credit(ctx: Context, cents: int) -> None: ...


@jobs.handler(queue="accounts")
def welcome(ctx: Context, user: User) -> None: ...


def driver_url(database: Database, driver: str = "psycopg") -> str:
    return make_url(database.url).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)


@contextmanager
def connected(database: Database) -> Iterator[psycopg.Connection]:
    url = make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


class Sleeper:
    """Stands for a relay that sleeps on the queue: it holds the flag, and hears who wakes it."""

    def __init__(self, connection: psycopg.Connection | None) -> None:
        self._connection = connection

    def wakes(self) -> list[str]:
        """What it heard until now. A NOTIFY is delivered before COMMIT returns, so nothing is waited for."""
        assert self._connection is not None
        self._connection.execute("SELECT 1")
        return [notification.payload for notification in self._connection.notifies(timeout=0)]


@pytest.fixture(params=[False, True], ids=["nobody-sleeps", "a-relay-sleeps"])
def sleeper(request: pytest.FixtureRequest, database: Database) -> Iterator[Sleeper | None]:
    if not request.param:
        yield None
        return
    with connected(database) as connection:
        connection.execute("LISTEN outboxq_outboxq")
        connection.execute("SELECT pg_advisory_lock(hashtext('outboxq_outboxq'), hashtext('accounts'))")
        yield Sleeper(connection)


@pytest.fixture
def stored(database: Database) -> Iterator[Callable[[], list[object]]]:
    with connected(database) as connection:
        connection.execute("DELETE FROM outboxq.job")
        yield lambda: [row[0] for row in connection.execute("SELECT args FROM outboxq.job ORDER BY seq").fetchall()]


@pytest.fixture
def prepared_transactions_allowed(database: Database) -> None:
    with connected(database) as connection:
        row = connection.execute("SHOW max_prepared_transactions").fetchone()
    assert row is not None
    if row[0] == "0":
        pytest.skip("this server has max_prepared_transactions = 0")


Stored = Callable[[], list[object]]


@pytest.mark.usefixtures("prepared_transactions_allowed")
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_two_phase_session_commits_its_jobs(
    database: Database, stored: Stored, sleeper: Sleeper | None, driver: str
) -> None:
    """PREPARE TRANSACTION refuses a transaction that has notified, so it wakes nobody; polling finds the jobs."""
    engine = create_engine(driver_url(database, driver))
    with Session(engine, twophase=True) as session:
        add_job(session, credit, cents=1)
        session.flush()
        with session.begin_nested():
            add_job(session, credit, cents=2)
        savepoint = session.begin_nested()
        add_job(session, credit, cents=3)
        savepoint.rollback()
        user = User()
        session.add(user)
        add_job(session, welcome, user)
        session.commit()
        user_id = user.id
        assert stored() == [{"cents": 1}, {"cents": 2}, {"user": user_id}]
        session.rollback()
        add_job(session, credit, cents=4)
        session.prepare()
        assert len(stored()) == 3
        session.rollback()
    assert len(stored()) == 3
    if sleeper is not None:
        assert sleeper.wakes() == []
    engine.dispose()


@pytest.mark.usefixtures("prepared_transactions_allowed")
def test_a_two_phase_session_leaves_the_connection_as_it_was(database: Database, stored: Stored) -> None:
    """The next transaction on the same connection wakes relays again."""
    engine = create_engine(driver_url(database), pool_size=1, max_overflow=0)
    with connected(database) as listening:
        listening.execute("LISTEN outboxq_outboxq")
        listening.execute("SELECT pg_advisory_lock(hashtext('outboxq_outboxq'), hashtext('accounts'))")
        with Session(engine, twophase=True) as session:
            add_job(session, credit, cents=1)
            session.commit()
        with Session(engine) as session:
            add_job(session, credit, cents=2)
            session.commit()
        assert Sleeper(listening).wakes() == ["accounts"]
    assert stored() == [{"cents": 1}, {"cents": 2}]
    engine.dispose()


@pytest.mark.usefixtures("prepared_transactions_allowed")
def test_preparing_after_a_notification_fails(database: Database) -> None:
    """Why a two-phase session suppresses it: what PostgreSQL does with a job that was added in SQL."""
    with connected(database) as sleeping, connected(database) as preparing:
        sleeping.execute("SELECT pg_advisory_lock(hashtext('outboxq_outboxq'), hashtext('accounts'))")
        preparing.execute("BEGIN")
        preparing.execute("SELECT outboxq.add_job('credit', queue => 'accounts')")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="cannot PREPARE a transaction that has executed"):
            preparing.execute(f"PREPARE TRANSACTION '{secrets.token_hex(8)}'")


@pytest.fixture(scope="module")
def producer_url(database: Database) -> Iterator[str]:
    """A role that may use the schema and insert jobs, nothing else."""
    role, password = f"outboxq_producer_{secrets.token_hex(6)}", secrets.token_hex(12)
    with connected(database) as connection:
        try:
            connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{password}'")
        except psycopg.errors.InsufficientPrivilege:
            pytest.skip("this server does not let us make roles")
        try:
            connection.execute(f"GRANT USAGE ON SCHEMA outboxq TO {role}")
            connection.execute(f"GRANT INSERT ON outboxq.job TO {role}")
            yield (
                make_url(database.url)
                .set(drivername="postgresql+psycopg", username=role, password=password)
                .render_as_string(hide_password=False)
            )
        finally:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")


@pytest.fixture
def producer(producer_url: str) -> Iterator[Engine]:
    engine = create_engine(producer_url)
    yield engine
    engine.dispose()


def test_a_producer_needs_no_more_than_insert(producer: Engine, stored: Stored, sleeper: Sleeper | None) -> None:
    """Through a session, with every option, one by one and in bulk; the trigger wakes a relay that sleeps."""
    with Session(producer) as session:
        add_job(session, credit.options(priority=5, headers={"a": "b"}, max_attempts=2), cents=1)
        session.commit()
        for cents in range(2, 5):
            add_job(session, credit, cents=cents)
        session.commit()
    assert stored() == [{"cents": cents} for cents in range(1, 5)]
    if sleeper is not None:
        assert sleeper.wakes() == ["accounts", "accounts"]


def test_a_producer_in_sql_needs_no_more_than_insert(producer: Engine, stored: Stored, sleeper: Sleeper | None) -> None:
    """SELECT outboxq.add_job(...), for triggers and other languages."""
    with producer.begin() as connection:
        call = """SELECT outboxq.add_job('credit', '{"cents": 7}', 'accounts', delay => '1 hour', priority => 3)"""
        job_id = connection.execute(text(call)).scalar_one()
    assert job_id.version == 7
    assert stored() == [{"cents": 7}]
    if sleeper is not None:
        assert sleeper.wakes() == ["accounts"]


def test_a_producer_on_asyncpg_needs_no_more_than_insert(producer_url: str, stored: Stored) -> None:
    """asyncpg prepares its statements; no type is looked up in a table that the role may not read."""

    async def produce() -> None:
        engine = create_async_engine(make_url(producer_url).set(drivername="postgresql+asyncpg"))
        async with AsyncSession(engine) as session, session.begin():
            add_job(session, credit, cents=1)
        await engine.dispose()

    asyncio.run(produce())
    assert stored() == [{"cents": 1}]


def test_a_producer_can_neither_read_nor_change_jobs(producer: Engine, stored: Stored) -> None:
    """The role of these tests has no right that would hide a missing one."""
    for statement in ("SELECT 1 FROM outboxq.job", "DELETE FROM outboxq.job", "UPDATE outboxq.job SET priority = 1"):
        with producer.connect() as connection, pytest.raises(DBAPIError, match="permission denied for table job"):
            connection.execute(text(statement))
