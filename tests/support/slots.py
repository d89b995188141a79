"""Slots without a relay around them."""

import threading
from uuid import uuid4

from sqlalchemy import Connection, Engine

from outboxq.database.engines import Engines
from outboxq.events import Emitter
from outboxq.execution.invoke import SyncInvoker
from outboxq.relay.connections import SlotConnection, make_line
from outboxq.relay.cursors import SweepSchedule
from outboxq.relay.effect_runners import make_callers
from outboxq.relay.lease import QuarantineTurns, RelayLease
from outboxq.relay.poller import SharedPoller
from outboxq.relay.state import RelayCounters, RelayState
from tests.support import app


def shared_by_slots(engine: Engine, queues: tuple[str, ...], *, poll_seconds: float = 30) -> RelayState:
    """What slots of these queues of the application share; they neither listen nor hold a lease."""
    emit = Emitter([], lambda *_: None)
    return RelayState(
        registry=app.jobs.resolve(),
        state=None,
        schema="outboxq",
        batch_size=1,
        poll_seconds=poll_seconds,
        until_empty=False,
        emit=emit,
        listener=None,
        poller=SharedPoller("outboxq", queues),
        lease=_unheld_lease(emit),
        quarantine=QuarantineTurns(),
        sweep_schedule=SweepSchedule(),
        max_crashes=3,
        effect_runners=make_callers(Engines(engine, None, owns_sync=False, owns_asynchronous=False), "outboxq", 30),
        stopping=threading.Event(),
        counters=RelayCounters(),
        lock=threading.Lock(),
    )


def _unheld_lease(emit: Emitter) -> RelayLease:
    """A lease whose thread was never started."""
    settings = {"lease_seconds": 30, "beat_seconds": 5, "max_crashes": 3}
    return RelayLease(
        lambda: None, "outboxq", uuid4(), (), QuarantineTurns(), set, emit, lambda _: None, lambda: None, **settings
    )


def line_on(connection: Connection) -> SlotConnection:
    """A slot's line on a connection of the test's."""
    return make_line(connection, SyncInvoker())
