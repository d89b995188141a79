"""A job that is dropped while its transaction commits is an error at COMMIT; one that is rolled back is not."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, make_url, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, make_transient, mapped_column

from outboxq import AsyncOutboxSession, OutboxSession, add_job, external
from outboxq.errors import EnqueueError
from outboxq.postgres import Database
from tests.support.own_tables import emptied

ship = external("ship", queue="depot")
SAYS = r"1 job \(.ship.\) left this session before being written.* roll back"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "enqueue_dropped_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    with emptied(database, "enqueue_dropped_order") as engine:
        yield engine


Stored = Callable[[], tuple[list[str], list[int]]]


@pytest.fixture
def stored(engine: Engine) -> Stored:
    """The orders and the numbers of the jobs, as another connection sees them."""

    def look() -> tuple[list[str], list[int]]:
        with engine.connect() as connection:
            orders = connection.execute(text("SELECT name FROM enqueue_dropped_order ORDER BY name")).scalars()
            jobs = connection.execute(text("SELECT (args->>'n')::int FROM outboxq.job ORDER BY seq")).scalars()
            return list(orders), list(jobs)

    return look


def place(session: Session, name: str, number: int) -> None:
    """A row that is written, and a job that waits for the next flush."""
    session.add(Order(name=name))
    session.flush()
    add_job(session, ship, n=number)


def _expunge_all(session: Session) -> None:
    session.expunge_all()


def _expunge_new(session: Session) -> None:
    for pending in session.new:
        session.expunge(pending)


def _make_new_transient(session: Session) -> None:
    for pending in session.new:
        make_transient(pending)


def _move_new(session: Session) -> None:
    with Session(session.get_bind()) as other:
        for pending in session.new:
            session.expunge(pending)
            other.add(pending)
        other.rollback()


DROPS = pytest.mark.parametrize("drop", [_expunge_all, _expunge_new, _make_new_transient, _move_new])


@pytest.mark.first_and_last
@DROPS
@pytest.mark.parametrize("more", [False, True], ids=["nothing-else", "with-other-rows"])
def test_a_commit_without_a_job_that_was_dropped_is_refused(
    session: Session, stored: Stored, drop: Callable[[Session], None], more: bool
) -> None:
    """Neither its rows nor other jobs are committed; the session is good again after a rollback."""
    place(session, "ann", 1)
    drop(session)
    if more:
        session.add(Order(name="bob"))
        add_job(session, ship, n=2)
    with pytest.raises(EnqueueError, match=SAYS):
        session.commit()
    session.rollback()
    assert stored() == ([], [])
    place(session, "cid", 3)
    session.commit()
    assert stored() == (["cid"], [3])


@DROPS
def test_a_dropped_job_is_not_forgotten_by_a_savepoint(
    session: Session, stored: Stored, drop: Callable[[Session], None]
) -> None:
    """One that rolls back ends without it: the job was added before."""
    place(session, "ann", 1)
    drop(session)
    session.begin_nested().rollback()
    with pytest.raises(EnqueueError, match=SAYS):
        session.commit()
    session.rollback()
    assert stored() == ([], [])


@DROPS
def test_a_job_that_is_dropped_inside_a_savepoint_is_refused_with_its_release(
    session: Session, stored: Stored, drop: Callable[[Session], None]
) -> None:
    """By the savepoint's own commit, and by the session's with the savepoint open; rolled back, it is forgotten."""
    savepoint = session.begin_nested()
    place(session, "bob", 2)
    drop(session)
    with pytest.raises(EnqueueError, match=SAYS):
        savepoint.commit()
    session.rollback()
    session.begin_nested()
    place(session, "cid", 3)
    drop(session)
    with pytest.raises(EnqueueError, match=SAYS):
        session.commit()
    session.rollback()
    assert stored() == ([], [])

    place(session, "dot", 4)
    savepoint = session.begin_nested()
    place(session, "eve", 5)
    drop(session)
    savepoint.rollback()
    session.commit()
    assert stored() == (["dot"], [4])


def test_an_outer_transaction_commits_with_a_savepoint_open(session: Session, stored: Stored) -> None:
    """Jobs of both are written, whichever of the two is told to commit."""
    with session.begin() as outer:
        add_job(session, ship, n=1)
        session.begin_nested()
        add_job(session, ship, n=2)
        outer.commit()
    assert stored() == ([], [1, 2])


@pytest.mark.first_and_last
@pytest.mark.parametrize("end", ["rollback", "close", "reset", "invalidate"])
@pytest.mark.parametrize("nested", [False, True], ids=["", "in-a-savepoint"])
def test_what_is_dropped_with_its_transaction_is_no_error(
    session: Session, stored: Stored, end: str, nested: bool
) -> None:
    """And nothing of it is held against the next transaction of the session."""
    place(session, "ann", 1)
    if nested:
        session.begin_nested()
    place(session, "bob", 2)
    session.expunge_all()
    getattr(session, end)()
    place(session, "cid", 3)
    session.commit()
    session.commit()
    assert stored() == (["cid"], [3])


def test_a_job_that_was_written_may_leave_the_session(session: Session, stored: Stored) -> None:
    """After a flush the session holds nothing that the job needs."""
    place(session, "ann", 1)
    session.flush()
    session.expunge_all()
    session.commit()
    assert stored() == (["ann"], [1])


def test_a_two_phase_session_refuses_to_prepare(engine: Engine, stored: Stored) -> None:
    """PREPARE TRANSACTION is as good as COMMIT. What is refused comes before it, so no server setting matters."""
    for session_class in (OutboxSession, Session):
        with session_class(engine, twophase=True) as session:
            place(session, "ann", 1)
            session.expunge_all()
            with pytest.raises(EnqueueError, match=SAYS):
                session.prepare()
            session.rollback()
    assert stored() == ([], [])


@pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint", "control_fully", "rollback_only"])
def test_a_session_in_a_connections_transaction_refuses_alike(engine: Engine, stored: Stored, mode: Any) -> None:
    """As test suites have it; what was committed before stays, as far as the mode commits anything."""
    with engine.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            place(session, "ann", 1)
            session.commit()
            place(session, "bob", 2)
            session.expunge_all()
            with pytest.raises(EnqueueError, match=SAYS):
                session.commit()
            session.rollback()
    assert stored() == ((["ann"], [1]) if mode == "control_fully" else ([], []))


def test_a_job_is_written_by_the_flush_of_a_session_that_never_commits(engine: Engine, stored: Stored) -> None:
    """The connection's owner commits; nothing else but the job was pending."""
    for session_class in (OutboxSession, Session):
        with engine.begin() as connection:
            session = session_class(connection)
            add_job(session, ship, n=1)
            session.flush()
    assert stored() == ([], [1, 1])


