"""The poller: what the slots of a relay know of its queues, from polls that they share and from notifications.

A poll names the queues in which something waits, and each of these queues is claimed from once, by the slot that takes
its turn. So slots send claims only to queues with jobs, whatever the number of their queues, and an idle relay polls as
often as one slot would. No slot depends on another: a poll that does not come back costs the others a second.
"""

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from outboxq.statements.wake import ALL_QUEUES, poll_queues

Sort: TypeAlias = Literal["ready", "due"]


@dataclass(frozen=True, slots=True)
class Poll:
    """A poll that was begun: its number, and the time of its begin."""

    number: int = 0
    begun_at: float = field(default_factory=time.monotonic)


class Order:
    """The queues of a slot, and which of them comes first: that of the lowest rank; queues of one rank take turns.

    Args:
        queues: The queues in their order, which ranks them.
        in_turns: The queues that take turns. They all have the rank of the first of them.
    """

    def __init__(self, queues: tuple[str, ...], in_turns: Collection[str] = ()) -> None:
        self.queues = queues
        self._places = {name: place for place, name in enumerate(queues)}
        first = min((self._places[name] for name in in_turns), default=0)
        self._ranks = {name: first if name in in_turns else place for name, place in self._places.items()}

    def __contains__(self, queue: str) -> bool:
        return queue in self._places

    def before(self, queue: str, among: Iterable[str]) -> tuple[str, ...]:
        """The queues for which a slot leaves this queue, though this one has jobs."""
        rank = self._ranks[queue]
        return tuple(name for name in among if name != queue and self._ranks.get(name, rank + 1) <= rank)

    def count_peers(self, queue: str, among: Iterable[str]) -> int:
        """How many of these queues take turns with this queue."""
        rank = self._ranks[queue]
        return sum(name != queue and self._ranks.get(name) == rank for name in among)

    def first(self, last: str, among: Iterable[str]) -> str | None:
        """The queue whose turn it is, after `last` had its turn."""
        behind, count = self._places[last] + 1, len(self.queues)
        keys = ((self._ranks[name], (self._places[name] - behind) % count, name) for name in among if name in self)
        return min(keys, default=(0, 0, None))[2]


class SharedPoller:
    """What the polls of a relay's slots found, and which of these queues no slot has claimed from yet.

    Args:
        overdue_seconds: A poll that has not come back after so long is not waited for.
    """

    def __init__(self, schema: str, queues: tuple[str, ...], overdue_seconds: float = 1.0) -> None:
        self.statement = poll_queues(schema, queues)
        self.queues = queues
        self.latest = Poll()
        self._schema = schema
        self._overdue_seconds = overdue_seconds
        # For each queue the newest poll that came back: polls may come back in another order than they began.
        self._recorded = dict.fromkeys(queues, self.latest)
        self._under_way: Poll | None = None
        self._ready: set[str] = set()
        # The last poll that began before a queue was called: it is older than the call, and may have missed ready jobs.
        self._called_after: dict[str, int] = {}
        # The last poll that began before a call to all queues at once.
        self._all_called_after = -1
        self._due_at: dict[str, float] = {}
        # The queues whose due jobs a slot has gone to claim.
        self._due_taken: set[str] = set()
        self._lock = threading.RLock()

    def statement_for(self, queues: tuple[str, ...]) -> str:
        """A poll of some of the queues."""
        return self.statement if queues == self.queues else poll_queues(self._schema, queues)

    def begin(self) -> Poll:
        """Begin a poll, whatever other slots do."""
        with self._lock:
            self.latest = Poll(self.latest.number + 1)
            return self.latest

    def begin_shared(self, queue: str, after: Poll) -> Poll | None:
        """Begin a poll of all queues, for all slots that sleep; None if a poll that began after `after` has come back.

        None also while another poll is under way: that one will do, or the caller begins the next.
        """
        with self._lock:
            if self.has_polled(queue, after) or self.is_under_way():
                return None
            self._under_way = self.begin()
            return self._under_way

    def end_shared(self, poll: Poll) -> None:
        """Record that a shared poll is over, also if it failed."""
        with self._lock:
            if self._under_way == poll:
                self._under_way = None

    def has_polled(self, queue: str, after: Poll) -> bool:
        """Whether a poll of this queue has come back that was begun after `after`."""
        with self._lock:
            return self._recorded[queue].number > max(after.number, self._all_called_after)

    def is_under_way(self) -> bool:
        """Whether a slot polls all queues at this moment."""
        with self._lock:
            return self._under_way is not None and time.monotonic() < self._under_way.begun_at + self._overdue_seconds

    def record(self, poll: Poll, rows: Sequence[tuple[object, ...]], queues: Collection[str] | None = None) -> None:
        """Record what a poll found: queues, whether each has a ready job, and the seconds to its next scheduled one."""
        now = time.monotonic()
        found = {str(row[0]): (bool(row[1]), row[2]) for row in rows}
        with self._lock:
            for name in self.queues if queues is None else queues:
                if poll.number <= self._recorded[name].number:
                    continue
                self._recorded[name] = poll
                ready, due = found.get(name, (False, None))
                if ready:
                    self._ready.add(name)
                elif poll.number > self._called_after.get(name, 0):
                    self._ready.discard(name)
                self._due_taken.discard(name)
                self._due_at.pop(name, None)
                if isinstance(due, float):
                    self._due_at[name] = now + due

    def polled_at(self, queue: str) -> float:
        """When the last poll of this queue was begun; minus infinity if all queues were called since."""
        poll = self._recorded[queue]
        return poll.begun_at if poll.number > self._all_called_after else float("-inf")

    def record_call(self, queue: str) -> None:
        """Record that a ready job was committed to this queue, or that more may wait than the caller takes.

        `ALL_QUEUES` stands for some queues: only a poll that begins from now on tells which.
        """
        with self._lock:
            if queue == ALL_QUEUES:
                self._all_called_after = self.latest.number
            elif queue in self._recorded:
                self._ready.add(queue)
                self._called_after[queue] = self.latest.number

    def take_queue(self, queue: str) -> None:
        """Record that the caller claims from this queue, whatever waits there."""
        with self._lock:
            self._ready.discard(queue)
            if self._is_due(queue):
                self._due_taken.add(queue)

    def take_turn(self, order: Order, last: str, due_first: Collection[str]) -> tuple[str, Sort] | None:
        """Take the queue whose turn it is after `last`, of those in which something waits that no other slot has taken.

        Args:
            due_first: The queues from which to take due jobs before ready ones.
        """
        with self._lock:
            name = order.first(last, self.waiting())
            if name is None:
                return None
            if self._is_due(name) and (name in due_first or name not in self._ready):
                self._due_taken.add(name)
                return name, "due"
            self._ready.discard(name)
            return name, "ready"

    def waiting(self) -> set[str]:
        """The queues that have a ready job, or one that is due by now, and that no slot has taken yet."""
        with self._lock:
            return self._ready.union(name for name in self._due_at if self._is_due(name))

    def _is_due(self, name: str) -> bool:
        due_at = self._due_at.get(name)
        return due_at is not None and due_at <= time.monotonic() and name not in self._due_taken

    def due_in_seconds(self, queues: Collection[str]) -> float:
        """The time until the next scheduled job of these queues; infinite if there is none."""
        with self._lock:
            due_at = min((self._due_at[name] for name in queues if name in self._due_at), default=float("inf"))
        return due_at - time.monotonic()
