"""The resolved registry: a relay's view of an application's handlers, after all of them are known and checked."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

from outboxq.admin.schedules import NewSchedule
from outboxq.codec.parameters import Signature
from outboxq.errors import UnknownKind
from outboxq.handlers.around import Arounds
from outboxq.handlers.handler import AnyHandler, BatchHandler, Flavour
from outboxq.handlers.hooks import EventHook
from outboxq.handlers.options import ClaimMode
from outboxq.handlers.retention import Window
from outboxq.queue_limits import QueueLimits

Lifespan: TypeAlias = Callable[
    [], AbstractContextManager[object] | AbstractAsyncContextManager[object] | Iterator[object] | AsyncIterator[object]
]


@dataclass(frozen=True, slots=True)
class Registry:
    """A checked registry, which `Jobs.resolve` makes at a relay's start, and in which the relay finds its handlers.

    Attributes:
        handlers: The handler of each kind and alias.
        signatures: The rules for the arguments of each kind and alias.
        by_flavour: The handlers of each flavour, by kind and alias.
        by_queue: The handlers of each queue.
        flavours: The flavour of each queue's handlers, "sync" or "async".
        claims: The claim mode of each queue's handlers.
        scopes: The retention and kinds of each declared scope.
        default_retention: The retention of all other scopes.
        arounds: The arounds of each kind and alias whose handler has any.
        limits: The limits of each queue that has any.
        keep_dead: The time for which each queue keeps its dead letters, if not for ever.
        owners: The names of the registry and of those that it includes.
    """

    handlers: Mapping[str, AnyHandler]
    signatures: Mapping[str, Signature]
    by_flavour: Mapping[Flavour, Mapping[str, AnyHandler]]
    by_queue: Mapping[str, Sequence[AnyHandler]]
    flavours: Mapping[str, Flavour]
    claims: Mapping[str, ClaimMode]
    lifespan: Lifespan | None
    scopes: Mapping[str, Window]
    default_retention: timedelta
    hooks: tuple[EventHook, ...]
    arounds: Mapping[str, Arounds]
    limits: Mapping[str, QueueLimits]
    schedules: tuple[NewSchedule, ...] = ()
    keep_dead: Mapping[str, timedelta] = field(default_factory=dict)
    owners: tuple[str, ...] = ()

    def known_kinds(self, flavour: Flavour) -> tuple[str, ...]:
        """Return the kinds, aliases included, whose handlers have this flavour, sync or async."""
        return tuple(self.by_flavour[flavour])

    def timeout_seconds(self, queue: str) -> float | None:
        """Return the longest `timeout_seconds` of a queue's handlers; None if an attempt of one has no deadline."""
        timeouts = [handler.timeout_seconds for handler in self.by_queue.get(queue, ())]
        finite = [seconds for seconds in timeouts if seconds is not None]
        return max(finite) if len(finite) == len(timeouts) else None

    def batch_size(self, queue: str, configured: int) -> int:
        """Return the most jobs of a queue to claim at once: the configured number, or more for a batch handler."""
        batched = (handler for handler in self.by_queue.get(queue, ()) if isinstance(handler, BatchHandler))
        return max(configured, 1, *(handler.max_size for handler in batched))

    def window(self, queue: str) -> int | None:
        """Return the most jobs of a call of the queue's batch handlers; None if a handler takes one job at a time."""
        sizes = [each.max_size if isinstance(each, BatchHandler) else None for each in self.by_queue.get(queue, ())]
        found = [size for size in sizes if size is not None]
        return min(found) if found and len(found) == len(sizes) else None

    def find(self, kind: str) -> AnyHandler:
        """Return the handler of a kind.

        Raises:
            UnknownKind: no handler of this kind is registered.
        """
        try:
            return self.handlers[kind]
        except KeyError:
            raise UnknownKind(kind, tuple(sorted(self.handlers))) from None

    def check_args(self, kind: str, args: str) -> None:
        """Refuse arguments, as JSON text, that do not fit the handler of a kind.

        Raises:
            PayloadError: they do not fit.
            UnknownKind: no handler is registered.
        """
        self.find(kind).signature().decode(args)

    def loads_late(self, kind: str) -> bool:
        """Return True if rows of this kind's jobs are loaded inside its arounds, as one of these uses `ctx.session`.

        Such an around may decide which rows are visible. Otherwise the relay loads the rows of several jobs together,
        before it enters their arounds.
        """
        arounds = self.arounds.get(kind)
        return arounds is not None and arounds.use_sessions

    def effect_retention(self, scope: str) -> timedelta:
        """Return how long effects of a scope are remembered: as declared, or else for `default_retention`."""
        declared = self.scopes.get(scope)
        return self.default_retention if declared is None else declared.retention

    def may_call(self, scope: str, kind: str) -> bool:
        """Return True if the handler of a kind may use a scope for `ctx.once`.

        It may if the declaration of the scope names its kind, or names no kinds, or if the scope is not declared.

        Raises:
            UnknownKind: no handler of this kind is registered.
        """
        declared, handler = self.scopes.get(scope), self.find(kind)
        return declared is None or not declared.kinds or handler in map(self.find, declared.kinds)
