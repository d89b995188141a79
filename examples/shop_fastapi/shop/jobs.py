"""What the relay runs: `outboxq relay shop.jobs:jobs`."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from sqlalchemy import func, insert, select, update

from outboxq import AsyncContext, Context, DeadLetter, Jobs
from outboxq.errors import EffectUnknown

from .mail import Mailer
from .models import Invoice, Order, OrderLine, Product
from .settings import read_mail_server

SENDER = "shop@example.org"


@contextmanager
def connect() -> Iterator[Mailer]:
    """The mailer that handlers find as `ctx.state`."""
    yield Mailer(read_mail_server(), SENDER)


jobs = Jobs(lifespan=connect)
MAILS = jobs.scope("mail", retention=timedelta(days=90))


@jobs.handler(queue="orders")
async def confirm_order(ctx: AsyncContext, order: Order) -> None:
    """Take the order's lines out of the stock, or call the order sold out; either way the customer is told."""
    if await take_from_stock(ctx, order.id):
        order.status = "confirmed"
        # Jobs of this transaction: they exist if the order is confirmed, and only then.
        ctx.session.add_job(write_invoice, order_id=order.id)
        subject, text = f"Order {order.id} is confirmed", "It is on its way to you."
    else:
        order.status = "sold out"
        subject, text = f"Order {order.id} is sold out", "We are sorry. Nothing is charged."
    ctx.session.add_job(send_mail, order_id=order.id, to=order.email, subject=subject, text=text)


@jobs.handler(queue="invoices")
async def write_invoice(ctx: AsyncContext, order_id: int) -> None:
    """Write the invoice of a confirmed order in one statement, at the prices that were ordered."""
    total = (
        select(OrderLine.order_id, func.sum(OrderLine.quantity * OrderLine.price_cents))
        .where(OrderLine.order_id == order_id)
        .group_by(OrderLine.order_id)
    )
    await ctx.session.execute(insert(Invoice).from_select(["order_id", "total_cents"], total))


# A mail reaches outside of the database: lease mode, so that no transaction is open meanwhile, and `ctx.once`.
@jobs.handler(queue="mail", claim="lease", timeout_seconds=60)
def send_mail(ctx: Context[Mailer], order_id: int, to: str, subject: str, text: str) -> DeadLetter | None:
    """Send the customer the one mail about what became of the order. SMTP is sync, and so is this handler."""
    try:
        ctx.once(MAILS, key=f"order-{order_id}", call=partial(ctx.state.send, to, subject, text))
    except EffectUnknown:
        return DeadLetter("it is not known whether the mail was sent: see `outboxq effects list --status unknown`")
    return None


async def take_from_stock(ctx: AsyncContext, order_id: int) -> bool:
    """Take all lines or none; False if a product is short.

    The stock is changed by an expression: PostgreSQL computes it from the newest row, which others may have changed.
    """
    # In one order everywhere, so that two orders of the same products do not deadlock.
    lines = await ctx.session.scalars(select(OrderLine).where(OrderLine.order_id == order_id).order_by(OrderLine.sku))
    async with ctx.session.begin_nested() as attempt:
        for line in lines:
            taken = await ctx.session.execute(
                update(Product)
                .where(Product.sku == line.sku, Product.stock >= line.quantity)
                .values(stock=Product.stock - line.quantity)
                .returning(Product.sku)
            )
            if taken.first() is None:
                await attempt.rollback()
                return False
    return True
