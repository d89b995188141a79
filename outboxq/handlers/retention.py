"""Retention: how long the keys of external calls, and the ids of received messages, are remembered.

Calls are grouped by scope, messages by consumer. A handler that runs again after its key was forgotten would make the
call, or accept the message, a second time: so a time that is shorter than a handler's retries may take is refused
before any job is claimed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

from outboxq.config import DEFAULT_RETENTION, check_retention
from outboxq.errors import RegistryError
from outboxq.inbox import Inbox
from outboxq.names import MAX_SCOPE_BYTES, check_key, check_name, named_options
from outboxq.outcomes import MAX_DELAY

Owner: TypeAlias = Literal["scope", "consumer"]

_SLACK = timedelta(days=1)
_ASKED: Mapping[Owner, str] = {"scope": "call again", "consumer": "accept the message again"}
_DECLARED: Mapping[Owner, str] = {"scope": "jobs.scope", "consumer": "jobs.inbox"}


@dataclass(frozen=True, slots=True)
class Window:
    """The time for which the keys of a scope (external calls), or a consumer's message ids, are remembered.

    `kinds` are the kinds whose handlers use the scope or consumer; if empty, every handler of the registry may.
    """

    owner: Owner
    name: str
    retention: timedelta
    kinds: tuple[str, ...] = ()


def check_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """Check kinds, and return them sorted, so that two declarations of one scope or inbox can be compared.

    Raises:
        RegistryError: a single str was given, whose letters would count as kinds.
        ArgumentError: a kind that cannot be a name.
    """
    if isinstance(kinds, str):
        raise RegistryError(f"kinds takes a tuple or a list of names, got the text {kinds!r}")
    return tuple(sorted({check_name("kind", kind) for kind in kinds}))


def check_same(declared: Window, again: Window) -> None:
    """Refuse a second declaration of a scope or inbox that differs from the first.

    Raises:
        RegistryError: the second declares another time, or other kinds.
    """
    if declared != again:
        raise RegistryError(
            f"{again.owner} {again.name!r} is declared twice: {_described(declared)}, and {_described(again)}. "
            "Declare it once, and import it where it is used"
        )


def check_windows(windows: Iterable[Window], horizons: Mapping[str, timedelta]) -> None:
    """Refuse a scope or inbox that forgets its keys while a handler may still retry.

    Args:
        horizons: By kind and alias, how long after its first attempt a handler may still run.

    Raises:
        RegistryError: a scope or inbox forgets too early, or names a kind that no handler has.
    """
    for window in windows:
        unknown = [kind for kind in window.kinds if kind not in horizons]
        if unknown:
            raise RegistryError(
                f"{window.owner} {window.name!r} is declared for the kind {unknown[0]!r}, and no handler of this "
                f"registry has it (known: {', '.join(horizons)})"
            )
        longest = max(window.kinds or horizons, key=horizons.__getitem__)
        if window.retention < horizons[longest]:
            raise RegistryError(_too_short(window, longest, horizons[longest]))


def default_retention(horizons: Iterable[timedelta]) -> timedelta:
    """Return the retention of an undeclared scope: 30 days, or a day more than any handler may retry, if longer."""
    return max(DEFAULT_RETENTION, min(max(horizons) + _SLACK, MAX_DELAY))


def spoken(length: timedelta) -> str:
    """A length in words, to the second, rounded up: "4 hours 8 minutes 14 seconds"."""
    seconds = -(-length // timedelta(seconds=1))
    parts: list[str] = []
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count:,} {unit}{'s' if count > 1 else ''}")
    return " ".join(parts) or "0 seconds"


def _described(window: Window) -> str:
    whose = f" for {', '.join(window.kinds)}" if window.kinds else ""
    return f"{spoken(window.retention)}{whose}"


def _too_short(window: Window, kind: str, horizon: timedelta) -> str:
    declared = f"{_DECLARED[window.owner]}({window.name!r}, retention=...)"
    others = "" if window.kinds else "; if it does not use it, name the handlers that do in kinds=(...)"
    return (
        f"{window.owner} {window.name!r} is remembered for {spoken(window.retention)}, and handler {kind!r} may still "
        f"run {spoken(horizon)} after its first attempt began: a late attempt would {_ASKED[window.owner]}. Remember "
        f"it at least that long with {declared}, or let the handler give up sooner with a smaller "
        f"Backoff(max_attempts=..., cap_seconds=...) or timeout_seconds{others}"
    )


class Retained:
    """The scopes and inboxes of a registry, each with the time for which it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[Owner, str], Window] = {}

    @named_options
    def scope(self, name: str, *, retention: timedelta = DEFAULT_RETENTION, kinds: Iterable[str] = ()) -> str:
        """Declare how long the effects of a scope are remembered; returns its name, for `ctx.once(CHARGES, ...)`.

        A relay refuses to start if a handler may still retry when its effects are forgotten. A scope that is not
        declared is remembered for the longer of two times: 30 days, and a day more than any handler of the registry may
        retry.

        Args:
            retention: From the moment that a result is recorded, 1 second to 10 years.
            kinds: The kinds whose handlers may use the scope; by default all handlers of the registry.

        Raises:
            RegistryError: the scope was declared before, with another time or other kinds.
            InvalidKey, ArgumentError, ConfigError: the scope, a kind or the retention is invalid.
        """
        checked = check_key("scope", name, MAX_SCOPE_BYTES)
        self._declare(Window("scope", checked, check_retention(retention), check_kinds(kinds)))
        return name

    @named_options
    def inbox(self, consumer: str, *, retention: timedelta = DEFAULT_RETENTION, kinds: Iterable[str] = ()) -> Inbox:
        """Make an inbox that relays check when they start: no handler may retry after its message id was forgotten.

        Use this if there is a registry; `Inbox(...)` is for a receiver that has none.

        Args:
            consumer: A name that never changes, of 1 to 63 bytes.
            retention: How long a message id is remembered, from 1 second to 10 years.
            kinds: The kinds whose handlers accept messages with it: only their retries count; by default all handlers'.

        Raises:
            RegistryError: the inbox was declared before, with another time or other kinds.
            InvalidKey, ArgumentError, ConfigError: the consumer, a kind or the retention is invalid.
        """
        made = Inbox(consumer, retention)
        self._declare(Window("consumer", consumer, retention, check_kinds(kinds)))
        return made

    def _declare(self, window: Window) -> None:
        check_same(self._windows.setdefault((window.owner, window.name), window), window)
