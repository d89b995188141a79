"""The aggregate: outcomes of a relay's jobs, counted per queue and kind in memory until they are added to the tables.

Its lock is never held during I/O. `take` returns each count only once.
"""

import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Literal, TypeAlias, cast

from outboxq.events import (
    Event,
    JobCancelled,
    JobCrashed,
    JobDied,
    JobDiscarded,
    JobDone,
    JobExpired,
    JobLeaseLost,
    JobRetried,
    JobSetAside,
    JobSnoozed,
)
from outboxq.statements.history import BOUNDS, BUCKETS

Outcome: TypeAlias = Literal["done", "retried", "died", "snoozed", "discarded", "crashed", "lost"]
OUTCOMES: tuple[Outcome, ...] = ("done", "retried", "died", "snoozed", "discarded", "crashed", "lost")
# This many kinds, over all queues, are counted separately. An application whose kinds contain its customers' names
# would fill the tables.
KINDS_MOST = 200
OTHER = "_other"

RAN: dict[type[Event], Outcome] = {
    JobDone: "done",
    JobRetried: "retried",
    JobDied: "died",
    JobSnoozed: "snoozed",
    JobDiscarded: "discarded",
}
Ended: TypeAlias = JobDone | JobRetried | JobDied | JobSnoozed | JobDiscarded
# Looked up without running Python code for each job.
_SORT = attrgetter("__class__", "job.queue", "job.kind", "job.claimed_at")
_RUN_AT, _SECONDS = attrgetter("job.run_at"), attrgetter("seconds")
# Events of jobs whose handler was not called, or whose run did not count.
NOT_RUN: dict[type[Event], Outcome] = {JobCancelled: "discarded", JobExpired: "discarded", JobLeaseLost: "lost"}


@dataclass(slots=True)
class KindCounts:
    """The numbers of one kind in one queue: counts of outcomes, and the times that its jobs waited and ran.

    `wait_seconds` and `run_seconds` are sums of these times. `wait` and `run` count the jobs by these times, in the
    buckets of `BOUNDS`.
    """

    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    wait_seconds: float = 0.0
    run_seconds: float = 0.0
    wait: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    run: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def add(self, other: "KindCounts") -> None:
        """Add the numbers of `other` to these."""
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] += count
        self.wait_seconds += other.wait_seconds
        self.run_seconds += other.run_seconds
        self.wait = [one + more for one, more in zip(self.wait, other.wait, strict=True)]
        self.run = [one + more for one, more in zip(self.run, other.run, strict=True)]


@dataclass(slots=True)
class Counters:
    """The counts of jobs of all queues together, since the relay began.

    `Aggregate` adds to the counts under its lock; others read them without it.
    """

    claimed: int = 0
    done: int = 0
    failed: int = 0
    died: int = 0
    leases_lost: int = 0
    cancelled: int = 0
    expired: int = 0

    def add(self, events: Sequence[Event]) -> None:
        """Count the events of committed jobs."""
        of = Counter(map(type, events))
        self.done += of[JobDone]
        if len(events) == of[JobDone]:
            return
        crashes = [event for event in events if isinstance(event, JobCrashed)] if of[JobCrashed] else []
        self.failed += of[JobRetried] + of[JobDied] + of[JobCrashed] + of[JobSetAside]
        self.died += of[JobDied] + of[JobSetAside] + sum(event.dead_letter for event in crashes)
        self.leases_lost += of[JobLeaseLost]
        self.cancelled += of[JobCancelled]
        self.expired += of[JobExpired]


Counts: TypeAlias = dict[tuple[str, str], KindCounts]


