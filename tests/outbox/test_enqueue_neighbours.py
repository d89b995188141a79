"""add_job beside what users do with SQLAlchemy: shards, several databases, hooks, cleared mappers, many queues."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, inspect, select, text
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from outboxq import Context, Inbox, Jobs, OutboxSession, add_job, add_jobs, external
from outboxq.errors import EnqueueError
from outboxq.postgres import Database, Server
from outboxq.tables import JobRow
from outboxq.tables import job as job_table
from tests.support.own_tables import database_with, emptied

ship = external("ship", queue="depot")
jobs = Jobs()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "enqueue_neighbours_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    region: Mapped[str]


class Audit(Base):
    __tablename__ = "enqueue_neighbours_audit"
    id: Mapped[int] = mapped_column(primary_key=True)
    what: Mapped[str]


@jobs.handler()
def bill(ctx: Context, order: Order) -> None: ...


@pytest.fixture(scope="module")
def east_database(outboxq_server: Server, outboxq_template: str) -> Iterator[Database]:
    with database_with(Base.metadata, outboxq_server, outboxq_template) as database:
        yield database


@pytest.fixture(scope="module")
def west_database(outboxq_server: Server, outboxq_template: str) -> Iterator[Database]:
    with database_with(Base.metadata, outboxq_server, outboxq_template) as database:
        yield database


TABLES = ("outboxq.inbox", "enqueue_neighbours_order", "enqueue_neighbours_audit")


@pytest.fixture
def east(east_database: Database) -> Iterator[Engine]:
    with emptied(east_database, *TABLES) as engine:
        yield engine


@pytest.fixture
def west(west_database: Database) -> Iterator[Engine]:
    with emptied(west_database, *TABLES) as engine:
        yield engine


def stored(engine: Engine) -> tuple[int, int]:
    """How many orders and jobs there are."""
    with engine.connect() as connection:
        orders = connection.scalar(select(func.count()).select_from(Order)) or 0
        return orders, connection.scalar(select(func.count()).select_from(job_table)) or 0


class ShardedOutboxSession(OutboxSession, ShardedSession):
    pass


MakeSharded = Callable[..., ShardedSession]


@pytest.fixture(params=[ShardedSession, ShardedOutboxSession], ids=["ShardedSession", "with-OutboxSession"])
def sharded(request: pytest.FixtureRequest, east: Engine, west: Engine) -> MakeSharded:
    """Makes sessions whose rows go by their region; the chooser knows nothing of jobs unless it is told."""

    def make(of_jobs: str | None = None, **options: Any) -> ShardedSession:
        def choose(_mapper: Any, instance: Any, clause: Any = None) -> str:
            if of_jobs is not None and isinstance(instance, JobRow):
                return of_jobs
            return str(instance.region)

        session: ShardedSession = request.param(
            shard_chooser=choose,
            identity_chooser=lambda *_, **__: ["east", "west"],
            execute_chooser=lambda _: ["east", "west"],
            shards={"east": east, "west": west},
            **options,
        )
        return session

    return make


@pytest.mark.first_and_last
@pytest.mark.parametrize("entity", [False, True], ids=["plain", "waiting-for-a-key"])
@pytest.mark.parametrize("flush", [False, True], ids=["", "after-a-flush"])
def test_a_job_goes_to_the_shard_of_its_rows(
    sharded: MakeSharded, east: Engine, west: Engine, entity: bool, flush: bool
) -> None:
    """Without a word in the user's shard_chooser, and whether the rows wait for the flush or are written already."""
    for region, count in (("east", 1), ("west", 2)):
        for _ in range(count):
            with sharded() as session:
                order = Order(region=region)
                session.add(order)
                if flush:
                    session.flush()
                if entity:
                    add_job(session, bill, order)
                else:
                    add_job(session, ship, n=1)
                session.commit()
    assert (stored(east), stored(west)) == ((1, 1), (2, 2))


