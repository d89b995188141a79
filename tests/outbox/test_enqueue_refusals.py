"""What add_job refuses: at the call where no I/O is needed to see it, else at the flush before any row."""

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from outboxq import AsyncOutboxSession, Context, Jobs, OutboxSession, add_job, add_jobs, external
from outboxq.errors import ArgumentError, EnqueueError, JobTooLarge, SchemaError
from outboxq.postgres import Database, Server
from outboxq.tables import JobRow


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "enqueue_note"
    id: Mapped[int] = mapped_column(primary_key=True)


jobs = Jobs()
ship = external("ship", queue="depot")


@jobs.handler()
def credit(ctx: Context, cents: int, ratio: float | None = None, anything: object = None) -> None: ...


@jobs.handler()
def annotate(ctx: Context, note: Note) -> None: ...


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    """Afterwards nothing may be stored: every test here is about a refusal."""
    engine = create_engine(database.url)
    yield engine
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one() == 0
        assert connection.execute(text("SELECT count(*) FROM enqueue_note")).scalar_one() == 0
    engine.dispose()


@pytest.fixture
def make_engine(database: Database) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(driver: str = "psycopg", **options: Any) -> Engine:
        engines.append(create_engine(make_url(database.url).set(drivername=f"postgresql+{driver}"), **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.dispose()


DRIVERS = pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
ASYNC_DRIVERS = pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])


@DRIVERS
@pytest.mark.parametrize("way", ["create_engine", "execution_options", "create_engine_execution_options", "connection"])
def test_autocommit_is_refused_at_the_call(
    engine: Engine, make_engine: Callable[..., Engine], driver: str, way: str
) -> None:
    """Where the engine, its options or the connection say so; a job would not be one with the rows."""
    match way:
        case "create_engine":
            bind: Any = make_engine(driver, isolation_level="AUTOCOMMIT")
        case "execution_options":
            bind = make_engine(driver).execution_options(isolation_level="AUTOCOMMIT")
        case "create_engine_execution_options":
            bind = make_engine(driver, execution_options={"isolation_level": "AUTOCOMMIT"})
        case _:
            bind = make_engine(driver).connect().execution_options(isolation_level="AUTOCOMMIT")
    with Session(bind) as session:
        with pytest.raises(EnqueueError, match=r"this session is in AUTOCOMMIT: .* would not be one with your rows"):
            add_job(session, credit, cents=5)
        session.commit()
    if way == "connection":
        bind.close()


@DRIVERS
@pytest.mark.parametrize("waiting", [False, True], ids=["plain", "waiting-for-a-key"])
def test_autocommit_that_only_the_connection_knows_is_refused_at_the_flush(
    engine: Engine, make_engine: Callable[..., Engine], driver: str, waiting: bool
) -> None:
    """Before any row of that flush is written, the business rows' included."""
    with Session(make_engine(driver)) as session:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        note = Note()
        session.add(note)
        if waiting:
            add_job(session, annotate, note)
        else:
            add_job(session, credit, cents=5)
        with pytest.raises(EnqueueError, match="in AUTOCOMMIT"):
            session.commit()
        session.rollback()


@ASYNC_DRIVERS
def test_autocommit_is_refused_for_async_sessions(engine: Engine, database: Database, driver: str) -> None:
    """At the call by the engine's options, at the flush by the connection's."""

    async def produce() -> None:
        url = make_url(database.url).set(drivername=f"postgresql+{driver}")
        always = create_async_engine(url, isolation_level="AUTOCOMMIT")
        plain = create_async_engine(url)
        for bind in (always, plain.execution_options(isolation_level="AUTOCOMMIT")):
            async with AsyncSession(bind) as session:
                with pytest.raises(EnqueueError, match="in AUTOCOMMIT"):
                    add_job(session, credit, cents=5)
        async with plain.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            async with AsyncSession(connection) as session:
                with pytest.raises(EnqueueError, match="in AUTOCOMMIT"):
                    add_job(session, credit, cents=5)
        async with AsyncOutboxSession(plain) as session:
            await session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
            session.add_job(credit, cents=5)
            with pytest.raises(EnqueueError, match="in AUTOCOMMIT"):
                await session.flush()
        for async_engine in (always, plain):
            await async_engine.dispose()

    asyncio.run(produce())


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_transactional_level_on_an_autocommit_engine_is_accepted(
    make_engine: Callable[..., Engine], level: str
) -> None:
    """What counts is the level that the job's transaction gets."""
    engine = make_engine(isolation_level="AUTOCOMMIT").execution_options(isolation_level=level)
    with OutboxSession(engine) as session:
        session.add_job(credit, cents=5)
        session.flush()
        session.rollback()


