"""The lookout: what the slots of a relay know of its queues, from looks that they share and from what calls them.

A look names the queues in which something waits, and each that it named is claimed from once: by the slot that takes
its turn there. So slots send claims only where jobs are, whatever the number of their queues, and an idle relay asks as
often as one slot would. No slot depends on another: a look that does not come back costs the others a second.
"""

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from outboxq.statements.wake import ALL_QUEUES, poll_queues

Sort: TypeAlias = Literal["ready", "due"]

# A look that has not come back after so long is not waited for.
OVERDUE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Poll:
    """A look that was begun: its number, and when."""

    number: int = 0
    begun_at: float = field(default_factory=time.monotonic)


class Order:
    """The queues of a slot, and which comes first of those that wait: the lowest rank, and equals take turns.

    Args:
        queues: In their order.
        in_turns: Of these, those that take turns. They have the rank of the first of them.
    """

    def __init__(self, queues: tuple[str, ...], in_turns: Collection[str] = ()) -> None:
        self.queues = queues
        self._places = {name: place for place, name in enumerate(queues)}
        shared = min((self._places[name] for name in in_turns), default=0)
        self._ranks = {name: shared if name in in_turns else place for name, place in self._places.items()}

    def __contains__(self, queue: str) -> bool:
        return queue in self._places

    def before(self, queue: str, among: Iterable[str]) -> tuple[str, ...]:
        """Those for which a slot leaves this one, though it has jobs."""
        rank = self._ranks[queue]
        return tuple(name for name in among if name != queue and self._ranks.get(name, rank + 1) <= rank)

    def count_peers(self, queue: str, among: Iterable[str]) -> int:
        """How many take turns with this one."""
        rank = self._ranks[queue]
        return sum(name != queue and self._ranks.get(name) == rank for name in among)

    def first(self, last: str, among: Iterable[str]) -> str | None:
        """Whose turn it is, after `last` had one."""
        behind, count = self._places[last] + 1, len(self.queues)
        keys = ((self._ranks[name], (self._places[name] - behind) % count, name) for name in among if name in self)
        return min(keys, default=(0, 0, None))[2]


class SharedPoller:
    """The looks of a relay's slots, what the last ones saw, and where nobody has gone to claim it yet."""

    def __init__(self, schema: str, queues: tuple[str, ...]) -> None:
        self.statement = poll_queues(schema, queues)
        self.queues = queues
        self.latest = Poll()
        self._schema = schema
        # The last look of each queue that came back: they may do so in another order.
        self._seen = dict.fromkeys(queues, self.latest)
        self._under_way: Poll | None = None
        self._ready: set[str] = set()
        # The last look that was begun before a queue called: what it saw of ready jobs is older than the call.
        self._called_after: dict[str, int] = {}
        # The same where all of them were called at once.
        self._all_called_after = -1
        self._due_at: dict[str, float] = {}
        # Due, and somebody has gone to claim.
        self._due_taken: set[str] = set()
        self._lock = threading.Lock()

    def statement_for(self, queues: tuple[str, ...]) -> str:
        """A look at some of the queues."""
        return self.statement if queues == self.queues else poll_queues(self._schema, queues)

    def begin(self) -> Poll:
        """Begin a look, whoever else does."""
        with self._lock:
            return self._begin()

    def _begin(self) -> Poll:
        self.latest = Poll(self.latest.number + 1)
        return self.latest

    def take(self, queue: str, since: Poll) -> Poll | None:
        """Begin a look at all queues, for all that sleep; None where one has come back that was begun after `since`.

        None also while another one is under way: it was begun too early, or it will do.
        """
        with self._lock:
            if self._is_known(queue, since) or self._is_awaited():
                return None
            self._under_way = self._begin()
            return self._under_way

    def is_known(self, queue: str, since: Poll) -> bool:
        """Whether a look at this queue has come back that was begun after `since`."""
        with self._lock:
            return self._is_known(queue, since)

    def _is_known(self, queue: str, since: Poll) -> bool:
        return self._seen[queue].number > max(since.number, self._all_called_after)

    def is_awaited(self) -> bool:
        """Whether somebody looks at all queues at this moment."""
        with self._lock:
            return self._is_awaited()

    def _is_awaited(self) -> bool:
        return self._under_way is not None and time.monotonic() < self._under_way.begun_at + OVERDUE_SECONDS

    def ended(self, taken: Poll) -> None:
        """A look that was taken is over, whatever came of it."""
        with self._lock:
            if self._under_way == taken:
                self._under_way = None

    def record(self, taken: Poll, rows: Sequence[tuple[object, ...]], queues: Collection[str] | None = None) -> None:
        """What a look found: queues, whether they have a ready job, and the seconds to their next scheduled one."""
        now = time.monotonic()
        found = {str(row[0]): (bool(row[1]), row[2]) for row in rows}
        with self._lock:
            for name in self.queues if queues is None else queues:
                if taken.number <= self._seen[name].number:
                    continue
                self._seen[name] = taken
                ready, due = found.get(name, (False, None))
                if ready:
                    self._ready.add(name)
                elif taken.number > self._called_after.get(name, 0):
                    self._ready.discard(name)
                self._due_taken.discard(name)
                self._due_at.pop(name, None)
                if isinstance(due, float):
                    self._due_at[name] = now + due

    def seen_at(self, queue: str) -> float:
        """When the last look at this queue was begun, if that is still to be trusted; else long ago."""
        seen = self._seen[queue]
        return seen.begun_at if seen.number > self._all_called_after else float("-inf")

    def called(self, queue: str) -> None:
        """A ready job was committed to this queue, or there may be more of them than the caller takes.

        To some queues, if it is `ALL_QUEUES`: nothing but a look that begins from now on tells to which.
        """
        with self._lock:
            if queue == ALL_QUEUES:
                self._all_called_after = self.latest.number
            elif queue in self._seen:
                self._ready.add(queue)
                self._called_after[queue] = self.latest.number

    def go(self, queue: str) -> None:
        """The caller goes to claim from this queue, whatever waits there."""
        with self._lock:
            self._ready.discard(queue)
            if self._is_due(queue):
                self._due_taken.add(queue)

    def take_turn(self, order: Order, last: str, due_first: Collection[str]) -> tuple[str, Sort] | None:
        """Go to claim from the queue whose turn it is after `last`: where something waits and nobody else goes for it.

        Args:
            due_first: Where to take due jobs before ready ones.
        """
        with self._lock:
            name = order.first(last, self._waiting())
            if name is None:
                return None
            if self._is_due(name) and (name in due_first or name not in self._ready):
                self._due_taken.add(name)
                return name, "due"
            self._ready.discard(name)
            return name, "ready"

    def waiting(self) -> set[str]:
        """The queues that have a ready job, or one that is due by now, for which nobody has gone yet."""
        with self._lock:
            return self._waiting()

    def _waiting(self) -> set[str]:
        return self._ready.union(name for name in self._due_at if self._is_due(name))

    def _is_due(self, name: str) -> bool:
        due_at = self._due_at.get(name)
        return due_at is not None and due_at <= time.monotonic() and name not in self._due_taken

    def due_in_seconds(self, queues: Collection[str]) -> float:
        """Until the next scheduled job of these queues; infinite where there is none."""
        with self._lock:
            due_at = min((self._due_at[name] for name in queues if name in self._due_at), default=float("inf"))
        return due_at - time.monotonic()
