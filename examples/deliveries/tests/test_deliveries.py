"""The application at work: events, a relay, and endpoints that answer late, not at all, or not yet."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import sessionmaker
from standardwebhooks import Webhook, WebhookVerificationError

from deliveries.__main__ import count, subscribe
from deliveries.endpoints import Endpoints, serve
from deliveries.jobs import jobs
from deliveries.models import Attempt, Delivery, Endpoint
from deliveries.publish import publish
from deliveries.sender import secret_of
from outboxq import OutboxSession, Relay, RelayConfig, SlotGroup
from outboxq.postgres import Database
from outboxq.testing import RelayProcess

LIMIT_SECONDS = 60
SECRET = "only for tests"
CUSTOMERS = 300

Sessions = sessionmaker[OutboxSession]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master secret, for relays here and in other processes."""
    monkeypatch.setenv("DELIVERIES_SECRET", SECRET)


@pytest.fixture
def endpoints() -> Endpoints:
    """All endpoints, behaving well."""
    return Endpoints()


@pytest.fixture
def address(endpoints: Endpoints) -> Iterator[str]:
    """Their address."""
    with serve(endpoints) as address:
        yield address


def settings(slots: int) -> RelayConfig:
    """Settings with which the jobs of a dead relay are taken over soon."""
    return RelayConfig(groups=(SlotGroup(("deliveries",), slots),), lease_seconds=1, poll_seconds=0.1)


@contextmanager
def relay_at_work(url: str, slots: int) -> Iterator[None]:
    """A relay in a thread, within the block."""
    relay = Relay(url, jobs, settings(slots))
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield
    finally:
        relay.stop()
        thread.join(LIMIT_SECONDS)
    assert not thread.is_alive(), "the relay did not stop"


def wait_until(reached: Callable[[], object], what: str) -> None:
    """Look again until it is so; `what` says what was waited for."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not reached():
        assert time.monotonic() < deadline, f"waited {LIMIT_SECONDS} s for: {what}"
        time.sleep(0.02)


def send(sessions: Sessions, number: int = 1) -> None:
    """Commit so many events."""
    for _ in range(number):
        with sessions.begin() as session:
            publish(session, "invoice.paid", {"invoice": "INV-1"})


def attempts(sessions: Sessions) -> Counter[int]:
    """Count the answers by delivery."""
    with sessions() as session:
        return Counter(session.scalars(select(Attempt.delivery_id)))


def test_each_endpoint_gets_the_event_once_and_the_answer_is_written_down(
    outboxq_database: Database, sessions: Sessions, endpoints: Endpoints, address: str
) -> None:
    """Three hundred customers, one process: a message each, an answer each."""
    subscribe(sessions, CUSTOMERS, address)
    send(sessions)
    with relay_at_work(outboxq_database.url, 20):
        wait_until(lambda: not count(sessions)["waiting"], "every delivery")
    assert count(sessions) == {"delivered": CUSTOMERS}
    assert set(endpoints.messages.values()) == {1}
    assert {endpoint for endpoint, _ in endpoints.messages} == set(range(1, CUSTOMERS + 1))
    assert set(attempts(sessions).values()) == {1}


def test_an_event_that_is_rolled_back_is_sent_to_nobody(sessions: Sessions, address: str) -> None:
    """Its deliveries and jobs were part of its transaction, and went with it."""
    subscribe(sessions, 3, address)
    with sessions() as session:
        assert publish(session, "invoice.paid", {}) == 3
        session.rollback()
        waiting = session.scalar(text("SELECT count(*) FROM outboxq.job"))
        assert (waiting, session.scalar(select(func.count(Delivery.id)))) == (0, 0)


def test_an_endpoint_that_does_not_answer_holds_up_no_other(
    outboxq_database: Database, sessions: Sessions, endpoints: Endpoints, address: str
) -> None:
    """All others have their messages while it still thinks about its own."""
    subscribe(sessions, 10, address)
    endpoints.behave({"held": (3,)})
    send(sessions, 2)
    with relay_at_work(outboxq_database.url, 4):
        wait_until(lambda: count(sessions) == {"delivered": 18, "waiting": 2}, "all other deliveries")
        endpoints.behave({"held": ()})
        wait_until(lambda: not count(sessions)["waiting"], "the rest")
    assert set(endpoints.messages.values()) == {1}


def test_an_endpoint_that_is_away_gets_the_same_message_again(
    outboxq_database: Database, sessions: Sessions, endpoints: Endpoints, address: str
) -> None:
    """A 503 is one attempt; the next one has the same id, by which the endpoint knows it."""
    subscribe(sessions, 2, address)
    endpoints.behave({"unavailable": (2,)})
    send(sessions)
    with relay_at_work(outboxq_database.url, 2):
        wait_until(lambda: not count(sessions)["waiting"], "both deliveries")
    assert sorted(times for times in endpoints.messages.values()) == [1, 2]
    assert set(endpoints.accepted.values()) == {1}
    assert count(sessions) == {"delivered": 2}


def test_an_endpoint_that_is_gone_gets_no_more_messages(
    outboxq_database: Database, sessions: Sessions, endpoints: Endpoints, address: str
) -> None:
    """A 410 is final, for this message and for the ones to come."""
    subscribe(sessions, 3, address)
    endpoints.behave({"gone": (2,)})
    send(sessions)
    with relay_at_work(outboxq_database.url, 3):
        wait_until(lambda: not count(sessions)["waiting"], "three deliveries")
        send(sessions)
        wait_until(lambda: not count(sessions)["waiting"], "two more")
    assert count(sessions) == {"delivered": 4, "refused": 1}
    with sessions() as session:
        assert list(session.scalars(select(Endpoint.url).where(~Endpoint.is_active))) == [f"{address}/endpoints/2"]


def test_messages_of_a_killed_relay_are_sent_again_under_their_ids(
    outboxq_database: Database, sessions: Sessions, endpoints: Endpoints, address: str
) -> None:
    """Killed while endpoints had messages and it had no answers: one answer each is written down in the end."""
    subscribe(sessions, 6, address)
    endpoints.behave({"held": tuple(range(1, 7))})
    send(sessions)
    with RelayProcess("deliveries.jobs:jobs", outboxq_database.url, settings(6)) as relay:
        wait_until(lambda: endpoints.at_work == 6, "six calls")
        relay.kill()
    endpoints.behave({"held": ()})
    with relay_at_work(outboxq_database.url, 6):
        wait_until(lambda: not count(sessions)["waiting"], "every delivery")
    assert len(endpoints.messages) == 6
    assert min(endpoints.messages.values()) >= 2
    assert set(attempts(sessions).values()) == {1}


def test_a_message_is_signed_with_the_secret_of_its_endpoint(
    outboxq_database: Database, sessions: Sessions, endpoints: Endpoints, address: str
) -> None:
    """The receiver's own library verifies it; another endpoint's secret does not fit."""
    subscribe(sessions, 1, address)
    send(sessions)
    with relay_at_work(outboxq_database.url, 1):
        wait_until(lambda: not count(sessions)["waiting"], "the delivery")
    assert endpoints.last is not None
    request = endpoints.last
    body = Webhook(secret_of(SECRET, 1)).verify(request.body, request.headers)
    assert body == {"type": "invoice.paid", "data": {"invoice": "INV-1"}}
    with pytest.raises(WebhookVerificationError):
        Webhook(secret_of(SECRET, 2)).verify(request.body, request.headers)
