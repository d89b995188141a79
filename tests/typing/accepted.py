# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What type checkers accept of the public names, and the types that they infer. Checked, never run."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, assert_type
from uuid import UUID

from sqlalchemy import Engine, insert, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from outboxq import (
    Acceptance,
    AcceptedBatch,
    Applied,
    AsyncBatchContext,
    AsyncContext,
    AsyncEffects,
    AsyncOutboxSession,
    Backoff,
    BatchContext,
    BatchHandler,
    BatchItem,
    Context,
    DeadLetter,
    Discard,
    Done,
    Effects,
    FoundJob,
    Handler,
    Inbox,
    Job,
    JobHandle,
    JobKind,
    Jobs,
    NewJob,
    NotApplied,
    OutboxSession,
    Outcome,
    Retry,
    Snooze,
    Unknown,
    add_job,
    add_jobs,
    external,
    find_job,
    wait_for_result,
)
from outboxq.events import Event, JobDied, JobDiscarded, JobDone, JobRetried, JobSnoozed


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)


class State:
    name: str


@contextmanager
def lifespan() -> Generator[State]:
    yield State()


jobs = Jobs(lifespan=lifespan)
ship = external("ship", queue="depot")


@jobs.handler(queue="accounts", retry=Backoff(max_attempts=8), aliases=["old"])
def credit(ctx: Context, account: Account, cents: int, *, note: str = "") -> None:
    assert_type(ctx.session, OutboxSession)
    assert_type(ctx.headers, dict[str, str])
    assert_type(ctx.job.id, UUID)
    ctx.session.add_job(credit, account=account, cents=cents)


@jobs.handler(kind="mail.send")
async def mail(ctx: AsyncContext[State], account_id: int) -> Outcome:
    assert_type(ctx.state, State)
    assert_type(ctx.session, AsyncOutboxSession)
    ctx.session.add_job(credit, Account(), 1)
    return Done() if account_id else Retry(timedelta(seconds=5), reason="no account")


@jobs.handler()
def settle(ctx: Context[State], day: datetime) -> Snooze | DeadLetter | Discard | None:
    return Snooze(timedelta(hours=1)) if day else DeadLetter("no day")


@jobs.handler()
def no_arguments(ctx: Context) -> None: ...


@jobs.handler
def without_brackets(ctx: Context[State], account: Account, cents: int) -> Snooze | None:
    return Snooze(timedelta(hours=1)) if cents else None


@jobs.handler
async def async_without_brackets(ctx: AsyncContext, day: datetime) -> None: ...


is_a_handler: Handler[[int], AsyncContext[Any], Awaitable[Outcome]] = mail
is_a_kind: JobKind[[datetime]] = settle
is_a_plain_handler: Handler[[Account, int], Context[Any], Snooze | None] = without_brackets
is_an_async_handler: Handler[[datetime], AsyncContext[Any], Awaitable[None]] = async_without_brackets


def produce(session: OutboxSession, account: Account) -> None:
    assert_type(session.add_job(credit, account, 500), JobHandle)
    assert_type(session.add_job(credit, account=account, cents=500, note="x"), JobHandle)
    assert_type(session.add_job(credit.options(delay=timedelta(hours=1), priority=5), account, cents=1), JobHandle)
    assert_type(session.add_job(mail, account_id=account.id).id, UUID)
    assert_type(session.add_job(no_arguments), JobHandle)
    assert_type(session.add_job(ship, order_id=7, anything="goes"), JobHandle)
    assert_type(session.add_job(ship.options(headers={"a": "b"}), order_id=7), JobHandle)
    assert_type(credit.job(account, cents=1), NewJob)
    assert_type(session.add_jobs(credit.job(account, cents) for cents in range(5)), list[JobHandle])
    assert_type(session.add_jobs([ship.job(order_id=1), mail.job(2)]), list[JobHandle])


