"""Endpoints that record their response in their own transaction: rows and response are one commit."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import httpx
import pytest
from sqlalchemy import Engine, text

from outboxq.postgres import Database
from outboxq.statements.effects import EffectLock, settle_started
from tests.support.http_app import make_app
from tests.support.http_server import closed_gate, is_replay, problem, seen, serve, wait_at_gate
from tests.support.ledger import ledger
from tests.support.waiting import wait_until

KEY = {"Idempotency-Key": '"order-1"'}


@pytest.fixture
def client(outboxq_database: Database) -> Iterator[httpx.Client]:
    with serve(make_app(outboxq_database.url)) as address:
        # A server closes the connection of a request that raised: none is used twice.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=address, limits=limits, timeout=60) as client:
            yield client


@pytest.mark.first_and_last
@pytest.mark.parametrize("path", ["/tx/orders", "/tx/sync", "/tx/late", "/tx/late-sync"])
def test_what_is_recorded_with_the_rows_is_replayed(client: httpx.Client, engine: Engine, path: str) -> None:
    """In async and sync endpoints, with a session of their own or one that FastAPI ends after the response."""
    first, retry = client.post(path, headers=KEY), client.post(path, headers=KEY)

    assert (first.status_code, is_replay(first), is_replay(retry)) == (201, False, True)
    assert "idempotency-warning" not in first.headers
    assert seen(retry) == seen(first)
    assert ledger(engine) == Counter(order=1)


def test_an_error_that_was_not_recorded_did_nothing(client: httpx.Client, engine: Engine) -> None:
    """What the endpoint did not commit did not happen: after an error, a retry is executed."""
    assert client.post("/tx/orders?raise=1", headers=KEY).status_code == 500
    assert client.post("/tx/orders?raise=1", headers=KEY).status_code == 500
    other = {"Idempotency-Key": '"order-2"'}
    assert [client.post("/tx/unrecorded?status=503", headers=other).status_code for _ in range(2)] == [503, 503]
    assert ledger(engine) == Counter()
    assert statuses(engine) == Counter(retryable=2)


def test_an_endpoint_that_raises_after_its_commit_has_answered(client: httpx.Client, engine: Engine) -> None:
    """What was committed is told to the first client too, and not executed again."""
    first, retry = (client.post("/tx/orders?raise-late=1", headers=KEY) for _ in range(2))

    assert first.status_code == 201
    assert seen(retry) == seen(first)
    assert ledger(engine) == Counter(order=1)


def test_a_commit_whose_answer_was_lost_has_answered(client: httpx.Client, engine: Engine) -> None:
    """What stands is looked up where the endpoint's session cannot know: its rows are told, and not made again."""
    first, retry = (client.post("/tx/orders?lost=1", headers=KEY) for _ in range(2))

    assert first.status_code == 201
    assert seen(retry) == seen(first)
    assert ledger(engine) == Counter(order=1)


def test_what_is_recorded_or_being_recorded_is_not_released(client: httpx.Client, engine: Engine) -> None:
    """A release that comes late finds the record, or its row locked, and does nothing; it does not wait."""
    client.post("/tx/orders", headers=KEY)
    with engine.connect() as connection, engine.connect() as recording:
        token = connection.execute(text("SELECT lock_token FROM outboxq.effect")).scalar_one()
        lock = EffectLock("POST /tx/orders", "order-1", token)
        release = settle_started(lock, "retryable", result=None, error=None, keep=timedelta(days=1))
        assert connection.execute(release).first() is None
        connection.execute(text("UPDATE outboxq.effect SET status = 'started', expires_at = NULL"))
        connection.commit()
        recording.execute(text("SELECT FROM outboxq.effect FOR UPDATE"))
        connection.execute(text("SET LOCAL lock_timeout = '1s'"))
        assert connection.execute(release).first() is None
        recording.rollback()
        assert connection.execute(release).first() is not None


def test_the_recorded_response_is_the_answer(client: httpx.Client, engine: Engine) -> None:
    """An endpoint that returns another response than it recorded answers what its retries will get."""
    first, retry = (client.post("/tx/orders?other=1", headers=KEY) for _ in range(2))

    assert seen(retry) == seen(first)
    assert ledger(engine) == Counter(order=1)


@pytest.mark.parametrize("query", ["", "?savepoint=1"])
def test_a_record_that_was_rolled_back_is_not_answered(client: httpx.Client, engine: Engine, query: str) -> None:
    """A success whose transaction, or savepoint, was rolled back is answered with 500, and may be executed again."""
    first, retry = (client.post(f"/tx/rolled-back{query}", headers=KEY) for _ in range(2))

    assert (first.status_code, problem(first), problem(retry)) == (500, "rolled-back", "rolled-back")
    assert ledger(engine) == Counter()


def test_a_commit_that_fails_after_the_response_is_not_answered_with_success(
    client: httpx.Client, engine: Engine
) -> None:
    """A transaction that ends after the endpoint is waited for: no client is told of rows that were rolled back."""
    first, retry = (client.post("/tx/late?fail-commit=1", headers=KEY) for _ in range(2))

    assert (first.status_code, retry.status_code) == (500, 500)
    assert not is_replay(retry)
    assert ledger(engine) == Counter()


