"""What the slots of a relay share, and what they have done."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from outboxq.events import Emitter, JobCrashed, JobDied, JobDone, JobLeaseLost, JobRetried, JobSetAside
from outboxq.execution.batch_state import BatchReport
from outboxq.execution.called_functions import CalledFunctions
from outboxq.handlers.registry import Registry
from outboxq.relay.cursors import SweepSchedule
from outboxq.relay.effect_runners import EffectRunners
from outboxq.relay.lease import QuarantineTurns, RelayLease
from outboxq.relay.listener import Listener
from outboxq.relay.poller import SharedPoller


@dataclass(slots=True)
class RelayCounters:
    """What a relay has done so far. Slots add under the lock."""

    claimed: int = 0
    done: int = 0
    failed: int = 0
    died: int = 0
    leases_lost: int = 0

    def add(self, report: BatchReport) -> None:
        """Count the events of one committed batch."""
        of = Counter(map(type, report.events))
        crashes = [event for event in report.events if isinstance(event, JobCrashed)] if of[JobCrashed] else []
        self.claimed += report.claimed
        self.done += of[JobDone]
        self.failed += of[JobRetried] + of[JobDied] + of[JobCrashed] + of[JobSetAside]
        self.died += of[JobDied] + of[JobSetAside] + sum(event.died for event in crashes)
        self.leases_lost += of[JobLeaseLost]


@dataclass(slots=True, eq=False)
class RelayState:
    """What all slots of a relay share."""

    registry: Registry
    state: object
    schema: str
    batch_size: int
    poll_seconds: float
    until_empty: bool
    emit: Emitter
    listener: Listener | None
    poller: SharedPoller
    lease: RelayLease
    quarantine: QuarantineTurns
    sweep_schedule: SweepSchedule
    max_crashes: int
    effect_runners: EffectRunners
    stopping: threading.Event
    counters: RelayCounters
    lock: threading.Lock
    called_functions: CalledFunctions = field(default_factory=CalledFunctions)

    def call(self, queue: str) -> None:
        """More than one slot takes may wait in this queue: another one that sleeps shall look."""
        if self.listener is None:
            self.poller.called(queue)
        else:
            self.listener.call(queue)
