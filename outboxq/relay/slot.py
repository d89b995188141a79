"""A slot: claims jobs in batches, runs them, commits their outcomes and emits the events, one batch after the other.

It has a connection while jobs wait: a sync `Connection`, for sync and for async handlers. `SlotLoop` is the loop around
it, in a thread or a task.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from typing import Protocol

from sqlalchemy import Connection

from outboxq.database.driver import is_listened_to, is_lost, run_alone, run_script
from outboxq.execution.batch_state import BatchReport, BatchState, Ended
from outboxq.execution.claim import Claimed, ClaimRequest, claim
from outboxq.execution.commit import commit, send_left
from outboxq.execution.errors import ConnectionLost, ConnectionSpoiled
from outboxq.execution.families import decide
from outboxq.execution.recovery import recover
from outboxq.execution.run import run
from outboxq.execution.runtime import Runtime, is_cancellation
from outboxq.execution.step import Step
from outboxq.fault_points import fault_point
from outboxq.handlers.handler import Flavour
from outboxq.relay.admission import Query, take_slot_again
from outboxq.relay.connections import SlotConnection
from outboxq.relay.idle import SlotSleep
from outboxq.relay.last_jobs import LastJobs
from outboxq.relay.outage import Outage
from outboxq.relay.parking import park_unknown_kinds
from outboxq.relay.planner import Planner
from outboxq.relay.poller import Order
from outboxq.relay.rolled_back import recover_claim_here, recover_here
from outboxq.relay.state import ClaimEvents, RelayState

logger = logging.getLogger("outboxq.relay")


class SlotWaits(Protocol):
    """The methods by which a slot or a dispatcher waits and borrows connections; its `SlotLoop` implements them."""

    def clear(self) -> None:
        """Forget earlier wake-ups of the slot, so that `wait` waits for the next one."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait until the slot is woken, and return True; return False after `seconds`."""
        ...

    def flagged_since(self, request: Future[float | None]) -> float | None:
        """Wait for the listener's answer to `request`, a second at most, and return it; None if there is none by then.

        The answer is the time (monotonic) since which all of the slot's sleep flags are up (locks that make producers
        notify), or None if they are not.
        """
        ...

    def on_connection(self, work: Callable[[SlotConnection], bool]) -> bool:
        """Borrow a connection, call `work` with it, and give it back; return the result of `work`."""
        ...


