"""Entities as arguments: stored as primary keys, also those that the database has yet to give."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, ForeignKey, event, make_url, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from outboxq import AsyncOutboxSession, Context, Jobs, OutboxSession, add_job, external
from outboxq.errors import ArgumentError, EnqueueError, JobTooLarge
from outboxq.postgres import Database
from tests.support.own_tables import emptied


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "enqueue_user"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    pets: Mapped[list["Pet"]] = relationship(back_populates="owner", cascade="all, delete-orphan")


class Pet(Base):
    __tablename__ = "enqueue_pet"
    id: Mapped[int] = mapped_column(primary_key=True)
    owner_id: Mapped[int] = mapped_column(ForeignKey("enqueue_user.id"))
    owner: Mapped[User] = relationship(back_populates="pets")


class Membership(Base):
    """A composite key: half from a user who may be pending too, half from the client."""

    __tablename__ = "enqueue_membership"
    user_id: Mapped[int] = mapped_column(ForeignKey("enqueue_user.id"), primary_key=True)
    club: Mapped[str] = mapped_column(primary_key=True)
    user: Mapped[User] = relationship()


jobs = Jobs()
notify = external("notify", queue="elsewhere")
JobArgs = Callable[[], list[object]]


@jobs.handler()
def welcome(ctx: Context, user: User, note: str = "") -> None: ...


@jobs.handler()
def maybe(ctx: Context, user: User | None) -> None: ...


@jobs.handler()
def introduce(ctx: Context, first: User, second: User) -> None: ...


@jobs.handler()
def join(ctx: Context, membership: Membership) -> None: ...


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    with emptied(database, "enqueue_user", "enqueue_pet", "enqueue_membership") as engine:
        yield engine


@pytest.fixture
def session(engine: Engine) -> Iterator[OutboxSession]:
    with OutboxSession(engine) as session:
        yield session


@pytest.fixture
def job_args(engine: Engine) -> JobArgs:
    """The arguments of all jobs, as another connection sees them."""

    def look() -> list[object]:
        with engine.connect() as connection:
            return list(connection.execute(text("SELECT args FROM outboxq.job ORDER BY seq")).scalars())

    return look


@pytest.fixture
def with_async_session(database: Database, engine: Engine) -> Callable[..., object]:
    """Runs a coroutine function with an async session on asyncpg."""

    def run(work: Callable[[AsyncOutboxSession], object]) -> None:
        async def main() -> None:
            async_engine: AsyncEngine = create_async_engine(make_url(database.url).set(drivername="postgresql+asyncpg"))
            async with AsyncOutboxSession(async_engine) as session:
                await work(session)  # type: ignore[misc]
            await async_engine.dispose()

        asyncio.run(main())

    return run


def test_a_persistent_entity_is_stored_as_its_key(session: OutboxSession, job_args: JobArgs) -> None:
    """Without loading anything, although it is expired."""
    user = User(name="ann")
    session.add(user)
    session.commit()
    user_id = user.id
    session.expire_all()
    statements: list[str] = []
    event.listen(session.get_bind(), "before_cursor_execute", lambda *args: statements.append(args[2]))
    session.add_job(welcome, user)
    session.add_job(maybe, user=user)
    session.add_job(notify, user=user, other=1)
    session.commit()
    assert [statement.split()[0] for statement in statements] == ["INSERT"]
    assert job_args() == [{"user": user_id}, {"user": user_id}, {"user": user_id, "other": 1}]


def test_a_detached_entity_is_stored_as_its_key(engine: Engine, session: OutboxSession, job_args: JobArgs) -> None:
    """Its session is closed; the key is known all the same. One of another session will do too."""
    with Session(engine) as other:
        user = User(name="ann")
        other.add(user)
        other.commit()
        user_id = user.id
        session.add_job(welcome, user)
    session.add_job(welcome, user)
    session.commit()
    assert job_args() == [{"user": user_id}] * 2


def test_a_pending_entity_is_stored_as_the_key_it_gets(session: OutboxSession, job_args: JobArgs) -> None:
    """An autoincrement key, known after the flush; the handle keeps its id."""
    user = User(name="ann")
    session.add(user)
    handles = [session.add_job(welcome, user, note="x"), session.add_job(notify, user=user, more=[1])]
    session.commit()
    assert job_args() == [{"user": user.id, "note": "x"}, {"user": user.id, "more": [1]}]
    ids = session.execute(text("SELECT id FROM outboxq.job ORDER BY seq")).scalars()
    assert list(ids) == [handle.id for handle in handles]


def test_what_waits_is_kept_apart_from_the_session_s_info(session: OutboxSession, job_args: JobArgs) -> None:
    """It is the user's, who may clear it: jobs are lost by nothing but a rollback."""
    user = User(name="ann")
    session.add(user)
    session.add_job(welcome, user)
    session.add_job(notify, more=[1])
    session.info.clear()
    session.commit()
    assert session.info == {}
    assert job_args() == [{"more": [1]}, {"user": user.id}]


