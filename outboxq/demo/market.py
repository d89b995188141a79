"""The demo's market: more work for the shop than orders, with failures and long jobs for an operator to handle.

Cards are charged by a provider that does not always answer, suppliers send prices of products that the shop does not
know, and a report takes half a minute.
"""

import random
import time
from datetime import timedelta

from outboxq import AsyncContext, Backoff, Context, Jobs
from outboxq.demo import shop
from outboxq.demo.shop import Product

jobs = Jobs()
CHARGES = jobs.scope("card-charge", retention=timedelta(days=30))
# One answer in so many orders is lost.
ORDERS_PER_LOSS = 33
REPORT_SECONDS = 30.0
_QUICKLY = Backoff(max_attempts=2, first_seconds=1.0)
_STEP_SECONDS = 0.2


class ProviderSilent(Exception):
    """The payment provider did not answer, so it is not known if the card was charged."""


class UnknownProduct(Exception):
    """A supplier's price is for a product that the shop does not have."""


@jobs.handler(queue="payments", claim="lease", retry=_QUICKLY)
def charge_card(ctx: Context, order_id: int) -> None:
    """Handler: charge the card of an order, once, even if the job runs again."""

    def charge(provider_key: str) -> dict[str, str]:
        time.sleep(random.uniform(0.02, 0.2))
        if order_id % ORDERS_PER_LOSS == 0:
            raise ProviderSilent("the provider did not answer within 5 seconds")
        return {"charge": f"ch_{provider_key[:8]}"}

    ctx.once(CHARGES, key=f"order-{order_id}", call=charge)


@jobs.handler(queue="imports", retry=_QUICKLY)
def import_price(ctx: Context, supplier: str, sku: str, price: int) -> None:
    """Handler: check a supplier's price; fail if the shop does not have the product."""
    assert price > 0
    time.sleep(random.uniform(0.01, 0.1))
    if ctx.session.get(Product, sku) is None:
        raise UnknownProduct(f"{supplier} sells a product that the shop does not know: {sku}")


@jobs.handler(queue="reports", claim="lease", keep=timedelta(hours=1), timeout_seconds=300)
def make_report(ctx: Context, month: str, seconds: float = REPORT_SECONDS) -> None:
    """Handler: make a month's report, slowly, so that an operator can watch or cancel it."""
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < seconds:
        if ctx.cancelled:
            return
        ctx.progress(passed / seconds, f"adding up {month}")
        time.sleep(_STEP_SECONDS)


@jobs.schedule("*/5 * * * *")
@jobs.handler(queue="mail")
async def remind_customers(_ctx: AsyncContext) -> None:
    """Handler of a schedule, to remind customers who have not paid; in the demo it does nothing."""


jobs.include(shop.jobs)
