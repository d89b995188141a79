"""What a handler sets, locks or creates on its connection never meets a later transaction of its slot."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.util import await_only

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.postgres import Database

BOTH_FLAVOURS = pytest.mark.parametrize("flavour", ["sync", "async"])
BOTH_CLAIMS = pytest.mark.parametrize("claim", ["transaction", "lease"])
BATCH_SIZES = pytest.mark.parametrize("batch_size", [1, 10])
OTHER_ROLE = "outboxq_test_other_role"
FUNCTIONS = [
    "CREATE FUNCTION sets() RETURNS int LANGUAGE plpgsql AS $$ BEGIN SET lock_timeout = 4321; RETURN 1; END $$",
    "CREATE PROCEDURE calls() LANGUAGE plpgsql AS $$ BEGIN SET lock_timeout = 4321; END $$",
    "CREATE FUNCTION doubles(given int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 2 * given'",
    "CREATE FUNCTION triples(given int) RETURNS int LANGUAGE sql VOLATILE AS 'SELECT 3 * given'",
    "CREATE AGGREGATE adds(int) (SFUNC = int4pl, STYPE = int, INITCOND = '0')",
]
# All that a session has beside its transaction. What names nothing here is read from the settings.
STATE = """
SELECT coalesce((SELECT string_agg(name || '=' || setting, E'\\n' ORDER BY name) FROM pg_settings
                 WHERE source = 'session' OR name IN ('application_name', 'client_encoding', 'search_path')), '')
    || E'\\nown=' || coalesce(current_setting('test.own', true), '')
    || E'\\nleft=' || coalesce(current_setting('test.carried', true), '')
    || E'\\nrole=' || current_user || ' ' || session_user
    || E'\\nlocks=' || (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())
    || E'\\ntemporary=' || (SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema())
    || E'\\nlistens=' || (SELECT count(*) FROM pg_listening_channels())
    || E'\\nprepared=' || (SELECT count(*) FROM pg_prepared_statements WHERE name = 'left_behind')
    || E'\\ncursors=' || (SELECT count(*) FROM pg_cursors WHERE name = 'left_behind')
