"""Rows of lone jobs: read and written on the driver's cursor, with the same result as by SQLAlchemy."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, ForeignKey, create_engine, delete, event, inspect, select, text
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    deferred,
    make_transient_to_detached,
    mapped_column,
    reconstructor,
    relationship,
    sessionmaker,
)

from outboxq import AsyncContext, Backoff, Context, Jobs, Locked, OutboxSession, Relay, RelayConfig, external
from outboxq.database.engines import make_async_engine
from outboxq.events import Event, JobDied, JobDone
from outboxq.execution import preload, write_buffer
from outboxq.testing import drain
from tests.support.ledger import rows

ONCE = Backoff(max_attempts=1)


class Own(DeclarativeBase):
    pass


class Lone(Own):
    __tablename__ = "lone"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)
    note: Mapped[str | None] = mapped_column(unique=True)


class Later(Own):
    """The same rows, of which one column is loaded when it is read."""

    __table__ = Lone.__table__
    note = deferred(Lone.__table__.c.note)


class Rebuilt(Own):
    """The same rows, each of which runs a function when it is loaded."""

    __table__ = Lone.__table__

    @reconstructor
    def rebuild(self) -> None:
        """Do nothing."""


class Coded(Own):
    """A row to which others refer by a column that is not its key; SQLAlchemy changes it in them."""

    __tablename__ = "coded"
    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str]
    kids: Mapped[list["Kid"]] = relationship(
        primaryjoin="Coded.code == foreign(Kid.code)", passive_updates=False, back_populates="of"
    )


class Kid(Own):
    __tablename__ = "kid"
    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str]
    of: Mapped[Coded] = relationship(
        primaryjoin="Coded.code == foreign(Kid.code)", passive_updates=False, back_populates="kids"
    )


class Holder(Own):
    __tablename__ = "holder"
    id: Mapped[int] = mapped_column(primary_key=True)
    coded_id: Mapped[int] = mapped_column(ForeignKey("coded.id"))


class Padded(Own):
    """A key of char(5): the server ignores blanks at its end."""

    __tablename__ = "padded"
    id: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


@pytest.fixture(autouse=True)
def _tables(engine: Engine) -> None:
    run(engine, "CREATE TABLE padded (id char(5) PRIMARY KEY, balance int NOT NULL)")
    Own.metadata.create_all(engine)
    run(engine, "INSERT INTO lone SELECT n, 0, 'note ' || n FROM generate_series(1, 9) AS n")
    run(engine, "INSERT INTO padded VALUES ('one', 0)")
    run(engine, "INSERT INTO coded VALUES (3, 'x'); INSERT INTO kid VALUES (1, 'x'), (2, 'x')")
    run(engine, "INSERT INTO holder VALUES (3, 3)")


def run(engine: Engine, sql: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(sql)


class Directly:
    """The entities that were read on the driver's cursor, and the keys of the rows that were changed there."""

    def __init__(self) -> None:
        self.read = 0
        self.changed: list[object] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count within the block."""
        read_rows, change = preload.read_rows, write_buffer.send_update

        def read(*what: Any) -> list[object]:
            self.read += 1
            return read_rows(*what)

        def changed(connection: Any, statement: Any, parameters: Mapping[str, object]) -> int:
            self.changed.append(parameters["oq_key_0"])
            return change(connection, statement, parameters)

        with mock.patch.object(preload, "read_rows", read), mock.patch.object(write_buffer, "send_update", changed):
            yield


def drained(engine: Engine, jobs: Jobs) -> tuple[list[Event], Directly]:
    """Run each job alone, by a relay on this engine; return its events, and what was done directly."""
    told, directly = list[Event](), Directly()
    config = RelayConfig(slots_per_queue=1, prune_seconds=0, stats_seconds=0)
    among = make_async_engine(engine.url)
    with directly.counted():
        Relay(engine, jobs, config, async_engine=among, hooks=[told.append]).drain()
    return told, directly


def jobs_of(sort: str, entity: type[Any], act: Callable[[Any, Any], None]) -> tuple[Jobs, Any]:
    """A kind whose handler does this with its session and its row, in each way of running alone."""
    jobs = Jobs()

    if sort == "async":

        @jobs.handler(queue="q", retry=ONCE)
        async def use_async(ctx: AsyncContext, row: entity) -> None:  # type: ignore[valid-type]
            act(ctx.session.sync_session, row)

        return jobs, use_async

    if sort == "locked":

        @jobs.handler(queue="q", retry=ONCE)
        def use_locked(ctx: Context, row: Locked[entity]) -> None:  # type: ignore[valid-type]
            act(ctx.session, row)

        return jobs, use_locked

    @jobs.handler(queue="q", retry=ONCE, claim="lease" if sort == "lease" else "transaction")
    def use(ctx: Context, row: entity) -> None:  # type: ignore[valid-type]
        act(ctx.session, row)

    return jobs, use


def ran(
    engine: Engine, act: Callable[[Any, Any], None], *, sort: str = "sync", entity: type[Any] = Lone, key: Any = 3
) -> tuple[list[Event], Directly]:
    """Run one job that does this with its row."""
    jobs, kind = jobs_of(sort, entity, act)
    with OutboxSession(engine) as session, session.begin():
        session.add_job(kind, row=session.get_one(entity, key))
    return drained(engine, jobs)


def credit(_session: Session, row: Any) -> None:
    row.balance += 5


@pytest.mark.first_and_last
@pytest.mark.parametrize("sort", ["sync", "async", "lease", "locked"])
def test_a_lone_job_reads_and_writes_directly(sort: str, engine: Engine) -> None:
    """The handler finds and leaves the same rows."""
    found = list[object]()

    def look(session: Session, row: Any) -> None:
        found.append((row.id, row.balance, row.note, row in session, row in session.dirty))
        credit(session, row)

    told, directly = ran(engine, look, sort=sort)
    assert [type(event) for event in told if isinstance(event, JobDone | JobDied)] == [JobDone]
    assert found == [(3, 0, "note 3", True, False)]
    assert (directly.read, directly.changed) == (1, [3])
    assert rows(engine, "SELECT id, balance FROM lone WHERE balance <> 0") == [(3, 5)]


def heard(engine: Engine, name: str) -> Engine:
    event.listen(engine, name, lambda *_: None)
    return engine


def heard_driver(engine: Engine, name: str) -> Engine:
    event.listen(engine.dialect, name, lambda *_: None)
    return engine


SURROUNDINGS: dict[str, Callable[[Engine], Engine]] = {
    "before_execute": lambda engine: heard(engine, "before_execute"),
    "after_execute": lambda engine: heard(engine, "after_execute"),
    "before_cursor_execute": lambda engine: heard(engine, "before_cursor_execute"),
    "after_cursor_execute": lambda engine: heard(engine, "after_cursor_execute"),
    "do_execute": lambda engine: heard_driver(engine, "do_execute"),
    "do_executemany": lambda engine: heard_driver(engine, "do_executemany"),
    "handle_error": lambda engine: heard_driver(engine, "handle_error"),
    "positions": lambda engine: create_engine(engine.url, paramstyle="format"),
    "echo": lambda engine: create_engine(engine.url, echo=True),
    "an option": lambda engine: engine.execution_options(logging_token="token"),
    "a schema": lambda engine: engine.execution_options(schema_translate_map={None: "public"}),
}


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_where_somebody_listens_sqlalchemy_reads_and_writes(name: str, engine: Engine) -> None:
    """The result is the same."""
    surrounded = SURROUNDINGS[name](engine)
    _, directly = ran(surrounded, credit)
    surrounded.dispose()
    assert (directly.read, directly.changed) == (0, [])
    assert rows(engine, "SELECT id, balance FROM lone WHERE balance <> 0") == [(3, 5)]


@pytest.mark.parametrize("target", ["a connection", "all connections"])
def test_listeners_on_connections_are_told_of_each_statement(
    target: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the one that a test gives to `drain`, as they count statements."""
    said = list[str]()
    # SQLAlchemy leaves it set on the class when the last listener is gone.
    monkeypatch.setattr(Connection, "_has_events", getattr(Connection, "_has_events", False), raising=False)

    def listener(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement.split()[0])

    jobs, kind = jobs_of("sync", Lone, credit)
    with engine.connect() as connection, connection.begin(), OutboxSession(connection) as session:
        session.add_job(kind, row=session.get_one(Lone, 3))
        session.commit()
        heard: Any = connection if target == "a connection" else Connection
        event.listen(heard, "before_cursor_execute", listener)
        try:
            drain(session, jobs)
        finally:
            event.remove(heard, "before_cursor_execute", listener)
    assert said.count("UPDATE") == 1
    assert said.count("SELECT") >= 1


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "name", ["before_flush", "after_flush", "before_commit", "after_begin", "pending_to_transient"]
)
def test_a_listener_on_the_session_is_told_of_its_flush(name: str, engine: Engine) -> None:
    """The handler has put it there, so its rows are read directly, and not written."""

    def hear(session: Session, row: Any) -> None:
        event.listen(session, name, lambda *_: None)
        credit(session, row)

    _, directly = ran(engine, hear)
    assert (directly.read, directly.changed) == (1, [])
    assert rows(engine, "SELECT balance FROM lone WHERE id = 3") == [(5,)]


