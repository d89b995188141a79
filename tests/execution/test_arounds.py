"""Arounds: what an application wraps around the calls of its handlers, in every way in which a job can run."""

import asyncio
import contextvars
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine, String, TypeDecorator, select, text
from sqlalchemy.orm import Mapped, Session, make_transient_to_detached, mapped_column, sessionmaker

from outboxq import (
    AsyncBatchContext,
    AsyncContext,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    DeadLetter,
    Discard,
    Done,
    Jobs,
    Locked,
    OutboxSession,
    Retry,
    Snooze,
)
from outboxq.events import Event, JobDied, JobDiscarded, JobDone, JobRetried, JobSnoozed
from tests.support.app import Account, Base, Effect
from tests.support.ledger import balances, effects, waiting
from tests.support.matrices import diagonal
from tests.support.shared_app import statements

Drain = Callable[..., list[Event]]
ONCE = Backoff(max_attempts=1)
TWICE = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)


@dataclass
class Credit:
    account: Account
    name: str


class Way(NamedTuple):
    """How jobs run: by what sort of handler, and how many are claimed at once."""

    name: str
    flavour: str
    batch_size: int = 1

    def __str__(self) -> str:
        return f"{self.flavour} {self.name}"


SIZES = {"alone": 1, "savepoints": 50, "shared": 50, "batch": 50, "lease": 1}
BOTH_FLAVOURS = pytest.mark.parametrize("flavour", ["sync", "async"])
EACH_NAME = pytest.mark.parametrize("name", SIZES)
every_way = diagonal(BOTH_FLAVOURS, EACH_NAME)


@pytest.fixture
def way(flavour: str, name: str) -> Way:
    """One of them."""
    return Way(name, flavour, SIZES[name])


