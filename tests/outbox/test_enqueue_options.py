"""How a job is stored: its options, its order, its arguments as jsonb, and in which schema."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outboxq import Context, Jobs, OutboxSession, add_job, add_jobs, external
from outboxq.errors import SchemaError
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database

jobs = Jobs()
ship = external("ship", queue="depot")
Sessions = sessionmaker[OutboxSession]


@jobs.handler(queue="accounts")
def credit(ctx: Context, cents: int = 0) -> None: ...


def rows(engine: Engine, schema: str = "outboxq") -> list[dict[str, object]]:
    with engine.connect() as connection:
        query = text(f"SELECT *, clock_timestamp() AS now FROM {schema}.job ORDER BY seq")
        return [dict(row) for row in connection.execute(query).mappings()]


def test_a_job_without_options_is_ready_at_once(sessions: Sessions, engine: Engine) -> None:
    """And leaves the number of attempts to its handler."""
    with sessions.begin() as session:
        handle = session.add_job(credit, cents=5)
    (row,) = rows(engine)
    expected = {
        "id": handle.id,
        "kind": handle.kind,
        "queue": handle.queue,
        "args": {"cents": 5},
        "headers": {},
        "priority": 0,
        "state": "ready",
        "attempt": 0,
        "max_attempts": None,
        "errors": [],
        "unique_key": None,
        "group_key": None,
    }
    assert row | expected == row
    assert (handle.kind, handle.queue) == ("credit", "accounts")
    assert row["run_at"] <= row["now"]


def test_options_are_stored_with_the_job(sessions: Sessions, engine: Engine) -> None:
    """Priority, attempts and headers, for a handler and for an external kind."""
    with sessions.begin() as session:
        for kind in (credit, ship):
            options = kind.options(priority=-5, max_attempts=3, headers={"trace": "a'b", "ключ": "📨"})
            session.add_job(options, cents=1)
    first, second = rows(engine)
    for row in (first, second):
        assert (row["priority"], row["max_attempts"]) == (-5, 3)
        assert row["headers"] == {"trace": "a'b", "ключ": "📨"}
    assert (second["kind"], second["queue"], second["args"]) == ("ship", "depot", {"cents": 1})


@pytest.mark.parametrize("delay", [timedelta(hours=1), timedelta(microseconds=1), timedelta(days=36_500)], ids=str)
def test_a_delay_counts_from_the_databases_clock(sessions: Sessions, engine: Engine, delay: timedelta) -> None:
    """The INSERT itself adds it to clock_timestamp(), so that no producer's clock matters."""
    statements: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    with engine.connect() as connection:
        before = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
    with sessions.begin() as session:
        session.add_job(credit.options(delay=delay))
    (row,) = rows(engine)
    assert row["state"] == "scheduled"
    assert before + delay <= row["run_at"] <= row["now"] + delay
    (insert,) = [statement for statement in statements if statement.startswith("INSERT")]
    assert "clock_timestamp() + " in insert


def test_a_run_at_is_stored_to_the_microsecond(sessions: Sessions, engine: Engine) -> None:
    """In whatever zone it was given; a time that is past is due."""
    moments = [datetime(2031, 2, 3, 4, 5, 6, 789_012, tzinfo=UTC), datetime(2001, 1, 1, tzinfo=UTC)]
    with sessions.begin() as session:
        for moment in moments:
            session.add_job(credit.options(run_at=moment.astimezone()))
    assert [(row["state"], row["run_at"]) for row in rows(engine)] == [("scheduled", moment) for moment in moments]


