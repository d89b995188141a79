"""The Idempotency-Key header: requests that no endpoint was there for, clients that leave, and whose a key is."""

import asyncio
import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from outboxq.errors import ConfigError
from outboxq.http import IdempotencyMiddleware, by_authorization, nobody
from outboxq.postgres import Database
from tests.support.http_server import is_replay, serve

KEY = {"Idempotency-Key": "a-key"}
ROWS = text("SELECT status, expires_at <= clock_timestamp() FROM outboxq.effect")


@pytest.fixture(params=["fastapi", "starlette"])
def client(outboxq_database: Database, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of an application with an endpoint that answers as it is asked to."""

    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("answered", int(request.query_params["status"]))

    below = Starlette(routes=[Route("/there", answer, methods=["POST"])])
    if request.param == "fastapi":
        app: Any = FastAPI()
        app.add_api_route("/there", answer, methods=["POST"])
        app.mount("/below", below)
    else:
        app = Starlette(routes=[Route("/there", answer, methods=["POST"]), Mount("/below", below)])
    engine = create_async_engine(outboxq_database.url)
    app.add_middleware(
        IdempotencyMiddleware,
        engine=engine,
        principal=nobody,
        methods=("POST", "PATCH"),
        in_transaction=lambda scope: b"tx" in scope["query_string"],
    )
    with serve(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client
    asyncio.run(engine.dispose())


@pytest.mark.first_and_last
@pytest.mark.parametrize("mode", ["", "tx"])
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/nowhere", 404),
        ("POST", "/below/nowhere", 404),
        ("PATCH", "/there", 405),
        ("PATCH", "/below/there", 405),
    ],
)
def test_what_the_router_refuses_is_not_kept(
    client: httpx.Client, engine: Engine, method: str, path: str, status: int, mode: str
) -> None:
    """No endpoint was there: its row has expired at once, and a retry is routed again."""
    for _ in range(2):
        answer = client.request(method, f"{path}?{mode}", headers=KEY)
        assert (answer.status_code, is_replay(answer)) == (status, False)
        with engine.connect() as connection:
            assert connection.execute(ROWS).all() == [("retryable", True)]


@pytest.mark.each_value
@pytest.mark.parametrize("path", ["/there", "/below/there"])
@pytest.mark.parametrize("status", [404, 405])
def test_the_same_status_of_an_endpoint_is_an_outcome(
    client: httpx.Client, engine: Engine, path: str, status: int
) -> None:
    """An endpoint may have done something before it answered so: it is replayed."""
    first, retry = (client.post(f"{path}?status={status}", headers=KEY) for _ in range(2))
    assert (first.status_code, retry.status_code) == (status, status)
    assert (is_replay(first), is_replay(retry)) == (False, True)


@pytest.mark.parametrize("leaves", [True, False])
def test_an_endpoint_sees_whether_its_client_has_left_before_it_reads(
    outboxq_database: Database, engine: Engine, leaves: bool
) -> None:
    """As without a key: `is_disconnected` tells at once, and takes nothing from the body of a client that is there."""

    async def ask() -> tuple[bool, bytes]:
        gone, seen = asyncio.Event(), []
        whole = iter([{"type": "http.request", "body": b"body", "more_body": False}])

        async def receive() -> dict[str, Any]:
            # A server's: what has come, then nothing until the client leaves.
            for message in whole:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None: ...

        async def application(scope: Any, receive: Any, send: Any) -> None:
            request = Request(scope, receive)
            if leaves:
                gone.set()
                # The server has it now; what waits for it is called within the next turns of the loop.
                for _ in range(3):
                    await asyncio.sleep(0)
                seen.append((await request.is_disconnected(), b""))
            else:
                seen.append((False, await request.body()))
            await PlainTextResponse("answered")(scope, receive, send)

        async_engine = create_async_engine(outboxq_database.url)
        guarded = IdempotencyMiddleware(application, async_engine, principal=nobody)
        headers = [(b"idempotency-key", b"a-key")]
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
        await guarded(scope, receive, send)
        await guarded._transactions.dispose()
        await async_engine.dispose()
        return seen[0]

    assert asyncio.run(ask()) == ((True, b"") if leaves else (False, b"body"))


def test_a_secret_keeps_passwords_from_being_guessed_from_the_table() -> None:
    """With a secret no hash of the header alone is stored; without one it stays what it was."""
    header = b"Basic YWxpY2U6aHVudGVyMg=="
    scope = {"headers": [(b"authorization", header)]}
    plain, one, other = (
        by_authorization(scope),
        by_authorization(secret=b"0123456789abcdef")(scope),
        by_authorization(secret="another secret of ours")(scope),
    )
    assert plain == hashlib.sha256(header).hexdigest()
    assert len({plain, one, other}) == 3
    assert one == by_authorization(secret="0123456789abcdef")(scope)
    assert by_authorization(secret=b"0123456789abcdef")({"headers": []}) is None


@pytest.mark.parametrize("secret", [None, "", b"too short", 7])
def test_a_secret_that_is_none_is_refused(secret: Any) -> None:
    """A forgotten variable of the environment is an error when the application starts."""
    with pytest.raises(ConfigError, match="16 bytes"):
        by_authorization(secret=secret)
