"""What customers order."""

from outboxq import JobKind, OutboxSession

from .jobs import charge
from .models import Order


def place_order(session: OutboxSession, cents: int, kind: JobKind[[int, int]] = charge) -> Order:
    """Add an order and the job that charges it to the session: they commit together, or neither does."""
    order = Order(cents=cents, status="placed")
    session.add(order)
    # For its number.
    session.flush()
    session.add_job(kind, order.id, cents)
    return order
