"""Requests of `once`, checked before the other side is called."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from uuid import UUID, uuid4, uuid5

import msgspec

from outboxq.codec.signature import resolve_return
from outboxq.codec.text import name_and_line
from outboxq.codec.values import build_decoder, fingerprint
from outboxq.errors import ConfigError
from outboxq.names import MAX_SCOPE_BYTES, check_key
from outboxq.statements.effects import EffectLock

T = TypeVar("T")

Describe: TypeAlias = Callable[[BaseException], str]
ErrorClass: TypeAlias = Literal["retryable", "final", "ambiguous"]
Classify: TypeAlias = Callable[[Exception], ErrorClass]


@dataclass(frozen=True, slots=True)
class Applied(Generic[T]):
    """A look-up's answer: the call was applied, with this result."""

    result: T


@dataclass(frozen=True, slots=True)
class NotApplied:
    """A look-up's answer: the call was not applied, and never will be."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A look-up's answer: the other side cannot tell."""


LookUp: TypeAlias = Applied[T] | NotApplied | Unknown


@dataclass(frozen=True, slots=True)
class OnceOptions:
    """The arguments of `once`, as its caller gave them."""

    scope: str
    key: str
    call: Callable[[str], Any]
    already_applied: Callable[[str], Any] | None = None
    ask_first: bool = False
    provider_remembers: timedelta | None = None
    payload: object = None
    returns: object = None
    classify: Classify | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """The checked arguments of one call of `once`, and the settings for its effect; the protocol reads it.

    `fingerprint` is the hash of the payload. `lease` is how long the lock lasts, `retention` how long the outcome is
    remembered. `can_look_up` is True if there is a look-up, `looks_up_first` if it precedes every call. `returns` is
    the type of the result. `describe` returns the text that is stored for an error. `token` marks the lock as this
    caller's.
    """

    scope: str
    key: str
    fingerprint: bytes | None
    lease: timedelta
    retention: timedelta
    provider_remembers: timedelta | None = None
    can_look_up: bool = False
    looks_up_first: bool = False
    returns: object = None
    classify: Classify | None = None
    describe: Describe = field(default=name_and_line, compare=False)
    token: UUID = field(default_factory=uuid4)

    @functools.cached_property
    def decoder(self) -> msgspec.json.Decoder[object]:
        """Return the decoder that reads a stored result as the type `returns`."""
        return build_decoder(f"effect {self.scope!r}", object if self.returns is None else self.returns)

    @functools.cached_property
    def lock(self) -> EffectLock:
        """Return the lock that this request takes on its effect: scope, key and token."""
        return EffectLock(self.scope, self.key, self.token)

    def is_key_remembered(self, since_seconds: float) -> bool:
        """Return True if the other side still remembers the key, so that a second call with it has no second effect.

        `since_seconds`: the time since the first call with the key.
        """
        return self.provider_remembers is not None and since_seconds < self.provider_remembers.total_seconds()


def make_request(
    options: OnceOptions, *, lease: timedelta, retention: timedelta, describe: Describe = name_and_line
) -> Request:
    """Check the caller's options, and make a request of them.

    Args:
        describe: Turns an error of the call into the text that is stored.

    Raises:
        InvalidKey, ArgumentError, ConfigError: an argument cannot be used as given.
    """
    _check_options(options)
    request = Request(
        scope=check_key("scope", options.scope, MAX_SCOPE_BYTES),
        key=check_key("key", options.key),
        fingerprint=None if options.payload is None else fingerprint(options.payload),
        lease=lease,
        retention=retention,
        provider_remembers=options.provider_remembers,
        can_look_up=options.already_applied is not None,
        looks_up_first=options.ask_first,
        returns=resolve_return(options.call) if options.returns is None else options.returns,
        classify=options.classify,
        describe=describe,
    )
    request.decoder  # noqa: B018  # refuses a type that cannot be read, before the call
    return request


def _check_options(options: OnceOptions) -> None:
    call, remembers, ask_first = options.call, options.provider_remembers, options.ask_first
    _check_function("call", call, "the provider key")
    if options.already_applied is not None:
        _check_function("already_applied", options.already_applied, "the provider key")
    if options.classify is not None:
        _check_function("classify", options.classify, "the error")
    if remembers is not None and (not isinstance(remembers, timedelta) or remembers <= timedelta(0)):
        raise ConfigError(
            "provider_remembers takes how long the other side honours a key, such as timedelta(hours=24), or None "
            f"where it does not, got {remembers!r}"
        )
    if not isinstance(ask_first, bool):
        raise ConfigError(f"ask_first takes True or False, got {type(ask_first).__name__}")
    if ask_first and options.already_applied is None:
        raise ConfigError("ask_first=True needs a look-up: give already_applied=..., which is called first")


def _check_function(name: str, function: object, argument: str) -> None:
    """Refuse a function that cannot be called with one argument; `name` is its name among the arguments of `once`.

    The check precedes the call: if the call itself raised the TypeError, the other side might have been called.
    """
    if not callable(function):
        raise ConfigError(f"once({name}=...) takes a function of {argument}, got {type(function).__name__}")
    try:
        # Its own signature counts: a wrapped function may take arguments that the wrapper adds.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        # Some functions in C have no signature.
        return
    try:
        signature.bind("")
    except TypeError as error:
        called = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"once({name}=...) takes a function of {argument}, and {called}{signature} cannot be called with it alone: "
            f"{error}"
        ) from None


def provider_key(deployment: UUID, scope: str, key: str) -> UUID:
    """Return the idempotency key for the other side: a UUIDv5 (RFC 9562), the same at every try."""
    # Neither may contain a newline, so no two pairs have the same text.
    return uuid5(deployment, f"{scope}\n{key}")
