"""The application of the soak: a queue for each way to run jobs, and handlers that misbehave on their first attempt.

Each job that is done leaves one row in a ledger without a unique constraint; the producer's request says what each job
is to come to.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import random

from sqlalchemy import bindparam, column, insert, table, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outboxq import (
    AsyncContext,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    DeadLetter,
    Jobs,
    Locked,
    Retry,
    Snooze,
)
from outboxq.job import Job

SCHEMA = """\
CREATE TABLE account (id integer PRIMARY KEY, balance bigint NOT NULL DEFAULT 0);
CREATE TABLE counter (id integer PRIMARY KEY, value bigint NOT NULL DEFAULT 0);
CREATE TABLE request (job_id uuid NOT NULL, kind text NOT NULL, ending text NOT NULL);
CREATE TABLE done (job_id uuid NOT NULL);
INSERT INTO account (id) SELECT generate_series(1, 50);
INSERT INTO counter (id) SELECT generate_series(0, 99);"""
ACCOUNTS = 50
# Two rows for each two jobs that deadlock: more such jobs on two rows would wait for one another until nothing moves.
PAIRS = 50

# Quick, and often enough for a job that meets many terminated connections. Those count as attempts.
RETRY = Backoff(max_attempts=25, first_seconds=0.05, cap_seconds=1.0)
# What a job of the four general kinds is told to end as a dead letter.
GIVE_UP = "give-up"
_ROUND_TRIP_SECONDS = 0.005
_LONGER_THAN_THE_DEADLINE = 30.0
# A thread that cannot be interrupted loses its connection two seconds after its deadline, and is back before the relay
# would have its process replaced.
_LONGER_THAN_THE_CONNECTION = 4.5

_DONE = insert(table("done", column("job_id"))).values(job_id=bindparam("job_id"))
_COUNT = text("UPDATE counter SET value = value + 1 WHERE id = :id")
_PAUSE = text("SELECT pg_sleep(0.1)")
_SLEEP = text("SELECT pg_sleep(:seconds)")

Outcome = DeadLetter | Retry | Snooze | None


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


class Misbehaviour(Exception):
    """What a handler was told to raise."""


jobs = Jobs()
jobs.scope("soak", retention=timedelta(minutes=5), kinds=("pay", "pay_async"))


@jobs.handler(queue="plain", retry=RETRY)
def record(ctx: Context, behaviour: str, pair: int = 0) -> Outcome:
    return run(ctx.session, ctx.job, behaviour, pair)


@jobs.handler(queue="async", retry=RETRY)
async def record_async(ctx: AsyncContext, behaviour: str, pair: int = 0) -> Outcome:
    return await ctx.session.run_sync(run, ctx.job, behaviour, pair)


@jobs.handler(queue="lease", retry=RETRY, claim="lease")
def record_leased(ctx: Context, behaviour: str, pair: int = 0) -> Outcome:
    return run(ctx.session, ctx.job, behaviour, pair)


@jobs.handler(queue="lease-async", retry=RETRY, claim="lease")
async def record_leased_async(ctx: AsyncContext, behaviour: str, pair: int = 0) -> Outcome:
    return await ctx.session.run_sync(run, ctx.job, behaviour, pair)


def run(session: Session, job: Job, behaviour: str, pair: int) -> Outcome:
    """What the four general kinds do. Of two deadlocks one locks up, the other down; which one loses is tried again."""
    is_first = job.attempt == 1
    match behaviour:
        case "raise" if is_first:
            raise Misbehaviour(behaviour)
        case "flush-raise" if is_first:
            session.execute(_DONE, {"job_id": job.id})
            raise Misbehaviour(behaviour)
        case "retry" if is_first:
            session.execute(_DONE, {"job_id": job.id})
            return Retry(timedelta(0))
        # Counts no attempt.
        case "snooze" if random() < 0.7:
            return Snooze(timedelta(milliseconds=200))
        case "deadlock-up" | "deadlock-down":
            for number in (0, 1) if behaviour == "deadlock-up" else (1, 0):
                session.execute(_COUNT, {"id": 2 * pair + number})
                session.execute(_PAUSE)
    session.execute(_DONE, {"job_id": job.id})
    return DeadLetter("it was told to") if behaviour == GIVE_UP else None


@jobs.handler(queue="shared", retry=RETRY, batchable=True)
def credit(ctx: Context, account: Locked[Account], cents: int, fails: bool = False) -> None:
    """Writes that wait for those of the batch's other jobs; a failure has the batch repeated one by one."""
    account.balance += cents
    ctx.defer(_DONE, {"job_id": ctx.job.id})
    if fails and ctx.job.attempt == 1:
        raise Misbehaviour("shared")


@dataclass(frozen=True)
class Credit:
    account_id: int


@jobs.batch_handler(Credit, queue="set", retry=RETRY, max_size=20)
def credit_many(ctx: BatchContext, items: Sequence[BatchItem[Credit]]) -> None:
    ctx.session.execute(_DONE, [{"job_id": item.job.id} for item in items])


@jobs.handler(queue="once", retry=RETRY, claim="lease", timeout_seconds=5)
def pay(ctx: Context, number: int) -> None:
    ctx.once("soak", key=f"sync-{number}", call=provider, provider_remembers=timedelta(hours=1))
    ctx.session.execute(_DONE, {"job_id": ctx.job.id})


@jobs.handler(queue="once-async", retry=RETRY, claim="lease", timeout_seconds=5)
async def pay_async(ctx: AsyncContext, number: int) -> None:
    await ctx.once("soak", key=f"async-{number}", call=provider_async, provider_remembers=timedelta(hours=1))
    await ctx.session.execute(_DONE, {"job_id": ctx.job.id})


def provider(key: str) -> dict[str, str]:
    """Another service, which remembers its keys."""
    time.sleep(_ROUND_TRIP_SECONDS)
    return {"receipt": key}


async def provider_async(key: str) -> dict[str, str]:
    await asyncio.sleep(_ROUND_TRIP_SECONDS)
    return {"receipt": key}


@jobs.handler(queue="plain", retry=RETRY, timeout_seconds=1)
def dawdle(ctx: Context, how: str) -> None:
    """Past its deadline at first: in a statement, which is cancelled, or in Python, which loses its connection."""
    ctx.session.execute(_DONE, {"job_id": ctx.job.id})
    if ctx.job.attempt > 1:
        return
    if how == "statement":
        ctx.session.execute(_SLEEP, {"seconds": _LONGER_THAN_THE_DEADLINE})
    else:
        time.sleep(_LONGER_THAN_THE_CONNECTION)


@jobs.handler(queue="async", retry=RETRY, timeout_seconds=1)
async def dawdle_async(ctx: AsyncContext) -> None:
    await ctx.session.execute(_DONE, {"job_id": ctx.job.id})
    if ctx.job.attempt == 1:
        await asyncio.sleep(_LONGER_THAN_THE_DEADLINE)