@pytest.mark.parametrize("name", ["loaded_as_persistent", "after_attach", "do_orm_execute"])
def test_a_listener_on_the_session_is_told_of_rows_that_are_loaded(name: str, engine: Engine) -> None:
    """An around has put it there."""
    jobs, kind = jobs_of("sync", Lone, credit)
    jobs.around(lambda ctx: event.listen(ctx.session, name, lambda *_: None))
    with OutboxSession(engine) as session, session.begin():
        session.add_job(kind, row=session.get_one(Lone, 3))
    _, directly = drained(engine, jobs)
    assert directly.read == 0
    assert rows(engine, "SELECT balance FROM lone WHERE id = 3") == [(5,)]


def test_a_change_that_others_refer_to_is_left_to_sqlalchemy(engine: Engine) -> None:
    """It changes the rows that refer to it, which are not loaded."""

    def rename(_session: Session, row: Any) -> None:
        row.code = "z"

    _, directly = ran(engine, rename, entity=Coded)
    assert (directly.read, directly.changed) == (1, [])
    assert rows(engine, "SELECT DISTINCT code FROM kid") == [("z",)]


def test_new_rows_are_written_before_changes(engine: Engine) -> None:
    """A change may refer to them."""

    def hold(session: Session, row: Any) -> None:
        session.add(Coded(id=50, code="new"))
        row.coded_id = 50

    _, directly = ran(engine, hold, entity=Holder)
    assert (directly.read, directly.changed) == (1, [])
    assert rows(engine, "SELECT coded_id FROM holder") == [(50,)]