def test_no_delay_is_no_schedule(sessions: Sessions, engine: Engine) -> None:
    """timedelta(0) makes an ordinary job, claimed from the ready ones in their order."""
    with sessions.begin() as session:
        session.add_job(credit.options(delay=timedelta(0)))
    assert [row["state"] for row in rows(engine)] == ["ready"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_options_are_stored_through_async_drivers(outboxq_database: Database, engine: Engine, driver: str) -> None:
    """asyncpg binds by type: an interval, a timestamp, smallints and jsonb."""
    moment = datetime(2031, 2, 3, 4, 5, 6, 789_012, tzinfo=UTC)

    async def produce() -> None:
        async_engine = create_async_engine(make_url(outboxq_database.url).set(drivername=f"postgresql+{driver}"))
        async with AsyncSession(async_engine) as session, session.begin():
            add_job(session, credit.options(delay=timedelta(hours=1), priority=7, max_attempts=2, headers={"a": "b"}))
            add_job(session, ship.options(run_at=moment), payload={"deep": [1, None, "x"]})
            add_jobs(session, [credit.job(cents) for cents in range(50)])
        await async_engine.dispose()

    asyncio.run(produce())
    stored = {row["id"]: row for row in rows(engine)}
    delayed = next(row for row in stored.values() if row["priority"])
    assert (delayed["state"], delayed["max_attempts"], delayed["headers"]) == ("scheduled", 2, {"a": "b"})
    at = next(row for row in stored.values() if row["kind"] == "ship")
    assert (at["state"], at["run_at"], at["args"]) == ("scheduled", moment, {"payload": {"deep": [1, None, "x"]}})
    assert [row["args"]["cents"] for row in stored.values() if row["args"].get("cents") is not None] == list(range(50))


def test_jobs_keep_the_order_in_which_they_were_added(sessions: Sessions, engine: Engine) -> None:
    """`seq`, the order in which they are claimed, follows the calls, over savepoints and flushes too."""
    with sessions.begin() as session:
        session.add_jobs(credit.job(cents) for cents in range(100))
        with session.begin_nested():
            session.add_job(credit, 100)
        session.flush()
        session.add_job(credit, 101)
    assert [row["args"]["cents"] for row in rows(engine)] == list(range(102))


def test_a_job_is_no_object_of_the_session(sessions: Sessions, engine: Engine) -> None:
    """The handle is a plain value, still readable when the session is closed and its rows are gone."""
    with sessions() as session:
        handle = session.add_job(credit, cents=1)
        session.commit()
        session.execute(text("DELETE FROM outboxq.job"))
        session.commit()
        session.add_job(credit, cents=2)
        session.commit()
    assert str(handle.id)
    assert [row["args"] for row in rows(engine)] == [{"cents": 2}]


def test_a_flush_sends_one_statement_for_many_jobs(sessions: Sessions, engine: Engine) -> None:
    """Bulk enqueue is batched by SQLAlchemy, without RETURNING, which a producer may not have the right for."""
    statements: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    with sessions.begin() as session:
        session.add_jobs(credit.job(cents) for cents in range(1000))
    inserts = [statement for statement in statements if statement.startswith("INSERT")]
    assert len(inserts) == 1
    assert "RETURNING" not in inserts[0]


@pytest.mark.parametrize("schema", ["jobs", 'my "jobs"'])
def test_a_schema_translate_map_leads_jobs_to_another_schema(
    outboxq_database: Database, engine: Engine, schema: str
) -> None:
    """Through the engine's options, for plain jobs and for one that waits, sync and async."""
    with engine.begin() as connection:
        migrate(connection, schema=schema)
    translate = {"schema_translate_map": {"outboxq": schema}}
    with Session(engine.execution_options(**translate)) as session, session.begin():
        add_job(session, credit.options(delay=timedelta(hours=1)), cents=1)

    async def produce() -> None:
        async_engine = create_async_engine(make_url(outboxq_database.url).set(drivername="postgresql+asyncpg"))
        async with AsyncSession(async_engine.execution_options(**translate)) as session, session.begin():
            add_job(session, credit, cents=2)
        await async_engine.dispose()

    asyncio.run(produce())
    quoted = engine.dialect.identifier_preparer.quote_identifier(schema)
    assert [row["args"] for row in rows(engine, quoted)] == [{"cents": 1}, {"cents": 2}]
    assert rows(engine) == []


def test_engines_made_for_a_moment_leave_nothing_behind(outboxq_database: Database) -> None:
    """A web application may call engine.execution_options() in each request."""
    engine = create_engine(outboxq_database.url)
    for number in range(20):
        translated = engine.execution_options(schema_translate_map={"outboxq": f"tenant{number}"})
        with Session(translated) as session:
            add_job(session, credit)
            with pytest.raises(SchemaError):
                session.flush()
    assert len(list(engine.dialect.dispatch.handle_error)) == 1
    engine.dispose()
