"""The parts of ASGI that this package needs: https://asgi.readthedocs.io/en/latest/specs/www.html."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = Mapping[str, Any]
MutableScope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

_ENOUGH_DIGITS = 19
_NOT_FOUND, _METHOD_NOT_ALLOWED = 404, 405


def header_values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Return the values of every header with this name, which has to be in lower case."""
    return [value for given, value in headers if given.lower() == name]


def declared_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Return the Content-Length; None if there is none, several, or one that is no number."""
    values = header_values(headers, b"content-length")
    if len(values) != 1 or not values[0].isdigit():
        return None
    # Python refuses to convert thousands of digits; so many exceed any cap.
    return int(values[0].lstrip(b"0")[:_ENOUGH_DIGITS] or b"0")


def was_not_routed(scope: Scope, status: int) -> bool:
    """Return True if the router of Starlette or FastAPI made this answer because it found no endpoint for the request.

    No route has the request's path, or none with its method. Only the router's entries in the scope are checked, so an
    answer of another router or of an endpoint is not recognised.

    Args:
        status: The status of the answer.
    """
    if "router" not in scope:
        return False
    if status == _NOT_FOUND:
        # A mounted application without a matching route is itself the endpoint that the scope names last.
        endpoint = scope.get("endpoint")
        return endpoint is None or endpoint is scope.get("app")
    methods = getattr(scope.get("route"), "methods", None)
    return status == _METHOD_NOT_ALLOWED and methods is not None and scope["method"] not in methods
