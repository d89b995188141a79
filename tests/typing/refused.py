# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
# mypy: enable-error-code="truthy-bool"
"""What type checkers refuse: each `type: ignore` below is an error that must be there. Checked, never run."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from outboxq import (
    Acceptance,
    AsyncContext,
    AsyncOutboxSession,
    BatchContext,
    BatchItem,
    Context,
    Inbox,
    Jobs,
    OutboxSession,
    Retry,
    Snooze,
    add_job,
    cancel,
    external,
    find_job,
    schedules,
)
from outboxq.events import JobDied, JobDone, JobRetried
from outboxq.tables import job

jobs = Jobs()
ship = external("ship", queue="depot")


@jobs.handler()
def credit(ctx: Context, account_id: int, cents: int = 0) -> None: ...


@jobs.handler()
async def mail(ctx: AsyncContext, address: str) -> None: ...


def wrong_arguments(session: OutboxSession, plain: Session) -> None:
    session.add_job(credit)  # type: ignore[call-arg]
    session.add_job(credit, "one")  # type: ignore[arg-type]
    session.add_job(credit, 1, 2, 3)  # type: ignore[call-arg]
    session.add_job(credit, account_id=1, cent=5)  # type: ignore[call-arg]
    session.add_job(credit, account_id=1, cents="5")  # type: ignore[arg-type]
    session.add_job(mail, 5)  # type: ignore[arg-type]
    session.add_job(credit.options(priority=5), account_id="x")  # type: ignore[arg-type]
    session.add_jobs([credit.job("x")])  # type: ignore[arg-type]
    session.add_jobs([credit])  # type: ignore[list-item]
    add_job(plain, credit, account_id="x")  # type: ignore[arg-type]
    add_job(plain, mail)  # type: ignore[call-arg]


def wrong_kinds(session: OutboxSession, plain: Session) -> None:
    session.add_job("credit", account_id=1)  # type: ignore[arg-type]
    session.add_job(wrong_kinds, session, plain)  # type: ignore[arg-type]
    plain.add_job(credit, 1)  # type: ignore[attr-defined]
    add_job(object(), credit, 1)  # type: ignore[arg-type]


def wrong_options() -> None:
    credit.options(delay=5)  # type: ignore[arg-type]
    credit.options(priority="high")  # type: ignore[arg-type]
    credit.options(dealy=timedelta(1))  # type: ignore[call-arg]
    credit.options(coalesce=5)  # type: ignore[arg-type]
    credit.options(every=5)  # type: ignore[arg-type]
    ship.options(headers={"a": 1})  # type: ignore[dict-item]
    external("ship")  # type: ignore[call-arg]
    Retry(5)  # type: ignore[arg-type]
    Snooze()  # type: ignore[call-arg]


def wrong_handlers() -> None:
    jobs.handler("credit")  # type: ignore[call-overload]
    jobs.handler(claim="leese")  # type: ignore[call-overload]
    jobs.handler(timeout_seconds="30")  # type: ignore[call-overload]
    jobs.handler(retry=5)  # type: ignore[call-overload]
    jobs.handler(quue="mail")  # type: ignore[call-overload]
    jobs.handler(group=5)  # type: ignore[call-overload]
    jobs.handler(delay=timedelta(1))  # type: ignore[call-overload]

    @jobs.handler()  # type: ignore[arg-type]
    def no_context(address: str) -> None: ...

    @jobs.handler  # type: ignore[arg-type]
    def no_context_either(address: str) -> None: ...

    @jobs.handler  # type: ignore[type-var]
    def returns_another_number(ctx: Context) -> int:
        return 5

    @jobs.handler()  # type: ignore[type-var]
    def returns_a_number(ctx: Context) -> int:
        return 5


def wrong_calls(ctx: Context, async_ctx: AsyncContext) -> None:
    credit(ctx, "x")  # type: ignore[arg-type]
    credit(async_ctx, 5)  # type: ignore[arg-type]
    credit(5)  # type: ignore[arg-type, call-arg]


def wrong_effects(ctx: Context, async_ctx: AsyncContext, session: Session) -> None:
    ctx.once("charge", "order-1", call=str)  # type: ignore[call-arg]
    ctx.once("charge", key=7, call=str)  # type: ignore[arg-type]
    ctx.once("charge", key="1", call=lambda: "no provider key")  # type: ignore[arg-type, misc]
    ctx.once("charge", key="1", call=str, provider_remembers=3600)  # type: ignore[arg-type]
    Inbox("payments").accept(session, 7)  # type: ignore[call-overload]
    Inbox("payments").accept_job(session, "m1", credit)  # type: ignore[call-overload]


async def charge(provider_key: str) -> str:
    return provider_key


async def forgotten_awaits(ctx: AsyncContext, session: AsyncOutboxSession) -> str:
    payments = Inbox("payments")
    ctx.once("charge", key="1", call=charge)  # type: ignore[unused-coroutine]
    find_job(session, "id")  # type: ignore[unused-coroutine]
    cancel(session, "id")  # type: ignore[unused-coroutine]
    schedules.pause(session, "nightly")  # type: ignore[unused-coroutine]
    payments.accept(session, "m1")  # type: ignore[unused-coroutine]
    payments.accept_all(session, ["m1"])  # type: ignore[unused-coroutine]
    payments.accept_job(session, "m1", credit.job(1))  # type: ignore[unused-coroutine]
    if payments.accept(session, "m1"):  # type: ignore[truthy-bool]
        return "accepted"
    if not payments.try_accept(session, "m1"):  # type: ignore[truthy-bool]
        return "accepted"
    if payments.try_accept(session, "m1") is Acceptance.DUPLICATE:  # type: ignore[comparison-overlap]
        return "duplicate"
    accepted: bool = payments.accept(session, "m1")  # type: ignore[assignment]
    count = len(payments.accept_all(session, ["m1"]).accepted)  # type: ignore[attr-defined]
    # What stands here is checked, too: the lines above do not make it unreachable.
    return count if accepted else 5  # type: ignore[return-value]


@dataclass
class Credit:
    account_id: int
    cents: int = 0


@jobs.batch_handler(Credit)
def credit_all(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> None: ...


def wrong_batches(session: OutboxSession, ctx: Context, async_ctx: AsyncContext) -> None:
    session.add_job(credit_all)  # type: ignore[call-arg]
    session.add_job(credit_all, account_id="one")  # type: ignore[arg-type]
    session.add_job(credit_all, 1, cent=5)  # type: ignore[call-arg]
    jobs.batch_handler(Credit, max_size="many")  # type: ignore[arg-type]
    jobs.batch_handler(Credit, queue=5)  # type: ignore[arg-type]
    jobs.batch_handler(Credit, batchable=True)  # type: ignore[call-arg]
    jobs.handler(batchable="yes")  # type: ignore[call-overload]
    ctx.defer(select(job))  # type: ignore[arg-type]
    async_ctx.defer(insert(job), [{"id": 1}])  # type: ignore[arg-type]

    @jobs.batch_handler(Credit)  # type: ignore[arg-type]
    def another_class(ctx: BatchContext, items: Sequence[BatchItem[int]]) -> None: ...

    @jobs.batch_handler(Credit)  # type: ignore[arg-type]
    def returns_a_number(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> int:
        return 5


@jobs.on(JobDone)  # type: ignore[arg-type]
def hook_of_another(event: JobDied) -> None: ...


@jobs.on(JobDone, JobRetried)  # type: ignore[arg-type]
def hook_of_one_of_them(event: JobDone) -> None: ...


@jobs.on  # type: ignore[call-overload]
def hook_of_none(event: JobDone) -> None: ...


@jobs.around  # type: ignore[type-var]
def around_that_gives_a_word(ctx: Context) -> str:
    return "word"


jobs.around(flavour="both")  # type: ignore[call-overload]