async def produce_async(session: AsyncOutboxSession, account: Account) -> None:
    assert_type(session.add_job(credit, account=account, cents=500), JobHandle)
    assert_type(session.add_jobs([mail.job(5)]), list[JobHandle])


def produce_elsewhere(
    session: Session,
    async_session: AsyncSession,
    scoped: scoped_session[Session],
    async_scoped: async_scoped_session[AsyncSession],
    account: Account,
) -> None:
    for any_session in (session, async_session, scoped, async_scoped):
        assert_type(add_job(any_session, credit, account, cents=1), JobHandle)
        assert_type(add_jobs(any_session, [credit.job(account, 1)]), list[JobHandle])


def factories(engine: Engine, async_engine: AsyncEngine) -> None:
    assert_type(sessionmaker(engine, class_=OutboxSession)(), OutboxSession)
    assert_type(async_sessionmaker(async_engine, class_=AsyncOutboxSession)(), AsyncOutboxSession)


async def call_plainly(ctx: Context, async_ctx: AsyncContext[State], account: Account) -> None:
    credit(ctx, account, 5)
    assert_type(settle(ctx, datetime.now()), Snooze | DeadLetter | Discard | None)
    assert_type(await mail(async_ctx, account_id=5), Outcome)


@Jobs().handler(queue="slow", claim="lease", timeout_seconds=None)
def long_work(ctx: Context, name: str) -> None: ...


def finding(session: Session, asynchronous: AsyncSession, handle: JobHandle) -> None:
    assert_type(find_job(session, handle), FoundJob | None)
    assert_type(find_job(session, handle.id), FoundJob | None)
    assert_type(find_job(session, str(handle.id)), FoundJob | None)
    found = [find_job(asynchronous, handle)]
    assert_type(found, list[Coroutine[Any, Any, FoundJob | None]])


async def waiting(engine: Engine, asynchronous: AsyncEngine, handle: JobHandle, job_id: UUID) -> None:
    assert_type(handle.result(engine, returns=Account, timeout=timedelta(seconds=5)), Account)
    assert_type(handle.result("postgresql://localhost/shop", returns=int, timeout=5), int)
    assert_type(await handle.result(asynchronous, returns=str), str)
    assert_type(wait_for_result(engine, job_id, returns=list[int]), list[int])
    assert_type(await wait_for_result(asynchronous, handle, returns=int, schema="other"), int)
    assert_type(handle.result(engine), Any)
    assert_type(await wait_for_result(asynchronous, job_id), Any)


async def accepting(session: Session, asynchronous: AsyncSession, account: Account) -> None:
    payments = Inbox("payments")
    assert_type(payments.accept(session, "m1", payload={"cents": 5}), bool)
    assert_type(await payments.accept(asynchronous, "m1"), bool)
    assert_type(payments.try_accept(session, "m1"), Acceptance)
    assert_type(await payments.try_accept(asynchronous, "m1"), Acceptance)
    assert_type(payments.accept_all(session, ["m1", "m2"]), AcceptedBatch)
    assert_type(await payments.accept_all(asynchronous, {"m1": b"body"}), AcceptedBatch)
    assert_type(payments.accept_job(session, "m1", credit.job(account, 5)), JobHandle | None)
    assert_type(await payments.accept_job(asynchronous, "m1", credit.job(account, 5)), JobHandle | None)


def receipt(provider_key: str) -> int:
    return len(provider_key)


async def receipt_async(provider_key: str) -> int:
    return len(provider_key)


async def receipt_applied(provider_key: str) -> Applied[int] | NotApplied | Unknown:
    return Applied(1) if provider_key else Unknown()


