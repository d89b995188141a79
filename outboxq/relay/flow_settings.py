"""Settings of a relay's queues: operators' settings as last read, and the application's declarations.

Operators' settings are read from the database before the relay's first claim, and then at each beat of its lease (the
regular statement by which a relay shows that it lives).
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
    """Facts about a relay's queues that the query `look_around` returned: which sorts of jobs they have.

    Attributes:
        suspects: The queues that have suspects (jobs that ran when their relay died).
        groups: The queues that have grouped jobs.
        group_suspects: The queues that have suspects in groups.
        group_leases: True if any queue has grouped jobs that are claimed under a lease.
        schedule_seconds: The seconds until the next schedule is due; infinite if there is none.
    """

    suspects: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    group_suspects: frozenset[str] = frozenset()
    group_leases: bool = False
    schedule_seconds: float = math.inf


class FlowSettings:
    """Operators' settings as a relay last read them (limits, paused kinds, cancelled jobs), and facts of its queues.

    Threads read them without a lock, because `record` replaces each value as a whole.

    Args:
        declared: The limits that the application declares: they apply if an operator has set no others.
    """

    def __init__(self, declared: Mapping[str, QueueLimits] | None = None) -> None:
        self.seen = Seen()
        self.orders = Orders()
        self.limits: Mapping[str, QueueLimits] = dict(declared or {})
        # True if a queue has or had a limit or a rate, so that slots may hold tokens.
        self.restricts = bool(self.limits)
        # Called with the queues whose limits have changed.
        self.on_limits: Callable[[frozenset[str]], None] = lambda _: None
        self._declared = self.limits

    def record(self, rows: Rows) -> Seen:
        """Replace the settings by the rows of the query `look_around`, and return the facts.

        Calls `on_limits` with the queues whose limits have changed.
        """
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
        """Return a queue's limits: each as an operator has set it or, if none has, as the application declares it."""
        return self.limits.get(queue, _NO_LIMITS)