class Aggregate:
    """Counts the outcomes of a relay's jobs: since the relay began, and since `take` last returned counts."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._lock = threading.Lock()
        self._counts: Counts = {}
        # The sum of all counts that were taken.
        self._taken: Counts = {}

    def add(self, events: Sequence[Event], claimed: int = 0) -> None:
        """Count the events of committed jobs, and add `claimed`, a number of jobs that were claimed."""
        with self._lock:
            self.counters.claimed += claimed
            if not events:
                return
            self.counters.add(events)
            if len(events) == 1 and type(events[0]) in RAN:
                one = cast("Ended", events[0])
                job, ran = one.job, one.seconds
                (waited,) = _waited_seconds(job.claimed_at, (one,))
                counts = self._counts.get((job.queue, job.kind)) or _counts_of(self._counts, job.queue, job.kind)
                counts.outcomes[RAN[type(one)]] += 1
                counts.wait_seconds += waited
                counts.run_seconds += ran
                counts.wait[bisect_left(BOUNDS, waited)] += 1
                counts.run[bisect_left(BOUNDS, ran)] += 1
                return
            ended: Iterable[Event] = events
            if not RAN.keys() >= set(map(type, events)):
                ended = [event for event in events if type(event) in RAN]
                for event in events:
                    if type(event) not in RAN:
                        self._add_not_run(event)
            # Jobs of one claim and kind that ended in the same way, as most of a batch do, are counted together.
            for _, alike in groupby(cast("Iterable[Ended]", ended), _SORT):
                self._add_alike(list(alike))

    @property
    def is_empty(self) -> bool:
        """Return True if nothing was counted since the last `take`."""
        return not self._counts

    def take(self) -> Counts:
        """Return the counts since the last call, to add them to the tables, and begin with new ones."""
        with self._lock:
            taken, self._counts = self._counts, {}
            _add_all(self._taken, taken)
        return taken

    def totals(self) -> Counts:
        """Return the counts since the relay began. Calls of `take` do not reset them."""
        found: Counts = {}
        with self._lock:
            _add_all(found, self._taken)
            _add_all(found, self._counts)
        return found

    def _add_alike(self, events: Sequence[Ended]) -> None:
        job = events[0].job
        counts = _counts_of(self._counts, job.queue, job.kind)
        counts.outcomes[RAN[type(events[0])]] += len(events)
        waited = _waited_seconds(job.claimed_at, events)
        ran = list(map(_SECONDS, events))
        counts.wait_seconds += sum(waited)
        counts.run_seconds += sum(ran)
        _count_values(counts.wait, waited)
        _count_values(counts.run, ran)

    def _add_not_run(self, event: Event) -> None:
        if isinstance(event, JobCancelled | JobExpired | JobLeaseLost):
            _counts_of(self._counts, event.job.queue, event.job.kind).outcomes[NOT_RUN[type(event)]] += 1
        elif isinstance(event, JobCrashed):
            outcomes = _counts_of(self._counts, event.queue, event.kind).outcomes
            outcomes["crashed"] += 1
            outcomes["died"] += event.dead_letter
        elif isinstance(event, JobSetAside):
            _counts_of(self._counts, event.queue, event.kind).outcomes["died"] += 1


def _counts_of(counts: Counts, queue: str, kind: str) -> KindCounts:
    found = counts.get((queue, kind))
    if found is None:
        key = (queue, kind) if len(counts) < KINDS_MOST else (queue, OTHER)
        found = counts.setdefault(key, KindCounts())
    return found


def _waited_seconds(claimed_at: datetime | None, events: Sequence[Ended]) -> list[float]:
    """Return, for each job of one claim, the seconds that the job waited between its due time and the claim."""
    if claimed_at is None:
        return [0.0] * len(events)
    waited = [(claimed_at - run_at).total_seconds() for run_at in map(_RUN_AT, events)]
    return waited if min(waited) >= 0.0 else [max(seconds, 0.0) for seconds in waited]


def _count_values(buckets: list[int], values: list[float]) -> None:
    """Count the values in their buckets. Sorts `values`, so that each bucket is looked up once."""
    values.sort()
    at = 0
    while at < len(values):
        bucket = bisect_left(BOUNDS, values[at])
        end = len(values) if bucket == len(BOUNDS) else bisect_right(values, BOUNDS[bucket], at)
        buckets[bucket] += end - at
        at = end


def _add_all(total: Counts, counts: Counts) -> None:
    for (queue, kind), each in counts.items():
        _counts_of(total, queue, kind).add(each)
