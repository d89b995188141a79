"""What relays that sleep would hear."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from outboxq.postgres import Database
from tests.support.waiting import PATIENCE


@contextmanager
def notifications(database: Database) -> Iterator[Callable[[], list[str]]]:
    """Collects the payloads that were notified so far."""
    url = database.url.replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("LISTEN outboxq_outboxq")
        heard: list[str] = []

        def collect() -> list[str]:
            # Notifications come in the order of their COMMITs: behind our own there is none of before.
            connection.execute("NOTIFY outboxq_outboxq, 'ours'")
            for notify in connection.notifies(timeout=PATIENCE):
                if notify.payload == "ours":
                    return heard
                heard.append(notify.payload)
            raise AssertionError("our own notification did not come back")

        yield collect