def test_two_pending_entities_get_their_keys_together(session: OutboxSession, job_args: JobArgs) -> None:
    """A job waits for all of its entities."""
    first, second = User(name="ann"), User(name="bob")
    session.add_all([first, second])
    session.add_job(introduce, first, second)
    session.flush()
    session.commit()
    assert job_args() == [{"first": first.id, "second": second.id}]


def test_a_pending_entity_with_a_composite_key_is_stored_as_a_list(session: OutboxSession, job_args: JobArgs) -> None:
    """Half of the key comes from another pending entity."""
    membership = Membership(user=User(name="ann"), club="chess")
    session.add(membership)
    session.add_job(join, membership)
    session.commit()
    assert job_args() == [{"membership": [membership.user_id, "chess"]}]


def test_a_pending_entity_with_a_key_of_the_clients_waits_too(session: OutboxSession, job_args: JobArgs) -> None:
    """The flush may still refuse it."""
    session.add(User(id=5_000, name="ann"))
    session.commit()
    twin = User(id=5_001, name="ann")
    session.add(twin)
    session.add_job(welcome, twin)
    with pytest.raises(IntegrityError):
        session.commit()
    session.rollback()
    session.add(User(name="carl"))
    session.commit()
    assert job_args() == []


def test_none_is_stored_where_the_annotation_allows_it(session: OutboxSession, job_args: JobArgs) -> None:
    """`User | None` takes None, `User` refuses it at the call."""
    session.add_job(maybe, None)
    with pytest.raises(ArgumentError, match="argument 'user' takes a User, got NoneType"):
        session.add_job(welcome, None)  # type: ignore[arg-type]
    session.commit()
    assert job_args() == [{"user": None}]


@pytest.mark.parametrize("persistent", [False, True])
def test_an_entity_of_the_wrong_class_is_refused_at_the_call(
    session: OutboxSession, job_args: JobArgs, persistent: bool
) -> None:
    """Pending or persistent: its key would lead to a row of another table."""
    pet = Pet(owner=User(name="ann"))
    session.add(pet)
    if persistent:
        session.flush()
    with pytest.raises(ArgumentError, match="argument 'user' takes a User, got Pet"):
        session.add_job(welcome, pet)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="argument 'note' is not annotated with a mapped class, got an entity"):
        session.add_job(welcome, pet.owner, pet)  # type: ignore[arg-type]
    session.commit()
    assert job_args() == []


def test_a_transient_entity_is_refused_at_the_call(engine: Engine, session: OutboxSession, job_args: JobArgs) -> None:
    """Nobody will give it a key; one that is pending in another session is no better."""
    user = User(name="ann")
    with pytest.raises(
        EnqueueError, match=r"'welcome' was given a new User, which has no primary key yet.*session\.add\(\) it"
    ):
        session.add_job(welcome, user)
    with Session(engine) as other:
        other.add(user)
        with pytest.raises(EnqueueError, match="is not in this session"):
            session.add_job(welcome, user)
    session.commit()
    assert job_args() == []


