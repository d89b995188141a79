"""What a handler sets, locks or creates on its connection never meets a later transaction of its slot."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import (
    Connection,
    Engine,
    Integer,
    Numeric,
    String,
    cast,
    column,
    create_engine,
    delete,
    event,
    func,
    insert,
    select,
    text,
    true,
    values,
)
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only

from outboxq import (
    AsyncBatchContext,
    AsyncContext,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    Jobs,
    OutboxSession,
    Relay,
    RelayConfig,
    external,
)
from outboxq.database import sql_text
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from tests.support.app import Account, Effect
from tests.support.limits import with_limits
from tests.support.matrices import diagonal

BOTH_FLAVOURS = pytest.mark.parametrize("flavour", ["sync", "async"])
BOTH_CLAIMS = pytest.mark.parametrize("claim", ["transaction", "lease"])
OTHER_ROLE = "outboxq_test_other_role"
FUNCTIONS = [
    "CREATE FUNCTION triples(given int) RETURNS int LANGUAGE sql VOLATILE AS 'SELECT 3 * given'",
    "CREATE PROCEDURE does(given int) LANGUAGE sql AS 'SELECT 3 * given'",
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
    "time-out": text("SET idle_session_timeout = 123456"),
    "application_name": text("SET application_name = 'left'"),
    "client_encoding": text("SET client_encoding = 'LATIN1'"),
    "own setting": text("SET test.carried = 'left'"),
    "role": text(f"SET ROLE {OTHER_ROLE}"),
    "session authorization": text(f"SET SESSION AUTHORIZATION {OTHER_ROLE}"),
    "set_config": select(func.set_config("test.carried", "left", False)),
    "set_config as text": text("SELECT set_config('test.carried', 'left', false)"),
    "view of settings": text("UPDATE pg_settings SET setting = '77' WHERE name = 'vacuum_cost_limit'"),
    "reset": text("RESET test.own"),
    "session lock": select(func.pg_advisory_lock(4711)),
    "session lock if it is free": text("SELECT pg_catalog.pg_try_advisory_lock_shared(4711)"),
    "temporary table": text("CREATE TEMPORARY TABLE left_behind (a int)"),
    "temporary table of rows": text("SELECT 1 AS a INTO TEMPORARY left_behind"),
    "listen": text("LISTEN left_behind"),
    "prepared statement": text("PREPARE left_behind AS SELECT 1"),
    "cursor": text("DECLARE left_behind CURSOR WITH HOLD FOR SELECT 1"),
    "block": text("DO $$ BEGIN SET vacuum_cost_limit = 4321; END $$"),
    "several at once": text("SELECT 1; SET vacuum_cost_limit = 4321"),
    "behind a comment": text("/* a /* b */ c */ SET vacuum_cost_limit = 4321"),
}


def _by_drivers_connection(connection: Connection) -> None:
    connection.connection.cursor().execute("SET vacuum_cost_limit = 4321")


def _by_cursor_of_result(connection: Connection) -> None:
    connection.execute(select(1)).cursor.execute("SET vacuum_cost_limit = 4321")


def _by_connection_of_cursor(connection: Connection) -> None:
    cursor = connection.execute(select(1)).cursor
    # SQLAlchemy's adapter of an async one names what it wraps.
    sent = getattr(cursor, "_cursor", cursor).connection.execute("SET vacuum_cost_limit = 4321")
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


@dataclass
class Named:
    name: str


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


def _handlers(flavour: str, style: str, batch_size: int) -> tuple[Jobs, Ledger]:
    """Handlers of a queue, one for each step of a ledger. `style`: a claim mode, or what their jobs share."""
    jobs, ledger = Jobs(), Ledger()
    options: dict[str, Any] = {"queue": "state", "retry": Backoff(max_attempts=1)}
    if style == "batch":
        _add_batch_handlers(jobs, ledger, flavour, {**options, "max_size": batch_size})
        return jobs, ledger
    options |= {"batchable": True} if style == "batchable" else {"claim": style}
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


def _add_batch_handlers(jobs: Jobs, ledger: Ledger, flavour: str, options: dict[str, Any]) -> None:

    def look(connection: Connection, items: Sequence[BatchItem[Named]]) -> None:
        for item in items:
            ledger.attempts.append(item.job.attempt)
            ledger.look(connection, item.args.name)

    def leave(connection: Connection, items: Sequence[BatchItem[Named]]) -> None:
        for item in items:
            ledger.leave(connection, item.args.name)

    def touch(connection: Connection, items: Sequence[BatchItem[Named]]) -> None:
        ledger.touch(connection)

    def add(step: Callable[[Connection, Sequence[BatchItem[Named]]], None]) -> None:
        if flavour == "sync":

            @jobs.batch_handler(Named, kind=step.__name__, **options)
            def call(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
                step(ctx.session.connection(), items)

        else:

            @jobs.batch_handler(Named, kind=step.__name__, **options)
            async def call_too(ctx: AsyncBatchContext, items: Sequence[BatchItem[Named]]) -> None:
                await (await ctx.session.connection()).run_sync(step, items)

    for step in (look, leave, touch):
        add(step)


def _add(sessions: sessionmaker[OutboxSession], jobs: Jobs, *calls: tuple[str, str]) -> None:
    handlers = jobs.resolve().handlers
    with sessions.begin() as session:
        for kind, name in calls:
            session.add_job(handlers[kind], name=name)


@pytest.fixture
def drain_with_listener(outboxq_database: Database, relay_limits: RelayLimits) -> Iterator[Callable[..., list[int]]]:
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
            with_limits(Relay(engine, jobs, config, hooks=()), relay_limits).drain()
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


@pytest.mark.wide
@pytest.mark.usefixtures("other_role")
@diagonal(
    BOTH_FLAVOURS,
    pytest.mark.parametrize(
        ("style", "batch_size"),
        [("transaction", 1), ("transaction", 10), ("lease", 1), ("batchable", 10), ("batch", 10)],
    ),
)
def test_nothing_that_a_handler_leaves_on_its_connection_meets_a_later_batch(
    flavour: str,
    style: str,
    batch_size: int,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain_with_listener: Callable[..., list[int]],
) -> None:
    """Whatever its kind and whatever became of its job: the next one finds what the first one of the slot found."""
    jobs, ledger = _handlers(flavour, style, batch_size)
    # As many as a claim takes: inside of one batch of transaction mode the connection is shared. Under a lease the very
    # next job has the connection, as there is one slot.
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


# What handlers send day by day, through the ORM, Core and text().
HARMLESS: dict[str, Callable[[Session], object]] = {
    "get and change": lambda session: setattr(session.get_one(Account, 1), "balance", Account.balance + 1),
    "insert": lambda session: session.add_all([Effect(name="a"), Effect(name="b")]),
    "insert in pieces": lambda session: session.execute(insert(Effect), [{"name": f"{n}"} for n in range(3_000)]),
    "returning": lambda session: session.scalars(
        insert(Effect).returning(Effect.row), [{"name": "a"}, {"name": "b"}]
    ).all(),
    "upsert": lambda session: session.execute(
        upsert(Account)
        .values(id=1, balance=1)
        .on_conflict_do_update(index_elements=["id"], set_={"balance": func.coalesce(Account.balance, 0) + 1})
    ),
    "delete": lambda session: session.execute(delete(Effect).where(Effect.name.in_(["a", "b"]))),
    "aggregates": lambda session: session.execute(
        select(func.count(), func.sum(Account.balance), func.max(Account.id).filter(Account.id > 0), func.now())
        .group_by(Account.id)
        .having(func.count() > 0)
    ).all(),
    "windows": lambda session: session.execute(
        select(func.row_number().over(partition_by=Account.id, order_by=Account.balance))
    ).all(),
    "casts": lambda session: session.execute(select(cast(Account.id, Numeric(10, 2)), cast("a", String(30)))).all(),
    "CTEs": lambda session: session.execute(
        select(select(Account.id).cte("some", recursive=True).union_all(select(Account.id)))
    ).all(),
    "values": lambda session: session.execute(
        select(values(column("a", Integer), name="given").data([(1,), (2,)]))
    ).all(),
    "functions with columns": lambda session: session.execute(
        select(func.jsonb_array_elements(text("'[1]'::jsonb")).table_valued("value").render_derived())
    ).all(),
    "lateral": lambda session: session.execute(
        select(Account.id).join(select(func.unnest(array([1, 2]))).lateral("them"), true())
    ).all(),
    "locks": lambda session: session.scalars(select(Account).with_for_update(key_share=True, of=Account)).all(),
    "a lock of the transaction": lambda session: session.execute(select(func.pg_advisory_xact_lock(4711))),
    "a savepoint": lambda session: session.begin_nested().rollback(),
    "a stream": lambda session: session.execute(select(Account).execution_options(yield_per=1)).all(),
    "a text": lambda session: session.execute(
        text("UPDATE account SET balance = balance + :cents WHERE id = :id -- by text\n;"), {"cents": 1, "id": 1}
    ),
    "a setting of the transaction": lambda session: session.execute(text("SET LOCAL vacuum_cost_limit = 4321")),
    "a setting of the transaction by value": lambda session: session.execute(
        select(func.set_config("test.carried", "given", True))
    ),
    "the same as text": lambda session: session.execute(
        text("SELECT set_config('test.carried', :value, true)"), {"value": "given"}
    ),
    "a statement of the driver's": lambda session: session.connection().exec_driver_sql(
        "SELECT count(*) FROM account WHERE id = %(id)s", {"id": 1}
    ),
    "its own options": lambda session: session.connection().execution_options(schema_translate_map={"a": "b"}),
    "another job": lambda session: session.add_job(external("nowhere", queue="nowhere")),
}


@pytest.mark.wide
@diagonal(
    BOTH_FLAVOURS,
    BOTH_CLAIMS,
)
def test_what_handlers_send_day_by_day_costs_no_connection(
    flavour: str,
    claim: str,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain_with_listener: Callable[..., list[int]],
) -> None:
    """Statements on rows, by the ORM, Core or text, leave their slot the connection that it has."""
    with Session(engine) as session, session.begin():
        session.add(Account(id=1))
    backends: dict[str, int] = {}

    def step(session: Session, name: str) -> None:
        backends[name] = session.scalars(select(func.pg_backend_pid())).one()
        HARMLESS[name](session)
        session.flush()

    jobs = Jobs()
    options: dict[str, Any] = {"kind": "send", "queue": "state", "claim": claim, "retry": Backoff(max_attempts=1)}
    if flavour == "sync":

        @jobs.handler(**options)
        def send(ctx: Context, name: str) -> None:
            step(ctx.session, name)

    else:

        @jobs.handler(**options)
        async def send_too(ctx: AsyncContext, name: str) -> None:
            await ctx.session.run_sync(step, name)

    names = [*HARMLESS, *HARMLESS]
    _add(sessions, jobs, *(("send", name) for name in names))
    drain_with_listener(jobs, flavour)
    assert list(backends) == list(HARMLESS)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT args ->> 'name', reason FROM outboxq.dead_job")).all() == []
    # At each change of it the one before had left something.
    changed = [name for name, last in zip(names[1:], names, strict=False) if backends[name] != backends[last]]
    assert changed == []


@pytest.mark.first_and_last
@diagonal(
    BOTH_CLAIMS,
    pytest.mark.parametrize(
        ("called", "connections"),
        [("SELECT triples(1)", 1), ("CALL does(1)", 1), ("SELECT triples(1), pg_advisory_lock(1)", 10)],
    ),
)
def test_a_function_of_the_users_own_costs_no_connection(
    claim: Any,
    called: str,
    connections: int,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Callable[..., object],
) -> None:
    """A VOLATILE one neither: what it does to the session is its own business, and no catalog is read for it."""
    with engine.begin() as connection:
        for statement in FUNCTIONS:
            connection.execute(text(statement))
    jobs, ledger = Jobs(), Ledger()

    @jobs.handler(queue="state", claim=claim)
    def call(ctx: Context) -> None:
        ledger.touch(ctx.session.connection())
        ctx.session.execute(text(called))

    with sessions.begin() as session:
        session.add_jobs(call.job() for _ in range(10))
    drain(jobs, slots_per_queue=1)
    assert len(ledger.backends) == 10
    assert len(set(ledger.backends)) == connections


def test_the_reason_for_a_new_connection_is_logged_once(
    sessions: sessionmaker[OutboxSession], drain: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    """A user finds out why a handler is slow, and no value of a statement is in it."""
    jobs = Jobs()

    @jobs.handler(queue="state")
    def set_up(ctx: Context) -> None:
        ctx.session.execute(text("SET test.carried = 'a secret'"))

    with sessions.begin() as session:
        session.add_jobs(set_up.job() for _ in range(3))
    with caplog.at_level("INFO", "outboxq.relay"):
        drain(jobs, slots_per_queue=1)
    lines = [record.getMessage() for record in caplog.records if "outlive" in record.getMessage()]
    assert lines == ["a handler's SET may outlive its transaction: its slot takes a new connection"]


def leave_thread_behind(
    connections: list[Connection], next_runs: threading.Event, tried: threading.Event, errors: list[str]
) -> None:
    """One that writes by each connection while the next job runs, and notes what that raises."""

    def write() -> None:
        next_runs.wait(60)
        for connection in connections:
            try:
                connection.execute(insert(Effect).values(name="late"))
            except Exception as error:  # noqa: BLE001  # that it is one is what matters
                errors.append(type(error).__name__)
        tried.set()

    threading.Thread(target=write, daemon=True).start()


@pytest.mark.first_and_last
@pytest.mark.parametrize(("claim", "batch_size"), [("transaction", 1), ("transaction", 10), ("lease", 1)])
def test_a_thread_left_behind_cannot_use_its_connection_in_a_later_job(
    claim: Any, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., object]
) -> None:
    """What goes on after its handler has returned has a connection that is closed, whichever way it got it."""
    jobs, errors = Jobs(), []
    next_runs, tried = threading.Event(), threading.Event()
    options: dict[str, Any] = {"queue": "state", "claim": claim, "retry": Backoff(max_attempts=1)}

    @jobs.handler(**options)
    def leave_thread(ctx: Context) -> None:
        connection = ctx.session.connection()
        result = connection.execute(select(1))
        own = Session(connection, join_transaction_mode="rollback_only")
        found = [connection, result.connection, ctx.session.get_bind(), own.connection()]
        # The relay's own, by the transactions that it has begun on it.
        nested, root = connection.get_nested_transaction(), connection.get_transaction()
        assert nested is not None
        assert root is not None
        found += [nested.connection, root.connection]
        leave_thread_behind(found, next_runs, tried, errors)

    @jobs.handler(**options)
    def write_too(ctx: Context) -> None:
        ctx.session.add(Effect(name="mine"))
        ctx.session.flush()
        next_runs.set()
        assert tried.wait(60)

    with sessions.begin() as session:
        session.add_job(leave_thread)
        session.add_job(write_too)
    drain(jobs, batch_size=batch_size, slots_per_queue=1)
    with Session(engine) as session:
        assert list(session.scalars(select(Effect.name))) == ["mine"]
        assert session.execute(text("SELECT count(*) FROM outboxq.job")).scalar() == 0
    assert errors == ["ResourceClosedError"] * 4 + ["InvalidRequestError"] * 2


@diagonal(
    pytest.mark.parametrize("together", ["shared", "group"]),
    pytest.mark.parametrize("then", ["the same", "alone"]),
)
def test_what_runs_together_leaves_its_connection_to_no_job_behind_it(
    together: str, then: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., object]
) -> None:
    """In one claim: neither a thread that goes on, nor what was set on the connection."""
    jobs, errors = Jobs(), []
    next_runs, tried = threading.Event(), threading.Event()
    once = Backoff(max_attempts=1)

    def act(session: OutboxSession, name: str) -> None:
        if name == "leaves":
            connection = session.connection()
            found = [connection, connection.execute(select(1)).connection, session.get_bind()]
            leave_thread_behind(found, next_runs, tried, errors)
            connection.execution_options(schema_translate_map={None: "nowhere"})
        elif name == "next":
            session.add(Effect(name="mine"))
            session.flush()
            next_runs.set()
            assert tried.wait(60)

    if together == "shared":

        @jobs.handler(queue="state", batchable=True, retry=once)
        def several(ctx: Context, name: str) -> None:
            act(ctx.session, name)
    else:

        @jobs.batch_handler(Named, queue="state", max_size=2, retry=once)
        def several(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
            for item in items:
                act(ctx.session, item.args.name)

    @jobs.handler(queue="state", retry=once)
    def alone(ctx: Context, name: str) -> None:
        act(ctx.session, name)

    behind = several if then == "the same" else alone
    with sessions.begin() as session:
        session.add_jobs([several.job(name=name) for name in ("nothing", "leaves")])
        session.add_jobs([behind.job(name=name) for name in ("next", "nothing")])
    drain(jobs, batch_size=10, slots_per_queue=1)
    with Session(engine) as session:
        assert list(session.scalars(select(Effect.name))) == ["mine"]
        assert session.execute(text("SELECT count(*) FROM outboxq.dead_job")).scalar() == 0
    assert errors == ["ResourceClosedError"] * 3


def test_a_task_left_behind_cannot_use_its_connection_in_a_later_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., object]
) -> None:
    """As a thread."""
    jobs, errors, tasks = Jobs(), [], []
    next_runs, tried = asyncio.Event(), asyncio.Event()

    async def write(connection: AsyncConnection) -> None:
        await next_runs.wait()
        try:
            await connection.execute(insert(Effect).values(name="late"))
        except Exception as error:  # noqa: BLE001  # that it is one is what matters
            errors.append(type(error).__name__)
        tried.set()

    @jobs.handler(queue="state")
    async def leave_task(ctx: AsyncContext) -> None:
        tasks.append(asyncio.create_task(write(await ctx.session.connection())))

    @jobs.handler(queue="state")
    async def write_too(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name="mine"))
        await ctx.session.flush()
        next_runs.set()
        await tried.wait()

    with sessions.begin() as session:
        session.add_job(leave_task)
        session.add_job(write_too)
    drain(jobs, slots_per_queue=1)
    with Session(engine) as session:
        assert list(session.scalars(select(Effect.name))) == ["mine"]
    assert errors == ["ResourceClosedError"]


@pytest.mark.wide
def test_the_values_of_a_statement_are_not_read(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an INSERT in pieces, or an IN of any length, the text as it was compiled, once: reading takes time for each
    character."""
    jobs, read, left_by = Jobs(), list[str](), sql_text.left_by

    @jobs.handler(queue="q")
    def work(ctx: Context, number: int) -> None:
        ctx.session.add_all(Effect(name=f"{number} {each}") for each in range(1_000))
        ctx.session.flush()
        ctx.session.execute(select(Effect).where(Effect.name.in_([str(each) for each in range(number + 1)])))

    with sessions.begin() as session:
        session.add_jobs(work.job(number=number) for number in range(20))
    monkeypatch.setattr(sql_text, "left_by", lambda statement: read.append(statement) or left_by(statement))
    with mock.patch.dict(sql_text.readings, clear=True):
        Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1)).drain()
    assert len(read) == len(set(read)) <= 4
    assert max(map(len, read)) < 500
