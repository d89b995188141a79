"""A job is one with its transaction, through every kind of session and driver that a project may have.

Each test looks at the rows through a connection of its own. Async sessions are driven step by step from here, so that
one scenario serves all; `add_job` itself is called outside of the event loop, which shows that it does no I/O.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlmodel import Session as SQLModelSession

from outboxq import AsyncOutboxSession, Context, JobHandle, Jobs, OutboxSession, add_job, add_jobs
from outboxq.postgres import Server


class Base(DeclarativeBase):
    pass


class Person(Base):
    __tablename__ = "enqueue_person"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


jobs = Jobs()


@jobs.handler()
def greet(ctx: Context, text: str) -> None: ...


@jobs.handler()
def welcome(ctx: Context, person: Person | None) -> None: ...


@dataclass
class Producer:
    """A session of any flavour, driven one step at a time."""

    session: Any
    runner: asyncio.Runner

    def wait(self, result: Any) -> Any:
        async def awaited() -> object:
            return await result

        return self.runner.run(awaited()) if inspect.isawaitable(result) else result

    def add_job(self, kind: Any, **arguments: object) -> JobHandle:
        if hasattr(type(self.session), "add_job"):
            return self.session.add_job(kind, **arguments)
        return add_job(self.session, kind, **arguments)

    def enqueue(self, name: str, *, waiting: bool) -> JobHandle:
        """A business row and a job; a waiting job needs the row's key."""
        person = Person(name=name)
        self.session.add(person)
        return self.add_job(welcome, person=person) if waiting else self.add_job(greet, text=name)

    def commit(self) -> None:
        self.wait(self.session.commit())

    def rollback(self) -> None:
        self.wait(self.session.rollback())

    @contextmanager
    def savepoint_that_rolls_back(self) -> Iterator[None]:
        savepoint = self.wait(self.session.begin_nested())
        yield
        self.wait(savepoint.rollback())

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        savepoint = self.wait(self.session.begin_nested())
        yield
        self.wait(savepoint.commit())


def _on_engine(make: Callable[[Any], Any], driver: str) -> Callable[[str, ExitStack, asyncio.Runner], Any]:
    def opened(url: str, stack: ExitStack, runner: asyncio.Runner) -> Any:
        engine = create_engine(make_url(url).set(drivername=f"postgresql+{driver}"))
        stack.callback(engine.dispose)
        session = make(engine)
        stack.callback(session.remove if isinstance(session, scoped_session) else session.close)
        return session

    return opened


def _on_async_engine(make: Callable[[Any], Any], driver: str) -> Callable[[str, ExitStack, asyncio.Runner], Any]:
    def opened(url: str, stack: ExitStack, runner: asyncio.Runner) -> Any:
        engine = create_async_engine(make_url(url).set(drivername=f"postgresql+{driver}"))
        stack.callback(lambda: runner.run(engine.dispose()))
        session = make(engine)
        close = session.remove if isinstance(session, async_scoped_session) else session.close
        stack.callback(lambda: runner.run(close()))
        return session

    return opened


def _flask_sqlalchemy(url: str, stack: ExitStack, runner: asyncio.Runner) -> Any:
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    db = SQLAlchemy(app)
    stack.enter_context(app.app_context())
    stack.callback(lambda: (db.session.remove(), db.engine.dispose()))
    return db.session


def _advanced_alchemy(url: str, stack: ExitStack, runner: asyncio.Runner) -> Any:
    from advanced_alchemy.config import SQLAlchemySyncConfig

    config = SQLAlchemySyncConfig(connection_string=url)
    stack.callback(config.get_engine().dispose)
    return stack.enter_context(config.get_session())


def _advanced_alchemy_async(url: str, stack: ExitStack, runner: asyncio.Runner) -> Any:
    from advanced_alchemy.config import SQLAlchemyAsyncConfig

    config = SQLAlchemyAsyncConfig(
        connection_string=make_url(url).set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)
    )
    async_stack = AsyncExitStack()

    async def entered() -> Any:
        async_stack.push_async_callback(config.get_engine().dispose)
        return await async_stack.enter_async_context(config.get_session())

    stack.callback(lambda: runner.run(async_stack.aclose()))
    return runner.run(entered())


def _scoped(engine: Any) -> Any:
    return scoped_session(sessionmaker(engine))


def _async_scoped(engine: Any) -> Any:
    return async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: "this test")


