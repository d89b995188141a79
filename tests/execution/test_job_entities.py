"""Entities of jobs whose session is opened when anything looks at it, alone and in a shared batch."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import Engine, ForeignKey, event, inspect, select, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import async_object_session
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    make_transient,
    mapped_column,
    object_session,
    relationship,
)

from outboxq import AsyncContext, Backoff, Context, Jobs, Locked, OutboxSession, Relay, RelayConfig
from outboxq.database.engines import make_async_engine
from outboxq.events import Event, JobDied, JobDone
from outboxq.execution import attempt, preload, shared_batch
from outboxq.execution.invoke import HandlerSession
from tests.support.ledger import rows
from tests.support.matrices import diagonal
from tests.support.waiting import PATIENCE

ONCE = Backoff(max_attempts=1)
# The flavour and claim of jobs; those of the last two run together.
ALL_WAYS = pytest.mark.parametrize("way", ["sync", "async", "lease", "locked", "shared", "shared async"])
# The two that have code of their own.
TWO_WAYS = pytest.mark.parametrize("way", ["locked", "shared"])
LAST = 5


class Own(DeclarativeBase):
    pass


class Shelf(Own):
    __tablename__ = "shelf"
    id: Mapped[int] = mapped_column(primary_key=True)


class Book(Own):
    __tablename__ = "book"
    id: Mapped[int] = mapped_column(primary_key=True)
    pages: Mapped[int] = mapped_column(default=0)
    shelf_id: Mapped[int | None] = mapped_column(ForeignKey("shelf.id"))
    shelf: Mapped[Shelf | None] = relationship()


@pytest.fixture(autouse=True)
def _tables(engine: Engine) -> None:
    Own.metadata.create_all(engine)
    with OutboxSession(engine) as session, session.begin():
        session.add(Shelf(id=1))
        session.flush()
        session.add_all(Book(id=n, shelf_id=1) for n in range(1, LAST + 1))


@contextmanager
def counted_sessions() -> Iterator[list[object]]:
    """The sessions of handlers that are made within the block; those that load rows ahead are none of them."""
    made, init = list[object](), HandlerSession.__init__

    def counting(self: HandlerSession, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    with mock.patch.object(HandlerSession, "__init__", counting):
        yield made


def ran(engine: Engine, way: str, act: Callable[[Any, Any], object]) -> list[str]:
    """Run a job for each of the books, whose handler does this with its context and book; return how they ended."""
    jobs, told = Jobs(), list[Event]()

    def plain(ctx: Context, book: Book) -> None:
        act(ctx, book)

    def locking(ctx: Context, book: Locked[Book]) -> None:
        act(ctx, book)

    async def coroutine(ctx: AsyncContext, book: Book) -> None:
        act(ctx, book)

    register = jobs.handler(
        kind="act", queue="q", retry=ONCE, batchable="shared" in way, claim="lease" if "lease" in way else "transaction"
    )
    function: Any = coroutine if "async" in way else locking if way == "locked" else plain
    kind: Any = register(function)
    with OutboxSession(engine) as session, session.begin():
        session.add_jobs(kind.job(book=session.get_one(Book, n)) for n in range(1, LAST + 1))
    config = RelayConfig(
        slots_per_queue=1, **({} if "lease" in way else {"batch_size": LAST if "shared" in way else 1})
    )
    Relay(engine, jobs, config, async_engine=make_async_engine(engine.url), hooks=[told.append]).drain()
    return [type(each).__name__ for each in told if isinstance(each, JobDone | JobDied)]


def read(ctx: Any, book: Any) -> None:
    """Read a page."""
    book.pages += 1


DONE = ["JobDone"] * LAST


@pytest.mark.first_and_last
@ALL_WAYS
def test_a_handler_that_changes_what_it_is_given_needs_no_session(way: str, engine: Engine) -> None:
    """Its changes are read off the entities."""
    with counted_sessions() as made:
        assert ran(engine, way, read) == DONE
    # One loads the rows of a shared batch ahead.
    assert len(made) == (1 if "shared" in way else 0)
    assert rows(engine, "SELECT DISTINCT pages FROM book") == [(1,)]


def same(ctx: Any, book: Any) -> None:
    assert object_session(book) is (ctx.session.sync_session if isinstance(ctx, AsyncContext) else ctx.session)


def same_async(ctx: Any, book: Any) -> None:
    if isinstance(ctx, AsyncContext):
        assert async_object_session(book) is ctx.session


def by_session(_ctx: Any, book: Any) -> None:
    session = object_session(book)
    assert isinstance(session, OutboxSession)
    assert session.in_transaction()
    assert book in session
    assert book in session.dirty


def by_state(_ctx: Any, book: Any) -> None:
    state: Any = inspect(book)
    assert state.persistent
    assert state.session.is_modified(book)


def by_query(_ctx: Any, book: Any) -> None:
    session: Any = object_session(book)
    # The change is flushed first.
    assert session.scalar(select(Book.pages).where(Book.id == book.id)) == 1


def by_relationship(_ctx: Any, book: Any) -> None:
    assert book.shelf.id == 1


def by_refresh(_ctx: Any, book: Any) -> None:
    session: Any = object_session(book)
    session.flush()
    session.refresh(book)
    assert book.pages == 1


def by_listener(_ctx: Any, book: Any) -> None:
    session: Any = object_session(book)
    event.listen(session, "before_flush", lambda session, *_: session.add(Shelf(id=book.id + 10)))


def by_name(_ctx: Any, book: Any) -> None:
    session: Any = object_session(book)
    session.autoflush = False
    assert session.scalar(select(Book.pages).where(Book.id == book.id)) == 0


# What handlers do after they have changed their entity.
REACHES: dict[str, Callable[[Any, Any], None]] = {
    each.__name__: each
    for each in (same, same_async, by_session, by_state, by_query, by_relationship, by_refresh, by_listener, by_name)
}
_WAITING = {"by_query", "by_relationship", "by_refresh", "by_name"}


@pytest.mark.first_and_last
@diagonal(pytest.mark.parametrize("name", REACHES), ALL_WAYS)
def test_a_session_that_is_reached_is_open(name: str, way: str, engine: Engine) -> None:
    """It is begun and has the entity, with its change."""

    def act(ctx: Any, book: Any) -> None:
        read(ctx, book)
        # These would wait in a coroutine.
        if not (isinstance(ctx, AsyncContext) and name in _WAITING):
            REACHES[name](ctx, book)

    assert ran(engine, way, act) == DONE
    assert rows(engine, "SELECT DISTINCT pages FROM book") == [(1,)]
    assert len(rows(engine, "SELECT id FROM shelf")) == (1 + LAST if name == "by_listener" else 1)


@TWO_WAYS
def test_a_change_that_needs_a_flush_is_not_lost_with_its_entity(way: str, engine: Engine) -> None:
    """Nobody but the session holds the entity when the handler has ended."""

    def act(_ctx: Any, book: Any) -> None:
        book.pages = Book.pages + 1

    assert ran(engine, way, act) == DONE
    assert rows(engine, "SELECT DISTINCT pages FROM book") == [(1,)]


@TWO_WAYS
def test_entities_are_detached_behind_their_job(way: str, engine: Engine) -> None:
    """Close detaches them, and a later change is written nowhere."""
    left = list[Any]()

    def act(_ctx: Any, book: Any) -> None:
        book.pages = 7
        left.append(book)

    assert ran(engine, way, act) == DONE
    for book in left:
        state: Any = inspect(book)
        assert state.detached
        assert (state.session, state.session_id) == (None, None)
        book.pages = 8
        with Session(engine) as session:
            # Else it would belong to another session.
            session.add(book)
    assert rows(engine, "SELECT DISTINCT pages FROM book") == [(7,)]


@TWO_WAYS
def test_a_session_that_was_not_looked_at_in_time_cannot_be_opened(way: str, engine: Engine) -> None:
    """It would write into another job's transaction."""
    left = list[Any]()

    def act(_ctx: Any, book: Any) -> None:
        left.append(object_session(book))

    assert ran(engine, way, act) == DONE
    for session in left:
        with pytest.raises(InvalidRequestError, match="the job of this context is over"):
            session.execute(text("SELECT 1"))
        with pytest.raises(InvalidRequestError, match="the job of this context is over"):
            session.autoflush = False


