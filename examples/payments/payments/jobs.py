"""What the relay runs: `outboxq relay payments.jobs:jobs`.

Three handlers for three kinds of provider. They differ in what `ctx.once` is told about the other side, which decides
what happens after a relay has died in the middle of a call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from outboxq import Applied, Backoff, Context, DeadLetter, Jobs, NotApplied, Unknown
from outboxq.errors import EffectFailed, EffectUnknown

from .client import Charge, PaymentClient
from .models import Order
from .settings import read_provider_url


@contextmanager
def connect() -> Iterator[PaymentClient]:
    """The client that handlers find as `ctx.state`."""
    yield PaymentClient(read_provider_url())


jobs = Jobs(lifespan=connect)
RETRY = Backoff(first_seconds=0.5, max_attempts=8)


@jobs.handler(queue="payments", claim="lease", retry=RETRY, timeout_seconds=60)
def charge(ctx: Context[PaymentClient], order_id: int, cents: int) -> DeadLetter | None:
    """Charge at a provider that honours idempotency keys for a day: an unfinished call is simply made again."""
    return take_payment(ctx, order_id, cents, provider_remembers=timedelta(hours=24))


@jobs.handler(queue="payments-asked", claim="lease", retry=RETRY, timeout_seconds=60)
def charge_or_ask(ctx: Context[PaymentClient], order_id: int, cents: int) -> DeadLetter | None:
    """Charge at a provider that ignores keys but can be asked: an unfinished call is looked up before another."""
    return take_payment(ctx, order_id, cents, already_applied=ctx.state.look_up)


@jobs.handler(queue="payments-blind", claim="lease", retry=RETRY, timeout_seconds=60)
def charge_or_give_up(ctx: Context[PaymentClient], order_id: int, cents: int) -> DeadLetter | None:
    """Charge at a provider that does neither: after an unfinished call a person has to find out."""
    return take_payment(ctx, order_id, cents)


def take_payment(
    ctx: Context[PaymentClient],
    order_id: int,
    cents: int,
    *,
    provider_remembers: timedelta | None = None,
    already_applied: Callable[[str], Applied[Charge] | NotApplied | Unknown] | None = None,
) -> DeadLetter | None:
    """Charge the customer once, and write down what came of it, in the transaction that removes the job.

    The order is loaded behind the call: as an argument it would hold a transaction open for as long as the call takes.
    """
    try:
        charged = ctx.once(
            "charge",
            key=f"order-{order_id}",
            # The same key with another amount is a mistake of ours, and refused.
            payload={"cents": cents},
            # Called with the key for the provider, which is the same at every try.
            call=partial(ctx.state.charge, order_id, cents),
            provider_remembers=provider_remembers,
            already_applied=already_applied,
            returns=Charge,
        )
    except EffectUnknown:
        # Trying again would come to the same. The dead letters are what a person goes through.
        return DeadLetter(
            "it is not known whether the customer was charged: see `outboxq effects list --status unknown`"
        )
    except EffectFailed:
        ctx.session.get_one(Order, order_id).status = "declined"
        return None
    order = ctx.session.get_one(Order, order_id)
    order.status, order.charge_id = "paid", charged.id
    return None