def test_all_jobs_are_checked_before_the_first_is_added(session: OutboxSession, job_args: JobArgs) -> None:
    """add_jobs adds all of them or none."""
    with pytest.raises(EnqueueError, match="no primary key yet"):
        session.add_jobs([maybe.job(None), welcome.job(User(name="ann"))])
    with pytest.raises(ArgumentError, match=r"add_jobs takes jobs made by kind\.job\(\.\.\.\), got Handler"):
        session.add_jobs([maybe.job(None), maybe])  # type: ignore[list-item]
    session.commit()
    assert job_args() == []


def test_a_pending_entity_is_gone_with_its_savepoint_and_so_is_its_job(
    session: OutboxSession, job_args: JobArgs
) -> None:
    """Flushed or not; the transaction goes on."""
    for flush in (False, True):
        savepoint = session.begin_nested()
        user = User(name="ann")
        session.add(user)
        session.add_job(welcome, user)
        if flush:
            session.flush()
        savepoint.rollback()
        with pytest.raises(EnqueueError, match="no primary key yet"):
            session.add_job(welcome, user)
    session.add(User(name="bob"))
    session.commit()
    assert job_args() == []


def _expunge(session: Session, user: User) -> None:
    session.expunge(user)


def _expunge_all(session: Session, user: User) -> None:
    session.expunge_all()


def _move_to_another_session(session: Session, user: User) -> None:
    session.expunge(user)
    with Session(session.get_bind()) as other:
        other.add(user)
        other.commit()


LEAVING = pytest.mark.parametrize("leave", [_expunge, _expunge_all, _move_to_another_session])


@LEAVING
@pytest.mark.parametrize("key", [None, 7_000], ids=["the-databases-key", "the-clients-key"])
@pytest.mark.parametrize("more", [False, True], ids=["nothing-else", "with-other-rows"])
def test_a_commit_without_a_waiting_jobs_entity_is_refused(
    session: OutboxSession, job_args: JobArgs, leave: Callable[[Session, User], None], key: int | None, more: bool
) -> None:
    """The job cannot be written, and is not lost without a word: nothing of the transaction is committed."""
    user = User(name="ann", id=key)
    session.add(user)
    session.add_job(welcome, user)
    leave(session, user)
    if more:
        session.add(User(name="bob"))
        session.flush()
    with pytest.raises(EnqueueError, match="'welcome' waits for the primary key of argument 'user', which left"):
        session.commit()
    session.rollback()
    assert job_args() == []
    assert session.query(User).filter_by(name="bob").count() == 0


@LEAVING
def test_a_savepoint_does_not_make_the_session_forget_a_waiting_job(
    session: OutboxSession, job_args: JobArgs, leave: Callable[[Session, User], None]
) -> None:
    """A savepoint that rolls back ends, but the job was added before it."""
    user = User(name="ann")
    session.add(user)
    session.add_job(welcome, user)
    leave(session, user)
    session.begin_nested().rollback()
    with pytest.raises(EnqueueError, match="'welcome' waits for the primary key"):
        session.commit()
    session.rollback()
    assert job_args() == []


def test_a_pending_orphan_that_its_flush_drops_is_noticed(session: OutboxSession, job_args: JobArgs) -> None:
    """delete-orphan expunges it inside the flush, after the commit has begun."""
    owner = User(name="ann")
    session.add(owner)
    session.commit()
    pet = Pet()
    owner.pets.append(pet)
    session.add_job(notify, pet=pet)
    owner.pets.remove(pet)
    with pytest.raises(EnqueueError, match="'notify' waits for the primary key of argument 'pet'"):
        session.commit()
    session.rollback()
    assert job_args() == []


def test_an_entity_that_comes_back_before_the_commit_is_fine(session: OutboxSession, job_args: JobArgs) -> None:
    """Only what is so at the commit counts."""
    user = User(name="ann")
    session.add(user)
    session.add_job(welcome, user)
    session.expunge(user)
    session.add(user)
    session.commit()
    assert job_args() == [{"user": user.id}]


