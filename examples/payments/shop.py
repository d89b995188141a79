"""Where customers order: `python -m examples.payments.shop tables | order 20 | show`."""

import os
import sys
from collections import Counter

from sqlalchemy import create_engine, select
from sqlalchemy.orm import sessionmaker

from examples.payments.jobs import charge
from examples.payments.models import Base, Order
from outboxq import JobKind, OutboxSession


def place_order(session: OutboxSession, cents: int, kind: JobKind[[int, int]] = charge) -> Order:
    """Add an order and the job that charges it to the session: they commit together, or neither does."""
    order = Order(cents=cents, status="placed")
    session.add(order)
    # For its number.
    session.flush()
    session.add_job(kind, order.id, cents)
    return order


def place_orders(sessions: sessionmaker[OutboxSession], number: int) -> None:
    """Place so many orders, each in a transaction of its own."""
    for position in range(number):
        with sessions.begin() as session:
            place_order(session, cents=100 + position)


def main(command: str, number: str = "20") -> None:
    """`tables`, `order` or `show`."""
    engine = create_engine(os.environ["OUTBOXQ_DATABASE_URL"])
    sessions = sessionmaker(engine, class_=OutboxSession)
    if command == "tables":
        Base.metadata.create_all(engine)
        return
    if command == "order":
        place_orders(sessions, int(number))
    with sessions() as session:
        counts = Counter(session.scalars(select(Order.status)))
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no orders")


if __name__ == "__main__":
    main(*sys.argv[1:])
