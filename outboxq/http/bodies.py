"""Request bodies: read to be compared, then given to the application as if nobody had."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from outboxq.http.keys import Scope, header_values

_ENOUGH_DIGITS = 19

Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Whole:
    """A body that was read to its end."""

    data: bytes


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The beginning of a body over the cap."""

    beginning: bytes
    goes_on: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """The client left before its request was whole."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> Whole | TooLarge | Gone:
    """Read the request's body, and no further than the cap."""
    if _declared_bytes(scope) > max_bytes:
        return TooLarge(b"", goes_on=True)
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return Gone()
        data += message.get("body", b"")
        goes_on = bool(message.get("more_body", False))
        if len(data) > max_bytes:
            return TooLarge(bytes(data), goes_on)
        if not goes_on:
            return Whole(bytes(data))


def given_back(read: Whole | TooLarge, receive: Receive) -> Receive:
    """A `receive` that begins with what was read; afterwards it tells what the server tells."""
    if isinstance(read, TooLarge) and not read.beginning and read.goes_on:
        return receive
    data, goes_on = (read.data, False) if isinstance(read, Whole) else (read.beginning, read.goes_on)
    unread: list[dict[str, Any]] = [{"type": "http.request", "body": data, "more_body": goes_on}]

    async def receive_again() -> dict[str, Any]:
        return unread.pop() if unread else await receive()

    return receive_again


def _declared_bytes(scope: Scope) -> int:
    values = header_values(scope, b"content-length")
    if len(values) != 1 or not values[0].isdigit():
        return 0
    # Python refuses to read thousands of digits; as many as these are over any cap.
    return int(values[0].lstrip(b"0")[:_ENOUGH_DIGITS] or b"0")