@TWO_WAYS
def test_a_failed_handler_leaves_no_change(way: str, engine: Engine) -> None:
    """Jobs of a batch then run alone, each with its own row."""

    def act(_ctx: Any, book: Any) -> None:
        book.pages += 1
        if book.id == LAST:
            raise ZeroDivisionError

    assert sorted(ran(engine, way, act)) == ["JobDied", *DONE[1:]]
    assert rows(engine, "SELECT id, pages FROM book WHERE pages = 0") == [(LAST, 0)]


@pytest.mark.first_and_last
@TWO_WAYS
@pytest.mark.parametrize(
    "does", [make_transient, lambda book: object_session(book).close(), lambda book: object_session(book).expunge(book)]
)
def test_an_entity_that_leaves_its_session_takes_its_change_along(
    way: str, does: Callable[[Any], object], engine: Engine
) -> None:
    """Nothing is written, as alone with SQLAlchemy."""

    def act(_ctx: Any, book: Any) -> None:
        book.pages = 7
        does(book)

    # A session that the handler closes has no transaction any more.
    assert set(ran(engine, way, act)) <= {"JobDone", "JobDied"}
    assert rows(engine, "SELECT DISTINCT pages FROM book") == [(0,)]


SESSION_EVENTS = [
    *("after_transaction_create", "after_begin", "before_attach", "after_attach", "detached_to_persistent"),
    *("after_transaction_end", "persistent_to_detached", "before_flush", "after_flush", "before_commit"),
]