"""
# One for each kind of state that a session has.
STATEMENTS: dict[str, Any] = {
    "search_path": text("SET search_path = pg_temp"),
    "session_replication_role": text("SET session_replication_role = replica"),
    "row_security": text("SET row_security = off"),
    "synchronous_commit": text("SET synchronous_commit = off"),
    "time zone": text("SET TIME ZONE 'Asia/Tokyo'"),
    "DateStyle": text("SET DateStyle = 'German'"),
    "transaction default": text("SET default_transaction_deferrable = on"),
    "session characteristics": text("SET SESSION CHARACTERISTICS AS TRANSACTION DEFERRABLE"),
    "time-out": text("SET statement_timeout = 123456"),
    "application_name": text("SET application_name = 'left'"),
    "client_encoding": text("SET client_encoding = 'LATIN1'"),
    "own setting": text("SET test.carried = 'left'"),
    "role": text(f"SET ROLE {OTHER_ROLE}"),
    "session authorization": text(f"SET SESSION AUTHORIZATION {OTHER_ROLE}"),
    "set_config": select(func.set_config("test.carried", "left", False)),
    "set_config as text": text("SELECT set_config('test.carried', 'left', false)"),
    "view of settings": text("UPDATE pg_settings SET setting = '77' WHERE name = 'lock_timeout'"),
    "reset": text("RESET test.own"),
    "session lock": select(func.pg_advisory_lock(4711)),
    "temporary table": text("CREATE TEMPORARY TABLE left_behind (a int)"),
    "temporary table of rows": text("SELECT 1 AS a INTO TEMPORARY left_behind"),
    "listen": text("LISTEN left_behind"),
    "prepared statement": text("PREPARE left_behind AS SELECT 1"),
    "cursor": text("DECLARE left_behind CURSOR WITH HOLD FOR SELECT 1"),
    "block": text("DO $$ BEGIN SET lock_timeout = 4321; END $$"),
    "function": select(func.sets()),
    "procedure": text("CALL calls()"),
    "several at once": text("SELECT 1; SET lock_timeout = 4321"),
    "behind a comment": text("/* a /* b */ c */ SET lock_timeout = 4321"),
}


def _by_drivers_connection(connection: Connection) -> None:
    connection.connection.cursor().execute("SET lock_timeout = 4321")


def _by_cursor_of_result(connection: Connection) -> None:
    connection.execute(select(1)).cursor.execute("SET lock_timeout = 4321")


def _by_connection_of_cursor(connection: Connection) -> None:
    cursor = connection.execute(select(1)).cursor
    # SQLAlchemy's adapter of an async one names what it wraps.
    sent = getattr(cursor, "_cursor", cursor).connection.execute("SET lock_timeout = 4321")
    if asyncio.iscoroutine(sent):
        await_only(sent)


def _by_execution_options(connection: Connection) -> None:
    connection.execution_options(schema_translate_map={None: "nowhere"})


def _and_fails(connection: Connection) -> None:
    connection.execute(select(func.pg_advisory_lock(4711)))
    raise ValueError("no luck")


STEPS: dict[str, Callable[[Connection], None]] = {
    "the driver's connection": _by_drivers_connection,
    "the cursor of a result": _by_cursor_of_result,
    "the connection of a cursor": _by_connection_of_cursor,
    "execution options": _by_execution_options,
    "a handler that fails": _and_fails,
}
KINDS = [*STATEMENTS, *STEPS]


class Ledger:
    """What the handlers saw, in this process."""

    def __init__(self) -> None:
        self.states: dict[str, list[str]] = {}
        self.backends: list[int] = []
        self.attempts: list[int] = []

    def look(self, connection: Connection, name: str) -> None:
        options = f"\noptions={dict(connection.get_execution_options()).get('schema_translate_map')}"
        state = connection.exec_driver_sql(STATE).scalar_one() + options
        self.states.setdefault(name, []).append(state)

    def leave(self, connection: Connection, kind: str) -> None:
        if kind in STATEMENTS:
            connection.execute(STATEMENTS[kind])
        else:
            STEPS[kind](connection)

    def touch(self, connection: Connection) -> None:
        self.backends.append(connection.execute(select(func.pg_backend_pid())).scalar_one())


def _handlers(flavour: str, claim: Any) -> tuple[Jobs, Ledger]:
    """Handlers of a queue, one for each step of a ledger."""
    jobs, ledger = Jobs(), Ledger()
    options: dict[str, Any] = {"queue": "state", "claim": claim, "retry": Backoff(max_attempts=1)}
    if flavour == "sync":

        @jobs.handler(kind="look", **options)
        def look(ctx: Context, name: str) -> None:
            ledger.attempts.append(ctx.job.attempt)
            ledger.look(ctx.session.connection(), name)

        @jobs.handler(kind="leave", **options)
        def leave(ctx: Context, name: str) -> None:
            ledger.leave(ctx.session.connection(), name)

        @jobs.handler(kind="touch", **options)
        def touch(ctx: Context, name: str) -> None:
            ledger.touch(ctx.session.connection())

    else:

        @jobs.handler(kind="look", **options)
        async def look_too(ctx: AsyncContext, name: str) -> None:
            ledger.attempts.append(ctx.job.attempt)
            await (await ctx.session.connection()).run_sync(ledger.look, name)

        @jobs.handler(kind="leave", **options)
        async def leave_too(ctx: AsyncContext, name: str) -> None:
            await (await ctx.session.connection()).run_sync(ledger.leave, name)

        @jobs.handler(kind="touch", **options)
        async def touch_too(ctx: AsyncContext, name: str) -> None:
            await (await ctx.session.connection()).run_sync(ledger.touch)

    return jobs, ledger


def _add(sessions: sessionmaker[OutboxSession], jobs: Jobs, *calls: tuple[str, str]) -> None:
    handlers = jobs.resolve().handlers
    with sessions.begin() as session:
        for kind, name in calls:
            session.add_job(handlers[kind], name=name)


@pytest.fixture
def drain_with_listener(outboxq_database: Database) -> Iterator[Callable[..., list[int]]]:
    """Drains with the user's own engines, whose listeners set up each connection; each one is counted."""
    with ExitStack() as stack:

        def drain(jobs: Jobs, flavour: str, **settings: object) -> list[int]:
            connects: list[int] = []

            def on_connect(driver: Any, _record: object) -> None:
                cursor = driver.cursor()
                cursor.execute("SET test.own = 'mine'")
                cursor.close()
                driver.commit()
                connects.append(1)

            engine: Engine | AsyncEngine
            if flavour == "sync":
                engine = create_engine(outboxq_database.url)
                event.listen(engine, "connect", on_connect)
                stack.callback(engine.dispose)
            else:
                engine = create_async_engine(outboxq_database.url)
                event.listen(engine.sync_engine, "connect", on_connect)
            config = RelayConfig(slots_per_queue=1, listen=False, prune_seconds=0, **settings)
            Relay(engine, jobs, config, hooks=()).drain()
            if isinstance(engine, AsyncEngine):
                asyncio.run(engine.dispose(close=False))
            return connects

        yield drain


@pytest.fixture
def other_role(engine: Engine) -> Iterator[None]:
    """A role that may do everything, so that what a handler's own transaction still has to do works."""
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {OTHER_ROLE} SUPERUSER"))
    yield
    with engine.begin() as connection:
        connection.execute(text(f"DROP ROLE {OTHER_ROLE}"))


@pytest.mark.usefixtures("other_role")
@BATCH_SIZES
@BOTH_CLAIMS
@BOTH_FLAVOURS
def test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch(
    flavour: str,
    claim: str,
    batch_size: int,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain_with_listener: Callable[..., list[int]],
) -> None:
    """Whatever its kind and whatever became of its job: the next one finds what the first one of the slot found."""
    with engine.begin() as connection:
        for statement in FUNCTIONS:
            connection.execute(text(statement))
    jobs, ledger = _handlers(flavour, claim)
    # As many as a claim takes: inside of one batch of transaction mode the connection is shared.
    more = [("touch", "")] * (batch_size - 1)
    calls = [("look", "first"), *more]
    for kind in KINDS:
        calls += [("leave", kind), *more, ("look", kind), *more]
    _add(sessions, jobs, *calls)
    drain_with_listener(jobs, flavour, batch_size=batch_size)
    (first,) = ledger.states.pop("first")
    assert "own=mine" in first
    assert {kind: states for kind, states in ledger.states.items() if states != [first]} == {}
    assert list(ledger.states) == KINDS
    assert set(ledger.attempts) == {1}
    with engine.connect() as connection:
        reasons = connection.execute(text("SELECT kind, args ->> 'name', reason FROM outboxq.dead_job")).all()
    assert [tuple(row[:2]) for row in reasons] == [("leave", "a handler that fails")], reasons
