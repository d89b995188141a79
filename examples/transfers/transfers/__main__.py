"""The command line: `python -m transfers order 20000 | until 1000 | books`."""

import argparse
import random
import time

from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession

from .bank import Books, open_accounts, order_transfer, read_books
from .settings import read_settings

Sessions = sessionmaker[OutboxSession]

ACCOUNTS = 100
OPENING_CENTS = 10_000_00
MOST_CENTS = 5_000_00
# So many transfers are ordered in one transaction.
AT_ONCE = 500
LOOK_SECONDS = 0.2


def order(sessions: Sessions, number: int) -> None:
    """Open a hundred accounts, and order so many transfers between them."""
    with sessions.begin() as session:
        accounts = open_accounts(session, [f"customer {each}" for each in range(ACCOUNTS)], OPENING_CENTS)
    for start in range(0, number, AT_ONCE):
        with sessions.begin() as session:
            for _ in range(min(AT_ONCE, number - start)):
                source_id, target_id = random.sample(accounts, 2)
                order_transfer(session, source_id, target_id, cents=random.randint(1, MOST_CENTS))


def until(sessions: Sessions, number: int) -> None:
    """Wait until so many transfers are carried out or refused."""
    while look(sessions).settled < number:
        time.sleep(LOOK_SECONDS)


def look(sessions: Sessions) -> Books:
    """The books as they are now."""
    with sessions() as session:
        return read_books(session)


def main() -> None:
    """Run one command, and print the books."""
    parser = argparse.ArgumentParser(prog="python -m transfers", description="A bank.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("order", help="order transfers between 100 new accounts").add_argument("number", type=int)
    commands.add_parser("until", help="wait for so many to be settled").add_argument("number", type=int)
    commands.add_parser("books", help="count the money and the transfers")
    given = parser.parse_args()
    sessions = sessionmaker(create_engine(read_settings().database_url), class_=OutboxSession)
    if given.command == "order":
        order(sessions, given.number)
    elif given.command == "until":
        until(sessions, given.number)
    print(look(sessions))


if __name__ == "__main__":
    main()
