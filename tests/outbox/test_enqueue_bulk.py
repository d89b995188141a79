"""Many jobs at once: few statements, and one with their transaction in every order of flushes and savepoints."""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outboxq import AsyncOutboxSession, Context, Jobs, NewJob, OutboxSession, add_job, add_jobs, external
from outboxq.codec.values import MAX_ARGS_BYTES
from outboxq.errors import ArgumentError, EnqueueError, JobTooLarge
from outboxq.postgres import Database
from outboxq.tables import job as job_table
from tests.support.own_tables import emptied


class Base(DeclarativeBase):
    pass


class Person(Base):
    __tablename__ = "enqueue_bulk_person"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)


jobs = Jobs()
ship = external("ship", queue="depot")


@jobs.handler(queue="accounts")
def credit(ctx: Context, cents: int) -> None: ...


@jobs.handler()
def welcome(ctx: Context, person: Person) -> None: ...


@jobs.handler()
def letter(ctx: Context, person: Person, text: str) -> None: ...


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    with emptied(database, "enqueue_bulk_person") as engine:
        yield engine


@pytest.fixture
def stored(engine: Engine) -> Callable[[], list[int]]:
    """The cents of all jobs in their order, as another connection sees them."""

    def look() -> list[int]:
        with engine.connect() as connection:
            return list(
                connection.execute(text("SELECT (args->>'cents')::int FROM outboxq.job ORDER BY seq")).scalars()
            )

    return look


@pytest.fixture
def statements(engine: Engine) -> list[str]:
    """What is sent from now on, without what begins and ends transactions."""
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    return sent


Stored = Callable[[], list[int]]


def many(*cents: int) -> Iterator[NewJob]:
    return (credit.job(cents=number) for number in cents)


@pytest.mark.first_and_last
@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (1_000, 1), (1_001, 2)])
def test_a_thousand_jobs_are_one_statement(
    session: Session, stored: Stored, statements: list[str], count: int, expected: int
) -> None:
    """Whatever their number was in each call; the handles have their final ids, in order."""
    handles = add_jobs(session, many(*range(count)))
    session.commit()
    assert len(statements) == expected
    assert stored() == list(range(count))
    ids = list(session.execute(text("SELECT id FROM outboxq.job ORDER BY seq")).scalars())
    assert ids == [handle.id for handle in handles] == sorted(ids)
    assert {(handle.kind, handle.queue) for handle in handles} <= {("credit", "accounts")}


def test_a_job_next_to_a_row_is_one_more_statement(session: Session, stored: Stored, statements: list[str]) -> None:
    """And so are several, added one by one and in bulk: their order is that of the calls."""
    session.add(Person(name="ann"))
    add_job(session, credit, cents=1)
    add_jobs(session, many(2, 3))
    add_job(session, credit, cents=4)
    session.commit()
    assert len(statements) == 2
    assert stored() == [1, 2, 3, 4]


def test_jobs_that_wait_for_keys_are_one_statement_too(session: Session, statements: list[str]) -> None:
    """However many entities get their keys in that flush."""
    people = [Person(name=str(number)) for number in range(50)]
    session.add_all(people)
    add_jobs(session, [welcome.job(person) for person in people])
    session.commit()
    assert sum("outboxq.job" in statement for statement in statements) == 1
    found = session.execute(text("SELECT (args->>'person')::int FROM outboxq.job ORDER BY seq")).scalars()
    assert list(found) == [person.id for person in people]


@pytest.mark.large
def test_a_hundred_thousand_jobs_are_added(engine: Engine, stored: Stored, statements: list[str]) -> None:
    """In one transaction, a thousand in a statement."""
    with OutboxSession(engine) as session:
        handles = session.add_jobs(many(*range(100_000)))
        session.commit()
    assert len(statements) == 100
    assert stored() == list(range(100_000))
    assert len({handle.id for handle in handles}) == 100_000