def test_a_session_whose_binds_leave_the_outbox_out_is_refused(engine: Engine) -> None:
    """With the line that mends it."""
    with (
        Session(binds={Base: engine}) as session,
        pytest.raises(EnqueueError, match=r"not bound to a database for the outbox.*`outboxq\.tables\.JobRow: engine`"),
    ):
        add_job(session, credit, cents=5)
    with Session(binds={Base: engine, JobRow: engine}) as session:
        add_job(session, credit, cents=5)
        session.flush()
        session.rollback()


def test_another_database_than_postgresql_is_refused(engine: Engine) -> None:
    """Also where only the outbox's bind is another one."""
    sqlite = create_engine("sqlite://")
    for session in (Session(sqlite), Session(engine, binds={JobRow: sqlite})):
        with (
            session,
            pytest.raises(EnqueueError, match="the outbox needs PostgreSQL, but this session is bound to sqlite"),
        ):
            add_job(session, credit, cents=5)
    sqlite.dispose()


@pytest.mark.parametrize(
    "thing", [None, "session", object(), sessionmaker(), JobRow], ids=lambda thing: type(thing).__name__
)
def test_what_is_no_session_is_refused(thing: Any) -> None:
    """With the type that came."""
    for call in (lambda: add_job(thing, credit, cents=5), lambda: add_jobs(thing, [])):
        with pytest.raises(EnqueueError, match="add_job takes an SQLAlchemy session"):
            call()


def test_an_engine_or_a_connection_is_no_session(engine: Engine) -> None:
    """add_job writes through a unit of work."""
    with engine.connect() as connection:
        for thing in (engine, connection):
            with pytest.raises(EnqueueError, match=f"takes an SQLAlchemy session.*got {type(thing).__name__}"):
                add_job(thing, credit, cents=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["credit", credit.function, None, credit.job(cents=5)], ids=lambda k: type(k).__name__)
def test_what_is_no_kind_is_refused(engine: Engine, kind: Any) -> None:
    """A name, or the plain function."""
    with OutboxSession(engine) as session:
        for call in (lambda: session.add_job(kind, cents=5), lambda: add_job(session, kind, cents=5)):
            with pytest.raises(ArgumentError, match=rf"add_job takes a handler, .*external.*got {type(kind).__name__}"):
                call()


NESTED = {"a": [{"b": None}]}


@pytest.mark.parametrize(
    ("kind", "args", "kwargs", "says"),
    [
        (credit, (), {}, "missing a required argument: 'cents'"),
        (credit, (), {"cents": 1, "euros": 2}, "unexpected keyword argument 'euros'"),
        (credit, ("one",), {}, "argument 'cents': Expected `int`, got `str`"),
        (credit, (1.5,), {}, "argument 'cents': Expected `int`, got `float`"),
        (credit, (1, math.nan), {}, "argument 'ratio' holds NaN or infinity"),
        (credit, (1,), {"ratio": -math.inf}, "argument 'ratio' holds NaN or infinity"),
        (credit, (1,), {"anything": [NESTED, {"a": [math.inf]}]}, "argument 'anything' holds NaN or infinity"),
        (credit, (1,), {"anything": {"a\0": 1}}, "argument 'anything' holds a NUL character"),
        (credit, (1,), {"anything": "\ud800"}, "argument 'anything' holds a lone surrogate"),
        (credit, (1,), {"anything": [object()]}, "argument 'anything' cannot be stored as JSON.* object"),
        (ship, (7,), {}, "'ship' is handled elsewhere: pass its arguments by name"),
        (ship, (), {"a": math.nan}, "argument 'a' holds NaN or infinity"),
        (ship, (), {"a": ["\0"]}, "argument 'a' holds a NUL character"),
        (ship, (), {"a\0": 1}, "the argument name .* holds a control character"),
    ],
)
def test_arguments_that_cannot_be_stored_are_refused_at_the_call(
    engine: Engine, kind: Any, args: tuple[object, ...], kwargs: dict[str, object], says: str
) -> None:
    """The session goes on, without the job."""
    with OutboxSession(engine) as session:
        with pytest.raises(ArgumentError, match=says):
            session.add_job(kind, *args, **kwargs)
        with pytest.raises(ArgumentError, match=says):
            session.add_jobs([credit.job(1), kind.job(*args, **kwargs)])
        session.commit()


def test_arguments_over_256_kib_are_refused_at_the_call(engine: Engine) -> None:
    """Of a handler and of an external kind."""
    with OutboxSession(engine) as session:
        for kind in (credit, ship):
            with pytest.raises(JobTooLarge, match="store the data in a table of yours and pass its key"):
                session.add_job(kind, cents=1, anything="x" * 262_144)
        session.commit()