def test_a_sharded_session_keeps_jobs_one_with_savepoints(sharded: MakeSharded, east: Engine, west: Engine) -> None:
    """As every session."""
    with sharded() as session:
        session.add(Order(region="west"))
        add_job(session, ship, n=1)
        with session.begin_nested() as savepoint:
            add_job(session, ship, n=2)
            savepoint.rollback()
        session.commit()
    assert (stored(east), stored(west)) == ((0, 0), (1, 1))


def test_the_shard_chooser_is_asked_if_the_rows_leave_it_open(sharded: MakeSharded, east: Engine, west: Engine) -> None:
    """For an instance of JobRow; a chooser that cannot tell makes a clear error, and nothing is written."""
    for rows in ([], ["east", "west"]):
        with sharded("west") as session:
            session.add_all([Order(region=region) for region in rows])
            add_job(session, ship, n=1)
            session.commit()
        with sharded() as session:
            session.add_all([Order(region=region) for region in rows])
            add_job(session, ship, n=1)
            with pytest.raises(EnqueueError, match=r"let it answer for an instance of outboxq\.tables\.JobRow"):
                session.commit()
    assert (stored(east), stored(west)) == ((1, 0), (1, 2))


def test_a_sharded_session_refuses_autocommit_at_its_flush(sharded: MakeSharded, east: Engine) -> None:
    """The call cannot know the shard."""
    with sharded() as session:
        session.bind_shard("east", east.execution_options(isolation_level="AUTOCOMMIT"))  # type: ignore[arg-type]
        session.add(Order(region="east"))
        add_job(session, ship, n=1)
        with pytest.raises(EnqueueError, match="in AUTOCOMMIT"):
            session.commit()
    assert stored(east) == (0, 0)


def test_a_message_is_accepted_in_the_shard_of_its_rows(sharded: MakeSharded, west: Engine) -> None:
    """The inbox lives beside the jobs."""
    with sharded() as session:
        session.add(Order(region="west"))
        assert Inbox("shop").accept(session, "m-1")
        session.commit()
    assert stored(west) == (1, 0)
    with west.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM outboxq.inbox")) == 1


def test_jobs_with_a_transaction_of_their_own_are_refused(east: Engine, west: Engine) -> None:
    """At the call: another database, and another engine object on the same one, whose connections are its own."""
    same = east.execution_options(isolation_level="REPEATABLE READ")
    for binds in ({Base: east, JobRow: west}, {Base: east, job_table: west}, {Base: east, JobRow: same}):
        with Session(binds=binds) as session:
            session.add(Order(region="east"))
            with pytest.raises(EnqueueError, match=r"a transaction of their own.*bind outboxq\.tables\.JobRow"):
                add_job(session, ship, n=1)
            with pytest.raises(EnqueueError, match="a transaction of their own"):
                Inbox("shop").accept(session, "m-1")
    with Session(east, binds={JobRow: west}) as session, pytest.raises(EnqueueError, match="of their own"):
        add_job(session, ship, n=1)
    assert (stored(east), stored(west)) == ((0, 0), (0, 0))


def test_binds_that_lead_jobs_where_rows_go_are_accepted(east: Engine, west: Engine) -> None:
    """One of several databases is enough: the job is one with the rows that go there."""
    settings: list[dict[Any, Any]] = [
        {"binds": {Base: east, JobRow: east}},
        {"binds": {Order: east, Audit: west, JobRow: east}},
        {"bind": east, "binds": {Audit: west}},
        {"bind": east, "binds": {JobRow: east, Audit: west}},
    ]
    for options in settings:
        with Session(**options) as session:
            session.add(Order(region="east"))
            add_job(session, ship, n=1)
            session.commit()
    with Session(binds={JobRow: east}) as session:
        add_job(session, ship, n=1)
        session.commit()
    assert (stored(east), stored(west)) == ((4, 5), (0, 0))


Hook = Callable[[Session], None]