FLAVOURS = {
    "Session-psycopg": _on_engine(Session, "psycopg"),
    "Session-psycopg2": _on_engine(Session, "psycopg2"),
    "OutboxSession-psycopg": _on_engine(OutboxSession, "psycopg"),
    "AsyncSession-psycopg": _on_async_engine(AsyncSession, "psycopg"),
    "AsyncSession-asyncpg": _on_async_engine(AsyncSession, "asyncpg"),
    "AsyncOutboxSession-psycopg": _on_async_engine(AsyncOutboxSession, "psycopg"),
    "AsyncOutboxSession-asyncpg": _on_async_engine(AsyncOutboxSession, "asyncpg"),
    "scoped_session": _on_engine(_scoped, "psycopg"),
    "scoped_session-OutboxSession": _on_engine(
        lambda engine: scoped_session(sessionmaker(engine, class_=OutboxSession)), "psycopg"
    ),
    "async_scoped_session": _on_async_engine(_async_scoped, "asyncpg"),
    "Flask-SQLAlchemy": _flask_sqlalchemy,
    "SQLModel": _on_engine(SQLModelSession, "psycopg"),
    "Advanced-Alchemy": _advanced_alchemy,
    "Advanced-Alchemy-async": _advanced_alchemy_async,
}
# It imports what SQLAlchemy has deprecated.
_ADVANCED_ALCHEMY = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.fixture(scope="module")
def database_url(outboxq_server: Server, outboxq_template: str) -> Iterator[str]:
    with outboxq_server.create_database(template=outboxq_template) as database:
        engine = create_engine(database.url)
        Base.metadata.create_all(engine)
        engine.dispose()
        yield database.url


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(
    params=[pytest.param(name, marks=_ADVANCED_ALCHEMY if name.startswith("Advanced") else ()) for name in FLAVOURS]
)
def producer(request: pytest.FixtureRequest, database_url: str, runner: asyncio.Runner) -> Iterator[Producer]:
    with ExitStack() as stack:
        yield Producer(FLAVOURS[request.param](database_url, stack, runner), runner)


@pytest.fixture
def stored(database_url: str) -> Iterator[Callable[[], dict[UUID, str]]]:
    """What another connection sees now: the ids of the jobs, each with the name in its job or of its person."""
    url = make_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DELETE FROM outboxq.job")
        connection.execute("DELETE FROM enqueue_person")

        def look() -> dict[UUID, str]:
            query = """
                SELECT job.id, coalesce(args->>'text', person.name) FROM outboxq.job
                LEFT JOIN enqueue_person AS person ON person.id = (args->>'person')::int
            """
            return dict(connection.execute(query).fetchall())

        yield look


waiting_or_not = pytest.mark.parametrize("waiting", [False, True], ids=["plain", "waiting-for-a-key"])
Stored = Callable[[], dict[UUID, str]]


@pytest.mark.first_and_last
@waiting_or_not
def test_a_job_exists_once_its_transaction_commits_and_not_before(
    producer: Producer, stored: Stored, waiting: bool
) -> None:
    """Under the id that add_job returned, beside the business row."""
    handle = producer.enqueue("ann", waiting=waiting)
    assert stored() == {}
    producer.wait(producer.session.flush())
    assert stored() == {}
    producer.commit()
    assert stored() == {handle.id: "ann"}


@pytest.mark.each_value
@waiting_or_not
@pytest.mark.parametrize("flush", [False, True], ids=["", "after-a-flush"])
def test_a_job_is_gone_with_its_rollback(producer: Producer, stored: Stored, waiting: bool, flush: bool) -> None:
    """And the next transaction of the same session does not bring it back."""
    producer.enqueue("ann", waiting=waiting)
    if flush:
        producer.wait(producer.session.flush())
    producer.rollback()
    handle = producer.enqueue("bob", waiting=waiting)
    producer.commit()
    assert stored() == {handle.id: "bob"}


@pytest.mark.first_and_last
@waiting_or_not
def test_a_job_is_gone_with_its_savepoint(producer: Producer, stored: Stored, waiting: bool) -> None:
    """The jobs before and after the savepoint stay; nothing was flushed by hand."""
    with producer.savepoint_that_rolls_back():
        producer.enqueue("gone", waiting=waiting)
    with producer.savepoint():
        kept = producer.enqueue("kept", waiting=waiting)
        with producer.savepoint_that_rolls_back():
            producer.enqueue("gone too", waiting=waiting)
    after = producer.enqueue("after", waiting=waiting)
    producer.commit()
    assert stored() == {kept.id: "kept", after.id: "after"}


@pytest.mark.first_and_last
@waiting_or_not
def test_a_job_stays_when_a_later_savepoint_rolls_back(producer: Producer, stored: Stored, waiting: bool) -> None:
    """Opening the savepoint flushed what came before it."""
    before = producer.enqueue("before", waiting=waiting)
    with producer.savepoint_that_rolls_back():
        producer.session.add(Person(name="gone"))
    producer.commit()
    assert stored() == {before.id: "before"}


@pytest.mark.first_and_last
def test_many_jobs_are_added_at_once(producer: Producer, stored: Stored) -> None:
    """add_jobs draws from any iterable, gives their handles in order, and mixes plain jobs with waiting ones."""
    person = Person(name="ann")
    producer.session.add(person)
    new = (greet.job(text=f"{n}") if n else welcome.job(person) for n in range(300))
    if hasattr(type(producer.session), "add_jobs"):
        handles = producer.session.add_jobs(new)
    else:
        handles = add_jobs(producer.session, new)
    producer.commit()
    assert stored() == dict(zip((h.id for h in handles), ["ann", *map(str, range(1, 300))], strict=True))


def test_a_job_is_added_inside_the_event_loop_too(database_url: str, runner: asyncio.Runner, stored: Stored) -> None:
    """As a program does it: one coroutine, one `async with`, no await for add_job."""

    async def produce() -> JobHandle:
        engine = create_async_engine(make_url(database_url).set(drivername="postgresql+asyncpg"))
        async with async_sessionmaker(engine, class_=AsyncOutboxSession).begin() as session:
            person = Person(name="ann")
            session.add(person)
            handle = session.add_job(welcome, person)
        await engine.dispose()
        return handle

    handle = runner.run(produce())
    assert stored() == {handle.id: "ann"}
