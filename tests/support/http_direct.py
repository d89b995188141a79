"""The middleware past any server, in the event loop of the test: what it sends, and what it leaves behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import Engine, Row, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq.http import IdempotencyMiddleware, nobody


@asynccontextmanager
async def guarding(url: str, app: Any, *, pool_size: int = 5, **settings: Any) -> AsyncIterator[IdempotencyMiddleware]:
    """The application behind the middleware, on an engine of its own."""
    engine = create_async_engine(url, pool_size=pool_size, max_overflow=0)
    middleware = IdempotencyMiddleware(app, engine, **({"principal": nobody} | settings))
    try:
        yield middleware
    finally:
        await settled(middleware)
        await middleware._transactions.dispose()
        await engine.dispose()


async def settled(middleware: IdempotencyMiddleware) -> None:
    """Wait until nothing is being written any more."""
    while middleware._writes._tasks:
        await asyncio.gather(*middleware._writes._tasks, return_exceptions=True)


async def cancel_in_its_claim(middleware: IdempotencyMiddleware, key: str) -> None:
    """A request whose client, or server, gives up while it waits for its claim."""
    claiming = asyncio.create_task(call(middleware, key=key))
    while not middleware._writes._tasks:  # noqa: ASYNC110  # a turn of the loop or two, until it claims
        await asyncio.sleep(0)
    claiming.cancel()
    await asyncio.wait([claiming])
    assert claiming.cancelled()
    await settled(middleware)


def answers_with(body: bytes) -> Any:
    """An application."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


async def call(app: Any, key: str | None) -> list[Any]:
    """One POST: the messages that a server would send."""
    sent: list[Any] = []
    headers = [] if key is None else [(b"idempotency-key", key.encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def answered(app: Any, key: str) -> tuple[int, bytes, dict[bytes, bytes]]:
    """Status, body and headers of one POST."""
    start, *bodies = await call(app, key)
    return start["status"], b"".join(message.get("body", b"") for message in bodies), dict(start["headers"])


def stored(engine: Engine) -> Row[Any]:
    """The only effect there is."""
    with engine.connect() as connection:
        return connection.execute(text("SELECT * FROM outboxq.effect")).one()