def _audit(session: Session) -> None:
    for each in session.new:
        session.add(Audit(what=each.__table__.name + str(each.id)))


def _describe(session: Session) -> None:
    for each in session.new:
        assert inspect(each).mapper.local_table.name.startswith("enqueue_neighbours")


def _tag(session: Session) -> None:
    for each in session.new:
        each.region = each.region.lower()


@pytest.mark.parametrize("hook", [_audit, _describe, _tag])
@pytest.mark.parametrize("where", ["session", "sessionmaker", "class"])
@pytest.mark.parametrize("base", [Session, OutboxSession])
def test_hooks_of_users_do_not_meet_a_job(east: Engine, hook: Hook, where: str, base: type[Session]) -> None:
    """Hooks at a flush may take every object of it for one of the user's own, wherever they are registered."""

    class OwnSession(base):  # type: ignore[misc, valid-type]
        pass

    met: list[object] = []
    make = sessionmaker(east, class_=OwnSession)
    session = make()
    target = {"session": session, "sessionmaker": make, "class": OwnSession}[where]

    def before_flush(session: Session, *_: object) -> None:
        met.extend(session.new)
        hook(session)

    event.listen(target, "before_flush", before_flush)
    session.add(Order(region="East"))
    add_job(session, ship, n=1)
    session.commit()
    session.close()
    assert stored(east) == (1, 1)
    assert [type(each) for each in met] == [Order]


def test_a_hook_at_any_other_moment_finds_a_table(east: Engine) -> None:
    """An object that is attached to a session has one, also ours."""
    names: list[str] = []
    with Session(east) as session:
        event.listen(session, "after_attach", lambda _, each: names.append(f"{each.__table__}"))
        add_job(session, ship, n=1)
        names.extend(each.__tablename__ for each in session.new)
        session.commit()
    assert names == ["outboxq.job", "job"]


def test_clearing_all_mappers_does_not_break_add_job(east_database: Database, east: Engine) -> None:
    """A common fixture of test suites; in a process of its own, because it takes everybody's mappers away."""
    script = f"""
import threading
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, clear_mappers, mapped_column
from outboxq import OutboxSession, add_job, add_jobs, external

ship = external("ship", queue="depot")
engine = create_engine({east_database.url!r})
for _ in range(3):
    for session_class in (Session, OutboxSession):
        with session_class(engine) as session:
            add_job(session, ship, n=1)
            session.flush()
            add_jobs(session, [ship.job(n=2), ship.job(n=3)])
            session.commit()
    clear_mappers()

def add():
    with Session(engine) as session:
        add_job(session, ship, n=4)
        session.commit()

threads = [threading.Thread(target=add) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert stored(east) == (0, 26)


@pytest.mark.large
@pytest.mark.parametrize("session_class", [Session, OutboxSession])
def test_jobs_for_twenty_thousand_queues_fit_in_one_transaction(east: Engine, session_class: type[Session]) -> None:
    """The trigger that wakes relays takes a lock for each queue, and the server has room for some thousands."""
    with session_class(east) as session:
        session.add(Order(region="east"))
        for first in range(0, 20_000, 500):
            add_jobs(session, [external("ship", queue=f"q{first + n}").job() for n in range(500)])
            session.flush()
        locks = session.scalar(text("SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND objsubid = 2"))
        session.commit()
    assert stored(east) == (1, 20_000)
    assert (locks or 0) <= 64


def test_jobs_for_a_few_queues_are_announced(east: Engine) -> None:
    """The trigger's lock on each queue tells a relay that wants to sleep of a job that is not committed yet."""
    with Session(east) as session:
        for n in range(64):
            add_job(session, external("ship", queue=f"q{n}"))
            add_job(session, external("ship", queue=f"q{n // 2}"))
            session.flush()
        locks = session.scalar(text("SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND objsubid = 2"))
        session.rollback()
    assert locks == 64
