"""The poller: the knowledge of a relay's slots about its queues, from polls that they share and from notifications.

A poll names the queues in which something waits. Each of them is claimed from once, by the slot that takes its turn. So
slots send claims only to queues with jobs, however many queues they have, and an idle relay polls as often as one slot
would. No slot depends on another: a poll that does not come back costs the others a second.
"""

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outboxq.statements.claim import Sort
from outboxq.statements.wake import ALL_QUEUES, poll_queues

# The sorts that take turns in each queue.
SORTS = (Sort.READY, Sort.DUE, Sort.GROUPED)
# A queue counts as having jobs of groups for so long after some were seen.
_GROUPS_SECONDS = 60.0

# A slot that claims from a queue after a hold keeps the others away for so long, unless it ends the hold sooner.
_TRIAL_SECONDS = 0.1
_LEAST_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Poll:
    """A poll: its number, and the time of its begin."""

    number: int = 0
    begun_at: float = field(default_factory=time.monotonic)


class Order:
    """The order of a slot's queues: that of the lowest rank comes first; queues of one rank take turns.

    Args:
        queues: The queues in their order, which ranks them.
        in_turns: The queues that take turns. All have the rank of the first of them.
    """

    def __init__(self, queues: tuple[str, ...], in_turns: Collection[str] = ()) -> None:
        self.queues = queues
        self._places = {name: place for place, name in enumerate(queues)}
        first = min((self._places[name] for name in in_turns), default=0)
        self._ranks = {name: first if name in in_turns else place for name, place in self._places.items()}

    def count_peers(self, queue: str, among: Iterable[str]) -> int:
        """The number of these queues that take turns with `queue`."""
        rank = self._ranks[queue]
        return sum(name != queue and self._ranks.get(name) == rank for name in among)

    def first(self, last: str, among: Iterable[str]) -> str | None:
        """The queue whose turn it is, after `last` had its turn."""
        behind, count = self._places[last] + 1, len(self.queues)
        ours = self._places.keys() & among
        keys = ((self._ranks[name], (self._places[name] - behind) % count, name) for name in ours)
        return min(keys, default=(0, 0, None))[2]