def make_handler(jobs: Jobs, way: Way, act: Callable[..., object], retry: Backoff = ONCE, kind: str = "credit") -> Any:
    """A handler that does `act(ctx, account, name)`, whichever way it is called."""
    options: dict[str, Any] = {"queue": "q", "kind": kind, "retry": retry}
    if way.name == "batch":

        def credit_all(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> Any:
            return [act(ctx, item.args.account, item.args.name) for item in items]

        async def credit_all_async(ctx: AsyncBatchContext, items: Sequence[BatchItem[Credit]]) -> Any:
            return [act(ctx, item.args.account, item.args.name) for item in items]

        register = jobs.batch_handler(Credit, **options)
        return register(credit_all) if way.flavour == "sync" else register(credit_all_async)
    options |= {"batchable": way.name == "shared", "claim": "lease" if way.name == "lease" else "transaction"}
    if way.flavour == "sync":

        @jobs.handler(**options)
        def credit(ctx: Context, account: Account, name: str) -> Any:
            return act(ctx, account, name)

        return credit

    @jobs.handler(**options)
    async def credit_async(ctx: AsyncContext, account: Account, name: str) -> Any:
        return act(ctx, account, name)

    return credit_async


@pytest.fixture(autouse=True)
def _accounts(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all(Account(id=id_) for id_ in range(1, 6))


@pytest.fixture
def run(sessions: sessionmaker[OutboxSession], drain: Drain) -> Callable[..., list[Event]]:
    """Enqueues a job for each of these accounts and drains; the events of jobs."""

    def enqueue_and_drain(way: Way, jobs: Jobs, handler: Any, accounts: Sequence[int] = (1, 2, 3)) -> list[Event]:
        with sessions.begin() as session:
            for id_ in accounts:
                session.add_job(handler, account=session.get(Account, id_) or Account(id=id_), name=f"job {id_}")
        found = drain(jobs, slots_per_queue=1, batch_size=way.batch_size)
        return [
            event for event in found if isinstance(event, JobDone | JobDied | JobDiscarded | JobRetried | JobSnoozed)
        ]

    return enqueue_and_drain


def names_of(ctx: Any) -> list[str]:
    """The accounts of a context's jobs, as their stored arguments name them."""
    return [job.args[job.args.index("job ") :].split('"')[0] for job in ctx.jobs]


@pytest.mark.first_and_last
@every_way
def test_arounds_wrap_the_loading_and_the_call_the_first_one_outermost(
    way: Way, engine: Engine, run: Callable[..., list[Event]]
) -> None:
    """Each call of a handler, in every way in which jobs run; with the handler's session, whose rows count."""
    jobs, seen, used = Jobs(), list[object](), list[object]()

    @jobs.around
    @contextmanager
    def outer(ctx: Any) -> Iterator[None]:
        seen.append(("outer", names_of(ctx)))
        yield
        seen.append("/outer")

    @jobs.around
    def inner(ctx: Any) -> Iterator[None]:
        seen.append("inner")
        used.append(ctx.session)
        ctx.session.add(Effect(name=f"around {names_of(ctx)}"))
        yield
        seen.append("/inner")

    def act(ctx: Any, account: Account, name: str) -> None:
        seen.append(name)
        account.balance += 1
        assert ctx.session is used[-1]

    handler = make_handler(jobs, way, act)
    assert [type(event) for event in run(way, jobs, handler)] == [JobDone] * 3
    named = ["job 1", "job 2", "job 3"]
    calls = [named] if way.name == "batch" else [[name] for name in named]
    expected = list[object]()
    for call in calls:
        expected += [("outer", call), "inner", *call, "/inner", "/outer"]
    assert seen == expected
    assert effects(engine) == sorted(f"around {call}" for call in calls)
    assert balances(engine) == {1: 1, 2: 1, 3: 1}


OUTCOMES: dict[str, tuple[object, type[Event]]] = {
    "Done": (Done(), JobDone),
    "Discard": (Discard("no"), JobDiscarded),
    "DeadLetter": (DeadLetter("no"), JobDied),
    "Snooze": (Snooze(timedelta(hours=1)), JobSnoozed),
    "Retry": (Retry(timedelta(hours=1)), JobRetried),
}


@pytest.mark.first_and_last
@every_way
def test_an_outcome_takes_the_place_of_the_call(
    way: Way, engine: Engine, sessions: sessionmaker[OutboxSession], run: Callable[..., list[Event]]
) -> None:
    """For all jobs of a batch handler; nothing is loaded, and the arounds that were entered are left."""
    jobs, seen = Jobs(), list[str]()

    @jobs.around
    def outer(ctx: Any) -> Iterator[None]:
        seen.append("outer")
        yield
        seen.append("/outer")

    @jobs.around
    def veto(ctx: Any) -> object:
        return OUTCOMES[(ctx.jobs if way.name == "batch" else [ctx.job])[0].kind][0]

    def act(ctx: Any, account: Account, name: str) -> None:
        raise AssertionError("called")

    handlers = [make_handler(jobs, way, act, retry=TWICE, kind=kind) for kind in OUTCOMES]
    with sessions.begin() as session:
        for handler in handlers[1:]:
            for id_ in (1, 2, 3):
                session.add_job(handler, account=session.get_one(Account, id_), name=f"job {id_}")
    with statements() as sent:
        told = run(way, jobs, handlers[0])
    assert Counter((event.job.kind, type(event)) for event in told) == {
        (kind, event): 3 for kind, (_, event) in OUTCOMES.items()
    }
    assert seen.count("outer") == seen.count("/outer") >= len(OUTCOMES)
    loads = [statement for statement, _ in sent if statement.startswith("SELECT account.id")]
    # Those of the test itself, which names the accounts.
    assert len(loads) == 3
    assert waiting(engine) == 6


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize("where", ["make", "enter", "handler", "exit", "inner enter"]),
    BOTH_FLAVOURS,
    EACH_NAME,
)
def test_an_error_fails_the_attempt_whatever_the_arounds_answer(
    where: str, way: Way, engine: Engine, run: Callable[..., list[Event]]
) -> None:
    """One that a context manager swallows, too; all that were entered are left, and nothing of the attempt stands."""
    jobs, entered = Jobs(), list[str]()

    class Swallowing:
        def __init__(self, ctx: Any) -> None:
            self.ctx = ctx

        def __enter__(self) -> None:
            entered.append("in")
            self.ctx.session.add(Effect(name="around"))

        def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
            entered.append("out" if error is None else f"out with {error}")
            return True

    jobs.around(Swallowing)
    jobs.around(Swallowing)

    class Failing:
        def __enter__(self) -> None:
            if where == "enter":
                raise ValueError("wrong")

        def __exit__(self, *_: object) -> None:
            if where == "exit":
                raise ValueError("wrong")

    @jobs.around
    def failing(ctx: Any) -> Any:
        if where == "make":
            raise ValueError("wrong")
        return Failing()

    @jobs.around
    def innermost(ctx: Any) -> Iterator[None]:
        if where == "inner enter":
            raise ValueError("wrong")
        yield

    def act(ctx: Any, account: Account, name: str) -> None:
        account.balance += 1
        if where == "handler":
            raise ValueError("wrong")

    handler = make_handler(jobs, way, act)
    died = run(way, jobs, handler, [1])
    assert [(type(event), event.message) for event in died] == [(JobDied, "wrong")]  # type: ignore[attr-defined]
    assert entered[:4] == ["in", "in", "out with wrong", "out with wrong"]
    assert entered.count("in") * 2 == len(entered)
    assert effects(engine) == []
    assert balances(engine) == {}


@pytest.mark.first_and_last
@every_way
def test_arounds_see_how_the_handler_ended(way: Way, run: Callable[..., list[Event]]) -> None:
    """The error that it raised, with its own type; None also if it returned another outcome than done."""
    jobs, seen = Jobs(), list[object]()

    @jobs.around
    def look(ctx: Any) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            seen.append(type(error))
            raise
        else:
            seen.append(None)

    def act(ctx: Any, account: Account, name: str) -> object:
        if name == "job 1":
            raise KeyError(name)
        return Discard("no")

    handler = make_handler(jobs, way, act)
    assert {type(event) for event in run(way, jobs, handler, [1, 2])} == {JobDied, JobDiscarded}
    assert set(seen) == {KeyError, None}


def test_what_an_around_raises_in_place_of_the_error_is_chained_to_it(run: Callable[..., list[Event]]) -> None:
    """The attempt's error is the last one; the handler's own is its context."""
    jobs, way = Jobs(), Way("alone", "sync")
    told = list[Event]()

    @jobs.around
    def clean_up(ctx: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("while cleaning up")

    def act(ctx: Any, account: Account, name: str) -> None:
        raise ValueError("first")

    told = run(way, jobs, make_handler(jobs, way, act), [1])
    assert isinstance(told[0], JobDied)
    assert told[0].message == "while cleaning up"
    assert told[0].exception is not None
    assert str(told[0].exception.__context__) == "first"


def test_async_arounds_wrap_async_handlers(engine: Engine, run: Callable[..., list[Event]]) -> None:
    """Coroutines that return an outcome, a context manager or None; async generators; and sync context managers."""
    jobs, way, seen = Jobs(), Way("alone", "async"), list[str]()

    @jobs.around
    async def looked_up(ctx: AsyncContext) -> Discard | None:
        found = await ctx.session.get(Account, 2)
        assert found is not None
        return Discard("no") if names_of(ctx) == ["job 2"] else None

    @jobs.around
    @asynccontextmanager
    async def span(ctx: AsyncContext) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        seen.append("span")
        yield
        seen.append("/span")

    @jobs.around
    async def bare(ctx: AsyncContext) -> AsyncIterator[None]:
        seen.append("bare")
        yield
        seen.append("/bare")

    @jobs.around
    async def made(ctx: AsyncContext) -> Any:
        return plain(ctx)

    @contextmanager
    def plain(ctx: AsyncContext) -> Iterator[None]:
        seen.append("plain")
        yield
        seen.append("/plain")

    def act(ctx: AsyncContext, account: Account, name: str) -> None:
        seen.append(name)
        account.balance += 1

    handler = make_handler(jobs, way, act)
    assert [type(event) for event in run(way, jobs, handler, [1, 2])] == [JobDone, JobDiscarded]
    assert seen == ["span", "bare", "plain", "job 1", "/plain", "/bare", "/span"]
    assert balances(engine)[1] == 1


@pytest.mark.first_and_last
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("made", [True, Done, "word"], ids=repr)
def test_anything_else_that_an_around_returns_is_an_error_that_names_it(
    made: object, flavour: str, run: Callable[..., list[Event]]
) -> None:
    """With what it may return; also an async context manager around a sync handler."""
    jobs, way = Jobs(), Way("alone", flavour)

    @jobs.around
    def wrong(ctx: Any) -> Any:
        return made

    (died,) = run(way, jobs, make_handler(jobs, way, lambda *_: None), [1])
    assert isinstance(died, JobDied)
    assert "wrong returned " in died.message
    assert "return a context manager, an outcome or None" in died.message


def test_an_async_context_manager_around_a_sync_handler_is_an_error(run: Callable[..., list[Event]]) -> None:
    """That is known only when it is made: the attempt fails, with the way out."""
    jobs, way = Jobs(), Way("alone", "sync")

    @asynccontextmanager
    async def span() -> AsyncIterator[None]:
        yield

    jobs.around(lambda ctx: span())
    (died,) = run(way, jobs, make_handler(jobs, way, lambda *_: None), [1])
    assert isinstance(died, JobDied)
    assert 'register it with @jobs.around(flavour="async")' in died.message


@pytest.mark.first_and_last
@pytest.mark.parametrize("where", ["enter", "exit"])
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_the_time_out_covers_the_arounds(
    flavour: str, where: str, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """One that takes too long fails the attempt as a handler would; those that were entered are left."""
    jobs, seen = Jobs(), list[str]()

    @jobs.around
    def outer(ctx: Any) -> Iterator[None]:
        try:
            yield
        finally:
            seen.append("left")

    if flavour == "sync":

        @jobs.around
        def slow(ctx: Context) -> Iterator[None]:
            if where == "exit":
                yield
            ctx.session.execute(text("SELECT pg_sleep(60)"))
            yield

        @jobs.handler(queue="q", retry=ONCE, timeout_seconds=0.3)
        def act(ctx: Context) -> None: ...

    else:

        @jobs.around
        async def slow(ctx: AsyncContext) -> AsyncIterator[None]:
            if where == "exit":
                yield
            await asyncio.sleep(60)
            yield

        @jobs.handler(queue="q", retry=ONCE, timeout_seconds=0.3)
        async def act(ctx: AsyncContext) -> None: ...

    with sessions.begin() as session:
        session.add_job(act)
    (died,) = [event for event in drain(jobs) if isinstance(event, JobDied)]
    assert died.error_type.endswith("HandlerTimedOut")
    assert seen == ["left"]


@pytest.mark.first_and_last
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("verb", ["commit", "rollback", "raw rollback"])
def test_an_around_is_contained_as_its_handler_is(
    verb: str, flavour: str, engine: Engine, run: Callable[..., list[Event]]
) -> None:
    """Its commit commits nothing by itself, and a rollback of it fails the attempt."""
    jobs, way = Jobs(), Way("alone", flavour)

    def misbehave(session: Session) -> None:
        session.add(Effect(name="around"))
        session.flush()
        if verb == "raw rollback":
            session.connection().exec_driver_sql("ROLLBACK")
        else:
            getattr(session, verb)()

    if flavour == "sync":
        jobs.around(lambda ctx: misbehave(ctx.session))
    else:
        jobs.around(lambda ctx: ctx.session.run_sync(misbehave))

    def act(ctx: Any, account: Account, name: str) -> None:
        if verb == "commit":
            raise ValueError("behind a commit")

    (died,) = run(way, jobs, make_handler(jobs, way, act), [1])
    assert isinstance(died, JobDied)
    assert effects(engine) == []


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_arounds_that_send_nothing_leave_jobs_to_share_their_batch(
    flavour: str, engine: Engine, run: Callable[..., list[Event]]
) -> None:
    """Their rows are loaded, locked and written together, as without arounds."""
    jobs, way, bound = Jobs(), Way("shared", flavour, 50), list[str]()

    @jobs.around
    def bind(ctx: Any) -> Iterator[None]:
        bound.extend(names_of(ctx))
        yield

    def act(ctx: Any, account: Account, name: str) -> None:
        account.balance += 1

    handler = make_handler(jobs, way, act)
    with statements() as seen:
        run(way, jobs, handler, [1, 2, 3, 4, 5])
    sent = [statement for statement, _ in seen if "account" in statement or "sa_savepoint" in statement]
    # The first ones are those of the test, which names the accounts.
    assert [statement.split()[0] for statement in sent[5:]] == ["SELECT", "WITH"]
    assert "FOR NO KEY UPDATE" in sent[6]
    assert "UPDATE account" in sent[6]
    assert bound == [f"job {id_}" for id_ in range(1, 6)]
    assert set(balances(engine).values()) == {1}


@pytest.mark.first_and_last
@every_way
def test_rows_are_loaded_after_what_the_arounds_sent(way: Way, engine: Engine, run: Callable[..., list[Event]]) -> None:
    """A row that an around has changed comes as it is now, and one that it has loaded is the handler's."""
    jobs, seen, held = Jobs(), list[object](), list[object]()

    def change(session: Session) -> None:
        session.execute(text("UPDATE account SET balance = balance + 10"))
        held[:] = [session.get(Account, 2)]

    if way.flavour == "sync":
        jobs.around(lambda ctx: change(ctx.session))
    else:
        jobs.around(lambda ctx: ctx.session.run_sync(change))

    def act(ctx: Any, account: Account, name: str) -> None:
        seen.append((name, account.balance, account is held[0]))
        account.balance += 1

    handler = make_handler(jobs, way, act)
    run(way, jobs, handler, [1, 2, 2])
    if way.name == "batch":
        assert seen == [("job 1", 10, False), ("job 2", 10, True), ("job 2", 11, True)]
        assert balances(engine) == {1: 11, 2: 12, 3: 10, 4: 10, 5: 10}
    else:
        assert seen == [("job 1", 10, False), ("job 2", 20, True), ("job 2", 31, True)]
        assert balances(engine) == {1: 31, 2: 32, 3: 30, 4: 30, 5: 30}


KEY: contextvars.ContextVar[str] = contextvars.ContextVar("KEY", default="none")


class Sealed(TypeDecorator[str]):
    """A text that is stored and read with the key of the context."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: object) -> str | None:
        return value and f"{KEY.get()}:{value}"

    def process_result_value(self, value: str | None, dialect: object) -> str | None:
        return value and value.removeprefix(f"{KEY.get()}:")


class Secret(Base):
    __tablename__ = "secret"
    id: Mapped[int] = mapped_column(primary_key=True)
    word: Mapped[str] = mapped_column(Sealed)
    plain: Mapped[int] = mapped_column(default=0)


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_types_of_the_application_s_own_work_within_the_arounds_of_their_job(
    flavour: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A shared batch loads no row ahead whose columns run code: that may go by what an around has set."""
    jobs, seen = Jobs(), list[str]()

    @jobs.around
    def bind(ctx: Any) -> Iterator[None]:
        token = KEY.set(ctx.headers["key"])
        yield
        KEY.reset(token)

    if flavour == "sync":

        @jobs.handler(queue="q", batchable=True)
        def read(ctx: Context, secret: Secret) -> None:
            seen.append(secret.word)
            secret.plain += 1

    else:

        @jobs.handler(queue="q", batchable=True)
        async def read(ctx: AsyncContext, secret: Secret) -> None:
            seen.append(secret.word)
            secret.plain += 1

    with sessions.begin() as session:
        for id_ in (1, 2, 3):
            session.execute(text(f"INSERT INTO secret VALUES ({id_}, 'k{id_}:word {id_}', 0)"))
            session.add_job(read.options(headers={"key": f"k{id_}"}), secret=session.get_one(Secret, id_))
    drain(jobs, slots_per_queue=1, batch_size=50)
    assert seen == ["word 1", "word 2", "word 3"]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT word, plain FROM secret ORDER BY id")).all() == [
            (f"k{id_}:word {id_}", 1) for id_ in (1, 2, 3)
        ]


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_free_retry_enters_the_arounds_again(flavour: str, engine: Engine, run: Callable[..., list[Event]]) -> None:
    """After a deadlock, which counts no attempt: what they do outside of the database happens again."""
    jobs, way, entered = Jobs(), Way("alone", flavour), list[int]()

    @jobs.around
    def count(ctx: Any) -> Iterator[None]:
        entered.append(ctx.job.attempt)
        yield

    deadlock = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40P01'; END $$"

    def fail_first(session: Session) -> None:
        if len(entered) == 1:
            session.execute(text(deadlock))

    if flavour == "sync":
        jobs.around(lambda ctx: fail_first(ctx.session))
    else:
        jobs.around(lambda ctx: ctx.session.run_sync(fail_first))

    def act(ctx: Any, account: Account, name: str) -> None:
        account.balance += 1

    assert [type(event) for event in run(way, jobs, make_handler(jobs, way, act), [1])] == [JobDone]
    assert entered == [1, 1]
    assert balances(engine)[1] == 1


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_row_that_could_not_be_locked_ahead_is_locked_when_it_is_loaded(
    flavour: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """One that another transaction inserted since the batch began; its job must not lose a write that comes between."""
    jobs, free = Jobs(), list[object]()
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM account WHERE id = 5"))

    def insert(session: Session) -> None:
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO account (id, balance) VALUES (5, 0)"))
        # A statement of its own: rows that were loaded ahead are loaded again.
        session.execute(select(Account.id).where(Account.id == 1))

    def look() -> None:
        with engine.connect() as connection:
            free.extend(connection.execute(text("SELECT id FROM account WHERE id = 5 FOR UPDATE SKIP LOCKED")).all())

    if flavour == "sync":

        @jobs.handler(queue="q", batchable=True)
        def first(ctx: Context, account: Locked[Account]) -> None:
            insert(ctx.session)

        @jobs.handler(queue="q", batchable=True)
        def second(ctx: Context, account: Locked[Account | None]) -> None:
            assert account is not None
            look()

    else:

        @jobs.handler(queue="q", batchable=True)
        async def first(ctx: AsyncContext, account: Locked[Account]) -> None:
            await ctx.session.run_sync(insert)

        @jobs.handler(queue="q", batchable=True)
        async def second(ctx: AsyncContext, account: Locked[Account | None]) -> None:
            assert account is not None
            look()

    with sessions.begin() as session:
        gone = Account(id=5)
        session.add_job(first, account=session.get_one(Account, 1))
        make_transient_to_detached(gone)
        session.add_job(second, account=gone)
    assert sum(isinstance(event, JobDone) for event in drain(jobs, slots_per_queue=1, batch_size=50)) == 2
    assert free == []
