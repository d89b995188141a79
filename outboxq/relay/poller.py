"""The poller: what a relay's slots know about its queues, from shared polls and from notifications.

A poll is a query for the queues in which jobs wait. Only one slot claims from each queue that a poll has found: the one
that takes it first. So slots send claims only to queues with jobs, however many queues they have, and an idle relay
polls as often as one slot would. A poll that does not return delays the other slots by a second at most.

A queue is called when a notification names it, or when a slot finds that more jobs may wait there than it takes. A held
queue is one from which no slot claims for a moment, because it is at its limit or has no tokens.
"""

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outboxq.statements.claim import Sort
from outboxq.statements.wake import ALL_QUEUES, poll_queues

# The sorts that take turns in each queue.
SORTS = (Sort.READY, Sort.DUE, Sort.GROUPED)
# A queue counts as having grouped jobs for this long after some were seen.
_GROUPS_SECONDS = 60.0

# A slot that claims from a queue after a hold keeps the others away for this long, unless it ends the hold sooner.
_TRIAL_SECONDS = 0.1
_LEAST_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Poll:
    """A poll: one query for the queues in which jobs wait.

    Attributes:
        number: Polls are numbered in the order in which they begin.
        begun_at: The time (monotonic) when the poll began.
    """

    number: int = 0
    begun_at: float = field(default_factory=time.monotonic)


class Order:
    """The order in which a slot prefers its queues: the lowest rank comes first; queues of the same rank take turns.

    Args:
        queues: The queues; the place of each is its rank.
        in_turns: The queues that take turns: each of them has the rank of the first one.
    """

    def __init__(self, queues: tuple[str, ...], in_turns: Collection[str] = ()) -> None:
        self.queues = queues
        self._places = {name: place for place, name in enumerate(queues)}
        first = min((self._places[name] for name in in_turns), default=0)
        self._ranks = {name: first if name in in_turns else place for name, place in self._places.items()}

    def count_peers(self, queue: str, among: Iterable[str]) -> int:
        """Return the number of queues in `among`, other than `queue`, that take turns with it."""
        rank = self._ranks[queue]
        return sum(name != queue and self._ranks.get(name) == rank for name in among)

    def first(self, last: str, among: Iterable[str]) -> str | None:
        """Return the queue from which the slot is to claim next: of its queues in `among`, the lowest by rank.

        If several have the lowest rank, take the next after `last`, the queue of the previous claim. Returns None if
        `among` has none of the slot's queues.
        """
        behind, count = self._places[last] + 1, len(self.queues)
        ours = self._places.keys() & among
        keys = ((self._ranks[name], (self._places[name] - behind) % count, name) for name in ours)
        return min(keys, default=(0, 0, None))[2]


