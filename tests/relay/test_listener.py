"""The listener's thread outlives every error: without it a relay would poll for as long as it runs."""

import logging
from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy import make_url

from outboxq.postgres import Database
from outboxq.relay.listener import IdleSlot, Listener
from outboxq.tables import SCHEMA

ANSWER_SECONDS = 30.0


@pytest.fixture
def listener(outboxq_database: Database) -> Iterator[Listener]:
    url = make_url(outboxq_database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    listener = Listener(lambda: psycopg.connect(url, autocommit=True), SCHEMA, lambda _queue: None, probe_seconds=10.0)
    listener.start()
    yield listener
    listener.stop()


def test_an_error_that_nobody_thought_of_is_told_and_survived(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither psycopg's nor the system's: the slot is answered, and the next one is flagged on a new connection."""
    ignore: Callable[[], None] = lambda: None  # noqa: E731
    with caplog.at_level(logging.WARNING, logger="outboxq.listener"):
        refused = listener.fall_asleep(IdleSlot(frozenset(("lone surrogate \ud800",)), ignore))
        assert refused.result(timeout=ANSWER_SECONDS) is None
        flagged = None
        while not flagged:
            # Without a connection the answer is no.
            flagged = listener.fall_asleep(IdleSlot(frozenset(("mail",)), ignore)).result(timeout=ANSWER_SECONDS)
    assert [record.error_type for record in caplog.records] == ["UnicodeEncodeError"]