@pytest.mark.each_value
@pytest.mark.parametrize("flush", [False, True], ids=["", "flushed"])
@pytest.mark.parametrize("ends", list(itertools.product([True, False], repeat=3)))
def test_a_batch_shares_the_end_of_its_savepoint(
    session: Session, stored: Stored, ends: tuple[bool, ...], flush: bool
) -> None:
    """Nested twice and once more after it, each released or rolled back."""
    outer_kept, inner_kept, later_kept = ends
    add_jobs(session, many(1, 2))
    outer = session.begin_nested()
    add_jobs(session, many(3, 4))
    inner = session.begin_nested()
    add_jobs(session, many(5, 6))
    if flush:
        session.flush()
    (inner.commit if inner_kept else inner.rollback)()
    add_jobs(session, many(7))
    (outer.commit if outer_kept else outer.rollback)()
    later = session.begin_nested()
    add_jobs(session, many(8))
    (later.commit if later_kept else later.rollback)()
    add_job(session, credit, cents=9)
    session.commit()
    inside = [3, 4, *([5, 6] if inner_kept else []), 7] if outer_kept else []
    assert stored() == [1, 2, *inside, *([8] if later_kept else []), 9]


@pytest.mark.first_and_last
@pytest.mark.parametrize("end", ["rollback", "close", "reset", "invalidate", "expunge_all"])
@pytest.mark.parametrize("flush", [False, True], ids=["", "flushed"])
def test_a_batch_is_gone_with_its_session_and_the_next_is_not(
    session: Session, stored: Stored, end: str, flush: bool
) -> None:
    """The next batch of the same session holds nothing of the one before."""
    add_jobs(session, many(1, 2))
    if flush:
        session.flush()
    getattr(session, end)()
    if end == "expunge_all":
        session.rollback()
    add_jobs(session, many(3))
    session.commit()
    session.commit()
    assert stored() == [3]


def test_a_query_flushes_the_batch_before_it(session: Session, stored: Stored, statements: list[str]) -> None:
    """Autoflush, as for any pending row; and not under no_autoflush."""
    add_jobs(session, many(1, 2))
    with session.no_autoflush:
        session.query(Person).all()
        assert not any("outboxq.job" in statement for statement in statements)
    session.query(Person).all()
    assert "outboxq.job" in statements[-2]
    add_jobs(session, many(3))
    session.commit()
    assert stored() == [1, 2, 3]


def test_a_failed_flush_leaves_no_batch(session: Session, stored: Stored) -> None:
    """The session has to be rolled back, as after any failed flush; then it goes on."""
    session.add(Person(name="ann"))
    session.commit()
    session.add(Person(name="ann"))
    add_jobs(session, many(1, 2))
    with pytest.raises(IntegrityError):
        session.flush()
    session.rollback()
    add_jobs(session, many(3))
    session.commit()
    assert stored() == [3]


def test_a_batch_that_postgresql_refuses_fails_its_flush(session: Session, stored: Stored) -> None:
    """With SQLAlchemy's error, and no commit behind it that says nothing."""
    kind = external("ship", queue="depot")
    object.__setattr__(kind, "queue", "x" * 64)
    add_jobs(session, [kind.job(cents=1)])
    with pytest.raises(IntegrityError, match="queue_name_bytes"):
        session.flush()
    with pytest.raises(EnqueueError, match="roll back"):
        session.commit()
    session.rollback()
    assert stored() == []


def test_a_job_that_a_flush_adds_is_not_lost(session: Session, stored: Stored) -> None:
    """By an event of the session before the flush, and by one after it: then it is for the next flush."""
    added = iter([2, 3])

    def add(session: Session, *_: object) -> None:
        for cents in itertools.islice(added, 1):
            add_job(session, credit, cents=cents)

    event.listen(session, "before_flush", add)
    event.listen(session, "after_flush", add)
    add_jobs(session, many(1))
    session.commit()
    assert stored() == [1, 2, 3]


