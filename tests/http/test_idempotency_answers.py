"""Bodies and answers of every shape, what surrounds the middleware, and what a guarded request costs."""

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse

from outboxq.errors import ConfigError
from outboxq.http import IdempotencyMiddleware, by_authorization, idempotency_of, nobody
from outboxq.postgres import Database
from tests.support.http_app import make_app
from tests.support.http_direct import answers_with, call, cancel_in_its_claim
from tests.support.http_server import closed_gate, is_replay, problem, seen, serve, wait_at_gate
from tests.support.ledger import ledger
from tests.support.waiting import wait_until

KEY = {"Idempotency-Key": '"order-1"'}


@pytest.fixture
def client(outboxq_database: Database) -> Iterator[httpx.Client]:
    app = make_app(outboxq_database.url, max_request_bytes=100_000, max_response_bytes=10_000)
    with serve(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def test_bytes_are_replayed_as_they_were(client: httpx.Client, engine: Engine) -> None:
    """A body that is no text comes again byte for byte, up to the cap."""
    first, retry = (client.post("/sized?bytes=10000", headers=KEY) for _ in range(2))

    assert is_replay(retry)
    assert seen(retry) == seen(first)
    assert ledger(engine) == Counter(order=1)


@pytest.mark.parametrize("path", ["/stream", "/sized?bytes=10001"])
def test_what_cannot_be_kept_is_executed_once(client: httpx.Client, engine: Engine, path: str) -> None:
    """A stream, or a response over the cap, passes through and is marked; a retry is refused, with no hint to come."""
    first, retry = (client.post(path, headers=KEY) for _ in range(2))

    assert (first.status_code, first.headers["idempotency-replayable"]) == (200, "false")
    assert len(first.content) in (20, 10_001)
    assert (retry.status_code, problem(retry)) == (409, "response-not-kept")
    assert "retry-after" not in retry.headers
    assert ledger(engine) == Counter(order=1)


def test_a_stream_is_passed_on_as_it_comes(client: httpx.Client, engine: Engine) -> None:
    """Its first piece arrives before its last one is made; meanwhile the key is in use."""
    with closed_gate(engine), client.stream("POST", "/stream?gate=1", headers=KEY) as streamed:
        # Kept: an iterator that nobody holds closes its connection.
        pieces = streamed.iter_raw()
        assert next(pieces) == b"one "
        assert problem(client.post("/stream?gate=1", headers=KEY)) == "in-progress"


def test_a_client_that_leaves_a_stream_has_had_it_executed(client: httpx.Client, engine: Engine) -> None:
    """A stream that is cut short is not executed again."""
    with closed_gate(engine), client.stream("POST", "/stream?gate=1", headers=KEY) as streamed:
        next(streamed.iter_raw())
    wait_until(lambda: statuses(engine) == Counter(done=1), "the stream to end")
    assert problem(client.post("/stream?gate=1", headers=KEY)) == "response-not-kept"
    assert ledger(engine) == Counter(order=1)


def test_a_client_that_leaves_gets_its_answer_when_it_comes_back(client: httpx.Client, engine: Engine) -> None:
    """An endpoint goes on without its client, and its answer is recorded."""
    with closed_gate(engine):
        with pytest.raises(httpx.ReadTimeout):
            client.post("/orders?gate=1", headers=KEY, timeout=1)
        wait_at_gate(engine)
    wait_until(lambda: statuses(engine) == Counter(done=1), "the record")
    assert is_replay(client.post("/orders?gate=1", headers=KEY))
    assert ledger(engine) == Counter(order=1)


def test_a_client_that_leaves_within_its_request_leaves_nothing(client: httpx.Client, engine: Engine) -> None:
    """Half a request is not executed, and does not use its key."""
    parts = urlsplit(str(client.base_url))
    head = b'POST /echo HTTP/1.1\r\nHost: x\r\nIdempotency-Key: "order-1"\r\nContent-Length: 10\r\n\r\n'
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(head + b"12345")
    answer = client.post("/echo", headers=KEY, content=b"1234567890")

    assert (answer.json(), is_replay(answer)) == ({"bytes": 10}, False)
    assert ledger(engine) == Counter(order=1)


@pytest.mark.parametrize("sized", [True, False])
def test_a_request_over_the_cap_is_passed_on_and_marked(client: httpx.Client, engine: Engine, sized: bool) -> None:
    """Where no key is required, the body arrives whole, and the answer says that the key was ignored."""
    content = b"x" * 100_001
    answers = [client.post("/echo", headers=KEY, content=content if sized else iter([content])) for _ in range(2)]

    assert [answer.json() for answer in answers] == [{"bytes": 100_001}] * 2
    assert {answer.headers["idempotency-key-ignored"] for answer in answers} == {"request body too large"}
    assert statuses(engine) == Counter()
    assert (
        client.post("/echo", headers=KEY, content=iter([content[:50_000], content[:50_000]])).json()["bytes"] == 100_000
    )
    assert statuses(engine) == Counter(done=1)


@pytest.mark.parametrize("sized", [True, False])
def test_a_request_over_the_cap_is_refused_where_a_key_is_required(
    outboxq_database: Database, engine: Engine, sized: bool
) -> None:
    """413, before anything is executed: also for a body that does not say how long it is."""
    content = b"x" * 1001
    app = make_app(outboxq_database.url, required=True, max_request_bytes=1000)
    with serve(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        answer = client.post("/echo", headers=KEY, content=content if sized else iter([content]))

    assert (answer.status_code, problem(answer)) == (413, "request-too-large")
    assert ledger(engine) == Counter()


def test_background_tasks_run_after_the_answer(client: httpx.Client, engine: Engine) -> None:
    """The client has its answer while the task still waits; a replay runs no task."""
    with closed_gate(engine):
        first = client.post("/background?gate=1", headers=KEY)
        assert first.status_code == 200
        assert seen(client.post("/background?gate=1", headers=KEY)) == seen(first)
    wait_until(lambda: ledger(engine) == Counter(background=1), "the task")


def test_other_middleware_may_be_around_and_inside(outboxq_database: Database, engine: Engine) -> None:
    """BaseHTTPMiddleware on either side, and compression outside: the replay is the first answer."""

    async def mark(request: Any, call_next: Any) -> Any:
        answer = await call_next(request)
        answer.headers["x-marked"] = "yes"
        return answer

    app = make_app(outboxq_database.url)
    ours = app.user_middleware.pop()
    app.add_middleware(BaseHTTPMiddleware, dispatch=mark)
    app.user_middleware.insert(0, ours)
    app.add_middleware(BaseHTTPMiddleware, dispatch=mark)
    app.add_middleware(GZipMiddleware, minimum_size=10)
    with serve(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        first, retry = (client.post("/orders", headers=KEY) for _ in range(2))
        recorded = [client.post("/tx/orders", headers=KEY) for _ in range(2)]
        plain = client.post("/orders", headers=KEY | {"accept-encoding": "identity"})

    assert first.headers["content-encoding"] == "gzip"
    assert first.headers.get_list("x-marked") in (["yes"], ["yes, yes"])
    assert (is_replay(retry), retry.status_code, retry.content) == (True, 201, first.content)
    assert plain.content == first.content
    assert (is_replay(recorded[1]), recorded[1].content) == (True, recorded[0].content)
    assert ledger(engine) == Counter(order=2)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_guarded_request_costs_two_short_transactions(outboxq_database: Database, in_transaction: bool) -> None:
    """A claim and a record; where the endpoint records, the claim alone; without a key nothing."""

    async def run() -> None:
        own = create_async_engine(outboxq_database.url)
        sent: list[str] = []

        async def recording(scope: Any, receive: Any, send: Any) -> None:
            async with async_sessionmaker(own).begin() as session:
                await idempotency_of(scope).record(session, PlainTextResponse("ok"))
            await PlainTextResponse("ok")(scope, receive, send)

        app = recording if in_transaction else answers_with(b"ok")
        middleware = IdempotencyMiddleware(app, own, principal=nobody, in_transaction=in_transaction)
        for ours in (pool.engine for pool in middleware._transactions._transactions.pools):
            event.listen(ours, "before_cursor_execute", lambda c, u, text, *rest: sent.append(text.split()[0]))
            event.listen(ours, "commit", lambda _: sent.append("COMMIT"))
        await call(middleware, key="first")  # reads the deployment's id too
        sent.clear()
        await call(middleware, key="a")
        assert sent == ["WITH", "COMMIT"] + ([] if in_transaction else ["UPDATE", "COMMIT"])
        sent.clear()
        assert (await call(middleware, key="a"))[0]["headers"][-1] == (b"idempotent-replayed", b"true")
        assert sent == ["WITH", "COMMIT"]
        sent.clear()
        await call(middleware, key=None)
        assert sent == []
        await middleware._transactions.dispose()
        await own.dispose()

    asyncio.run(run())


def test_a_request_that_is_cancelled_is_settled(outboxq_database: Database, engine: Engine) -> None:
    """Cancelled in the endpoint: nobody knows. Cancelled in the claim: the key is free again."""

    async def run() -> None:
        own = create_async_engine(outboxq_database.url)
        reached = asyncio.Event()

        async def endless(scope: Any, receive: Any, send: Any) -> None:
            reached.set()
            await asyncio.Event().wait()

        middleware = IdempotencyMiddleware(endless, own, principal=nobody)
        running = asyncio.create_task(call(middleware, key="in-the-endpoint"))
        await reached.wait()
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        await cancel_in_its_claim(middleware, key="in-the-claim")
        await middleware._transactions.dispose()
        await own.dispose()

    asyncio.run(run())
    with engine.connect() as connection:
        found = dict(connection.execute(text("SELECT key, status FROM outboxq.effect")).all())
    assert found == {"in-the-endpoint": "unknown", "in-the-claim": "retryable"}


@pytest.mark.wide
def test_without_a_database_nothing_is_executed(outboxq_database: Database) -> None:
    """503 with Retry-After where no key can be checked: the client may come again."""

    async def run() -> list[Any]:
        own = create_async_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
        return await call(IdempotencyMiddleware(answers_with(b"executed"), own, principal=nobody), key="a")

    start, body = asyncio.run(run())
    assert start["status"] == 503
    assert (b"retry-after", b"5") in start["headers"]
    assert b"executed" not in body["body"]


def test_principals_and_settings_are_checked() -> None:
    """A principal must be chosen, and what cannot work is refused when the application is made."""
    own = create_async_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    app = answers_with(b"")
    for wrong in ({"principal": None}, {"methods": "POST"}, {"lease_seconds": 0}, {"max_response_bytes": -1}):
        with pytest.raises(ConfigError):
            IdempotencyMiddleware(app, own, **({"principal": nobody} | wrong))
    with pytest.raises(TypeError, match="principal"):
        IdempotencyMiddleware(app, own)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did not pass through IdempotencyMiddleware"):
        idempotency_of({"type": "http"})
    assert by_authorization({"headers": []}) is None
    some, other = ({"headers": [(b"authorization", value)]} for value in (b"Bearer a", b"Bearer b"))
    assert by_authorization(some) != by_authorization(other)
    assert "Bearer" not in str(by_authorization(some))


def statuses(engine: Engine) -> Counter[str]:
    with engine.connect() as connection:
        return Counter(connection.execute(text("SELECT status FROM outboxq.effect")).scalars())
