"""What a caller of `once` asks for, checked before anything is called."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias
from uuid import UUID, uuid4, uuid5

import msgspec

from outboxq.codec.signature import resolve_return
from outboxq.codec.values import build_decoder, fingerprint
from outboxq.errors import ConfigError
from outboxq.names import MAX_SCOPE_BYTES, check_key

ErrorClass: TypeAlias = Literal["retryable", "final", "ambiguous"]
Classify: TypeAlias = Callable[[Exception], ErrorClass]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call to be made once: what it is, how it is told from others, and what is known of the other side."""

    scope: str
    key: str
    fingerprint: bytes | None
    lease: timedelta
    retention: timedelta
    provider_remembers: timedelta | None = None
    asks: bool = False
    asks_first: bool = False
    returns: object = None
    classify: Classify | None = None
    token: UUID = field(default_factory=uuid4)

    @functools.cached_property
    def decoder(self) -> msgspec.json.Decoder[object]:
        """Reads a stored result."""
        return build_decoder(f"effect {self.scope!r}", object if self.returns is None else self.returns)


def make_request(
    scope: str,
    key: str,
    call: Callable[[str], object],
    *,
    payload: object,
    asks: bool,
    asks_first: bool,
    provider_remembers: timedelta | None,
    returns: object,
    classify: Classify | None,
    lease: timedelta,
    retention: timedelta,
) -> Request:
    """Check what a caller gave, before anything is called.

    Raises:
        InvalidKey, ArgumentError, ConfigError: something cannot be used as given.
    """
    if not callable(call):
        raise ConfigError(f"once(call=...) takes a function of the provider key, got {type(call).__name__}")
    if provider_remembers is not None and (
        not isinstance(provider_remembers, timedelta) or provider_remembers <= timedelta(0)
    ):
        raise ConfigError(
            "provider_remembers takes how long the other side honours a key, such as timedelta(hours=24), or None "
            f"where it does not, got {provider_remembers!r}"
        )
    request = Request(
        scope=check_key("scope", scope, MAX_SCOPE_BYTES),
        key=check_key("key", key),
        fingerprint=None if payload is None else fingerprint(payload),
        lease=lease,
        retention=retention,
        provider_remembers=provider_remembers,
        asks=asks,
        asks_first=_check_asks_first(asks_first, asks=asks),
        returns=resolve_return(call) if returns is None else returns,
        classify=classify,
    )
    request.decoder  # noqa: B018  # refuses a type that cannot be read, before the call
    return request


def _check_asks_first(given: object, *, asks: bool) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(f"ask_first takes True or False, got {type(given).__name__}")
    if given and not asks:
        raise ConfigError("ask_first=True takes a look-up too: give already_applied=..., which is what is asked")
    return given


def provider_key(deployment: UUID, scope: str, key: str) -> UUID:
    """What the other side is given as idempotency key: a UUIDv5 (RFC 9562), the same at every try."""
    # Neither may hold a newline, so no two pairs are spelled alike.
    return uuid5(deployment, f"{scope}\n{key}")
