"""Settings of a relay's queues: operators' settings as the relay last read them, and the application's declarations.

Read at the relay's start, before its first claim, and with each beat of its lease.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

import msgspec

from outboxq.execution.runtime import Orders
from outboxq.queue_limits import QueueLimits, limits_in_force

Rows: TypeAlias = Iterable[tuple[object, ...]]

_NO_LIMITS = QueueLimits()


@dataclass(frozen=True, slots=True)
class Seen:
    """The queues with jobs of some sorts, and the time until a schedule is due, as `look_around` returned them."""

    suspects: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    group_suspects: frozenset[str] = frozenset()
    group_leases: bool = False
    schedule_seconds: float = math.inf


class FlowSettings:
    """The settings as a relay last read them. Threads read them without a lock: each query replaces them whole.

    Args:
        declared: The limits that the application declares: they hold if an operator has set no others.
    """

    def __init__(self, declared: Mapping[str, QueueLimits] | None = None) -> None:
        self.seen = Seen()
        self.orders = Orders()
        self.limits: Mapping[str, QueueLimits] = dict(declared or {})
        # A queue has or had a limit or a rate: slots may hold tokens.
        self.restricts = bool(self.limits)
        # Called with the queues whose limits have changed.
        self.on_limits: Callable[[frozenset[str]], None] = lambda _: None
        self._declared = self.limits

    def record(self, rows: Rows) -> Seen:
        """Take over what `look_around` returned."""
        queues: defaultdict[str, set[str]] = defaultdict(set)
        limits: dict[str, QueueLimits] = {}
        paused: set[tuple[str, str]] = set()
        cancelled: set[UUID] = set()
        schedule_seconds = math.inf
        for word, name, other, details in rows:
            match word:
                case "limits":
                    limits[str(name)] = msgspec.json.decode(str(details), type=QueueLimits)
                case "paused":
                    paused.add((str(name), str(other)))
                case "cancel":
                    cancelled.add(UUID(str(name)))
                case "schedule":
                    schedule_seconds = float(str(details))
                case _:
                    queues[str(word)].add(str(name))
        self.seen = Seen(
            frozenset(queues["suspects"]),
            frozenset(queues["groups"]),
            frozenset(queues["group_suspects"]),
            "group_leases" in queues,
            schedule_seconds,
        )
        self.orders.cancelled, self.orders.paused = cancelled, paused
        before, self.limits = self.limits, limits_in_force(limits, self._declared)
        self.restricts |= bool(self.limits)
        every = self.limits.keys() | before.keys()
        changed = frozenset(name for name in every if self.limits.get(name) != before.get(name))
        if changed:
            self.on_limits(changed)
        return self.seen

    def limits_of(self, queue: str) -> QueueLimits:
        """The limits of a queue: each as an operator has set it, else as the application declares it."""
        return self.limits.get(queue, _NO_LIMITS)
