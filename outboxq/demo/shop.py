"""The demo's shop: its tables and its handlers.

`EnqueuedJob` and `Effect` exist for the proof. A row of `EnqueuedJob` is written with each job, in the same
transaction, and a row of `Effect` by each run of a handler. No constraint forbids a second effect of a job, so doubled
effects would show.
"""

import asyncio
import time
from uuid import UUID

from sqlalchemy import BigInteger, ForeignKey, Identity, MetaData, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outboxq import AsyncContext, Context, Jobs, Locked

SCHEMA = "shop"
STOCK = 1_000_000

# The time that a label printer or a mail server takes. Handlers have written their effect by then, and not committed
# it.
WORK_SECONDS = 0.04


class Base(DeclarativeBase):
    """The shop's tables, in a schema of their own."""

    metadata = MetaData(schema=SCHEMA)


class Product(Base):
    """A product, and how much of it is left."""

    __tablename__ = "product"

    sku: Mapped[str] = mapped_column(String, primary_key=True)
    stock: Mapped[int] = mapped_column(server_default=str(STOCK))


class Order(Base):
    """An order of a customer."""

    __tablename__ = "order"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    customer: Mapped[str]
    sku: Mapped[str] = mapped_column(ForeignKey(Product.sku))
    quantity: Mapped[int]


class GiftWrap(Base):
    """An order that is wrapped as a gift."""

    __tablename__ = "gift_wrap"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))


class EnqueuedJob(Base):
    """A record of a job that was enqueued, written in the same transaction as the job."""

    __tablename__ = "enqueued_job"

    job_id: Mapped[UUID] = mapped_column(primary_key=True)
    kind: Mapped[str]


class Effect(Base):
    """A row that a handler writes in its transaction, as a record of its run.

    `relay` is the name of the relay's connection.
    """

    __tablename__ = "effect"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    job_id: Mapped[UUID]
    kind: Mapped[str]
    relay: Mapped[str] = mapped_column(server_default=text("current_setting('application_name')"))


jobs = Jobs()


@jobs.handler(queue="warehouse")
def ship_order(ctx: Context, order: Order, product: Locked[Product]) -> None:
    """Handler: take the ordered products out of the stock."""
    ctx.session.add(Effect(job_id=ctx.job.id, kind=ctx.job.kind))
    ctx.session.flush()
    time.sleep(WORK_SECONDS)
    product.stock -= order.quantity


@jobs.handler(queue="warehouse")
def wrap_gift(ctx: Context, gift: GiftWrap) -> None:
    """Handler: wrap an order as a gift."""
    assert gift.order_id is not None
    ctx.session.add(Effect(job_id=ctx.job.id, kind=ctx.job.kind))
    ctx.session.flush()
    time.sleep(WORK_SECONDS)


@jobs.handler(queue="mail")
async def send_receipt(ctx: AsyncContext, order_id: int, customer: str) -> None:
    """Handler: write a receipt. It is async, and so has another queue than the sync handlers."""
    assert order_id
    assert customer
    ctx.session.add(Effect(job_id=ctx.job.id, kind=ctx.job.kind))
    await ctx.session.flush()
    await asyncio.sleep(WORK_SECONDS)