def test_new_jobs_are_written_before_changes(engine: Engine) -> None:
    """A change may refer to them."""
    run(engine, "CREATE TABLE tracked (id int PRIMARY KEY, job_id uuid REFERENCES outboxq.job (id) ON DELETE SET NULL)")
    run(engine, "INSERT INTO tracked VALUES (3, NULL)")

    class Own(DeclarativeBase):
        pass

    class Tracked(Own):
        __tablename__ = "tracked"
        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[UUID | None]

    def track(session: Any, row: Any) -> None:
        row.job_id = session.add_job(external("later", queue="elsewhere")).id

    told, directly = ran(engine, track, entity=Tracked)
    assert [type(event) for event in told if isinstance(event, JobDone | JobDied)] == [JobDone]
    assert (directly.read, directly.changed) == (1, [3])
    assert rows(engine, "SELECT job_id FROM tracked") == rows(engine, "SELECT id FROM outboxq.job")


@pytest.mark.parametrize("with_entity", [False, True], ids=["plain", "with-entity"])
def test_new_jobs_and_changes_are_written_in_the_order_of_a_flush(with_entity: bool, engine: Engine) -> None:
    """A trigger on new jobs finds the same rows."""
    run(engine, "CREATE TABLE seen (balance int)")
    run(
        engine,
        "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO public.seen SELECT balance FROM public.lone WHERE id = 3; RETURN NULL; END'",
    )
    jobs = Jobs()

    @jobs.handler(queue="elsewhere")
    def later(ctx: Context, row: Lone | None = None) -> None: ...

    def pass_on(session: Any, row: Any) -> None:
        credit(session, row)
        session.add_job(later, **({"row": row} if with_entity else {}))

    own, kind = jobs_of("sync", Lone, pass_on)
    seen = []
    for is_direct in (True, False):
        # A listener to statements leaves all of them to SQLAlchemy.
        relays = engine if is_direct else heard(create_engine(engine.url), "before_execute")
        with OutboxSession(engine) as session, session.begin():
            session.execute(text("DROP TRIGGER IF EXISTS look ON outboxq.job"))
            session.execute(text("DELETE FROM outboxq.job"))
            session.add_job(kind, row=session.get_one(Lone, 3))
        run(engine, "CREATE TRIGGER look AFTER INSERT ON outboxq.job FOR EACH ROW EXECUTE FUNCTION look()")
        _, directly = drained(relays, own)
        relays.dispose()
        assert directly.changed == ([3] if is_direct else [])
        seen += rows(engine, "SELECT balance - (SELECT balance FROM lone WHERE id = 3) FROM seen")
        run(engine, "DELETE FROM seen")
    assert seen == [(0 if with_entity else -5,)] * 2
    assert rows(engine, "SELECT args->>'row' FROM outboxq.job") == [("3" if with_entity else None,)]


