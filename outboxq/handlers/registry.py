"""The registry: an application's handlers, lifespan, scopes and inboxes, and their checks at the relay's start."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from outboxq.config import DEFAULT_RETENTION, check_retention
from outboxq.errors import RegistryError, UnknownKind
from outboxq.handlers.handler import (
    DEFAULT_MAX_SIZE,
    DEFAULT_TIMEOUT_SECONDS,
    AnyHandler,
    Arguments,
    BatchHandler,
    BatchHandlerDecorator,
    ClaimMode,
    Flavour,
    HandlerDecorator,
    HandlerOptions,
    Messages,
    check_choice,
)
from outboxq.handlers.retention import Owner, Window, check_kinds, check_same, check_windows, default_retention
from outboxq.inbox import Inbox
from outboxq.names import MAX_SCOPE_BYTES, check_key
from outboxq.outbox.kinds import P
from outboxq.outcomes import Backoff

T = TypeVar("T")

Lifespan: TypeAlias = Callable[
    [], AbstractContextManager[object] | AbstractAsyncContextManager[object] | Iterator[object] | AsyncIterator[object]
]


class Jobs:
    """A registry of handlers, given to the relay.

    Args:
        lifespan: A function without arguments that returns a context manager, sync or async, entered once per relay
            process before the first job; what it yields is `ctx.state`.
        messages: What is stored of error texts, for handlers that do not say it themselves; explained at `handler`.

    Raises:
        RegistryError: `messages` is neither "redacted" nor "withheld".
    """

    def __init__(self, *, lifespan: Lifespan | None = None, messages: Messages = "redacted") -> None:
        self.lifespan = lifespan
        check_choice("messages", messages, Messages)
        self._messages: Messages = messages
        self._handlers: dict[str, AnyHandler] = {}
        self._windows: dict[tuple[Owner, str], Window] = {}

    def handler(
        self,
        *,
        kind: str | None = None,
        queue: str = "default",
        aliases: Iterable[str] = (),
        retry: Backoff | None = None,
        claim: ClaimMode = "transaction",
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        batchable: bool = False,
        messages: Messages | None = None,
    ) -> HandlerDecorator:
        """Register a handler.

        Args:
            kind: The stored name, by default the function's. Give one before you rename the function.
            queue: Where its jobs wait. A queue holds handlers of one flavour, sync or async, and of one claim mode.
            aliases: Earlier names whose jobs this handler still runs.
            retry: When a failed job runs again, and how often.
            claim: "transaction": the handler runs in the transaction that removed the job. "lease": the claim is
                committed first, and the job removed in the transaction of the handler's rows, refused if the lease was
                lost; for handlers that are long or reach outside the database.
            timeout_seconds: The deadline of one attempt. A statement, then the handler, is cancelled; what cannot be
                cancelled loses its connection, so that no late write can land. Up to 7 days; None for no deadline.
            batchable: The handler does nothing but write rows through its session, and defer statements. Such jobs
                that are claimed together share a session and one flush; if anything goes wrong each runs once more.
            messages: What is stored and logged of the text of an error or of an outcome's reason; by default as the
                registry says. "redacted": the text, with each argument's value replaced by its name; what the handler
                makes of a value, such as a slice of it, stays. "withheld": the error's type, place and SQLSTATE alone.

        Raises:
            RegistryError: the kind or an alias is taken, or an option is out of its range.
            ArgumentError: a name over 63 bytes, or with control characters.
        """
        options = HandlerOptions(
            queue, aliases, retry or Backoff(), claim, timeout_seconds, messages or self._messages, batchable
        )
        return HandlerDecorator(self.add, kind, options)

    def batch_handler(
        self,
        arguments: Callable[P, T],
        *,
        max_size: int = DEFAULT_MAX_SIZE,
        kind: str | None = None,
        queue: str = "default",
        aliases: Iterable[str] = (),
        retry: Backoff | None = None,
        claim: ClaimMode = "transaction",
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        messages: Messages | None = None,
    ) -> BatchHandlerDecorator[P, T]:
        """Register a handler that is given many jobs at a time: for set-based SQL.

        The handler returns None if all are done, or the outcome of each, in their order; what it wrote for those that
        are not done stays. If it raises, all of its rows are undone, and it is called for each job alone.

        Args:
            arguments: The class that holds the arguments of one job: a dataclass, a `msgspec.Struct`, an attrs class.
            max_size: How many jobs at most, 1 to 10,000. A queue claims so many at once.
            kind: This option and the others mean what they mean for `handler`.
            claim: "transaction", the only one so far.

        Raises:
            RegistryError: the kind or an alias is taken, an option is out of its range, or the arguments of the class
                cannot be seen.
            ArgumentError: a name over 63 bytes, or with control characters.
        """
        if claim == "lease":
            raise RegistryError(
                'a batch handler runs in the transaction that removed its jobs: leave out claim="lease", or give the '
                "jobs one by one to a handler of their own"
            )
        declared = Arguments(arguments)
        options = HandlerOptions(
            queue, aliases, retry or Backoff(), claim, timeout_seconds, messages or self._messages, max_size=max_size
        )
        return BatchHandlerDecorator(self.add, kind, options, declared)

    def scope(self, name: str, *, retention: timedelta = DEFAULT_RETENTION, kinds: Iterable[str] = ()) -> str:
        """Declare how long the effects of a scope are remembered; returns its name, for `ctx.once(CHARGES, ...)`.

        A relay refuses to start if a handler may still retry when its effects are forgotten. A scope that is not
        declared is remembered for 30 days, or a day longer than any handler of the registry may retry.

        Args:
            retention: From the moment that a result is recorded, 1 second to 10 years.
            kinds: Whose handlers call it; no other handler may. Without any, all handlers of the registry may.

        Raises:
            RegistryError: it was declared before, with another window or other kinds.
            InvalidKey, ArgumentError, ConfigError: such a scope, such a kind or such a retention cannot be.
        """
        checked = check_key("scope", name, MAX_SCOPE_BYTES)
        self._declare(Window("scope", checked, check_retention(retention), check_kinds(kinds)))
        return name

    def inbox(self, consumer: str, *, retention: timedelta = DEFAULT_RETENTION, kinds: Iterable[str] = ()) -> Inbox:
        """Make an inbox that a relay checks as it checks a `scope`: no retry may outlive what it remembers.

        Args:
            consumer: A name that never changes, of 1 to 63 bytes.
            retention: How long a message id is remembered, from 1 second to 10 years.
            kinds: Whose handlers accept with it: only their retries count. Without any, those of all handlers do.

        Raises:
            RegistryError: it was declared before, with another window or other kinds.
            InvalidKey, ArgumentError, ConfigError: such a consumer, such a kind or such a retention cannot be.
        """
        made = Inbox(consumer, retention)
        self._declare(Window("consumer", consumer, retention, check_kinds(kinds)))
        return made

    def _declare(self, window: Window) -> None:
        check_same(self._windows.setdefault((window.owner, window.name), window), window)

    def add(self, handler: AnyHandler) -> None:
        """Register a handler that was made elsewhere.

        Raises:
            RegistryError: its kind or an alias is taken by another handler.
        """
        for name in (handler.kind, *handler.aliases):
            taken = self._handlers.get(name)
            # The same handler comes twice if two included registries include a third.
            if taken is not None and taken is not handler:
                raise RegistryError(
                    f"kind {name!r} is registered twice: by {_where(taken)} and by {_where(handler)}. "
                    "Give one of them another name with kind=..."
                )
        for name in (handler.kind, *handler.aliases):
            self._handlers[name] = handler

    def include(self, other: "Jobs") -> None:
        """Register every handler of another registry here too, and its scopes and inboxes.

        Raises:
            RegistryError: a kind is taken, a scope or an inbox is declared otherwise, or `other` has a lifespan of its
                own, which would never be entered.
        """
        if other.lifespan is not None:
            raise RegistryError(
                "an included registry has a lifespan, which would not run: give it to the registry on top"
            )
        for handler in tuple(dict.fromkeys(other._handlers.values())):  # noqa: SLF001  # the same class
            self.add(handler)
        for window in tuple(other._windows.values()):  # noqa: SLF001  # the same class
            self._declare(window)

    def resolve(self) -> "Registry":
        """Check everything that can only be checked when all handlers are known.

        Raises:
            RegistryError: no handler at all, a queue with both flavours, a signature that cannot be stored, or a scope
                or an inbox that forgets while a handler may still retry.
        """
        if not self._handlers:
            raise RegistryError("this registry has no handlers: is the module that defines them imported?")
        firsts: dict[str, AnyHandler] = {}
        for handler in dict.fromkeys(self._handlers.values()):
            handler.signature()
            _check_same_queue(firsts.setdefault(handler.queue, handler), handler)
        horizons = {name: handler.retry_horizon() for name, handler in self._handlers.items()}
        check_windows(self._windows.values(), horizons)
        return Registry(
            MappingProxyType(dict(self._handlers)),
            MappingProxyType({queue: handler.flavour for queue, handler in firsts.items()}),
            MappingProxyType({queue: handler.claim for queue, handler in firsts.items()}),
            self.lifespan,
            MappingProxyType({name: window for (owner, name), window in self._windows.items() if owner == "scope"}),
            default_retention(horizons.values()),
        )


@dataclass(frozen=True, slots=True)
class Registry:
    """A checked registry: handlers by kind and alias, the flavour and the claim mode of each queue, declared scopes."""

    handlers: Mapping[str, AnyHandler]
    flavours: Mapping[str, Flavour]
    claims: Mapping[str, ClaimMode]
    lifespan: Lifespan | None
    scopes: Mapping[str, Window]
    default_retention: timedelta

    def known_kinds(self, flavour: Flavour) -> tuple[str, ...]:
        """The kinds, aliases included, whose handlers have this flavour."""
        return tuple(kind for kind, handler in self.handlers.items() if handler.flavour == flavour)

    def timeout_seconds(self, queue: str) -> float | None:
        """The longest deadline of a queue's handlers; None if one has none."""
        timeouts = [handler.timeout_seconds for handler in self.handlers.values() if handler.queue == queue]
        finite = [seconds for seconds in timeouts if seconds is not None]
        return max(finite) if len(finite) == len(timeouts) else None

    def batch_size(self, queue: str, configured: int) -> int:
        """How many jobs of a queue to claim at once: as configured, or as many as one of its batch handlers takes."""
        batched = (handler for handler in self.handlers.values() if isinstance(handler, BatchHandler))
        return max(configured, 1, *(handler.max_size for handler in batched if handler.queue == queue))

    def find(self, kind: str) -> AnyHandler:
        """The handler of a kind.

        Raises:
            UnknownKind: none is registered.
        """
        try:
            return self.handlers[kind]
        except KeyError:
            raise UnknownKind(kind, tuple(sorted(self.handlers))) from None

    def effect_retention(self, scope: str) -> timedelta:
        """How long the effects of a scope are remembered: as declared, else longer than any handler may retry."""
        declared = self.scopes.get(scope)
        return self.default_retention if declared is None else declared.retention

    def may_call(self, scope: str, kind: str) -> bool:
        """Whether the handler of this kind may use the scope: its declaration names this kind, or no kinds at all.

        Raises:
            UnknownKind: none is registered.
        """
        declared, handler = self.scopes.get(scope), self.find(kind)
        return declared is None or not declared.kinds or handler in map(self.find, declared.kinds)


def _check_same_queue(first: AnyHandler, other: AnyHandler) -> None:
    """Refuse two handlers that cannot share a queue."""
    if first.flavour != other.flavour:
        raise RegistryError(
            f"queue {other.queue!r} has {first.flavour} handlers ({first.kind}) and {other.flavour} ones "
            f"({other.kind}): put one flavour into a queue of its own, "
            f"such as @jobs.handler(queue={other.queue + '-' + other.flavour!r})"
        )
    if first.claim != other.claim:
        raise RegistryError(
            f"queue {other.queue!r} has handlers with claim={first.claim!r} ({first.kind}) and with "
            f"claim={other.claim!r} ({other.kind}): put one mode into a queue of its own, "
            f"such as @jobs.handler(queue={other.queue + '-' + other.claim!r}, claim={other.claim!r})"
        )


def _where(handler: AnyHandler) -> str:
    return f"{handler.function.__module__}.{handler.function.__qualname__}"