class SharedPoller:
    """The results of polls by a relay's slots: the queues in which jobs wait and from which no slot has claimed since.

    Args:
        overdue_seconds: The longest time for which slots wait for another slot's poll; then they poll themselves.
    """

    def __init__(self, schema: str, queues: tuple[str, ...], overdue_seconds: float = 1.0) -> None:
        self.statement = poll_queues(schema, queues)
        self.queues = queues
        self.latest = Poll()
        self._schema = schema
        self._overdue_seconds = overdue_seconds
        # For each queue the newest poll that returned: polls may return in another order than they began.
        self._recorded = dict.fromkeys(queues, self.latest)
        self._under_way: Poll | None = None
        self._ready: set[str] = set()
        # The last poll that began before a queue was called: it may have missed ready jobs.
        self._called_after: dict[str, int] = {}
        # The last poll that began before a call to all queues.
        self._all_called_after = -1
        # By sort: the time when the first job of a queue may run, and the queues whose jobs a slot is claiming.
        self._first_at: dict[Sort, dict[str, float]] = {Sort.DUE: {}, Sort.GROUPED: {}}
        self._taken: dict[Sort, set[str]] = {Sort.DUE: set(), Sort.GROUPED: set()}
        # The time until which no slot claims from a queue that is at its limit, or has no tokens.
        self.held_until: dict[str, float] = {}
        # The time when jobs of groups were last seen.
        self._groups_seen_at: dict[str, float] = {}
        self._lock = threading.RLock()

    def statement_for(self, queues: tuple[str, ...]) -> str:
        return self.statement if queues == self.queues else poll_queues(self._schema, queues)

    def begin(self) -> Poll:
        """Record that a slot begins a poll, even if others poll too; return the object to pass to `record`."""
        with self._lock:
            self.latest = Poll(self.latest.number + 1)
            return self.latest

    def begin_shared(self, queue: str, after: Poll) -> Poll | None:
        """Record that a sleeping slot begins a poll of all queues for all sleeping slots; return the poll for `record`.

        Returns None if the slot is not to poll, because a poll of `queue` that began after the poll `after` has
        returned, or another slot is making a shared poll now; after that the caller may call this again.
        """
        with self._lock:
            if self.has_polled(queue, after) or self.is_under_way():
                return None
            self._under_way = self.begin()
            return self._under_way

    def end_shared(self, poll: Poll) -> None:
        """Record that a shared poll has ended, even if it failed."""
        with self._lock:
            if self._under_way == poll:
                self._under_way = None

    def has_polled(self, queue: str, after: Poll) -> bool:
        """Return True if a poll of this queue has returned that began after the poll `after`.

        The poll must also have begun after the last notification for all queues (`ALL_QUEUES`), because this queue may
        have got jobs then.
        """
        with self._lock:
            return self._recorded[queue].number > max(after.number, self._all_called_after)

    def is_under_way(self) -> bool:
        """Return True while a slot polls all queues for all sleeping slots, for `overdue_seconds` at most."""
        with self._lock:
            return self._under_way is not None and time.monotonic() < self._under_way.begun_at + self._overdue_seconds

    def record(self, poll: Poll, rows: Sequence[tuple[object, ...]], queues: Collection[str] | None = None) -> None:
        """Record the rows that the query of a poll (`poll_queues`) returned.

        Args:
            queues: The queues that the poll was for; None: all.
        """
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
        """Return the time (monotonic) at which this queue's last poll began.

        Returns minus infinity if jobs were committed to an unknown queue after that poll began, so that it proves
        nothing.
        """
        poll = self._recorded[queue]
        return poll.begun_at if poll.number > self._all_called_after else float("-inf")

    def uncalled_since(self, queues: Collection[str]) -> float:
        """Return the time (monotonic) at which the oldest of these queues' last polls began.

        Returns minus infinity if one of the queues was called (a notification or slot reported that it may have got
        more jobs) since its last poll began.
        """
        with self._lock:
            polls = {name: self._recorded[name] for name in queues}
            if any(poll.number <= self._called_after.get(name, -1) for name, poll in polls.items()):
                return float("-inf")
            return min(self.polled_at(name) for name in queues)

    def record_call(self, queue: str) -> None:
        """Record that jobs may wait in a queue: a job was committed to it, or more may wait there than a slot takes.

        `ALL_QUEUES` means that the queue is not known: only a poll that begins from now on shows in which queues jobs
        wait.
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
        """Record that a claim may have left jobs in this queue. Polls that have begun already do not show if it did."""
        with self._lock:
            self._called_after[queue] = self.latest.number

    def take_queue(self, queue: str) -> bool | None:
        """Record that the caller claims from this queue now.

        Returns True if jobs were known to wait there, else False; None if the queue is held (at its limit or without
        tokens), so that the caller must not claim from it now.
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
        """Return True if a poll or claim found grouped jobs in this queue within the last minute."""
        seen_at = self._groups_seen_at.get(queue)
        return seen_at is not None and time.monotonic() < seen_at + _GROUPS_SECONDS

    def take_turn(self, order: Order, last: str, first: Mapping[str, Sort]) -> tuple[str, Sort] | None:
        """Choose the queue from which the caller is to claim next; return the queue and the sort of jobs to claim.

        Jobs are known to wait there, and no other slot claims them: from now on they count as taken by the caller.
        Returns None if there are none.

        Args:
            order: The order of the caller's queues.
            last: The queue from which the caller claimed before.
            first: By queue, the sort of jobs to prefer.
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
        """Return the queues in which jobs are known to wait that no slot has taken yet.

        Queues from which no slot may claim at this moment (held ones) are left out.
        """
        with self._lock:
            timed = ({name for name in names if self._waits(name, sort)} for sort, names in self._first_at.items())
            found = self._ready.union(*timed)
            return {name for name in found if not self.is_held(name)} if self.held_until else found

    def hold(self, queue: str, seconds: float) -> float:
        """Keep all slots from claiming from a queue for `seconds` (hold it); return the end of this time (monotonic).

        After this time one slot tries first, and the others only later.
        """
        with self._lock:
            until = self.held_until[queue] = time.monotonic() + seconds
            self._ready.add(queue)
            return until

    def release(self, queue: str) -> bool:
        """End a queue's hold, so that slots may claim from it again. Returns True if it was held."""
        # Without the lock, because each claim calls this: a hold that begins now counts as begun after this call.
        if queue not in self.held_until:
            return False
        with self._lock:
            return self.held_until.pop(queue, None) is not None

    def is_held(self, queue: str) -> bool:
        """Return True if no slot may claim from this queue now, because of the queue's limit or rate."""
        until = self.held_until.get(queue)
        return until is not None and time.monotonic() < until

    def held_seconds(self, queues: Collection[str]) -> float | None:
        """Return the seconds until slots may claim again from one of these queues; None if they may now.

        Only queues in which jobs may wait count.
        """
        with self._lock:
            held = [name for name in queues if name in self.held_until]
            waits = (name for name in held if any(self._waits(name, sort) for sort in SORTS))
            until = min((self.held_until[name] for name in waits), default=None)
        return None if until is None else max(0.0, until - time.monotonic())

    def _try_alone(self, queue: str) -> None:
        """Keep other slots away from a queue for 0.1 s while the caller claims, if the queue was held until now.

        If the caller finds the queue at its limit again, the other slots need not try.
        """
        if queue in self.held_until:
            self.held_until[queue] = time.monotonic() + _TRIAL_SECONDS

    def due_in_seconds(self, queues: Collection[str]) -> float:
        """Return the seconds until a claim from these queues may find jobs.

        That is when their next scheduled job is due, or when slots may claim again from a queue that is held. The
        result is infinite if there is neither, and 0 or less if a job is due.
        """
        now = time.monotonic()
        with self._lock:
            times = [
                max(at[name], self.held_until.get(name, 0.0))
                for at in self._first_at.values()
                for name in queues
                if name in at
            ]
            # After a hold that has just ended, pause only for a moment.
            held = [until for name, until in self.held_until.items() if name in queues and name in self._ready]
            times += [max(until, now + _LEAST_SECONDS) for until in held]
        return min(times, default=float("inf")) - now