def test_a_generator_that_fails_half_way_adds_nothing(engine: Engine) -> None:
    """add_jobs draws all jobs before it adds the first."""

    def half() -> Any:
        yield credit.job(1)
        raise RuntimeError("no more")

    with OutboxSession(engine) as session:
        with pytest.raises(RuntimeError, match="no more"):
            session.add_jobs(half())
        session.commit()


NAMES = ["it's", 'a "quoted"; DROP TABLE outboxq.job; --', "%s %(a)s {} :b", "$1 \\ $$", "ключ 📨"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_data_and_comes_back_intact(engine: Engine, name: str) -> None:
    """Kind, queue, argument names, header names and values, with quotes, semicolons and percent signs."""
    with OutboxSession(engine) as session:
        kind = external(name, queue=name).options(headers={name: name})
        handle = session.add_job(kind, **{name: name, "\\u0000": "\\u0000"})
        session.flush()
        row = session.execute(text("SELECT id, kind, queue, args, headers FROM outboxq.job")).one()
        assert row == (handle.id, name, name, {name: name, "\\u0000": "\\u0000"}, {name: name})
        session.rollback()


SAYS = r"an outboxq table is missing, or older.*`outboxq migrate`.*`outboxq\.migrations\.upgrade\(op, to=\d+\)`"


@pytest.fixture
def broken(outboxq_server: Server, outboxq_template: str, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database without our tables, or with those of an earlier version; and with a table of the user's."""
    with outboxq_server.create_database(template=outboxq_template) as database:
        engine = create_engine(database.url)
        with engine.begin() as connection:
            connection.execute(text(request.param))
        Base.metadata.create_all(engine)
        engine.dispose()
        yield database


BROKEN = pytest.mark.parametrize(
    "broken",
    ["DROP SCHEMA outboxq CASCADE", "DROP TABLE outboxq.job", "ALTER TABLE outboxq.job DROP COLUMN headers"],
    indirect=True,
)


@pytest.mark.first_and_last
@BROKEN
@DRIVERS
@pytest.mark.parametrize("waiting", [False, True], ids=["plain", "waiting-for-a-key"])
def test_missing_or_older_tables_are_explained_at_the_flush(broken: Database, driver: str, waiting: bool) -> None:
    """With the command to run; the business rows are rolled back with the failed flush."""
    engine = create_engine(make_url(broken.url).set(drivername=f"postgresql+{driver}"))
    with Session(engine) as session:
        note = Note()
        session.add(note)
        if waiting:
            add_job(session, annotate, note)
        else:
            add_job(session, credit, cents=5)
        with pytest.raises(SchemaError, match=SAYS) as error:
            session.commit()
        assert error.value.__cause__ is not None
        session.rollback()
        assert session.query(Note).count() == 0
    engine.dispose()


@pytest.mark.first_and_last
@BROKEN
@ASYNC_DRIVERS
def test_missing_or_older_tables_are_explained_to_async_sessions(broken: Database, driver: str) -> None:
    """Alike, for both drivers."""

    async def produce() -> None:
        engine: AsyncEngine = create_async_engine(make_url(broken.url).set(drivername=f"postgresql+{driver}"))
        async with AsyncSession(engine) as session:
            note = Note()
            session.add(note)
            add_job(session, credit, cents=5)
            add_job(session, annotate, note)
            with pytest.raises(SchemaError, match=SAYS):
                await session.commit()
        await engine.dispose()

    asyncio.run(produce())


@pytest.mark.parametrize("broken", ["DROP TABLE outboxq.job"], indirect=True)
def test_engines_made_for_a_moment_explain_missing_tables_too(broken: Database) -> None:
    """engine.execution_options() in each request, and the original engine behind them."""
    engine = create_engine(broken.url)
    for number in range(10):
        with Session(engine.execution_options(schema_translate_map={"outboxq": f"tenant{number}"})) as session:
            add_job(session, credit, cents=5)
            with pytest.raises(SchemaError, match=SAYS):
                session.flush()
    engine.dispose()


def test_a_missing_table_of_the_users_is_not_taken_for_ours(engine: Engine) -> None:
    """Even one that is called `job`: the error stays SQLAlchemy's."""
    with scoped_session(sessionmaker(engine))() as session:
        add_job(session, credit, cents=5)
        session.flush()
        with pytest.raises(ProgrammingError):
            session.execute(text("INSERT INTO legacy.job (id) VALUES (1)"))
        session.rollback()
