"""The lookout: what the sleeping slots of a relay know of its queues, from looks that they share.

Whoever's pause ends first looks at all queues of the relay, on its own connection; the others learn what was seen. So
an idle relay asks as often as one slot would, whatever the number of its slots and queues. No slot depends on another:
a look that does not come back costs the others one more pause.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outboxq.statements.listen import look


@dataclass(frozen=True, slots=True)
class Look:
    """A look that was begun: its number, and when."""

    number: int = 0
    begun_at: float = field(default_factory=time.monotonic)


class Lookout:
    """The looks of a relay's slots, and what the last one saw."""

    def __init__(self, schema: str, queues: tuple[str, ...]) -> None:
        self.statement = look(schema, queues)
        self.latest = Look()
        self._seen = 0
        self._ready: frozenset[str] = frozenset()
        self._due_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, since: Look | None = None) -> Look | None:
        """Begin a look; None where somebody has begun one after `since`."""
        with self._lock:
            if since is not None and self.latest != since:
                return None
            self.latest = Look(self.latest.number + 1)
            return self.latest

    def saw(self, taken: Look, rows: Sequence[tuple[object, ...]]) -> None:
        """What a look found: queues, whether they have a ready job, and the seconds to their next scheduled one."""
        now = time.monotonic()
        with self._lock:
            # They may come back in another order.
            if taken.number > self._seen:
                self._seen = taken.number
                self._ready = frozenset(str(name) for name, ready, _, _ in rows if ready)
                self._due_at = {str(name): now + due for name, _, due, _ in rows if isinstance(due, float)}

    def is_waiting(self, queues: Iterable[str]) -> bool:
        """Whether one of these has a ready job, or a scheduled one that is due by now."""
        return not self._ready.isdisjoint(queues) or self.due_in_seconds(queues) <= 0

    def due_in_seconds(self, queues: Iterable[str]) -> float:
        """Until the next scheduled job of these queues; infinite where there is none."""
        due_at = self._due_at
        return min((due_at[name] for name in queues if name in due_at), default=float("inf")) - time.monotonic()