def test_a_batch_is_checked_before_it_is_added(session: Session, stored: Stored) -> None:
    """A generator that fails half-way, or what is no job, adds none; the batch before it stays whole."""
    add_jobs(session, many(1))

    def half() -> Iterator[NewJob]:
        yield credit.job(cents=2)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        add_jobs(session, half())
    with pytest.raises(ArgumentError, match="add_jobs takes jobs"):
        add_jobs(session, [credit.job(cents=2), credit])  # type: ignore[list-item]
    with pytest.raises(EnqueueError, match="no primary key yet"):
        add_jobs(session, [credit.job(cents=2), welcome.job(Person(name="x"))])
    session.commit()
    assert stored() == [1]


TEXTS = ['"', "\\", '\\"', "{a,b}", "NULL", "null", " ", "", "'", "a\nb\tc", "ключ 📨", "%s $1 :a", "\\u0000", "\x7f"]


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_mixed_kinds_and_options_are_each_stored_as_they_are(session: Session, engine: Engine, together: bool) -> None:
    """No job takes over anything of its neighbours, and no text is more than text: in one statement, or in its own."""
    moment = datetime(2030, 1, 1, 5, 30, 0, 7, tzinfo=UTC)
    added = [
        credit.job(cents=1),
        credit.options(priority=-7, max_attempts=3).job(cents=2),
        credit.options(run_at=moment).job(cents=3),
        credit.options(delay=timedelta(days=40, microseconds=3)).job(cents=4),
        credit.options(delay=timedelta(0)).job(cents=5),
        *(ship.options(headers={word: word}).job(a=word) for word in TEXTS),
    ]
    for some in [added] if together else [[new] for new in added]:
        add_jobs(session, some)
        session.flush()
    session.commit()
    query = "SELECT priority, max_attempts, state, run_at, run_at - created_at AS wait, args, headers FROM outboxq.job"
    with engine.connect() as connection:
        rows: list[Any] = list(connection.execute(text(f"{query} ORDER BY seq")))
    assert [(row.priority, row.max_attempts, row.state) for row in rows[:5]] == [
        (0, None, "ready"),
        (-7, 3, "ready"),
        (0, None, "scheduled"),
        (0, None, "scheduled"),
        (0, None, "ready"),
    ]
    assert rows[2].run_at == moment
    assert timedelta(0) <= timedelta(days=40, microseconds=3) - rows[3].wait < timedelta(seconds=10)
    assert [(row.args["a"], row.headers) for row in rows[5:]] == [(word, {word: word}) for word in TEXTS]


def test_jobs_of_one_kind_are_told_apart_by_their_options(
    session: Session, engine: Engine, statements: list[str]
) -> None:
    """However their options repeat, in one statement."""
    kinds = [credit, credit.options(priority=1), credit.options(delay=timedelta(hours=1)), credit]
    add_jobs(session, [kind.job(cents=number) for number in range(5) for kind in kinds])
    session.commit()
    assert len(statements) == 1
    query = "SELECT (args->>'cents')::int, priority, state FROM outboxq.job ORDER BY seq"
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(text(query))]
    expected = [(0, "ready"), (1, "ready"), (0, "scheduled"), (0, "ready")]
    assert found == [(number, *options) for number in range(5) for options in expected]


def test_a_job_that_turns_out_too_large_adds_none_of_its_call(session: Session, stored: Stored) -> None:
    """Not even one that waits for the key of an entity: what is refused may be mended and added again."""
    waits, flushed = Person(name="ann"), Person(name="bob")
    session.add(flushed)
    with session.no_autoflush:
        full = letter.job(flushed, "x" * (MAX_ARGS_BYTES - len('{"text":""}')))
        session.flush()
        session.add(waits)
        with pytest.raises(JobTooLarge):
            add_jobs(session, [welcome.job(waits), full])
    add_jobs(session, many(1))
    session.commit()
    assert stored() == [1]


