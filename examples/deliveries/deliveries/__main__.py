"""The command line: `python -m deliveries subscribe 300 URL | publish TYPE DATA | until-settled | show`."""

import argparse
import json
import time
from collections import Counter

from sqlalchemy import create_engine, select
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession

from .models import Delivery, Endpoint
from .publish import publish
from .settings import read_settings

Sessions = sessionmaker[OutboxSession]

LOOK_SECONDS = 0.2


def subscribe(sessions: Sessions, number: int, address: str) -> None:
    """Add so many endpoints."""
    with sessions.begin() as session:
        session.add_all(Endpoint(url=f"{address}/endpoints/{position}") for position in range(1, number + 1))


def count(sessions: Sessions) -> Counter[str]:
    """Count the deliveries by status."""
    with sessions() as session:
        return Counter(session.scalars(select(Delivery.status)))


def main() -> None:
    """Run one command, and print how many deliveries have each status."""
    parser = argparse.ArgumentParser(prog="python -m deliveries", description="Events for the endpoints of customers.")
    commands = parser.add_subparsers(dest="command", required=True)
    subscribing = commands.add_parser("subscribe", help="add endpoints of one server")
    subscribing.add_argument("number", type=int)
    subscribing.add_argument("address")
    publishing = commands.add_parser("publish", help="send an event to every endpoint")
    publishing.add_argument("type")
    publishing.add_argument("data", type=json.loads)
    commands.add_parser("until-settled", help="wait until no delivery waits")
    commands.add_parser("show", help="count the deliveries")
    given = parser.parse_args()
    sessions = sessionmaker(create_engine(read_settings().database_url), class_=OutboxSession)
    if given.command == "subscribe":
        subscribe(sessions, given.number, given.address)
    if given.command == "publish":
        with sessions.begin() as session:
            publish(session, given.type, given.data)
    while given.command == "until-settled" and count(sessions)["waiting"]:
        time.sleep(LOOK_SECONDS)
    print(", ".join(f"{number} {status}" for status, number in sorted(count(sessions).items())) or "no deliveries")


if __name__ == "__main__":
    main()
