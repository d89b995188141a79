"""Request bodies: read to be compared, then given to the application as if they had not been read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from outboxq.http.asgi import Receive, Scope, declared_bytes


@dataclass(frozen=True, slots=True)
class Whole:
    """A body that was read to its end."""

    data: bytes


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The beginning of a body over the cap."""

    beginning: bytes
    goes_on: bool


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> Whole | TooLarge | None:
    """Read the request's body, and no further than the cap; None if the client left before it was whole."""
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
    """A `receive` that gives the body; it reports at once that a client has left, even before the body was taken.

    Servers do so, and Starlette's `is_disconnected()` does not wait: so a task calls the server's `receive` in advance.
    After the whole body, a server reports nothing else.
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
            # The result may be left unread: reading the exception keeps asyncio from logging it.
            leaving.exception()


def given_back(read: TooLarge, receive: Receive) -> Receive:
    """A `receive` that gives first the bytes already read, then the server's messages."""
    if not read.beginning and read.goes_on:
        return receive
    unread: list[dict[str, Any]] = [_message(read.beginning, goes_on=read.goes_on)]

    async def receive_again() -> dict[str, Any]:
        return unread.pop() if unread else await receive()

    return receive_again


def _message(body: bytes, *, goes_on: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": goes_on}
