"""Slots, their state and their batches, without a relay around them."""

import threading
from collections.abc import Callable
from uuid import UUID, uuid4

from sqlalchemy import Connection, Engine

from outboxq import RelayConfig
from outboxq.database.driver import DriverConnection, ServerSession
from outboxq.database.engines import Engines
from outboxq.emitter import Emitter
from outboxq.events import JobCrashed
from outboxq.execution.batch_state import BatchState
from outboxq.execution.claim import Claimed, ClaimRequest, claim
from outboxq.execution.invoke import SyncInvoker
from outboxq.relay.connections import SlotConnection, make_slot_connection
from outboxq.relay.effect_runners import EffectRunners
from outboxq.relay.flow_settings import FlowSettings
from outboxq.relay.lease import RelayLease
from outboxq.relay.limits import RelayLimits
from outboxq.relay.poller import SharedPoller
from outboxq.relay.progress import ProgressWriter
from outboxq.relay.slot import Slot
from outboxq.relay.state import RelayState
from outboxq.relay.suspects import QuarantineTurns
from outboxq.statements.claim import ClaimStatements
from tests.support import app

SILENT = Emitter([], lambda *_: None)


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
    return RelayState(
        config=config,
        registry=app.jobs.resolve(),
        until_empty=False,
        emit=SILENT,
        stopping=threading.Event(),
        listener=None,
        poller=SharedPoller(config.schema, queues, overdue_seconds),
        lease=make_lease(config),
        quarantine=QuarantineTurns(),
        flow=FlowSettings(),
        effect_runners=EffectRunners(engines, config.schema, config.effect_lease_seconds, SILENT),
        progress=ProgressWriter(engine.connect, config.schema, uuid4()),
        limits=limits or RelayLimits(),
    )


def make_lease(
    config: RelayConfig,
    *,
    connect: Callable[[], "DriverConnection | None"] = lambda: None,
    owner: UUID | None = None,
    queues: tuple[str, ...] = (),
    running: Callable[[], set[tuple[str, int]]] = set,
    emit: Emitter = SILENT,
    on_reaped: Callable[[JobCrashed], None] = lambda _: None,
) -> RelayLease:
    """A lease whose thread is not started."""
    callbacks = {"running": running, "emit": emit, "on_reaped": on_reaped, "wake": lambda: None}
    callbacks["expect_schedule"] = lambda _seconds: None
    return RelayLease(connect, config, owner or uuid4(), queues, QuarantineTurns(), FlowSettings(), **callbacks)


def make_slot(state: RelayState) -> Slot:
    """A slot for the queues of this state, whose wake-up calls nothing."""
    return Slot(state, "sync", state.poller.queues, (), lambda: None)


def claim_ready(connection: Connection, queue: str, limit: int, epoch: str = "") -> Claimed:
    """Claim ready jobs of a queue in the connection's transaction."""
    return claim(
        connection,
        ClaimRequest(ClaimStatements("outboxq", queue).ready, limit, queue=queue, server=ServerSession(epoch)),
    )


def claim_batch(connection: Connection, queue: str, limit: int, *, epoch: str) -> BatchState:
    """The batch of such a claim, made in this run of the server."""
    return BatchState.of(claim_ready(connection, queue, limit, epoch))


def slot_connection_on(connection: Connection) -> SlotConnection:
    """A slot's connection, made of one of the test's."""
    return make_slot_connection(connection, SyncInvoker())
