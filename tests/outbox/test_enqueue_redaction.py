"""Errors as PostgreSQL and its drivers really raise them leave no row, value or parameter in the record."""

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outboxq.execution.failure import describe_failure
from outboxq.job import Job
from outboxq.postgres import Database, Server
from tests.support.own_tables import database_with

SECRET = "ann@example.org"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
# The values below are not the job's arguments: nothing but the rules for database errors takes them out.
JOB = Job(UUID(int=7), "q", "kind", "{}", "{}", 0, 1, None, 0, 0, None, None, "[]", NOW, NOW, 1)


class Base(DeclarativeBase):
    pass


class Person(Base):
    __tablename__ = "enqueue_redaction"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(unique=True)


@pytest.fixture(scope="module")
def database(outboxq_server: Server, outboxq_template: str) -> Iterator[Database]:
    with database_with(Base.metadata, outboxq_server, outboxq_template) as database:
        engine = create_engine(database.url)
        with Session(engine) as session:
            session.add(Person(email=SECRET))
            session.commit()
        engine.dispose()
        yield database


STATEMENTS = {
    "unique violation": ("INSERT INTO enqueue_redaction (email) VALUES (:value)", "23505"),
    "not-null violation": ("INSERT INTO enqueue_redaction (id, email) VALUES (NULL, :value)", "23502"),
    "text that is no number": ("SELECT CAST(CAST(:value AS text) AS integer)", "22P02"),
    "text that is no date": ("SELECT CAST(CAST(:value AS text) AS date)", "22007"),
    "no such column": ("SELECT nothing FROM enqueue_redaction WHERE email = :value", "42703"),
}


def recorded(error: BaseException) -> str:
    record = describe_failure(error, JOB).record
    assert SECRET not in record.as_json()
    return record.message


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_database_error_leaves_no_value(database: Database, driver: str, statement: str) -> None:
    """The SQLSTATE or the constraint is left, also where a handler takes the text over into an error of its own."""
    engine: Engine = create_engine(make_url(database.url).set(drivername=f"postgresql+{driver}"))
    query, sqlstate = STATEMENTS[statement]
    with engine.connect() as connection, pytest.raises(DBAPIError, match=SECRET) as raised:
        connection.execute(text(query), {"value": SECRET})
    engine.dispose()
    message = recorded(raised.value)
    if driver == "psycopg":
        assert sqlstate in message
    own = RuntimeError(f"no luck: {raised.value}")
    own.__cause__ = raised.value
    assert recorded(own).startswith("no luck: ")


@pytest.mark.parametrize("statement", STATEMENTS)
def test_an_error_of_asyncpg_leaves_no_value(database: Database, statement: str) -> None:
    """A handler may have an engine of its own."""

    async def fail() -> BaseException:
        engine = create_async_engine(make_url(database.url).set(drivername="postgresql+asyncpg"))
        try:
            async with engine.connect() as connection:
                await connection.execute(text(STATEMENTS[statement][0]), {"value": SECRET})
        except Exception as error:  # noqa: BLE001  # looked at by the caller
            return error
        finally:
            await engine.dispose()
        raise AssertionError("nothing failed")

    assert recorded(asyncio.run(fail()))


def _flush(session: Session) -> None:
    session.flush()


def _go_on_after_a_failed_flush(session: Session) -> None:
    with pytest.raises(Exception, match="enqueue_redaction_email_key"):
        session.flush()
    session.execute(text("SELECT 1"))


@pytest.mark.parametrize("work", [_flush, _go_on_after_a_failed_flush])
def test_a_failed_flush_leaves_no_value(database: Database, work: Callable[[Session], None]) -> None:
    """PendingRollbackError quotes the first error whole, with its parameters."""
    engine = create_engine(database.url)
    with Session(engine) as session:
        session.add(Person(email=SECRET))
        with pytest.raises(Exception, match=SECRET) as raised:
            work(session)
        assert isinstance(raised.value, PendingRollbackError) is (work is _go_on_after_a_failed_flush)
        assert recorded(raised.value)
    engine.dispose()


def test_a_job_that_is_logged_as_json_shows_no_arguments() -> None:
    """What cannot be serialized is shown by its repr; a tuple would be shown value by value."""
    job = msgspec.structs.replace(JOB, args=f'{{"secret": "{SECRET}"}}', headers=f'{{"secret": "{SECRET}"}}')
    assert SECRET not in json.dumps({"job": job}, default=repr)
