"""A slot: claims, decides, runs, commits and publishes one batch after the other.

It has a connection while something waits: a sync `Connection`, for sync and for async handlers. `SlotLoop` is the loop
around it.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.codec.text import name_and_line
from outboxq.database.closing import give_up
from outboxq.database.driver import is_listened_to, is_lost, pause, run_alone, run_script
from outboxq.database.errors import (
    INSUFFICIENT_PRIVILEGE,
    LOCK_NOT_AVAILABLE,
    NoConnection,
    describe_error,
    describe_refusal,
    is_database_unavailable,
    sqlstate_of,
)
from outboxq.errors import LeaseLost
from outboxq.events import (
    BatchRolledBack,
    ClaimsEmpty,
    ClaimsFailed,
    DatabaseBack,
    DatabaseLost,
    JobDone,
    JobsClaimed,
)
from outboxq.execution.batch_state import BatchReport, BatchState, Ended
from outboxq.execution.claim import Claimed, ClaimRequest, claim
from outboxq.execution.commit import commit, send_left
from outboxq.execution.errors import ConnectionLost, ConnectionSpoiled, TransactionEscaped, WritesRefused
from outboxq.execution.families import decide
from outboxq.execution.lease_mode import LeasedBatch
from outboxq.execution.recovery import recover, recover_claim
from outboxq.execution.run import run
from outboxq.execution.runtime import Runtime, is_cancellation
from outboxq.execution.settle import JobRowHeld
from outboxq.execution.step import Step
from outboxq.fault_points import fault_point
from outboxq.handlers.handler import Flavour
from outboxq.relay.admission import Query
from outboxq.relay.connections import SlotConnection
from outboxq.relay.idle import SlotSleep
from outboxq.relay.last_suspects import LastSuspects
from outboxq.relay.leased_loop import LeasedLoop
from outboxq.relay.parking import park_unknown_kinds
from outboxq.relay.planner import Planner
from outboxq.relay.poller import Order
from outboxq.relay.state import RECORDED, RelayState

logger = logging.getLogger("outboxq.relay")

_RECONNECT_FIRST_SECONDS = 0.1
_RECONNECT_CAP_SECONDS = 10.0
_MOST_DOUBLINGS = 10
# The errors of a connection that is lost, or refuses a statement.
CONNECTION_ERRORS = (psycopg.Error, SQLAlchemyError, ConnectionLost, NoConnection, OSError, asyncio.CancelledError)
_NOT_ALLOWED = ": its role lacks rights, run what `outboxq roles --sql` prints"


class Slot:
    """The batches of one slot, one after the other.

    Attributes:
        batch: The batch that runs, or whose outcome is unknown yet.
        left: Steps that could not go with their COMMIT, to be sent after it.
        connected: The slot's connection; None while it sleeps.
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
        self.batch: BatchState | None = None
        self.left: list[Step] = []
        self.connected: SlotConnection | None = None
        self.is_abandoned = False
        self._planner = Planner(state, order)
        self._leased = LeasedLoop(self, self._planner)
        self._last_suspects = LastSuspects(state, queues)
        sizes = {name: state.registry.batch_size(name, state.config.batch_size) for name in queues}
        self._sharing_queues = frozenset(name for name, size in sizes.items() if size > 1)
        # The results of claims since their last events, counted only if a hook wants them.
        self._counts_claims = any(state.emit.use_of(kind)() for kind in (JobsClaimed, ClaimsEmpty, ClaimsFailed))
        self._claims: list[JobsClaimed] = []
        self._vain_claims: Counter[tuple[type[ClaimsEmpty | ClaimsFailed], str]] = Counter()
        self._noted: set[str] = set()
        # The slot left its connection for another one, with work left.
        self._goes_on = False
        # How often the database was lost since the last batch was committed.
        self._outages = 0
        self._lost_since: float | None = None
        self._spoiled: ConnectionSpoiled | None = None

    @property
    def leased_batch(self) -> LeasedBatch | None:
        """The claim under the lease whose jobs are not all settled yet."""
        return self._leased.batch

    @property
    def running(self) -> int:
        """The number of jobs that this slot has claimed."""
        # Read once each: other threads call this, and the slot's thread may just end them.
        batch, leased = self.batch, self.leased_batch
        own = 0 if batch is None else len(batch.jobs)
        return own if leased is None else own + leased.unsettled

    def is_seized(self) -> bool:
        """Return True if the relay has taken the batch from this slot, which then must neither commit nor report it."""
        return self.batch is not None and self.batch.owner.is_seized

    @property
    def is_in_doubt(self) -> bool:
        """Return True if a lost connection left jobs whose outcome is unknown."""
        return self.batch is not None or self.leased_batch is not None

    def wants_work(self) -> bool:
        """Return True if there is work: to claim, or to find out the outcome of a lost connection's jobs."""
        return self.is_in_doubt or self._lost_since is not None or self._goes_on or self.sleep.has_work()

    def end_turn(self) -> None:
        """Give up the turn to run suspects; called when this slot was cut off."""
        self.state.quarantine.end_turn(self._planner)

    # Rounds of the slot's queues, each up to the first claim that takes jobs.

    def work_all(self, connected: SlotConnection) -> bool:
        """Claim and run jobs until none wait or the relay stops; False if another connection is needed."""
        with self._on(connected) as runtime:
            while self._may_go_on(connected) and self.work_once(connected, runtime):
                pass
        return not self._goes_on

    def work_seen(self, connected: SlotConnection) -> bool:
        """Poll if due, and work if something waits; False if nothing was done."""
        worked = False
        with self._on(connected) as runtime:
            self.sleep.poll(connected.connection)
            while (worked or self.sleep.has_work()) and self._may_go_on(connected):
                if not self.work_once(connected, runtime):
                    break
                worked = True
        return worked

    def drain(self, connected: SlotConnection) -> bool:
        """Work until nothing waits, suspects included; False if another connection is needed."""
        with self._on(connected) as runtime:
            while self._may_go_on(connected):
                if self.work_once(connected, runtime):
                    continue
                remain = self._last_suspects.remain(connected.connection)
                if remain is None or (remain and self.work_once(connected, runtime)):
                    continue
                held_seconds = self.state.poller.held_seconds(self.queues)
                if held_seconds is None:
                    return True
                pause(connected.connection, held_seconds)
            return self.state.stopping.is_set()

    def settle(self, connected: SlotConnection) -> None:
        """Find out the outcome of a lost connection's jobs, and claim nothing."""
        with self._on(connected):
            pass

    def work_once(self, connected: SlotConnection, runtime: Runtime) -> bool:
        """Claim and run the jobs of one round, and those that each COMMIT claims; False if nothing waits."""
        connection = connected.connection
        self.sleep.begin_claims()
        # Closed once its jobs have ended, which ends a turn that it has taken.
        with closing(self._planner.first(connected)) as asked:
            for each in asked:
                if isinstance(each, ClaimRequest):
                    if self._work(connection, each, runtime):
                        return True
                else:
                    _send(connection, each)
        return False

    def _work(self, connection: Connection, request: ClaimRequest, runtime: Runtime) -> bool:
        """Claim and run batches, for as long as each COMMIT claims the next; False if nothing waited."""
        run_all = self._leased.run if request.script.leased else self._run
        try:
            ended = run_all(connection, request, runtime)
        except BaseException as error:  # noqa: BLE001  # what is not settled here is raised again
            if self.batch is None:
                ended = self._recover_claim(connection, request, error)
            else:
                ended = self._recover(connection, self.batch, error, runtime)
        self.batch = None
        if ended is not None and ended.report is not None:
            # First: the batch has ended, and steps that are left may wait, or find the connection lost.
            self._publish_last(connection, ended.report, runtime)
        self._leased.release(connection)
        self._send_left(connection)
        return ended is not None

    def _run(self, connection: Connection, request: ClaimRequest, runtime: Runtime) -> Ended | None:
        """Run batches in transaction mode: publish all but the last, and return its end; None if nothing waited."""
        fault_point("before-claim")
        with connection.begin():
            # The batches' own scripts commit; leaving the block ends the transaction that the last script began.
            claimed = self.claim(connection, request)
            while claimed.jobs:
                batch = self.batch = BatchState.of(claimed)
                handlers = decide(connection, batch, runtime)
                fault_point("after-claim")
                ended = None
                # None if COMMIT was refused, and all is undone.
                while ended is None:
                    run(connection, batch, runtime, handlers, shared=len(batch.jobs) > 1)
                    ended = commit(connection, batch, runtime, self._after(connection, batch, runtime))
                self.left += ended.left
                self._planner.record(claimed.request, ended)
                if ended.claimed is None:
                    return ended
                claimed = self.received(ended.claimed)
                if not (claimed.jobs or claimed.moved):
                    return ended
                # Now, because the connection may be lost after this.
                self.batch = None
                self.committed(ended)
            if not claimed.moved:
                return None
            # If this is not committed, a claim finds the suspects again by their marks.
            ended = Ended(BatchState.of(claimed).report())
            self._planner.record(claimed.request, ended)
        return ended

    def claim(self, connection: Connection, request: ClaimRequest) -> Claimed:
        """Send a claim by itself, and record the answer."""
        try:
            claimed = claim(connection, request)
        except BaseException:
            if self._counts_claims:
                self._vain_claims[ClaimsFailed, request.queue] += 1
            raise
        return self.received(claimed)

    def received(self, claimed: Claimed) -> Claimed:
        """Record the answer to a claim."""
        request, count = claimed.request, len(claimed.jobs)
        if self._counts_claims:
            if count:
                self._claims.append(JobsClaimed(request.queue, count, _now() - request.asked_at))
            else:
                self._vain_claims[ClaimsEmpty, request.queue] += 1
        calls_another = self._planner.record_claim(claimed, is_called=self.sleep.is_asleep)
        if count and self.sleep.is_asleep:
            self.sleep.end()
        if calls_another:
            self.state.wake_another(request.queue)
        return claimed

    def _after(self, connection: Connection, batch: BatchState, runtime: Runtime) -> ClaimRequest | None:
        """The claim that goes with the COMMIT of a batch, if any."""
        return None if is_listened_to(connection) or runtime.guard.left else self._planner.after(batch)

    def publish(self, report: BatchReport, parked: int = 0) -> None:
        """Count what was committed, and emit it after the events of claims; adds `parked` to the parked jobs."""
        state, events = self.state, report.events
        state.aggregate.add(events, report.claimed)
        if self._counts_claims and (self._claims or self._vain_claims):
            vain = (event(queue, count) for (event, queue), count in self._vain_claims.items())
            events = (*self._claims, *vain, *events)
            self._claims, self._vain_claims = [], Counter()
        # Most events are of jobs that are done, and most relays have no hook for them.
        are_done_wanted = state.has_use_for_done()
        for event in events:
            if are_done_wanted or type(event) is not JobDone:
                state.emit(state.recorded(event, parked) if isinstance(event, RECORDED) else event)

    def committed(self, ended: Ended) -> None:
        """Publish what was committed on the slot's connection, which works."""
        self._outages = 0
        if ended.report is not None:
            self.publish(ended.report)

    def _publish_last(self, connection: Connection, report: BatchReport, runtime: Runtime) -> None:
        """Park the jobs of unknown kinds of the last batch, with others at the head of the queue; publish the batch."""
        self._outages = 0
        parked, queue = 0, report.parked_in
        try:
            if queue is not None:
                kinds = runtime.orders.known_kinds(queue, runtime.registry.known_kinds(self.flavour))
                parked = park_unknown_kinds(connection, self.state.config.schema, queue, kinds)
        finally:
            self.publish(report, parked)

    def _send_left(self, connection: Connection) -> None:
        """Send the steps that could not go with a COMMIT; SQLAlchemy has no transaction open."""
        if self.left and not is_lost(connection):
            left, self.left = self.left, []
            for event in send_left(connection, left):
                self.state.emit(event)

    # Errors.

    def _recover_claim(self, connection: Connection, request: ClaimRequest, error: BaseException) -> Ended | None:
        """Find out the outcome of a claim that ended in `error`; raises `error` if the next one would, too.

        None if the slot leaves its queue for a moment, and claims from others.
        """
        if request.script.leased:
            request = self._leased.request or request
        if not isinstance(error, psycopg.Error | SQLAlchemyError) or is_lost(connection):
            raise error
        if request.script.lock and sqlstate_of(error) == LOCK_NOT_AVAILABLE:
            # It gave up because another claim of the queue hangs.
            self._planner.record_claim(Claimed(request, is_full=True), is_called=False)
            return None
        ended = recover_claim(connection, request, error, self.state.config.schema)
        self._planner.record(request, ended)
        if ended.report is not None:
            return ended
        if self.running or not request.sort.runs_by_itself:
            raise error
        # The suspect was not even claimed: ready jobs do not wait for it. The lease's next beat finds it again.
        logger.warning("suspects of queue %r could not be claimed: %s", request.queue, describe_refusal(error))
        self._planner.record_claim(Claimed(request), is_called=False)
        return None

    def _recover(self, connection: Connection, batch: BatchState, error: BaseException, runtime: Runtime) -> Ended:
        """Find out the outcome of a batch that ended in `error`; raises `error` if this connection does not show it."""
        running = self.running
        if isinstance(error, TransactionEscaped | LeaseLost):
            batch.owner.begin_recovery()
            if isinstance(error, JobRowHeld):
                self.state.lease.excuse(batch.job)
            try:
                ended = self._find_out(connection, batch, error, runtime)
            except (psycopg.Error, SQLAlchemyError) as refused:
                # The recovery's own writes were refused: the job is charged, or put off, as for any database error.
                error = refused
            else:
                if ended.report is None:
                    self.state.emit(BatchRolledBack(batch.queue, running, describe_error(error)))
                return replace(ended, report=ended.report or BatchReport(0, ()))
        elif not isinstance(error, psycopg.Error | SQLAlchemyError | WritesRefused):
            if runtime.guard.left is None or not runtime.is_failure(error):
                raise error
            # A handler left the cause on the connection: a listener, or a type that it registered.
            give_up(connection)
            raise ConnectionSpoiled(runtime.describe(error, batch.job)) from error
        if is_lost(connection) or batch.owner.is_seized:
            raise error
        self.state.emit(BatchRolledBack(batch.queue, running, describe_error(error)))
        ended = self._find_out(connection, batch, error, runtime)
        if ended.report is None:
            raise error
        return ended

    def _find_out(self, connection: Connection, batch: BatchState, error: BaseException, runtime: Runtime) -> Ended:
        ended = recover(connection, batch, error, runtime)
        self.batch = None
        self.left += ended.left
        self._planner.record(batch.claimed.request, ended)
        return ended

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
        self._goes_on = False
        runtime = self.runtime_on(connected)
        if self._lost_since is not None:
            self.state.emit(DatabaseBack(_now() - self._lost_since))
            self._lost_since = None
        self._leased.release(connected.connection)
        if self.batch is not None:
            lost = self._spoiled or ConnectionLost("the connection was lost while the job ran")
            ended = self._find_out(connected.connection, self.batch, lost, runtime)
            if ended.report is not None:
                self.publish(ended.report)
        self._spoiled = None
        return runtime

    def runtime_on(self, connected: SlotConnection) -> Runtime:
        """Make the runtime of handlers on this connection."""
        return self.state.runtime_on(connected, self.flavour, self._sharing_queues, self._is_interruption)

    def _is_interruption(self, error: BaseException) -> bool:
        # Not a KeyboardInterrupt: signals reach the main thread alone, where no handler runs. `is_abandoned`, because a
        # handler can cancel the slot's task too.
        return self.is_abandoned and is_cancellation(error)

    def _may_go_on(self, connected: SlotConnection) -> bool:
        """Return True to claim again on this connection: not if the relay stops, or a handler left something on it."""
        if self.state.stopping.is_set():
            return False
        left = connected.guard.left
        if left is None:
            return True
        self._goes_on = True
        if left not in self._noted:
            self._noted.add(left)
            logger.info("a handler's %s may outlive its transaction: its slot takes a new connection", left)
        return False

    def lost(self, error: BaseException) -> float:
        """Report a lost or refused connection, or an error of users' code on it; returns the seconds to the next try.

        Raises:
            LoginRefused: the database refuses the relay's login for too long.
        """
        self.state.login.failed(error)
        if isinstance(error, ConnectionSpoiled):
            # We closed it: the server is well.
            self._spoiled = error
            return 0.0
        self.sleep.want_poll()
        longest = min(_RECONNECT_FIRST_SECONDS * 2.0**self._outages, _RECONNECT_CAP_SECONDS)
        seconds = longest * random.uniform(0.5, 1.0)
        self._outages = min(self._outages + 1, _MOST_DOUBLINGS)
        if not isinstance(error, CONNECTION_ERRORS):
            # A user's listener on the engine raised: the connection is closed, and its transaction rolled back.
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


def _send(connection: Connection, query: Query) -> None:
    if query.is_alone:
        query.rows = run_alone(connection, query.statement)
    else:
        # After a statement with a COMMIT of its own the block has nothing to end.
        with connection.begin():
            query.rows = run_script(connection, query.statement)


def _now() -> float:
    return time.monotonic()
