"""Request bodies: read to compare a retry with its first request, then passed to the application as if unread."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from outboxq.http.asgi import Receive, Scope, declared_bytes


@dataclass(frozen=True, slots=True)
class Whole:
    """A request body that `read_body` has read to its end."""

    data: bytes


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A request body that is longer than `max_bytes`, so that `read_body` did not read it to its end.

    Attributes:
        beginning: The bytes that were read of the body.
        goes_on: True if there is more of the body to read.
    """

    beginning: bytes
    goes_on: bool


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> Whole | TooLarge | None:
    """Read the request's body: return it as `Whole`, or as `TooLarge` if it is longer than `max_bytes`.

    Return None if the client left before the end.
    """
    if (declared_bytes(scope["headers"]) or 0) > max_bytes:
        return TooLarge(b"", goes_on=True)
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        data += message.get("body", b"")
        goes_on = bool(message.get("more_body", False))
        if len(data) > max_bytes:
            return TooLarge(bytes(data), goes_on)
        if not goes_on:
            return Whole(bytes(data))


@asynccontextmanager
async def given_whole(read: Whole, receive: Receive) -> AsyncIterator[Receive]:
    """Yield a `receive` for the application: it returns the whole body, then reports at once if the client has left.

    Starlette's `is_disconnected()` needs the report without any wait. So a task calls the server's `receive` in
    advance: once the body is read, that can only report that the client has left.
    """
    leaving = asyncio.ensure_future(receive())
    unread: list[dict[str, Any]] = [_message(read.data, goes_on=False)]

    async def receive_again() -> dict[str, Any]:
        if unread and not leaving.done():
            return unread.pop()
        return await asyncio.shield(leaving)

    try:
        yield receive_again
    finally:
        if not leaving.cancel() and not leaving.cancelled():
            # The result may never be read: reading the exception keeps asyncio from logging it.
            leaving.exception()


def given_back(read: TooLarge, receive: Receive) -> Receive:
    """Return a `receive` for the application of a request that is not guarded, because its body is too large.

    It returns the bytes that were read, then the server's messages.
    """
    if not read.beginning and read.goes_on:
        return receive
    unread: list[dict[str, Any]] = [_message(read.beginning, goes_on=read.goes_on)]

    async def receive_again() -> dict[str, Any]:
        return unread.pop() if unread else await receive()

    return receive_again


def _message(body: bytes, *, goes_on: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": goes_on}
