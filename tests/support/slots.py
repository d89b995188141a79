"""Slots without a relay around them."""

import threading
from uuid import uuid4

from sqlalchemy import Connection, Engine

from outboxq import RelayConfig
from outboxq.database.engines import Engines
from outboxq.events import Emitter
from outboxq.execution.invoke import SyncInvoker
from outboxq.relay.connections import SlotConnection, make_slot_connection
from outboxq.relay.effect_runners import make_effect_runners
from outboxq.relay.lease import RelayLease
from outboxq.relay.limits import RelayLimits
from outboxq.relay.poller import SharedPoller
from outboxq.relay.state import RelayState
from outboxq.relay.suspects import QuarantineTurns
from tests.support import app


def relay_state(
    engine: Engine,
    queues: tuple[str, ...],
    *,
    overdue_seconds: float = 1.0,
    limits: RelayLimits | None = None,
    **settings: object,
) -> RelayState:
    """What slots of these queues of the application share; they neither listen nor hold a lease."""
    config = RelayConfig(**{"poll_seconds": 30} | settings)
    engines = Engines(engine, None, owns_sync=False, owns_asynchronous=False)
    emit = Emitter([], lambda *_: None)
    return RelayState(
        config=config,
        registry=app.jobs.resolve(),
        until_empty=False,
        emit=emit,
        stopping=threading.Event(),
        listener=None,
        poller=SharedPoller(config.schema, queues, overdue_seconds),
        lease=_unheld_lease(config, emit),
        quarantine=QuarantineTurns(),
        effect_runners=make_effect_runners(engines, config.schema, config.effect_lease_seconds),
        limits=limits or RelayLimits(),
    )


def _unheld_lease(config: RelayConfig, emit: Emitter) -> RelayLease:
    """A lease whose thread was never started."""
    callbacks = {"running": set, "emit": emit, "on_reaped": lambda _: None, "wake": lambda: None}
    return RelayLease(lambda: None, config, uuid4(), (), QuarantineTurns(), **callbacks)


def slot_connection_on(connection: Connection) -> SlotConnection:
    """A slot's connection, made of one of the test's."""
    return make_slot_connection(connection, SyncInvoker())