def test_another_session_does_not_write_what_was_moved_to_it(session: Session, stored: Stored) -> None:
    """The job belongs to the transaction that it was added in."""
    place(session, "ann", 1)
    with Session(session.get_bind()) as other:
        for pending in session.new:
            session.expunge(pending)
            other.add(pending)
        with pytest.raises(EnqueueError, match="another session"):
            other.commit()
    with pytest.raises(EnqueueError, match=SAYS):
        session.commit()
    session.rollback()
    assert stored() == ([], [])


def test_a_session_goes_on_after_a_refusal_inside_its_flush(session: Session, stored: Stored) -> None:
    """A flush that fails drops its rows and jobs together."""
    place(session, "ann", 1)
    session.commit()
    session.add(Order(name="ann"))
    add_job(session, ship, n=2)
    with pytest.raises(IntegrityError):
        session.commit()
    session.rollback()
    add_job(session, ship, n=3)
    session.commit()
    assert stored() == (["ann"], [1, 3])


def test_a_hook_that_drops_what_is_new_drops_no_job(session: Session, stored: Stored) -> None:
    """Before the commit it is noticed; at the flush the jobs are written before a hook can see them."""

    def tidy(session: Session, *_: object) -> None:
        for pending in session.new:
            session.expunge(pending)

    event.listen(session, "before_flush", tidy)
    add_job(session, ship, n=1)
    session.commit()
    assert stored() == ([], [1])


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("session_class", [AsyncOutboxSession, AsyncSession])
def test_an_async_session_refuses_alike(
    database: Database, engine: Engine, stored: Stored, driver: str, session_class: type[AsyncSession]
) -> None:
    """At its COMMIT, at its savepoint's, and not after a rollback."""

    async def produce() -> None:
        async_engine = create_async_engine(make_url(database.url).set(drivername=f"postgresql+{driver}"))
        async with session_class(async_engine) as session:
            session.add(Order(name="ann"))
            await session.flush()
            add_job(session, ship, n=1)
            session.expunge_all()
            with pytest.raises(EnqueueError, match=SAYS):
                await session.commit()
            await session.rollback()
            savepoint = await session.begin_nested()
            add_job(session, ship, n=2)
            session.expunge_all()
            with pytest.raises(EnqueueError, match=SAYS):
                await savepoint.commit()
            await session.rollback()
            add_job(session, ship, n=3)
            session.expunge_all()
            await session.close()
            add_job(session, ship, n=4)
            await session.commit()
        await async_engine.dispose()

    asyncio.run(produce())
    assert stored() == ([], [4])
