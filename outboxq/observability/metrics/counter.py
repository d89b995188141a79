"""The counter: a hook that counts a relay's events, except for the outcomes of jobs, which the aggregate counts.

It uses plain dictionaries, because objects of prometheus_client would cost several microseconds for each job.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from outboxq import events
from outboxq.events import Event
from outboxq.observability.metrics.families import JOBS
from outboxq.observability.metrics.reading import Labels, Reading
from outboxq.statements.history import BOUNDS, BUCKETS

_Counts: TypeAlias = Iterable[tuple[str, Labels, float]]


def _failed(event: events.JobRetried | events.JobDied) -> _Counts:
    # The label is empty if no handler ran.
    return [("outboxq_job_errors_total", (event.job.queue, event.job.kind, event.error_type or "_none"), 1)]


def _pruned(event: events.Pruned) -> _Counts:
    counts = {"inbox": event.messages, "effect": event.effects, "unique_key": event.keys}
    return [("outboxq_pruned_rows_total", (table,), count) for table, count in counts.items()]


def _of_queue(name: str) -> Callable[[Any], _Counts]:
    return lambda event: [(name, (event.queue,), getattr(event, "count", 1))]


def _plain(name: str) -> Callable[[Any], _Counts]:
    return lambda _event: [(name, (), 1)]


# The counts that each event adds.
COUNTED: Mapping[type[Event], Callable[[Any], _Counts]] = {
    events.JobRetried: _failed,
    events.JobDied: _failed,
    events.JobInterrupted: lambda event: [(JOBS, (event.job.queue, event.job.kind, "interrupted"), 1)],
    events.ClaimsEmpty: lambda event: [("outboxq_claims_total", (event.queue, "empty"), event.count)],
    events.ClaimsFailed: lambda event: [("outboxq_claims_total", (event.queue, "failed"), event.count)],
    events.JobsParked: _of_queue("outboxq_parked_jobs_total"),
    events.JobsSuspected: _of_queue("outboxq_suspected_jobs_total"),
    events.JobsCoalesced: lambda event: [("outboxq_coalesced_jobs_total", (event.job.queue,), event.count)],
    events.BatchRolledBack: _of_queue("outboxq_rolled_back_batches_total"),
    events.BatchFinished: _of_queue("outboxq_finished_batches_total"),
    events.ScheduleFired: lambda event: [("outboxq_fired_schedules_total", (event.name,), 1)],
    events.LeaseExtensionFailed: _plain("outboxq_lease_extension_failures_total"),
    events.IndexRebuilt: _plain("outboxq_index_rebuilds_total"),
    events.Pruned: _pruned,
    events.EffectCalled: lambda event: [("outboxq_effect_calls_total", (event.scope, event.outcome), 1)],
}
# Counters without labels, which are 0 until an event is counted.
_ZEROS = ("outboxq_lease_extension_failures_total", "outboxq_index_rebuilds_total")
_HANDLED_APART = (events.JobsClaimed, events.DatabaseLost, events.DatabaseBack, events.RelayStarted)


@dataclass(slots=True)
class _Claims:
    """Counts of one queue's claims that took jobs, and of these jobs.

    `seconds` is the sum of the claims' round trips to the database, and `buckets` counts the claims by this time.
    """

    claims: int = 0
    jobs: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def add(self, count: int, seconds: float) -> None:
        """Count one claim that took `count` jobs in a round trip of `seconds`."""
        self.claims += 1
        self.jobs += count
        self.seconds += seconds
        self.buckets[bisect_left(BOUNDS, seconds)] += 1


class EventCounter:
    """A hook that counts all events other than the outcomes of jobs, for the relay's metrics."""

    # The events that the hook receives. None of them occurs for every job, unless each job is claimed alone.
    events = frozenset({*COUNTED, *_HANDLED_APART})

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading = Reading()
        self._claims: dict[str, _Claims] = {}
        self._is_lost = False

    def __call__(self, event: Event) -> None:
        """Count an event."""
        count = COUNTED.get(type(event))
        with self._lock:
            if count is not None:
                for name, labels, amount in count(event):
                    self._reading.add(name, labels, amount)
            elif isinstance(event, events.JobsClaimed):
                self._claims.setdefault(event.queue, _Claims()).add(event.count, event.seconds)
            else:
                self._is_lost = isinstance(event, events.DatabaseLost)

    def read(self) -> Reading:
        """Return all counts so far. A label's values beyond a cap are counted under `_other`.

        All readings of this counter agree on the values beyond the cap, so that no count moves to another label.
        """
        reading = Reading(caps=self._reading.caps)
        for name in _ZEROS:
            reading.add(name, (), 0)
        with self._lock:
            reading.merge(self._reading)
            for queue, found in self._claims.items():
                reading.add("outboxq_claims_total", (queue, "jobs"), found.claims)
                reading.add("outboxq_claimed_jobs_total", (queue,), found.jobs)
                reading.add_buckets("outboxq_claim_seconds", (queue,), found.buckets, found.seconds)
        reading.add("outboxq_relay_database_lost", (), int(self._is_lost))
        return reading
