"""Metrics for programs that embed a relay, or only add jobs: a hook over objects of prometheus_client.

These metrics are in the application's own registry, and also work in prometheus_client's multiprocess mode. `outboxq
relay --metrics` does not need this module, and costs less time per job.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from outboxq import events
from outboxq.errors import ConfigError
from outboxq.events import Event
from outboxq.observability.aggregate import NOT_RUN, RAN
from outboxq.observability.metrics.counter import COUNTED
from outboxq.observability.metrics.families import JOBS, RELAY, RUN, WAIT
from outboxq.observability.metrics.reading import OUTCOMES, LabelCaps, Labels
from outboxq.statements.history import BOUNDS

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ImportError as error:
    raise ConfigError("metrics need prometheus-client: pip install 'outboxq[metrics]'") from error

__all__ = ["MetricsHook"]

_Counts: TypeAlias = Iterable[tuple[str, Labels, float]]
_LOST = "outboxq_relay_database_lost"
_CLAIM_SECONDS = "outboxq_claim_seconds"

_BESIDES: Mapping[type[Event], Callable[[Any], _Counts]] = {
    events.JobsEnqueued: lambda event: [("outboxq_enqueued_jobs_total", (event.queue, event.kind), event.count)],
    events.MessageSeen: lambda event: [("outboxq_inbox_messages_total", (event.consumer, event.outcome), 1)],
    events.JobsClaimed: lambda event: [
        ("outboxq_claims_total", (event.queue, "jobs"), 1),
        ("outboxq_claimed_jobs_total", (event.queue,), event.count),
    ],
}
_ALL_COUNTED = {**COUNTED, **_BESIDES}


class MetricsHook:
    """A hook that counts events in a registry of prometheus_client, under the names of `outboxq relay --metrics`.

    It is for `Relay(hooks=[...])`, and for the engine's option `outboxq_hooks` in processes that only add jobs. It is
    thread-safe.

    Args:
        registry: The application's registry; each registry takes one such hook.
        database: The value of the label `database`.
        detail: "kind" for a series of each queue and kind, "queue" for a series of each queue.
    """

    # The hook receives all events, including those that hooks receive only on request.
    events = frozenset(get_args(Event))

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        database: str = "",
        detail: Literal["kind", "queue"] = "kind",
    ) -> None:
        self._database = database
        self._has_kinds = detail == "kind"
        self._caps = LabelCaps()
        names = {name for count in ("counter", "histogram") for name, each in RELAY.items() if each.type == count}
        # Known only to the relay itself, or to its supervisor.
        names -= {"outboxq_relay_child_ends_total", "outboxq_hook_failures_total", "outboxq_stat_flush_failures_total"}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for name in sorted(names):
            family = RELAY[name]
            labels = ("database", *family.labels)
            if family.type == "counter":
                self._counters[name] = Counter(name, family.help, labels, registry=registry)
            else:
                self._histograms[name] = Histogram(name, family.help, labels, registry=registry, buckets=BOUNDS)
        lost = RELAY[_LOST]
        self._lost = Gauge(_LOST, lost.help, ("database",), registry=registry, multiprocess_mode="livesum")

    def __call__(self, event: Event) -> None:
        """Count an event."""
        for name, labels, amount in _outcomes(event):
            self._count(name, labels, amount)
        count = _ALL_COUNTED.get(type(event))
        for name, labels, amount in count(event) if count is not None else ():
            self._count(name, labels, amount)
        if type(event) in RAN:
            ended: Any = event
            labels = (ended.job.queue, ended.job.kind)
            self._observe(WAIT, labels, ended.job.waited_seconds)
            self._observe(RUN, labels, ended.seconds)
        elif isinstance(event, events.JobsClaimed):
            self._observe(_CLAIM_SECONDS, (event.queue,), event.seconds)
        elif isinstance(event, events.DatabaseLost | events.DatabaseBack | events.RelayStarted):
            self._lost.labels(self._database).set(int(isinstance(event, events.DatabaseLost)))

    def _count(self, name: str, labels: Labels, amount: float) -> None:
        self._counters[name].labels(*self._fitted(name, labels)).inc(amount)

    def _observe(self, name: str, labels: Labels, seconds: float) -> None:
        self._histograms[name].labels(*self._fitted(name, labels)).observe(seconds)

    def _fitted(self, name: str, labels: Labels) -> Labels:
        family = RELAY[name]
        if not self._has_kinds:
            labels = tuple("" if each == "kind" else value for each, value in zip(family.labels, labels, strict=True))
        return (self._database, *self._caps.fit(family, labels))


def _outcomes(event: Event) -> _Counts:
    """Yield the counts of jobs' outcomes that an event adds, the same as in the history that relays store."""
    found: Any = event
    outcome = RAN.get(type(event)) or NOT_RUN.get(type(event))
    if outcome is not None:
        yield JOBS, (found.job.queue, found.job.kind, OUTCOMES[outcome]), 1
    elif isinstance(event, events.JobCrashed):
        yield JOBS, (event.queue, event.kind, "crashed"), 1
        if event.dead_letter:
            yield JOBS, (event.queue, event.kind, "dead"), 1
    elif isinstance(event, events.JobSetAside):
        yield JOBS, (event.queue, event.kind, "dead"), 1
