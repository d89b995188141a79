"""A slot: it runs one batch at a time, on a connection that it has while something waits.

The connection is a sync `Connection`, for sync and for async handlers; the loop around the slot is `SlotLoop`.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.codec.text import name_and_line
from outboxq.database.driver import pause, run_alone, run_script
from outboxq.database.errors import (
    INSUFFICIENT_PRIVILEGE,
    NoConnection,
    describe_error,
    describe_refusal,
    is_database_unavailable,
    sqlstate_of,
)
from outboxq.events import DatabaseBack, DatabaseLost
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.execution.claim import AnyScript
from outboxq.execution.errors import ConnectionLost, ConnectionSpoiled
from outboxq.execution.lease_mode import LeasedBatch
from outboxq.execution.runtime import Runtime, is_cancellation
from outboxq.handlers.handler import Flavour
from outboxq.relay.batch_loop import BatchLoop
from outboxq.relay.claim_planner import ClaimPlanner
from outboxq.relay.connections import SlotConnection
from outboxq.relay.idle import SlotSleep
from outboxq.relay.poller import Order
from outboxq.relay.state import RelayState
from outboxq.statements.lease import look_around

logger = logging.getLogger("outboxq.relay")

# How often, and how long each time, a drain that meets suspects waits for its lease.
_LEASE_WAITS, _LEASE_WAIT_SECONDS = 500, 0.02
_RECONNECT_FIRST_SECONDS = 0.1
_RECONNECT_CAP_SECONDS = 10.0
_MOST_DOUBLINGS = 10
# What a connection that is lost, or refuses a statement, raises.
CONNECTION_ERRORS = (psycopg.Error, SQLAlchemyError, ConnectionLost, NoConnection, OSError, asyncio.CancelledError)
_NOT_ALLOWED = ": its role lacks rights, run what `outboxq roles --sql` prints"


class Slot:
    """The batches of one slot, one after the other.

    Attributes:
        connected: The connection that the slot works on; None while it sleeps.
        is_abandoned: The slot's task was, or will be, cancelled by the relay.
    """

    def __init__(
        self,
        state: RelayState,
        flavour: Flavour,
        queues: tuple[str, ...],
        wake: Callable[[], None],
        in_turns: Collection[str] = (),
    ) -> None:
        order = Order(queues, in_turns)
        self.state = state
        self.flavour: Flavour = flavour
        self.queues = queues
        self.in_turns = frozenset(in_turns)
        self.sleep = SlotSleep(state, order, wake)
        self.connected: SlotConnection | None = None
        self.is_abandoned = False
        self._planner = ClaimPlanner(state, order)
        self._batches = BatchLoop(state, flavour, self._planner, self.sleep)
        self._told: set[str] = set()
        # The slot left its connection for another one, with work to do.
        self._goes_on = False
        self._is_rested = True
        self._lease_waits = 0
        self._lost_since: float | None = None
        self._spoiled: ConnectionSpoiled | None = None

    @property
    def batch(self) -> BatchState | None:
        """The batch that runs, or whose outcome is not known yet."""
        return self._batches.batch

    @property
    def leased_batch(self) -> LeasedBatch | None:
        """The jobs that are claimed under the lease besides the one that runs."""
        return self._batches.leased_batch

    @property
    def running(self) -> int:
        """How many jobs this slot has claimed."""
        return self._batches.running

    def is_seized(self) -> bool:
        """Whether the relay has taken the batch away from this slot, which then must neither commit nor report it."""
        return self._batches.is_seized

    def publish(self, report: BatchReport) -> None:
        """Count and emit the events of what was committed."""
        self._batches.publish(report)

    def wants_work(self) -> bool:
        """Whether there is something to do: to claim, or to find out what became of a lost connection's jobs."""
        return self.is_in_doubt or self._lost_since is not None or self._goes_on or self.sleep.has_work()

    @property
    def is_in_doubt(self) -> bool:
        """Whether a lost connection left jobs of which it is not known what became of them."""
        return self.batch is not None or self.leased_batch is not None

    # The slot's connection.

    @contextmanager
    def _on(self, connected: SlotConnection) -> Iterator[Runtime]:
        """Work on this connection. Jobs that a lost connection left are settled first."""
        try:
            yield self._take(connected)
        finally:
            self.connected = None

    def _take(self, connected: SlotConnection) -> Runtime:
        self.connected = connected
        self.state.login.succeeded()
        self._planner.prepared = connected.prepared
        if self._goes_on or self._spoiled is not None or self._lost_since is not None:
            self._planner.begin_anew()
        self._goes_on = False
        runtime = self.runtime_on(connected)
        if self._lost_since is not None:
            self.state.emit(DatabaseBack(_now() - self._lost_since))
            self._lost_since = None
        connection = connected.connection
        self._batches.release_waiting(connection)
        if self.batch is not None:
            lost = self._spoiled or ConnectionLost("the connection was lost while the job ran")
            report = self._batches.recover(connection, self.batch, lost, runtime)
            if report is not None:
                self.publish(report)
        self._spoiled = None
        return runtime

    def runtime_on(self, connected: SlotConnection) -> Runtime:
        """What running handlers on this connection needs."""
        state = self.state
        runners = state.effect_runners
        return Runtime(
            state.registry,
            state.lifespan_state,
            connected.invoker,
            connected.guard,
            state.config.schema,
            state.config.max_crashes,
            connected.epoch,
            runners.sync if self.flavour == "sync" else runners.asynchronous,
            sharing_queues=self._planner.sharing_queues,
            is_interruption=self._is_interruption,
            orders=state.flow.orders,
            keeper=state.keeper,
            notes=state.progress,
            prepared_rows=connected.prepared_rows,
            has_citus=connected.has_citus,
        )

    def _is_interruption(self, error: BaseException) -> bool:
        # Not a KeyboardInterrupt: signals reach the main thread alone, where no handler runs. `is_abandoned`, because a
        # handler can cancel the slot's task too.
        return self.is_abandoned and is_cancellation(error)

    def _needs_connection(self, connected: SlotConnection) -> bool:
        """Whether the next job has to start on another connection, because a handler left something on this one."""
        left = connected.guard.left
        if left is None:
            return False
        self._goes_on = True
        if left not in self._told:
            self._told.add(left)
            logger.info("a handler's %s may outlive its transaction: its slot takes a new connection", left)
        return True

    def settle(self, connected: SlotConnection) -> None:
        """Find out what became of the jobs of a lost connection, and claim nothing."""
        with self._on(connected):
            pass

    # The slot's claims.

    def work_all(self, connected: SlotConnection) -> bool:
        """Claim and run what waits, until nothing does or the relay stops; False if another connection is needed."""
        with self._on(connected) as runtime:
            self._is_rested = True
            while not (self.state.stopping.is_set() or self._needs_connection(connected)):
                if not self.work_once(connected.connection, runtime):
                    break
        return not self._goes_on

    def work_seen(self, connected: SlotConnection) -> bool:
        """Poll if that is due, and work if something is seen to wait; False if nothing was done."""
        worked = False
        with self._on(connected) as runtime:
            self.sleep.poll(connected.connection)
            self._is_rested = True
            while self.sleep.has_work() or worked:
                if self.state.stopping.is_set() or self._needs_connection(connected):
                    break
                if not self.work_once(connected.connection, runtime):
                    break
                worked = True
        return worked

    def drain(self, connected: SlotConnection) -> bool:
        """Work until nothing waits, suspects included; False if another connection is needed."""
        with self._on(connected) as runtime:
            connection = connected.connection
            while not (self.state.stopping.is_set() or self._needs_connection(connected)):
                if self.work_once(connection, runtime) or self._drain_suspects(connection, runtime):
                    continue
                held_seconds = self.state.poller.held_seconds(self.queues)
                if held_seconds is None:
                    return True
                pause(connection, held_seconds)
            return self.state.stopping.is_set()

    def work_once(self, connection: Connection, runtime: Runtime) -> bool:
        """Claim and run the jobs of a turn; False if nothing waits."""
        self._planner.begin_walk()
        self.sleep.begin_claims()
        if self._run_suspects(connection, self._suspected(), runtime):
            return True
        if len(self.queues) == 1:
            name = self.queues[0]
            if not self._planner.take_queue(name):
                return False
            for script in self._planner.sorts(name):
                if self._batches.run_claims(connection, name, script, runtime):
                    return True
                if self.state.poller.is_held(name):
                    break
            return False
        while (turn := self._next_turn(connection)) is not None:
            if self._batches.run_claims(connection, *turn, runtime):
                return True
        return False

    def _next_turn(self, connection: Connection) -> tuple[str, AnyScript] | None:
        """Where to claim next, after a poll if the last one is old, or if all that it named was claimed from."""
        if self._planner.wants_poll() and not self._is_rested:
            self._poll(connection)
        self._is_rested = False
        turn = self._planner.take_turn()
        if turn is None and self._planner.has_found:
            self._poll(connection)
            turn = self._planner.take_turn()
        return turn

    def _poll(self, connection: Connection) -> None:
        """Poll the queues of this slot."""
        poller, started_at = self.state.poller, _now()
        taken = poller.begin()
        rows = run_alone(connection, poller.statement_for(self.queues))
        poller.record(taken, rows, self.queues)
        self.state.quarantine.record_poll(rows)
        self._planner.poll_took_seconds = _now() - started_at
        self._planner.has_found = False

    def _suspected(self) -> tuple[str, ...]:
        quarantine = self.state.quarantine
        found = quarantine.queues | quarantine.groups if quarantine.groups else quarantine.queues
        return tuple(name for name in self.queues if name in found) if found else ()

    def _run_suspects(self, connection: Connection, names: tuple[str, ...], runtime: Runtime) -> bool:
        """Run one suspect of the first of these queues that has one, if it is this slot's turn."""
        quarantine = self.state.quarantine
        for name in names:
            if self.state.poller.is_held(name) or not quarantine.take_turn(self):
                continue
            try:
                if self.state.lease.want():
                    scripts = (quarantine.queues, self._planner.suspects), (quarantine.groups, self._planner.in_groups)
                    for known, script in scripts:
                        if name in known and self._run_suspect(connection, name, script(name), runtime):
                            return True
                        # One that found no room may still be there, also if the hold of its queue is over by now.
                        if not (self._batches.is_full or self.state.poller.is_held(name)):
                            known.discard(name)
            finally:
                quarantine.end_turn(self)
        return False

    def _run_suspect(self, connection: Connection, name: str, script: AnyScript, runtime: Runtime) -> bool:
        try:
            return self._batches.run_claims(connection, name, script, runtime)
        except (psycopg.Error, SQLAlchemyError) as error:
            if not self._batches.claim_failed or self.running:
                raise
            # The suspect was not even claimed: ready jobs do not wait for it. The lease's next beat finds it again.
            logger.warning("suspects of queue %r could not be claimed: %s", name, describe_refusal(error))
            return False

    def _drain_suspects(self, connection: Connection, runtime: Runtime) -> bool:
        """Look whether suspects wait, and run one; False if a drain has nothing more to wait for."""
        with connection.begin():
            # In all queues of the relay: what is seen stands for all of its slots.
            rows = run_script(connection, look_around(self.state.config.schema, self.state.lease.queues))
        seen = self.state.flow.record(rows)
        quarantine = self.state.quarantine
        quarantine.queues |= seen.suspects
        quarantine.groups |= seen.group_suspects
        names = self._suspected()
        if names and not self.state.lease.want():
            self._lease_waits += 1
            return self.state.lease.wait(_LEASE_WAIT_SECONDS) or self._lease_waits < _LEASE_WAITS
        return self._run_suspects(connection, names, runtime)

    def pause_seconds(self, *, flagged: bool) -> float:
        """How long to sleep."""
        self._planner.expect_ready()
        return self.sleep.pause_seconds(flagged=flagged)

    def lost(self, error: BaseException) -> float:
        """Report a lost or refused connection, or an error of users' code on it; how long to wait before the next try.

        Raises:
            LoginRefused: the database refuses the relay's login for too long.
        """
        self.state.login.failed(error)
        if isinstance(error, ConnectionSpoiled):
            # Closed by us: the server is well.
            self._spoiled = error
            return 0.0
        self.sleep.want_poll()
        longest = min(_RECONNECT_FIRST_SECONDS * 2.0**self._batches.outages, _RECONNECT_CAP_SECONDS)
        seconds = longest * random.uniform(0.5, 1.0)
        self._batches.outages = min(self._batches.outages + 1, _MOST_DOUBLINGS)
        if not isinstance(error, CONNECTION_ERRORS):
            # A listener of users' on the engine: the connection is closed, and what it had begun is rolled back.
            logger.warning(
                "code on the relay's connection raised an error, trying again: %s",
                name_and_line(error),
                extra={"retry_seconds": seconds},
            )
        elif is_database_unavailable(error):
            self._lost_since = self._lost_since or _now()
            self.state.emit(DatabaseLost(describe_error(error), seconds))
        else:
            advice = _NOT_ALLOWED if sqlstate_of(error) == INSUFFICIENT_PRIVILEGE else ""
            logger.warning(
                "the relay's statements fail, trying again: %s%s",
                describe_refusal(error),
                advice,
                extra={"retry_seconds": seconds},
            )
        return seconds


def _now() -> float:
    return time.monotonic()