def test_a_change_that_is_made_while_new_jobs_are_written_is_written_too(engine: Engine) -> None:
    """Code of users that is called there is not seen as a listener."""
    write = write_buffer.write_plain_jobs

    def write_and_change(session: Session, connection: Connection) -> bool:
        session.get_one(Lone, 3).balance = 99
        return write(session, connection)

    def pass_on(session: Any, row: Any) -> None:
        credit(session, row)
        session.add_job(external("later", queue="elsewhere"))

    with mock.patch.object(write_buffer, "write_plain_jobs", write_and_change):
        ran(engine, pass_on)
    assert rows(engine, "SELECT balance FROM lone WHERE id = 3") == [(99,)]


def test_a_job_that_is_refused_is_not_followed_by_changes(engine: Engine) -> None:
    """The attempt fails for the INSERT, as by a flush, and nothing stays."""
    run(engine, "ALTER TABLE outboxq.job ADD CONSTRAINT none_elsewhere CHECK (queue <> 'elsewhere')")

    def pass_on(session: Any, row: Any) -> None:
        credit(session, row)
        session.add_job(external("later", queue="elsewhere"))

    told, directly = ran(engine, pass_on)
    assert [event.error_type for event in told if isinstance(event, JobDied)] == ["psycopg.errors.CheckViolation"]
    assert directly.changed == []
    assert rows(engine, "SELECT sum(balance) FROM lone") == [(0,)]


def test_many_changes_are_sent_together_by_sqlalchemy(engine: Engine) -> None:
    """Each would take a round trip of its own."""

    def credit_all(session: Session, _row: Any) -> None:
        for each in session.scalars(select(Lone)):
            each.balance += 5

    _, directly = ran(engine, credit_all)
    assert (directly.read, directly.changed) == (1, [])
    assert rows(engine, "SELECT sum(balance) FROM lone") == [(45,)]


