"""Entities as arguments that change their primary key, or are deleted, between `add_job` and the flush."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from sqlalchemy import Engine, ForeignKey, delete, event, make_url, select, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from outboxq import AsyncOutboxSession, Context, Jobs, OutboxSession, external
from outboxq.errors import EnqueueError
from outboxq.postgres import Database
from tests.support.own_tables import emptied


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "flush_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(default="")
    lines: Mapped[list["Line"]] = relationship(cascade="all, delete-orphan")


class Line(Base):
    __tablename__ = "flush_line"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("flush_order.id", onupdate="CASCADE"))


jobs = Jobs()
notify = external("notify", queue="elsewhere")
Rows = Callable[[], list[tuple[object, ...]]]
Change = Callable[[Session, Order], None]


@jobs.handler()
def ship(ctx: Context, order: Order, note: str = "") -> None: ...


@jobs.handler()
def forget(ctx: Context, order: Order | None) -> None: ...


@jobs.handler()
def pack(ctx: Context, line: Line) -> None: ...


@jobs.handler()
def compare(ctx: Context, first: Order, second: Order) -> None: ...


@jobs.handler(unique=lambda order: f"u{order.id}", group=lambda order: f"g{order.id}")
def keyed(ctx: Context, order: Order) -> None: ...


@jobs.handler(group=lambda order: f"m{order.id}")
def member(ctx: Context, order: Order) -> None: ...


@jobs.handler(coalesce=lambda order: f"c{order.id}")
def coalesced(ctx: Context, order: Order) -> None: ...


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    with emptied(database, "flush_order", "flush_line") as engine:
        yield engine


@pytest.fixture
def session(engine: Engine) -> Iterator[OutboxSession]:
    with OutboxSession(engine) as session:
        yield session


@pytest.fixture
def order(session: OutboxSession) -> Order:
    order = Order(id=100, lines=[Line(id=10)])
    session.add(order)
    session.commit()
    # Loaded here, so that no step of a test flushes by loading them.
    assert order.lines
    return order


@pytest.fixture
def rows(engine: Engine) -> Rows:
    """Kinds and arguments of all jobs, as another connection sees them."""

    def look() -> list[tuple[object, ...]]:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text("SELECT kind, args FROM outboxq.job ORDER BY id"))]

    return look


def _renumber(session: Session, order: Order) -> None:
    order.id = 7


@pytest.mark.parametrize("made_before", [False, True])
def test_the_key_at_the_flush_counts(session: OutboxSession, order: Order, rows: Rows, made_before: bool) -> None:
    """Whether the primary key was changed after add_job or before it; the other arguments stay as they were given."""
    if made_before:
        _renumber(session, order)
    session.add_job(ship, order, note="x")
    session.add_job(notify, order=order, more=[1])
    session.add_job(forget, order)
    session.add_job(notify, more=2)
    if not made_before:
        _renumber(session, order)
    session.commit()
    assert rows() == [
        ("ship", {"order": 7, "note": "x"}),
        ("notify", {"order": 7, "more": [1]}),
        ("forget", {"order": 7}),
        ("notify", {"more": 2}),
    ]


def test_a_key_that_a_flush_has_changed_counts_for_jobs_made_before(
    session: OutboxSession, order: Order, rows: Rows
) -> None:
    """A job of `kind.job(...)` is added after the flush, when nothing else is to be written."""
    made = ship.job(order)
    _renumber(session, order)
    session.flush()
    session.add_jobs([made])
    session.commit()
    assert rows() == [("ship", {"order": 7})]


def test_a_known_and_a_new_entity_get_their_keys_together(session: OutboxSession, order: Order, rows: Rows) -> None:
    """The known one changes its key in the flush that gives the new one its own."""
    new = Order(note="new")
    session.add(new)
    session.add_job(compare, order, new)
    _renumber(session, order)
    session.commit()
    assert rows() == [("compare", {"first": 7, "second": new.id})]


def test_keys_made_of_a_primary_key_are_those_of_the_flush(
    session: OutboxSession, engine: Engine, order: Order
) -> None:
    """`unique`, `group` and `coalesce`, also of a job in a batch; the handle says that the job was added."""
    handle = session.add_job(keyed, order)
    session.add_job(coalesced, order)
    with jobs.batch(session, on_done=notify.job(order=order)) as batch:
        batch.add_jobs([member.job(order)])
    _renumber(session, order)
    session.commit()
    assert handle.added
    with engine.connect() as connection:
        found = connection.execute(
            text("SELECT coalesce(headers ->> 'outboxq.unique', unique_key), group_key FROM outboxq.job ORDER BY id")
        )
        assert [tuple(row) for row in found] == [("u7", "g7"), ("coalesced\x1fc7", None), (None, "m7")]
        (callback,) = connection.execute(text("SELECT callback FROM outboxq.batch")).scalars()
        assert callback["args"] == {"order": 7}


def test_jobs_that_follow_have_the_keys_of_the_flush(session: OutboxSession, order: Order, engine: Engine) -> None:
    """In the header of the job before them."""
    session.add_jobs([notify.job(a=1).then(ship.job(order)).then(forget.job(order))])
    _renumber(session, order)
    session.commit()
    with engine.connect() as connection:
        (header,) = connection.execute(text("SELECT headers::text FROM outboxq.job")).scalars()
    assert header.count(r"\"order\":7") == 2, header


def _delete(session: Session, order: Order) -> None:
    session.delete(order)


def _delete_by_statement(session: Session, order: Order) -> None:
    with session.no_autoflush:
        session.execute(delete(Line))
        session.execute(delete(Order).where(Order.id == 100))


DELETIONS = pytest.mark.parametrize("remove", [_delete, _delete_by_statement])


@DELETIONS
@pytest.mark.parametrize("before", [False, True], ids=["after-add_job", "before-add_job"])
@pytest.mark.parametrize("kind", [ship, notify], ids=["handler", "external"])
def test_a_deleted_entity_is_refused(
    session: OutboxSession, order: Order, rows: Rows, remove: Change, before: bool, kind: object
) -> None:
    """The flush raises, nothing is committed, and the order is still there after the rollback."""
    steps = [partial(session.add_job, kind, order=order), partial(remove, session, order)]  # type: ignore[arg-type]
    for step in reversed(steps) if before else steps:
        step()
    with pytest.raises(EnqueueError, match=r"argument 'order', a Order that is deleted .* Annotate Order \| None"):
        session.commit()
    session.rollback()
    assert rows() == []
    assert session.get(Order, 100) is not None
    session.add_job(ship, order)
    session.commit()
    assert rows() == [("ship", {"order": 100})]


@DELETIONS
def test_a_deleted_entity_may_be_given_for_an_optional_parameter(
    session: OutboxSession, order: Order, rows: Rows, remove: Change
) -> None:
    """The handler is said to receive None then."""
    session.add_job(forget, order)
    remove(session, order)
    session.commit()
    assert rows() == [("forget", {"order": 100})]


def test_an_orphan_that_the_flush_deletes_is_refused(session: OutboxSession, order: Order, rows: Rows) -> None:
    """No call of delete() names it: the flush finds it out."""
    session.add_job(pack, order.lines[0])
    order.lines.clear()
    with pytest.raises(EnqueueError, match="argument 'line', a Line that is deleted"):
        session.commit()
    session.rollback()
    assert rows() == []


def test_a_follower_of_a_deleted_entity_is_refused(session: OutboxSession, order: Order, rows: Rows) -> None:
    """Its handler would find no row either."""
    session.add_jobs([notify.job(a=1).then(ship.job(order))])
    session.delete(order)
    with pytest.raises(EnqueueError, match="'ship' was given"):
        session.commit()
    session.rollback()
    assert rows() == []


def test_an_entity_that_left_the_session_keeps_its_key(session: OutboxSession, order: Order, rows: Rows) -> None:
    """Its row is there, whatever was changed in memory."""
    session.add_job(ship, order)
    order.id = 7
    session.expunge(order)
    session.add_job(notify, order=order)
    session.commit()
    assert rows() == [("ship", {"order": 100}), ("notify", {"order": 100})]


def test_a_savepoint_that_rolls_back_gives_the_old_key_back(session: OutboxSession, order: Order, rows: Rows) -> None:
    """And the deleted entity; the jobs of the savepoint are gone."""
    made = ship.job(order)
    savepoint = session.begin_nested()
    _renumber(session, order)
    session.add_job(ship, order, note="lost")
    session.flush()
    savepoint.rollback()
    savepoint = session.begin_nested()
    session.delete(order)
    session.flush()
    savepoint.rollback()
    session.add_jobs([made])
    session.commit()
    assert rows() == [("ship", {"order": 100})]


def test_a_job_added_before_a_savepoint_survives_it(session: OutboxSession, order: Order, rows: Rows) -> None:
    """Opening the savepoint flushes it, with the key of that time."""
    session.add_job(ship, order)
    _renumber(session, order)
    savepoint = session.begin_nested()
    session.add_job(ship, order, note="lost")
    order.note = "changed"
    savepoint.rollback()
    session.commit()
    assert rows() == [("ship", {"order": 7})]


def test_a_flush_that_has_nothing_to_do_in_the_end_loses_no_job(
    session: OutboxSession, order: Order, rows: Rows
) -> None:
    """A hook of the flush takes the change back, so that SQLAlchemy calls no hook after it."""

    def take_back(session: Session, *_: object) -> None:
        for entity in session.dirty:
            session.expunge(entity)

    session.add_job(ship, order)
    order.note = "changed"
    event.listen(session, "before_flush", take_back)
    session.commit()
    assert rows() == [("ship", {"order": 100})]


def test_one_insert_writes_jobs_of_entities_that_nothing_changes(
    session: OutboxSession, order: Order, rows: Rows
) -> None:
    """As those of other arguments; nothing is loaded for it."""
    statements: list[str] = []
    event.listen(session.get_bind(), "before_cursor_execute", lambda *args: statements.append(args[2]))
    session.add_job(ship, order)
    session.add_job(notify, more=1)
    session.commit()
    assert [statement.split()[0] for statement in statements] == ["INSERT"]
    assert len(rows()) == 2


def test_an_async_session_does_alike(database: Database, engine: Engine, order: Order, rows: Rows) -> None:
    """A changed key counts, a deleted entity is refused."""

    async def main() -> None:
        async_engine = create_async_engine(make_url(database.url).set(drivername="postgresql+asyncpg"))
        try:
            async with AsyncOutboxSession(async_engine) as session:
                found = (await session.execute(select(Order))).scalar_one()
                session.add_job(keyed, found)
                found.id = 7
                await session.commit()
                # Loaded here, so that delete() does not flush by loading it.
                await session.refresh(found, ["id", "lines"])
                session.add_job(ship, found)
                await session.delete(found)
                with pytest.raises(EnqueueError, match="a Order that is deleted"):
                    await session.commit()
        finally:
            await async_engine.dispose()

    asyncio.run(main())
    assert rows() == [("keyed", {"order": 7})]
