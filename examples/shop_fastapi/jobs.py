"""What the relay runs: `outboxq relay examples.shop_fastapi.jobs:jobs`."""

from sqlalchemy import func, insert, select, update

from examples.shop_fastapi.models import Invoice, Order, OrderLine, Product
from outboxq import AsyncContext, Jobs

jobs = Jobs()


@jobs.handler(queue="orders")
async def confirm_order(ctx: AsyncContext, order: Order) -> None:
    """Take the order's lines out of the stock and have the invoice written, or mark the order as sold out."""
    if not await take_from_stock(ctx, order.id):
        order.status = "sold out"
        return
    order.status = "confirmed"
    # A job of this transaction: it exists if the order is confirmed, and only then.
    ctx.session.add_job(write_invoice, order_id=order.id)


@jobs.handler(queue="invoices")
async def write_invoice(ctx: AsyncContext, order_id: int) -> None:
    """Write the invoice of a confirmed order, in one statement."""
    total = (
        select(OrderLine.order_id, func.sum(OrderLine.quantity * Product.price_cents))
        .join(Product, Product.sku == OrderLine.sku)
        .where(OrderLine.order_id == order_id)
        .group_by(OrderLine.order_id)
    )
    await ctx.session.execute(insert(Invoice).from_select(["order_id", "total_cents"], total))


async def take_from_stock(ctx: AsyncContext, order_id: int) -> bool:
    """Take all lines or none; False where a product is short.

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