def test_a_row_that_is_given_twice_is_one_object(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """It is read once."""
    found = list[bool]()
    jobs, kind = two(Lone, Lone, lambda one, other: found.append(one is other))
    with sessions.begin() as session:
        session.add_job(kind, one=session.get_one(Lone, 3), other=session.get_one(Lone, 3))
    _, directly = drained(engine, jobs)
    assert (found, directly.read) == ([True], 1)


@pytest.mark.parametrize("way", ["rollback", "savepoint"])
def test_a_row_is_not_read_in_a_transaction_that_an_around_has_ended(way: str, engine: Engine) -> None:
    """The handler does not run, as if SQLAlchemy had loaded the row."""
    called = list[int]()
    jobs, kind = jobs_of("sync", Lone, lambda _session, row: called.append(row.id))

    @jobs.around
    def ending(ctx: Context[Any]) -> Iterator[None]:
        if way == "rollback":
            ctx.session.execute(text("SELECT 1"))
            ctx.session.rollback()
            yield
        else:
            with ctx.session.connection().begin_nested() as savepoint:
                savepoint.rollback()
                yield

    with OutboxSession(engine) as session, session.begin():
        session.add_job(kind, row=session.get_one(Lone, 3))
    told, directly = drained(engine, jobs)
    assert [type(event) for event in told if isinstance(event, JobDone | JobDied)] == [JobDied]
    assert (directly.read, called) == (0, [])


def test_a_failed_update_ends_as_a_failed_flush(engine: Engine) -> None:
    """The row loses the value that was not written, also where the handler keeps it."""
    kept = list[Any]()

    def take(_session: Session, row: Any) -> None:
        row.note = "note 4"
        kept.append(row)

    _, directly = ran(engine, take)
    assert directly.changed == [3]
    state = inspect(kept[0])
    assert (state.modified, state.expired, "note" in state.dict) == (False, True, False)


@pytest.mark.parametrize("entity", [Later, Rebuilt])
def test_what_is_more_than_columns_of_its_row_is_loaded_by_sqlalchemy(entity: type[Any], engine: Engine) -> None:
    """Columns that are loaded later, and functions of the class."""
    _, directly = ran(engine, credit, entity=entity)
    assert (directly.read, directly.changed) == (0, [3])
    assert rows(engine, "SELECT id, balance FROM lone WHERE balance <> 0") == [(3, 5)]


def test_a_setting_of_the_handlers_leaves_the_rest_to_sqlalchemy(engine: Engine) -> None:
    """The same text may mean another table now."""

    def change(session: Session, row: Any) -> None:
        session.execute(text("SET LOCAL search_path = pg_temp, public"))
        credit(session, row)

    _, directly = ran(engine, change)
    assert (directly.read, directly.changed) == (1, [])
    assert rows(engine, "SELECT id, balance FROM lone WHERE balance <> 0") == [(3, 5)]


def taken(_session: Session, row: Any) -> None:
    row.note = "note 4"


def gone(session: Session, row: Any) -> None:
    session.execute(delete(Lone.__table__))  # type: ignore[arg-type]
    credit(session, row)


@pytest.mark.parametrize("act", [taken, gone])
def test_errors_are_sqlalchemys(act: Callable[[Any, Any], None], engine: Engine) -> None:
    """By their classes and their own words; nothing of the job is kept."""
    said = []
    for each in (engine, create_engine(engine.url)):
        told, directly = ran(each if not said else heard(each, "before_execute"), act)
        [died] = [event for event in told if isinstance(event, JobDied)]
        said.append((died.error_type, died.message.partition("[SQL")[0]))
        assert directly.changed == ([3] if len(said) == 1 else [])
        each.dispose()
    assert said[0] == said[1]
    assert rows(engine, "SELECT count(*), sum(balance) FROM lone") == [(9, 0)]


def two(first: type[Any], second: type[Any], act: Callable[[Any, Any], None]) -> tuple[Jobs, Any]:
    """A kind with two rows."""
    jobs = Jobs()

    @jobs.handler(queue="q")
    def use(ctx: Context, one: first, other: second) -> None:  # type: ignore[valid-type]
        act(one, other)

    return jobs, use


def test_rows_are_locked_in_the_order_of_their_keys(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """Two transfers between two accounts, the other way round, would else wait for each other."""

    def transfer(one: Lone, other: Lone) -> None:
        one.balance -= 5
        other.balance += 5

    jobs, kind = two(Lone, Lone, transfer)
    with sessions.begin() as session:
        session.add_job(kind, one=session.get_one(Lone, 4), other=session.get_one(Lone, 2))
    _, directly = drained(engine, jobs)
    assert (directly.read, directly.changed) == (2, [2, 4])
    assert rows(engine, "SELECT id, balance FROM lone WHERE balance <> 0 ORDER BY id") == [(2, 5), (4, -5)]


def test_changes_of_several_forms_are_sent_in_sqlalchemys_order(
    engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """One statement would come behind the other, whatever the keys."""

    def transfer(one: Lone, other: Lone) -> None:
        one.balance -= 5
        other.balance, other.note = other.balance + 5, "more"

    jobs, kind = two(Lone, Lone, transfer)
    with sessions.begin() as session:
        session.add_job(kind, one=session.get_one(Lone, 4), other=session.get_one(Lone, 2))
    _, directly = drained(engine, jobs)
    assert (directly.read, directly.changed) == (2, [])
    assert rows(engine, "SELECT id, balance FROM lone WHERE balance <> 0 ORDER BY id") == [(2, 5), (4, -5)]


def test_keys_that_are_equal_to_the_server_alone_are_one_row(
    engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Both arguments are the same object, as a session's own loading gives it."""
    found = list[bool]()
    jobs, kind = two(Padded, Padded, lambda one, other: found.append(one is other))
    with sessions.begin() as session:
        named = [Padded(id=key, balance=0) for key in ("one", "one  ")]
        for each in named:
            make_transient_to_detached(each)
        session.add_job(kind, one=named[0], other=named[1])
        session.add_job(kind, one=named[1], other=named[0])
    told, directly = drained(engine, jobs)
    assert [type(event) for event in told if isinstance(event, JobDone | JobDied)] == [JobDone, JobDone]
    assert (found, directly.read) == ([True, True], 0)