class SharedPoller:
    """The results of the polls of a relay's slots, and the queues that no slot has claimed from since.

    Args:
        overdue_seconds: No slot waits for a poll that has not come back after so long.
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
        # The last poll that began before a queue was called: it may have missed ready jobs.
        self._called_after: dict[str, int] = {}
        # The last poll that began before a call to all queues.
        self._all_called_after = -1
        # By sort: the time when the first job of a queue may run, and the queues whose jobs a slot has gone to claim.
        self._first_at: dict[Sort, dict[str, float]] = {Sort.DUE: {}, Sort.GROUPED: {}}
        self._taken: dict[Sort, set[str]] = {Sort.DUE: set(), Sort.GROUPED: set()}
        # The time until which no slot claims from a queue that is at its limit, or has no tokens of its rate.
        self.held_until: dict[str, float] = {}
        # The time when jobs of groups were last seen.
        self._groups_seen_at: dict[str, float] = {}
        self._lock = threading.RLock()

    def statement_for(self, queues: tuple[str, ...]) -> str:
        return self.statement if queues == self.queues else poll_queues(self._schema, queues)

    def begin(self) -> Poll:
        """Begin a poll, also while other slots poll."""
        with self._lock:
            self.latest = Poll(self.latest.number + 1)
            return self.latest

    def begin_shared(self, queue: str, after: Poll) -> Poll | None:
        """Begin a poll of all queues, for all slots that sleep; None if one that began after `after` has come back.

        None also while another poll is under way: that one suffices, or the caller begins the next.
        """
        with self._lock:
            if self.has_polled(queue, after) or self.is_under_way():
                return None
            self._under_way = self.begin()
            return self._under_way

    def end_shared(self, poll: Poll) -> None:
        """Record that a shared poll has ended, also if it failed."""
        with self._lock:
            if self._under_way == poll:
                self._under_way = None

    def has_polled(self, queue: str, after: Poll) -> bool:
        """Return True if a poll of this queue that began after `after` has come back."""
        with self._lock:
            return self._recorded[queue].number > max(after.number, self._all_called_after)

    def is_under_way(self) -> bool:
        """Return True if a slot polls all queues at this moment."""
        with self._lock:
            return self._under_way is not None and time.monotonic() < self._under_way.begun_at + self._overdue_seconds

    def record(self, poll: Poll, rows: Sequence[tuple[object, ...]], queues: Collection[str] | None = None) -> None:
        """Record what `poll_queues` found."""
        now = time.monotonic()
        found = {str(row[0]): (bool(row[1]), row[2], row[4]) for row in rows}
        with self._lock:
            for name in self.queues if queues is None else queues:
                if poll.number <= self._recorded[name].number:
                    continue
                self._recorded[name] = poll
                ready, due, grouped = found.get(name, (False, None, None))
                if ready:
                    self._ready.add(name)
                elif poll.number > self._called_after.get(name, 0):
                    self._ready.discard(name)
                for sort, seconds in ((Sort.DUE, due), (Sort.GROUPED, grouped)):
                    self._taken[sort].discard(name)
                    self._first_at[sort].pop(name, None)
                    if isinstance(seconds, float):
                        self._first_at[sort][name] = now + seconds
                if isinstance(grouped, float):
                    self._groups_seen_at[name] = now

    def polled_at(self, queue: str) -> float:
        """The time when the last poll of this queue began; minus infinity if all queues were called since."""
        poll = self._recorded[queue]
        return poll.begun_at if poll.number > self._all_called_after else float("-inf")

    def uncalled_since(self, queues: Collection[str]) -> float:
        """The time when the last poll of a slot's queues began; minus infinity if one was called since."""
        with self._lock:
            polls = {name: self._recorded[name] for name in queues}
            if any(poll.number <= self._called_after.get(name, -1) for name, poll in polls.items()):
                return float("-inf")
            return min(self.polled_at(name) for name in queues)

    def record_call(self, queue: str) -> None:
        """Record that a ready job was committed to this queue, or that more may wait than the caller takes.

        `ALL_QUEUES` means unknown queues: only a poll that begins from now on shows which.
        """
        with self._lock:
            if queue == ALL_QUEUES:
                self._all_called_after = self.latest.number
            elif queue in self._recorded:
                self._ready.add(queue)
                if self.has_groups(queue):
                    self._first_at[Sort.GROUPED][queue] = time.monotonic()
                    self._taken[Sort.GROUPED].discard(queue)
                self._called_after[queue] = self.latest.number

    def record_rest(self, queue: str) -> None:
        """Record that a claim may have left jobs in this queue, which only a poll that begins from now on shows."""
        with self._lock:
            self._called_after[queue] = self.latest.number

    def take_queue(self, queue: str) -> bool | None:
        """Record that the caller claims from this queue; return True if something was known to wait there.

        None if the caller must not claim at this moment.
        """
        with self._lock:
            if self.is_held(queue):
                return None
            self._try_alone(queue)
            waiting = [sort for sort in SORTS if self._waits(queue, sort)]
            for sort in waiting:
                self._take(queue, sort)
            return bool(waiting)

    def record_groups(self, queue: str) -> None:
        self._groups_seen_at[queue] = time.monotonic()

    def has_groups(self, queue: str) -> bool:
        """Return True if jobs of groups were seen in a queue not long ago."""
        seen_at = self._groups_seen_at.get(queue)
        return seen_at is not None and time.monotonic() < seen_at + _GROUPS_SECONDS

    def take_turn(self, order: Order, last: str, first: Mapping[str, Sort]) -> tuple[str, Sort] | None:
        """Take the next queue after `last` in which something waits that no other slot has taken.

        Args:
            first: By queue, the sort to take first.
        """
        with self._lock:
            name = order.first(last, self.waiting())
            if name is None:
                return None
            self._try_alone(name)
            at = SORTS.index(first.get(name, Sort.READY))
            sort = next(sort for sort in SORTS[at:] + SORTS[:at] if self._waits(name, sort))
            self._take(name, sort)
            return name, sort

    def _take(self, name: str, sort: Sort) -> None:
        if sort is Sort.READY:
            self._ready.discard(name)
        else:
            self._taken[sort].add(name)

    def _waits(self, name: str, sort: Sort) -> bool:
        if sort is Sort.READY:
            return name in self._ready
        first_at = self._first_at[sort].get(name)
        return first_at is not None and first_at <= time.monotonic() and name not in self._taken[sort]

    def waiting(self) -> set[str]:
        """The queues with a ready or due job that no slot has taken, and that are not held."""
        with self._lock:
            timed = ({name for name in names if self._waits(name, sort)} for sort, names in self._first_at.items())
            found = self._ready.union(*timed)
            return {name for name in found if not self.is_held(name)} if self.held_until else found

    def hold(self, queue: str, seconds: float) -> float:
        """Keep all slots from claiming from this queue for a time; then one of them tries. Returns its end."""
        with self._lock:
            until = self.held_until[queue] = time.monotonic() + seconds
            self._ready.add(queue)
            return until

    def release(self, queue: str) -> bool:
        """Release a held queue, so that slots claim from it again; True if it was held."""
        # Without the lock, as each claim comes here: a hold that begins now counts as begun after this call.
        if queue not in self.held_until:
            return False
        with self._lock:
            return self.held_until.pop(queue, None) is not None

    def is_held(self, queue: str) -> bool:
        """Return True if no slot may claim from this queue at this moment."""
        until = self.held_until.get(queue)
        return until is not None and time.monotonic() < until

    def held_seconds(self, queues: Collection[str]) -> float | None:
        """The time until the first hold ends of these queues in which jobs may wait; None without a hold."""
        with self._lock:
            held = [name for name in queues if name in self.held_until]
            waits = (name for name in held if any(self._waits(name, sort) for sort in SORTS))
            until = min((self.held_until[name] for name in waits), default=None)
        return None if until is None else max(0.0, until - time.monotonic())

    def _try_alone(self, queue: str) -> None:
        """Make the others wait while one slot tries to claim from a queue after its hold."""
        if queue in self.held_until:
            self.held_until[queue] = time.monotonic() + _TRIAL_SECONDS

    def due_in_seconds(self, queues: Collection[str]) -> float:
        """The time until the next scheduled job of these queues, or the end of a hold; infinite without either."""
        now = time.monotonic()
        with self._lock:
            times = [
                max(at[name], self.held_until.get(name, 0.0))
                for at in self._first_at.values()
                for name in queues
                if name in at
            ]
            # After a hold that has just ended, pause for a moment only.
            held = [until for name, until in self.held_until.items() if name in queues and name in self._ready]
            times += [max(until, now + _LEAST_SECONDS) for until in held]
        return min(times, default=float("inf")) - now