@pytest.mark.first_and_last
@diagonal(
    TWO_WAYS,
    pytest.mark.parametrize("when", ["before", "while it runs"]),
    pytest.mark.parametrize("name", SESSION_EVENTS),
)
def test_listeners_on_all_sessions_are_told(way: str, when: str, name: str, engine: Engine) -> None:
    """They receive the same events of a job as when SQLAlchemy loads its entity."""
    told, begun = list[str](), list[bool]()

    def heard(*_: object) -> None:
        told.append(name)

    def act(_ctx: Any, book: Any) -> None:
        begun.append(bool(told))
        if when == "while it runs" and not event.contains(HandlerSession, name, heard):
            event.listen(HandlerSession, name, heard)
        book.pages += 1

    def told_of_all() -> int:
        told.clear()
        if when == "before":
            event.listen(HandlerSession, name, heard)
        try:
            assert ran(engine, way, act) == DONE
        finally:
            event.remove(HandlerSession, name, heard)
        return len(told)

    with mock.patch.object(preload, "is_readable", return_value=False):
        by_sqlalchemy = told_of_all()
        begun_by_sqlalchemy = [begun.pop() for _ in range(LAST)]
    # A session that is opened late tells what happened to it before the listener was there, too.
    assert told_of_all() >= by_sqlalchemy
    if when == "before":
        assert begun[::-1] == begun_by_sqlalchemy
    assert rows(engine, "SELECT DISTINCT pages FROM book") == [(2,)]


@TWO_WAYS
def test_a_thread_that_is_left_and_looks_takes_no_change_along(
    way: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay waits for an opening that has begun, and the session then has the change."""
    opening, deciding, threads = threading.Semaphore(0), threading.Semaphore(0), list[threading.Thread]()
    init = HandlerSession.__init__

    def slow(self: HandlerSession, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread() in threads:
            opening.release()
            assert deciding.acquire(timeout=PATIENCE)
        init(self, *args, **kwargs)

    def decide(original: Callable[..., object]) -> Callable[..., object]:
        def decided(*args: Any) -> object:
            deciding.release()
            return original(*args)

        return decided

    monkeypatch.setattr(HandlerSession, "__init__", slow)
    monkeypatch.setattr(attempt, "send_before", decide(attempt.send_before))
    monkeypatch.setattr(shared_batch, "changes_before", decide(shared_batch.changes_before))

    def act(_ctx: Any, book: Any) -> None:
        book.pages += 1
        session: Any = object_session(book)
        threads.append(threading.Thread(target=lambda: session.info))
        threads[-1].start()
        assert opening.acquire(timeout=PATIENCE)

    assert ran(engine, way, act) == DONE
    for thread in threads:
        thread.join()
    assert rows(engine, "SELECT DISTINCT pages FROM book") == [(1,)]


@TWO_WAYS
def test_a_job_whose_session_could_not_be_opened_is_not_done(way: str, engine: Engine) -> None:
    """The handler may swallow the error, and its change would be lost."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    def act(_ctx: Any, book: Any) -> None:
        book.pages += 1
        event.listen(HandlerSession, "after_begin", fail)
        try:
            with suppress(ZeroDivisionError):
                repr(book.shelf)
        finally:
            event.remove(HandlerSession, "after_begin", fail)

    assert ran(engine, way, act) == ["JobDied"] * LAST
    assert rows(engine, "SELECT DISTINCT pages FROM book") == [(0,)]


@pytest.mark.parametrize("way", ["async", "lease async"])
def test_a_task_that_is_left_does_not_open_the_session(way: str, engine: Engine) -> None:
    """It runs before the relay goes on, in whose transaction it would read and write."""
    tasks, met = list[asyncio.Task[None]](), list[str]()

    async def look(book: Any) -> None:
        # Its first step comes after the handler's last one.
        try:
            async_object_session(book)
        except InvalidRequestError as error:
            met.append(str(error))

    def act(_ctx: Any, book: Any) -> None:
        book.pages += 1
        tasks.append(asyncio.get_running_loop().create_task(look(book)))

    assert ran(engine, way, act) == DONE
    assert [said.split(":")[0] for said in met] == ["the handler of this session has ended"] * LAST
    assert rows(engine, "SELECT DISTINCT pages FROM book") == [(1,)]


def test_what_looks_at_all_objects_opens_no_session(engine: Engine) -> None:
    """A logger asks of each argument if it is a mapping."""

    def act(_ctx: Any, book: Any) -> None:
        book.pages += 1
        assert not isinstance(object_session(book), dict)
        repr(object_session(book))

    with counted_sessions() as made:
        assert ran(engine, "sync", act) == DONE
    assert made == []


@TWO_WAYS
def test_a_session_that_was_opened_late_goes_with_its_job(way: str, engine: Engine) -> None:
    """It takes no collector to free it."""
    left = list[weakref.ref[object]]()

    def act(ctx: Any, book: Any) -> None:
        book.pages += 1
        left.append(weakref.ref(ctx.session))

    gc.disable()
    try:
        assert ran(engine, way, act) == DONE
        assert [each() for each in left] == [None] * LAST
    finally:
        gc.enable()