async def calling(ctx: Context, async_ctx: AsyncContext, engine: Engine, async_engine: AsyncEngine) -> None:
    assert_type(ctx.once("charge", key="1", call=receipt, provider_remembers=timedelta(days=1)), int)
    assert_type(ctx.once("charge", key="1", call=receipt, already_applied=lambda _: NotApplied()), int)
    assert_type(ctx.once("charge", key="1", call=receipt, already_applied=lambda _: Applied(1), ask_first=True), int)
    assert_type(await async_ctx.once("charge", key="1", call=receipt_async, already_applied=receipt_applied), int)
    assert_type(Effects(engine).once("charge", key="1", call=receipt), int)
    assert_type(await AsyncEffects(async_engine).once("charge", key="1", call=receipt_async), int)
    assert_type(Jobs().scope("charge", retention=timedelta(days=90)), str)
    assert_type(Jobs().inbox("payments"), Inbox)


@dataclass
class Credit:
    account_id: int
    cents: int = 0


@jobs.handler(queue="batches", batchable=True)
def quick(ctx: Context, account_id: int) -> None:
    ctx.defer(insert(Account), {"id": account_id})
    ctx.defer(text("DELETE FROM account"))


@jobs.batch_handler(Credit, queue="batches", max_size=500, kind="credit.all", aliases=["old.all"])
def credit_all(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> None:
    assert_type(ctx.session, OutboxSession)
    assert_type([item.args.cents for item in items], list[int])
    assert_type(items[0].job.id, UUID)


@jobs.batch_handler(Credit)
def credit_some(ctx: BatchContext[State], items: Sequence[BatchItem[Credit]]) -> list[Outcome | None]:
    assert_type(ctx.state, State)
    return [None if item.args.cents else Discard("nothing") for item in items]


@jobs.batch_handler(Credit, queue="batches-async")
async def credit_async(ctx: AsyncBatchContext[State], items: Sequence[BatchItem[Credit]]) -> Sequence[Outcome] | None:
    assert_type(ctx.session, AsyncOutboxSession)
    return [Done() for _ in items]


is_a_batch_handler: BatchHandler[[int, int], Credit] = credit_all


def produce_batches(session: OutboxSession, async_ctx: AsyncContext) -> None:
    assert_type(session.add_job(credit_all, account_id=1, cents=5), JobHandle)
    assert_type(session.add_job(credit_async, 1), JobHandle)
    assert_type(credit_some.options(priority=5).job(1, cents=2), NewJob)
    async_ctx.defer(insert(Account), {"id": 1})


hooked = Jobs(hooks=[print])


@hooked.on(JobDied)
def died(event: JobDied) -> None:
    assert_type(event.reason, str)


@hooked.on(JobDied, JobRetried)
async def failed(event: JobDied | JobRetried) -> None: ...


@hooked.on(JobDone, JobDied, JobRetried, JobSnoozed, JobDiscarded)
def over(event: Event) -> None: ...


@hooked.on(JobDone)
def anything(event: Event) -> int:
    return 1


assert_type(died, Callable[[JobDied], None])


@jobs.around
@contextmanager
def wrapped(ctx: Context) -> Generator[None]:
    yield


@jobs.around
def generated(ctx: Context | BatchContext) -> Iterator[None]:
    assert_type(ctx.jobs, tuple[Job, ...])
    yield


@jobs.around(flavour="async")
@asynccontextmanager
async def wrapped_async(ctx: AsyncContext[State]) -> AsyncGenerator[None]:
    assert_type(ctx.state, State)
    yield


@jobs.around(flavour="async")
async def generated_async(ctx: AsyncContext) -> AsyncIterator[None]:
    yield


@jobs.around
def veto(ctx: Context) -> Discard | None:
    return Discard("no") if ctx.job.attempt > 5 else None


@jobs.around(flavour="async")
async def veto_async(ctx: AsyncContext) -> Outcome | None:
    return None


@jobs.around
class Span:
    def __init__(self, ctx: Context) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...


@jobs.around
def nothing(ctx: Context) -> None: ...


assert_type(veto(Context(Job.__new__(Job), None, OutboxSession())), Discard | None)