def test_a_success_that_was_not_recorded_is_recorded_late_and_marked(client: httpx.Client, engine: Engine) -> None:
    """An endpoint that forgets to record is told so in a header, and still not executed again."""
    first, retry = (client.post("/tx/unrecorded", headers=KEY) for _ in range(2))

    assert first.headers["idempotency-warning"] == "recorded after the endpoint's transaction"
    assert (is_replay(retry), retry.content) == (True, first.content)
    assert ledger(engine) == Counter(order=1)


def test_recording_needs_to_be_announced(client: httpx.Client, engine: Engine) -> None:
    """An endpoint that records where the middleware was not told raises, and writes nothing."""
    assert problem(client.post("/record-anyway", headers=KEY)) == "failed"
    assert ledger(engine) == Counter()


def test_without_a_key_there_is_nothing_to_record(client: httpx.Client, engine: Engine) -> None:
    """The same endpoint serves requests without a key, each for itself."""
    answers = [client.post(path) for path in ("/tx/orders", "/tx/orders", "/tx/sync", "/record-anyway")]

    assert [answer.status_code for answer in answers] == [201] * 4
    assert statuses(engine) == Counter()


def test_a_request_that_was_taken_over_commits_nothing(outboxq_database: Database, engine: Engine) -> None:
    """Whoever wakes after its lease ran out, and was taken over, is rolled back: one row, one answer."""
    with (
        serve(make_app(outboxq_database.url)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
        ThreadPoolExecutor(1) as clients,
    ):
        with closed_gate(engine):
            stalled = clients.submit(client.post, "/tx/orders?gate=1", headers=KEY)
            wait_at_gate(engine)
            expire(engine)
            # Takes over, and waits at the gate too: the first to pass is not the first to have come.
            other = ThreadPoolExecutor(1)
            taken_over = other.submit(client.post, "/tx/orders?gate=1", headers=KEY)
            wait_at_gate(engine, 2)
        answers = [stalled.result(), taken_over.result()]
        other.shutdown()
        retry = client.post("/tx/orders?gate=1", headers=KEY)

    assert (answers[0].status_code, problem(answers[0])) == (409, "in-progress")
    assert answers[0].headers["retry-after"] == "1"
    assert answers[1].status_code == 201
    assert seen(retry) == seen(answers[1])
    assert ledger(engine) == Counter(order=1)


def test_a_retry_does_not_wait_for_a_record_that_is_being_committed(client: httpx.Client, engine: Engine) -> None:
    """While the lease lasts it is told that the request is under way, and holds no connection meanwhile."""
    with ThreadPoolExecutor(1) as clients:
        with closed_gate(engine):
            first = clients.submit(client.post, "/tx/orders?gate=late", headers=KEY)
            wait_at_gate(engine)
            # The gate is closed: whoever waited for the first one would wait for ever.
            assert problem(client.post("/tx/orders?gate=late", headers=KEY, timeout=20)) == "in-progress"
        answer = first.result()
    retry = client.post("/tx/orders?gate=late", headers=KEY)
    assert (answer.status_code, is_replay(retry), seen(retry)) == (201, True, seen(answer))


def test_what_is_being_committed_is_not_taken_over(outboxq_database: Database, engine: Engine) -> None:
    """A record that waits for its commit holds its key, also when the lease has run out meanwhile."""
    with (
        serve(make_app(outboxq_database.url, lease_seconds=0.5)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
        ThreadPoolExecutor(2) as clients,
    ):
        with closed_gate(engine):
            first = clients.submit(client.post, "/tx/orders?gate=late", headers=KEY)
            wait_at_gate(engine)
            wait_until(lambda: is_expired(engine), "the lease to run out")
            meanwhile = clients.submit(client.post, "/tx/orders?gate=late", headers=KEY)
            wait_for_row_lock(engine)
        answer = first.result()
        assert is_replay(meanwhile.result()) or problem(meanwhile.result()) == "in-progress"
        retry = client.post("/tx/orders?gate=late", headers=KEY)

    assert answer.status_code == 201
    assert (is_replay(retry), seen(retry)) == (True, seen(answer))
    assert ledger(engine) == Counter(order=1)


def expire(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.effect SET locked_until = clock_timestamp() - interval '1 s'"))


def is_expired(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(connection.execute(text("SELECT locked_until < clock_timestamp() FROM outboxq.effect")).scalar())


def wait_for_row_lock(engine: Engine) -> None:
    query = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock' AND wait_event IN ('transactionid', 'tuple')"
    )

    def waits() -> bool:
        with engine.connect() as connection:
            return connection.execute(query).scalar_one() > 0

    wait_until(waits, "a retry that waits for the record")


def statuses(engine: Engine) -> Counter[str]:
    with engine.connect() as connection:
        return Counter(connection.execute(text("SELECT status FROM outboxq.effect")).scalars())
