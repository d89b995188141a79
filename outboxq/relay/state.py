"""The state that the slots and dispatchers of a relay share."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from outboxq.clock import DatabaseClock
from outboxq.config import RelayConfig
from outboxq.database.driver import NOT_PREPARED
from outboxq.database.guard import Guard
from outboxq.emitter import Emitter
from outboxq.events import (
    ClaimsEmpty,
    ClaimsFailed,
    Event,
    JobCrashed,
    JobDone,
    JobsClaimed,
    JobsParked,
    JobsSuspected,
)
from outboxq.execution.batch_state import BatchReport
from outboxq.execution.claim import Claimed
from outboxq.execution.invoke import Invoker
from outboxq.execution.keep import Keeper
from outboxq.execution.runtime import Runtime
from outboxq.handlers.handler import Flavour
from outboxq.handlers.resolved import Registry
from outboxq.handlers.row_writes import Catalog
from outboxq.observability.aggregate import Aggregate
from outboxq.relay.admission import Admission
from outboxq.relay.connections import SlotConnection
from outboxq.relay.effect_runners import EffectRunners
from outboxq.relay.flow_settings import FlowSettings
from outboxq.relay.hook_thread import HookThread
from outboxq.relay.lease import RelayLease
from outboxq.relay.limits import RelayLimits
from outboxq.relay.listener import Listener
from outboxq.relay.poller import SORTS, SharedPoller
from outboxq.relay.progress import ProgressWriter
from outboxq.relay.queue_claims import Sweep
from outboxq.relay.startup import Login
from outboxq.relay.suspects import QuarantineTurns
from outboxq.statements.claim import Sort

# The events that `RelayState.recorded` handles before they are emitted.
RECORDED = (JobsSuspected, JobCrashed, JobsParked)


@dataclass(frozen=True, slots=True)
class RelayReport:
    """A relay's result: done jobs, failed attempts, and jobs that became dead letters (also counted as failed).

    `leases_lost` counts handlers that ended after another relay had taken their job, so that their rows were rolled
    back. `hook_failures` counts errors that hooks raised. `hook_events_dropped` counts events that the registry's hooks
    did not get because they were too slow. `cancelled` and `expired` count jobs that were dropped for these reasons.
    """

    done: int
    failed: int
    died: int
    leases_lost: int = 0
    hook_failures: int = 0
    hook_events_dropped: int = 0
    cancelled: int = 0
    expired: int = 0


class ClaimEvents:
    """Collects the results of a slot's or dispatcher's claims, and emits them as events, if a hook wants any."""

    def __init__(self, state: "RelayState") -> None:
        self._emit = state.emit
        self._is_wanted = any(state.emit.use_of(kind)() for kind in (JobsClaimed, ClaimsEmpty, ClaimsFailed))
        self._claims: list[JobsClaimed] = []
        self._without_jobs: Counter[tuple[type[ClaimsEmpty | ClaimsFailed], str]] = Counter()

    def record(self, claimed: Claimed) -> None:
        """Record the answer to a claim: its jobs, or that it found none."""
        if self._is_wanted:
            request, count = claimed.request, len(claimed.jobs)
            if count:
                self._claims.append(JobsClaimed(request.queue, count, time.monotonic() - request.asked_at))
            else:
                self._without_jobs[ClaimsEmpty, request.queue] += 1

    def record_failure(self, queue: str) -> None:
        """Record that a claim failed."""
        if self._is_wanted:
            self._without_jobs[ClaimsFailed, queue] += 1

    def emit(self) -> None:
        """Emit the events of the recorded claims. To be called before the events of their jobs are emitted."""
        if self._claims or self._without_jobs:
            claims, others, self._claims, self._without_jobs = self._claims, self._without_jobs, [], Counter()
            for event in claims:
                self._emit(event)
            for (kind, queue), count in others.items():
                self._emit(kind(queue, count))


@dataclass(slots=True, eq=False, kw_only=True)
class RelayState:
    """The state that the slots and dispatchers of a relay share.

    The caller makes the parts that open their own connections.
    """

    config: RelayConfig
    registry: Registry
    until_empty: bool
    emit: Emitter
    stopping: threading.Event
    listener: Listener | None
    poller: SharedPoller
    lease: RelayLease
    quarantine: QuarantineTurns
    flow: FlowSettings
    effect_runners: EffectRunners
    progress: ProgressWriter
    limits: RelayLimits = field(default_factory=RelayLimits)
    # The state that the application's lifespan yielded.
    lifespan_state: object = None
    # Facts of each queue, by name.
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    aggregate: Aggregate = field(default_factory=Aggregate)
    clock: DatabaseClock = field(default_factory=DatabaseClock)
    # Writes finished rows; it is empty until the start has checked the rights.
    keeper: Keeper = field(default_factory=Keeper)
    admission: Admission = field(init=False)
    login: Login = field(init=False)
    has_use_for_done: Callable[[], bool] = field(init=False)

    def __post_init__(self) -> None:
        claims, limits = self.registry.claims, self.limits
        self.login = Login(limits.refused_seconds)
        self.has_use_for_done = self.emit.use_of(JobDone)
        self.admission = Admission(self.config.schema, claims, self.flow, self.poller, limits, self.wake_another)

    def report(self, hooks: HookThread) -> RelayReport:
        """Return the counts of the relay so far."""
        counts = self.aggregate.counters
        return RelayReport(
            counts.done,
            counts.failed,
            counts.died,
            counts.leases_lost,
            hooks.failures,
            hooks.dropped,
            counts.cancelled,
            counts.expired,
        )

    def has_groups(self, queue: str) -> bool:
        """Return True if a queue has grouped jobs, or had some in the last minute, as far as the relay knows."""
        return queue in self.flow.seen.groups or self.poller.has_groups(queue)

    def sorts_of(self, queue: str) -> tuple[Sort, ...]:
        """Return the sorts of jobs that slots claim from a queue in turns: ready, due and, if it has any, grouped."""
        return SORTS if self.has_groups(queue) else (Sort.READY, Sort.DUE)

    def suspect(self, queue: str) -> None:
        """Record that a queue has a suspect (a job that ran when its relay died), so that slots claim it.

        If the queue has groups, the suspect may be in one of them.
        """
        self.quarantine.queues.add(queue)
        if self.has_groups(queue):
            self.quarantine.groups.add(queue)

    def runtime(
        self,
        flavour: Flavour,
        invoker: Invoker,
        guard: Guard,
        sharing_queues: frozenset[str],
        is_interruption: Callable[[BaseException], bool],
        connected: SlotConnection | None = None,
    ) -> Runtime:
        """Make the `Runtime` (all that executing a job needs, except the job) for a connection, or for none."""
        runners = self.effect_runners
        catalog = Catalog() if connected is None else connected.catalog
        return Runtime(
            self.registry,
            self.lifespan_state,
            invoker,
            guard,
            self.config.schema,
            self.config.max_crashes,
            runners.sync if flavour == "sync" else runners.asynchronous,
            sharing_queues,
            is_interruption,
            catalog,
            orders=self.flow.orders,
            keeper=self.keeper,
            notes=self.progress,
            prepared_rows=NOT_PREPARED if connected is None else connected.server.finished_rows,
            has_citus=connected is not None and connected.server.has_citus,
        )

    def publish(self, report: BatchReport, parked: int = 0) -> None:
        """Count committed outcomes and emit their events.

        Args:
            parked: The number of further jobs that were parked (made to wait for a relay that knows their kind); the
                event counts them too.
        """
        self.aggregate.add(report.events, report.claimed)
        # Most events are of done jobs, and most relays have no hook for these.
        are_done_wanted = self.has_use_for_done()
        for event in report.events:
            if are_done_wanted or type(event) is not JobDone:
                self.emit(self.recorded(event, parked) if isinstance(event, RECORDED) else event)

    def wake_another(self, queue: str) -> None:
        """Wake another slot that sleeps on this queue, if any: more jobs may wait there than the caller takes."""
        # A slot that falls asleep from now on polls first; a sleeping one is woken.
        self.poller.record_rest(queue)
        if self.listener is None:
            self.poller.record_call(queue)
        else:
            self.listener.wake_one(queue)

    def recorded(self, event: JobsSuspected | JobCrashed | JobsParked, parked: int) -> Event:
        """Return `event` to be emitted, with the number of parked jobs added if it is a `JobsParked`.

        If the event says that a job is now a suspect (ran when its relay died), first record that its queue has one.

        Args:
            parked: The number of further parked jobs (made to wait for a relay that knows their kind).
        """
        if isinstance(event, JobsParked):
            return replace(event, count=event.count + parked)
        if isinstance(event, JobsSuspected) or not event.dead_letter:
            self.suspect(event.queue)
        return event
