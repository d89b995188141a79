"""The command line: `python -m payments order 20 | until-settled | show`."""

import argparse
import time
from collections import Counter

from sqlalchemy import create_engine, select
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession

from .jobs import charge, charge_or_ask, charge_or_give_up
from .models import Order
from .settings import read_settings
from .shop import place_order

Sessions = sessionmaker[OutboxSession]

KINDS = {"keys": charge, "look-ups": charge_or_ask, "neither": charge_or_give_up}
LOOK_SECONDS = 0.2


def order(sessions: Sessions, number: int, provider: str) -> None:
    """Place so many orders, each in a transaction of its own."""
    for position in range(number):
        with sessions.begin() as session:
            place_order(session, 500 + position, KINDS[provider])


def count(sessions: Sessions) -> Counter[str]:
    """How many orders have each status."""
    with sessions() as session:
        return Counter(session.scalars(select(Order.status)))


def main() -> None:
    """Run one command, and print how many orders have each status."""
    parser = argparse.ArgumentParser(prog="python -m payments", description="A shop.")
    commands = parser.add_subparsers(dest="command", required=True)
    ordering = commands.add_parser("order", help="place orders")
    ordering.add_argument("number", type=int)
    ordering.add_argument("--provider-has", choices=list(KINDS), default="keys", help="what the handler relies on")
    commands.add_parser("until-settled", help="wait until no order is merely placed")
    commands.add_parser("show", help="count the orders")
    given = parser.parse_args()
    sessions = sessionmaker(create_engine(read_settings().database_url), class_=OutboxSession)
    if given.command == "order":
        order(sessions, given.number, given.provider_has)
    while given.command == "until-settled" and count(sessions)["placed"]:
        time.sleep(LOOK_SECONDS)
    print(", ".join(f"{number} {status}" for status, number in sorted(count(sessions).items())) or "no orders")


if __name__ == "__main__":
    main()