def test_a_bind_by_table_leads_the_batch(engine: Engine, stored: Stored) -> None:
    """As it leads statements on the table."""
    with Session(binds={job_table: engine}) as session:
        add_jobs(session, many(1, 2))
        session.commit()
    assert stored() == [1, 2]


def test_a_translated_schema_is_honoured(database: Database, engine: Engine, stored: Stored) -> None:
    """The batch goes to the table of the session's own schema."""
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA tenant"))
        connection.execute(text("CREATE TABLE tenant.job (LIKE outboxq.job INCLUDING ALL)"))
    with Session(engine.execution_options(schema_translate_map={"outboxq": "tenant"})) as session:
        add_jobs(session, many(1, 2))
        session.commit()
        assert session.execute(text("SELECT count(*) FROM tenant.job")).scalar_one() == 2
    assert stored() == []


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_row_level_security_checks_each_job(database: Database, engine: Engine, stored: Stored, driver: str) -> None:
    """A producer with INSERT alone, under a policy; and the batch wakes a relay that sleeps."""
    role, password = f"outboxq_bulk_{secrets.token_hex(6)}", secrets.token_hex(12)
    admin = make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(admin, autocommit=True) as connection:
        try:
            connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{password}'")
        except psycopg.errors.InsufficientPrivilege:
            pytest.skip("this server does not let us make roles")
        connection.execute(f"GRANT USAGE ON SCHEMA outboxq TO {role}")
        connection.execute(f"GRANT INSERT ON outboxq.job TO {role}")
        connection.execute("ALTER TABLE outboxq.job ENABLE ROW LEVEL SECURITY")
        connection.execute(f"CREATE POLICY own ON outboxq.job FOR INSERT TO {role} WITH CHECK (queue = 'accounts')")
        connection.execute("LISTEN outboxq_outboxq")
        connection.execute("SELECT pg_advisory_lock(hashtext('outboxq_outboxq'), hashtext('accounts'))")
        producer = create_engine(
            make_url(database.url).set(drivername=f"postgresql+{driver}", username=role, password=password)
        )
        try:
            with Session(producer) as session:
                add_jobs(session, many(1, 2, 3))
                session.commit()
                add_jobs(session, [*many(4), ship.job(cents=5)])
                with pytest.raises(DBAPIError, match="row-level security policy"):
                    session.commit()
            assert stored() == [1, 2, 3]
            connection.execute("SELECT 1")
            assert [heard.payload for heard in connection.notifies(timeout=0)] == ["accounts"]
        finally:
            producer.dispose()
            connection.execute("ALTER TABLE outboxq.job DISABLE ROW LEVEL SECURITY")
            connection.execute("DROP POLICY own ON outboxq.job")
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_async_session_adds_a_batch_alike(database: Database, stored: Stored, engine: Engine, driver: str) -> None:
    """add_jobs is not awaited and sends nothing; savepoints, rollbacks and statement counts are those of a sync one."""

    async def produce() -> list[str]:
        async_engine = create_async_engine(make_url(database.url).set(drivername=f"postgresql+{driver}"))
        sent: list[str] = []
        async with AsyncOutboxSession(async_engine) as session:
            await session.connection()
            event.listen(async_engine.sync_engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
            session.add_jobs(many(*range(1_000)))
            assert sent == []
            await session.commit()
            counted = list(sent)
            async with session.begin_nested() as savepoint:
                session.add_jobs(many(1_000))
                await savepoint.rollback()
            session.add_jobs([credit.options(delay=timedelta(hours=1)).job(cents=1_001)])
            await session.commit()
            session.add_jobs(many(1_002))
            await session.rollback()
        await async_engine.dispose()
        return counted

    assert len(asyncio.run(produce())) == 1
    assert stored() == [*range(1_000), 1_001]
