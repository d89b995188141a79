"""What the slots of a relay share."""

import threading
from dataclasses import dataclass, field

from outboxq.config import RelayConfig
from outboxq.events import Emitter
from outboxq.execution.called_functions import CalledFunctions
from outboxq.handlers.registry import Registry
from outboxq.relay.cursors import SweepSchedule
from outboxq.relay.effect_runners import EffectRunners
from outboxq.relay.lease import RelayLease
from outboxq.relay.listener import Listener
from outboxq.relay.poller import SharedPoller
from outboxq.relay.report import RelayCounters
from outboxq.relay.suspects import QuarantineTurns


@dataclass(slots=True, eq=False, kw_only=True)
class RelayState:
    """What the slots of a relay share. Whatever opens connections of its own is made by the caller."""

    config: RelayConfig
    registry: Registry
    until_empty: bool
    emit: Emitter
    stopping: threading.Event
    listener: Listener | None
    poller: SharedPoller
    lease: RelayLease
    quarantine: QuarantineTurns
    effect_runners: EffectRunners
    # What the application's lifespan yielded.
    lifespan_state: object = None
    sweep_schedule: SweepSchedule = field(default_factory=SweepSchedule)
    called_functions: CalledFunctions = field(default_factory=CalledFunctions)
    counters: RelayCounters = field(default_factory=RelayCounters)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wake_another(self, queue: str) -> None:
        """Wake another slot that sleeps, if any: more jobs may wait in this queue than the caller takes."""
        if self.listener is None:
            self.poller.record_call(queue)
        else:
            self.listener.wake_one(queue)