@pytest.mark.parametrize("end", ["close", "rollback", "reset", "invalidate"])
def test_a_session_that_was_closed_forgets_what_waited(session: OutboxSession, job_args: JobArgs, end: str) -> None:
    """And is good for the next transaction."""
    lost = User(name="ann")
    session.add(lost)
    session.add_job(welcome, lost)
    getattr(session, end)()
    user = User(name="bob")
    session.add(user)
    session.add_job(welcome, user)
    session.commit()
    assert job_args() == [{"user": user.id}]
    session.commit()
    assert len(job_args()) == 1


def test_a_failed_flush_takes_the_waiting_job_with_it(session: OutboxSession, job_args: JobArgs) -> None:
    """The next transaction starts empty."""
    session.add(User(name="ann"))
    session.commit()
    twin = User(name="ann")
    session.add(twin)
    session.add_job(welcome, twin)
    with pytest.raises(IntegrityError):
        session.flush()
    session.rollback()
    session.add(User(name="bob"))
    session.commit()
    assert job_args() == []


def test_the_key_of_a_pending_entity_counts_towards_the_cap(session: OutboxSession, job_args: JobArgs) -> None:
    """The rest of the arguments is measured at the call, the whole once more at the flush, before any job's row."""
    user = User(name="ann")
    session.add(user)
    with pytest.raises(JobTooLarge):
        session.add_job(welcome, user, note="x" * 262_144)
    session.add_job(welcome, user, note="x" * (262_144 - len('{"note":"","user":}')))
    with pytest.raises(JobTooLarge):
        session.commit()
    session.rollback()
    assert job_args() == []


def test_an_entity_can_wait_in_a_job_made_before(session: OutboxSession, job_args: JobArgs) -> None:
    """kind.job(...) takes a pending entity; by the time it is added the key may be there."""
    early, late = User(name="ann"), User(name="bob")
    session.add_all([early, late])
    made = [welcome.job(early)]
    session.flush()
    session.add_jobs([*made, welcome.job(late)])
    session.commit()
    assert job_args() == [{"user": early.id}, {"user": late.id}]


def test_an_async_session_gives_keys_alike(with_async_session: Callable[..., None], job_args: JobArgs) -> None:
    """Persistent, expired, pending and composite, without a word of await for add_job."""
    expected: list[object] = []

    async def work(session: AsyncOutboxSession) -> None:
        user = User(name="ann")
        session.add(user)
        session.add_job(welcome, user)
        await session.commit()
        session.add_job(maybe, user)
        membership = Membership(user=User(name="bob"), club="chess")
        session.add(membership)
        session.add_job(join, membership)
        await session.commit()
        user_id = await session.run_sync(lambda _: user.id)
        bob_id = await session.run_sync(lambda _: membership.user_id)
        expected.extend([{"user": user_id}, {"user": user_id}, {"membership": [bob_id, "chess"]}])

    with_async_session(work)
    assert job_args() == expected


def test_an_async_session_refuses_alike(with_async_session: Callable[..., None], job_args: JobArgs) -> None:
    """A transient entity at the call; one that left, at the commit; a savepoint takes its jobs with it."""

    async def work(session: AsyncSession) -> None:
        with pytest.raises(EnqueueError, match="is not in this session"):
            add_job(session, welcome, User(name="x"))
        async with session.begin_nested() as savepoint:
            gone = User(name="gone")
            session.add(gone)
            add_job(session, welcome, gone)
            await savepoint.rollback()
        user = User(name="ann")
        session.add(user)
        add_job(session, welcome, user)
        session.expunge(user)
        await (await session.begin_nested()).rollback()
        with pytest.raises(EnqueueError, match="'welcome' waits for the primary key"):
            await session.commit()
        await session.rollback()
        session.add(user)
        add_job(session, maybe, user)
        await session.close()
        add_job(session, maybe, None)
        await session.commit()

    with_async_session(work)
    assert job_args() == [{"user": None}]