class Slot:
    """One slot, which runs batches of jobs one after the other.

    Attributes:
        batch: The batch that runs, or whose outcome is not known yet.
        left: Steps whose statements belong after a COMMIT, but could not be sent with it; they are sent as soon as
            possible.
        connected: The slot's connection; None while it sleeps.
        is_abandoned: True if the relay has cancelled, or will cancel, the slot's task.
    """

    def __init__(
        self,
        state: RelayState,
        flavour: Flavour,
        queues: tuple[str, ...],
        in_turns: Collection[str],
        wake: Callable[[], None],
    ) -> None:
        order = Order(queues, in_turns)
        self.state = state
        self.flavour: Flavour = flavour
        self.queues = queues
        self.in_turns = frozenset(in_turns)
        self.sleep = SlotSleep(state, order, wake)
        self.slots = 1
        self.batch: BatchState | None = None
        self.left: list[Step] = []
        self.connected: SlotConnection | None = None
        self.is_abandoned = False
        self._planner = Planner(state, order)
        self._last_jobs = LastJobs(state, queues)
        sizes = {name: state.registry.batch_size(name, state.config.batch_size) for name in queues}
        self._sharing_queues = frozenset(name for name, size in sizes.items() if size > 1)
        self._claims = ClaimEvents(state)
        self._noted: set[str] = set()
        # True if a handler may have left state on the connection, so that the slot goes on with another one.
        self._needs_connection = False
        self._outage = Outage(state)
        self._spoiled: ConnectionSpoiled | None = None

    @property
    def running(self) -> int:
        """The number of jobs that this slot has claimed and not finished."""
        # Read once, because other threads call this while the slot's thread may end the batch.
        batch = self.batch
        return 0 if batch is None else len(batch.jobs)

    @property
    def busy(self) -> int:
        """The number of busy slots: 1 while this slot has claimed jobs, otherwise 0.

        A dispatcher, which has several slots, has this property too.
        """
        return int(self.batch is not None)

    def goes_on(self) -> bool:
        """Return True until the relay stops, or takes this slot's batch away because a handler exceeds its time."""
        return not (self.state.stopping.is_set() or self.is_seized())

    @property
    def is_drained(self) -> bool:
        """Return True if the slot is to end as soon as `work` finds no more jobs, because the relay drains."""
        return self.state.until_empty

    def is_seized(self) -> bool:
        """Return True if the relay has taken the batch away, so that this slot must neither commit nor report it."""
        return self.batch is not None and self.batch.owner.is_seized

    @property
    def is_in_doubt(self) -> bool:
        """Return True if the slot lost its connection while jobs ran, so that their outcome is not known."""
        return self.batch is not None

    def wants_work(self) -> bool:
        """Return True if `work` is to be called: jobs may wait, or a lost connection left their outcome unknown."""
        has_reason = self.is_in_doubt or self._outage.since is not None or self._needs_connection
        return self.state.until_empty or has_reason or self.sleep.has_work()

    def close(self) -> None:
        """Do nothing: a slot has no resources of its own to close."""

    def end_turn(self) -> None:
        """Give up the slot's turn to run suspects (jobs that ran when their relay died).

        Called after the slot's batch was taken away.
        """
        self.state.quarantine.end_turn(self._planner)

    # Rounds of the slot's queues, each up to the first claim that takes jobs.

    def work(self, connected: SlotConnection) -> bool:
        """Claim and run jobs until none wait or the relay stops; return False if another connection is needed."""
        if self.state.until_empty:
            return self.drain(connected)
        with self._on(connected) as runtime:
            while self._may_go_on(connected) and self.work_once(connected, runtime):
                pass
        return not self._needs_connection

    def rest(self, loop: "SlotWaits") -> None:
        """Sleep until the slot is woken, or until a poll finds jobs.

        The slot has a connection only during a poll, and while it runs jobs that the poll found.
        """
        sleep, flagged = self.sleep, False
        loop.clear()
        while not self.state.stopping.is_set():
            if sleep.needs_connection() and loop.on_connection(self.work_seen):
                return
            if not flagged:
                request = sleep.fall_asleep()
                flagged = sleep.is_flagged(None if request is None else loop.flagged_since(request))
                if sleep.is_behind():
                    continue
            if loop.wait(sleep.pause_seconds(flagged=flagged)):
                sleep.want_poll()
                return

    def work_seen(self, connected: SlotConnection) -> bool:
        """Poll if a poll is due, and claim and run jobs while some are known to wait. Returns True if any were run."""
        worked = False
        with self._on(connected) as runtime:
            self.sleep.poll(connected.connection)
            while (worked or self.sleep.has_work()) and self._may_go_on(connected):
                if not self.work_once(connected, runtime):
                    break
                worked = True
        return worked

    def drain(self, connected: SlotConnection) -> bool:
        """Work until no jobs are left; return False if another connection is needed."""
        with self._on(connected) as runtime:
            work_once = partial(self.work_once, connected, runtime)
            while self._may_go_on(connected):
                began_at = time.monotonic()
                if not (work_once() or self._last_jobs.work_off(connected.connection, work_once, began_at)):
                    return True
            return self.state.stopping.is_set()

    def settle(self, connected: SlotConnection) -> bool:
        """Find out and write the outcome of jobs whose connection was lost, without claiming others.

        Returns True always.
        """
        with self._on(connected):
            return True

    def work_once(self, connected: SlotConnection, runtime: Runtime) -> bool:
        """Claim jobs from the first queue that has some, and run them.

        Also runs each batch that was claimed together with the COMMIT of the batch before it. Returns False if no queue
        of the slot has jobs.
        """
        connection = connected.connection
        self.sleep.begin_claims()
        # Closed after its jobs have ended, which also ends a turn that it has taken.
        with closing(self._planner.first(connected.server)) as asked:
            for each in asked:
                if isinstance(each, ClaimRequest):
                    if self._work(connection, each, runtime):
                        return True
                else:
                    send_query(connection, each)
        return False

    def _work(self, connection: Connection, request: ClaimRequest, runtime: Runtime) -> bool:
        """Send a claim and run its jobs, and then each batch that the COMMIT of the previous one has claimed.

        Returns False if the claim found no job.
        """
        run_all = self._run_leased if request.script.leased else self._run
        try:
            ended = run_all(connection, request, runtime)
        except BaseException as error:  # noqa: BLE001  # what is not settled here is raised again
            if self.batch is None:
                ended = recover_claim_here(self.state, self._planner, connection, request, error)
            else:
                ended = self._recover(connection, self.batch, error, runtime)
        self.batch = None
        if ended is not None and ended.report is not None:
            # First, because the batch has ended, and leftover steps may wait, or find the connection lost.
            self._publish_last(connection, ended.report, runtime)
        self._send_left(connection)
        return ended is not None

    def _run(self, connection: Connection, request: ClaimRequest, runtime: Runtime) -> Ended | None:
        """Send a claim and run its jobs in one transaction, then each batch that the COMMIT before it has claimed.

        Publishes the outcomes of all batches but the last, and returns how the last one ended. Returns None if the
        claim found no job.
        """
        fault_point("before-claim")
        with connection.begin():
            # The batches' own scripts commit; leaving the block ends, for SQLAlchemy, the transaction that the last
            # script began.
            claimed = self.claim(connection, request)
            while claimed.jobs:
                batch = self.batch = BatchState.of(claimed)
                handlers = decide(connection, batch, runtime)
                fault_point("after-claim")
                ended = None
                # None: COMMIT was refused, and the jobs run again. `commit` settles or raises other refusals.
                while ended is None:
                    run(connection, batch, runtime, handlers, shared=len(batch.jobs) > 1)
                    next_claim = self._after(connection, batch, runtime)
                    ended = commit(connection, batch, runtime, next_claim)
                self.left += ended.left
                self._planner.record(claimed.request, ended)
                if ended.claimed is None:
                    return ended
                claimed = self.received(ended.claimed)
                if not (claimed.jobs or claimed.moved):
                    return ended
                # Now, because the connection may be lost later.
                self.batch = None
                self.committed(ended)
            if not claimed.moved:
                return None
            # If this is not committed, a later claim finds the moved jobs by their marks.
            moved = BatchState.of(claimed)
            decide(connection, moved, runtime)
            ended = Ended(moved.report())
            self._planner.record(claimed.request, ended)
        return ended

    def _run_leased(self, connection: Connection, request: ClaimRequest, runtime: Runtime) -> Ended | None:
        """Claim a suspect and run it alone, under the relay's lease, not in the claim's transaction.

        A suspect is a job that ran when its relay died, and may have caused that. Returns how the run ended; None if no
        suspect waits, or if the queue's limit has no room for it.
        """
        fault_point("before-claim")
        with connection.begin():
            claimed = self.claim(connection, request)
        if not claimed.jobs:
            return None
        # If COMMIT's answer was lost, the lease's heartbeat finds the job.
        batch = self.batch = BatchState.of(claimed)
        handlers = decide(connection, batch, runtime)
        fault_point("after-claim")
        ended = None if batch.jobs else Ended(batch.report())
        # BEGIN is sent with the first statement, so no transaction is open while the handler works outside the
        # database.
        with connection.begin():
            if batch.jobs and not take_slot_again(connection, claimed, self.state.config.schema):
                self._planner.record_claim(Claimed(request, is_full=True), is_called=False)
                self.batch = None
                return None
            while ended is None:
                run(connection, batch, runtime, handlers, shared=False)
                ended = commit(connection, batch, runtime, None)
        self.left += ended.left
        self._planner.record(request, ended)
        return ended

    def claim(self, connection: Connection, request: ClaimRequest) -> Claimed:
        """Send a claim by itself (not with a COMMIT); record and return the answer."""
        try:
            claimed = claim(connection, request)
        except BaseException:
            self._claims.record_failure(request.queue)
            raise
        return self.received(claimed)

    def received(self, claimed: Claimed) -> Claimed:
        """Record the answer to a claim and return it; wake another slot if the claim may have left jobs."""
        request, count = claimed.request, len(claimed.jobs)
        self._claims.record(claimed)
        calls_another = self._planner.record_claim(claimed, is_called=self.sleep.is_asleep)
        if count and self.sleep.is_asleep:
            self.sleep.end()
        if calls_another:
            self.state.wake_another(request.queue)
        return claimed

    def _after(self, connection: Connection, batch: BatchState, runtime: Runtime) -> ClaimRequest | None:
        """Return the claim to send together with the COMMIT of a batch; None to send the COMMIT alone."""
        return None if is_listened_to(connection) or runtime.guard.left else self._planner.after(batch)

    def publish(self, report: BatchReport, parked: int = 0) -> None:
        """Count committed outcomes and emit their events, after the events of the claims that took the jobs.

        Args:
            parked: The number of further jobs that were parked (made to wait for a relay that knows their kind); the
                event counts them too.
        """
        self._claims.emit()
        self.state.publish(report, parked)

    def committed(self, ended: Ended) -> None:
        """Publish the outcomes of a batch that was committed, and record that the connection works."""
        self._outage.losses = 0
        if ended.report is not None:
            self.publish(ended.report)

    def _publish_last(self, connection: Connection, report: BatchReport, runtime: Runtime) -> None:
        """Publish the outcomes of the slot's last batch.

        If the batch had jobs of unknown kinds, which wait now, make others at the queue's head wait too (park them).
        """
        self._outage.losses = 0
        parked, queue = 0, report.parked_in
        try:
            if queue is not None:
                kinds = runtime.orders.known_kinds(queue, runtime.registry.known_kinds(self.flavour))
                parked = park_unknown_kinds(connection, self.state.config.schema, queue, kinds)
        finally:
            self.publish(report, parked)

    def _send_left(self, connection: Connection) -> None:
        """Send the statements that belong after a COMMIT, but could not be sent with it.

        SQLAlchemy must have no transaction open.
        """
        if self.left and not is_lost(connection):
            left, self.left = self.left, []
            for event in send_left(connection, left):
                self.state.emit(event)

    # Errors.

    def _recover(self, connection: Connection, batch: BatchState, error: BaseException, runtime: Runtime) -> Ended:
        """Find out, on a batch's own connection, what was committed of it before `error`, and write the other outcomes.

        Raises `error` if this connection cannot show that.
        """
        ended = recover_here(self.state, connection, batch, error, runtime, self.running)
        self._recovered(batch, ended)
        if ended.report is None:
            raise error
        return ended

    def _recovered(self, batch: BatchState, ended: Ended) -> None:
        self.batch = None
        self.left += ended.left
        self._planner.record(batch.claimed.request, ended)

    # The slot's connection.

    @contextmanager
    def _on(self, connected: SlotConnection) -> Iterator[Runtime]:
        """Use this connection in the block, and yield its `Runtime` (all that running a job needs, except the job).

        If an earlier connection was lost while jobs ran, their outcome is found out and written first.
        """
        try:
            yield self._take(connected)
        finally:
            self.connected = None

    def _take(self, connected: SlotConnection) -> Runtime:
        self.connected = connected
        self._needs_connection = False
        runtime = self.runtime_on(connected)
        self._outage.connected()
        if self.batch is not None:
            lost = self._spoiled or ConnectionLost("the connection was lost while the job ran")
            batch = self.batch
            ended = recover(connected.connection, batch, lost, runtime)
            self._recovered(batch, ended)
            if ended.report is not None:
                self.publish(ended.report)
        self._spoiled = None
        return runtime

    def runtime_on(self, connected: SlotConnection) -> Runtime:
        """Make the `Runtime` (all that executing a job needs, except the job) for this connection."""
        return self.state.runtime(
            self.flavour,
            connected.invoker,
            connected.guard,
            self._sharing_queues,
            self._is_interruption,
            connected,
        )

    def _is_interruption(self, error: BaseException) -> bool:
        # Not a KeyboardInterrupt: signals reach only the main thread, in which no handler runs. `is_abandoned`, because
        # a handler can cancel the slot's task too.
        return self.is_abandoned and is_cancellation(error)

    def _may_go_on(self, connected: SlotConnection) -> bool:
        """Return True if the slot may claim more jobs on this connection.

        It may not if the relay stops, or if a handler has changed the connection's state; then the slot needs another
        connection.
        """
        if self.state.stopping.is_set():
            return False
        left = connected.guard.left
        if left is None:
            return True
        self._needs_connection = True
        if left not in self._noted:
            self._noted.add(left)
            logger.info("a handler's %s may outlive its transaction: its slot takes a new connection", left)
        return False

    def lost(self, error: BaseException) -> float:
        """Report a lost or refused connection, or an error of users' code on it; return the seconds to wait.

        Raises:
            LoginRefused: the database has refused the relay's login for too long.
        """
        if isinstance(error, ConnectionSpoiled):
            # The relay closed it: the server is available.
            self._spoiled = error
            return 0.0
        self.sleep.want_poll()
        return self._outage.lost(error)


def send_query(connection: Connection, query: Query) -> None:
    """Send a query that the planner has yielded, and store its answer in it.

    SQLAlchemy must have no transaction open.
    """
    if query.is_alone:
        query.rows = run_alone(connection, query.statement)
    else:
        # After a statement with its own COMMIT the block has no transaction to end.
        with connection.begin():
            query.rows = run_script(connection, query.statement)
