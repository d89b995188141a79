"""A failing handler of each sort."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import shopcore
from sqlalchemy import text

from outboxq import AsyncContext, Backoff, BatchContext, BatchItem, Context, Jobs

ONCE = Backoff(max_attempts=1)
jobs = Jobs()


@jobs.handler(queue="shop", retry=ONCE)
def plain(ctx: Context, card: str) -> None:
    shopcore.check(card)


@jobs.handler(queue="shop", retry=ONCE)
def chained(ctx: Context, card: str) -> None:
    try:
        shopcore.check(card)
    except ValueError as error:
        raise RuntimeError("the payment failed") from error


@jobs.handler(queue="shop", retry=ONCE)
def grouped(ctx: Context, card: str) -> None:
    failures = []
    for _ in range(2):
        try:
            shopcore.check(card)
        except ValueError as error:
            failures.append(error)
    raise ExceptionGroup("both cards failed", failures)


@jobs.handler(queue="async-shop", retry=ONCE)
async def awaited(ctx: AsyncContext, card: str) -> None:
    await asyncio.sleep(0)
    shopcore.check(card)


@dataclass
class Charge:
    card: str


@jobs.batch_handler(Charge, queue="shop-batches", retry=ONCE)
def batched(ctx: BatchContext, items: Sequence[BatchItem[Charge]]) -> None:
    for item in items:
        shopcore.check(item.args.card)


@jobs.handler(queue="shop", retry=ONCE)
def refused(ctx: Context, card: str) -> None:
    ctx.session.execute(text("CREATE TEMPORARY TABLE paid (card text UNIQUE) ON COMMIT DROP"))
    # The second row is refused, and PostgreSQL's DETAIL quotes it.
    ctx.session.execute(text("INSERT INTO paid VALUES (:made), (:made)"), {"made": f"{card[:12]}!"})


@jobs.handler(queue="shop", retry=ONCE, timeout_seconds=0.2)
def slow_statement(ctx: Context, card: str) -> None:
    ctx.session.execute(text("SELECT pg_catalog.pg_sleep(60)"))


@jobs.handler(queue="shop", retry=ONCE, timeout_seconds=0.2)
def stuck(ctx: Context, card: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.01)


@jobs.handler(queue="async-shop", retry=ONCE, timeout_seconds=0.2)
async def hanging(ctx: AsyncContext, card: str) -> None:
    await asyncio.sleep(60)
