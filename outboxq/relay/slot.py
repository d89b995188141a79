"""A slot: it claims and runs one batch at a time, on a line that it has while something waits.

On a sync `Connection`, for both worlds; the thin loops around it are in `serve.py`.
"""

import logging
import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from uuid import UUID

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from outboxq.database.driver import give_up, is_lost, pause, run_alone, run_script
from outboxq.database.errors import NoConnection, outage_reason, sqlstate_of
from outboxq.errors import LeaseLost
from outboxq.events import (
    BatchRolledBack,
    DatabaseBack,
    DatabaseLost,
    JobCrashed,
    JobLeaseLost,
    JobsParked,
    JobsSuspected,
)
from outboxq.execution.aside import is_of_a_row, set_aside_first
from outboxq.execution.attempt import ConnectionLost, ConnectionSpoiled, Runtime, TransactionEscaped, is_cancellation
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.execution.claim import ClaimRequest, clear_marks, forgive, park_unknown
from outboxq.execution.failure import describe_failure
from outboxq.execution.lease_mode import LeasedBatch, release_waiting, run_held
from outboxq.execution.recovery import (
    find_outcome,
    held_up,
    postpone,
    record_failed_attempt,
    recover,
    return_to_suspects,
    settle_on_new_connection,
)
from outboxq.execution.settle import JobRowHeld
from outboxq.execution.transaction_mode import end_transaction, run_batches
from outboxq.handlers.handler import Flavour
from outboxq.job import Job
from outboxq.relay.claim_planner import ClaimPlanner
from outboxq.relay.connections import SlotConnection
from outboxq.relay.idle import SlotSleep
from outboxq.relay.poller import Order
from outboxq.relay.state import RelayState
from outboxq.statements.claim import ClaimScript
from outboxq.statements.lease import suspect_queues

logger = logging.getLogger("outboxq.relay")

# query_canceled: by a time-out, or by a call of pg_cancel_backend().
_CANCELLED = "57014"
# So many jobs of each sort are compared with one that cannot be claimed.
_COMPARED = 10
# A drain that meets suspects waits so often, and so long each time, for its lease.
_LEASE_WAITS, _LEASE_WAIT_SECONDS = 500, 0.02
_RECONNECT_FIRST_SECONDS = 0.1
# How long, and how often, a slot asks for the end of a transaction whose connection it has closed.
_RESOLVE_SECONDS, _RETRY_SECONDS = 10.0, 0.005
_RECONNECT_CAP_SECONDS = 10.0


class Slot:
    """The claims of one slot, and its pauses."""

    def __init__(
        self,
        shared: RelayState,
        flavour: Flavour,
        queues: tuple[str, ...],
        wake: Callable[[], None],
        in_turns: Collection[str] = (),
    ) -> None:
        order = Order(queues, in_turns)
        self.shared = shared
        self.flavour: Flavour = flavour
        self.queues = queues
        self.in_turns = frozenset(in_turns)
        self.sleep = SlotSleep(shared, order, wake)
        self.line: SlotConnection | None = None
        # Its task was, or will be, cancelled by the relay.
        self.is_abandoned = False
        self.progress: BatchState | None = None
        # What is claimed under the lease besides the job that runs.
        self.leased_batch: LeasedBatch | None = None
        self._claims = ClaimPlanner(shared, order)
        self._told: set[str] = set()
        # It left its line for another one, with work to do.
        self._goes_on = False
        # Since the last look at its queues.
        self._has_found = True
        self._is_rested = True
        self._lease_waits = 0
        self._lost_since: float | None = None
        self._spoiled: ConnectionSpoiled | None = None
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS

    @property
    def running(self) -> int:
        """How many jobs are claimed here."""
        progress, held = self.progress, self.leased_batch
        return (0 if progress is None else len(progress.jobs)) + (0 if held is None else held.unsettled)

    def is_seized(self) -> bool:
        """Whether the relay has taken the batch away from this slot, which then has nothing more to say about it."""
        progress = self.progress
        return progress is not None and progress.seized

    def wants_work(self) -> bool:
        """Whether there is something to do: to claim, or to find out what became of a lost connection's jobs."""
        is_in_doubt = self.progress is not None or self.leased_batch is not None or self._lost_since is not None
        return is_in_doubt or self._goes_on or self.sleep.is_called()

    def _take(self, line: SlotConnection) -> Runtime:
        self.line = line
        self._claims.prepared = line.prepared
        if self._goes_on or self._spoiled is not None or self._lost_since is not None:
            self._claims.begin_anew()
        self._goes_on = False
        self.shared.called_functions.answer(line.connection)
        work = self.work_on(line)
        if self._lost_since is not None:
            self.shared.emit(DatabaseBack(_now() - self._lost_since))
            self._lost_since = None
        connection = line.connection
        self._relieve(connection)
        lost = self._spoiled or ConnectionLost("the connection was lost while the job ran")
        report = self._settle_doubt(connection, work, lost)
        self._spoiled = None
        if report is not None:
            self.publish(report)
        return work

    def work_on(self, line: SlotConnection) -> Runtime:
        """What executing on this line needs."""
        shared = self.shared
        caller = shared.effect_runners.sync if self.flavour == "sync" else shared.effect_runners.asynchronous
        return Runtime(
            shared.registry,
            shared.state,
            line.invoker,
            line.guard,
            shared.schema,
            shared.max_crashes,
            line.epoch,
            caller,
            sharing_queues=self._claims.sharing_queues,
            is_interruption=self._is_interruption,
        )

    def _is_interruption(self, error: BaseException) -> bool:
        # Not a KeyboardInterrupt: signals reach the main thread alone, where no handler runs. And a handler can cancel
        # the slot's task too.
        return self.is_abandoned and is_cancellation(error)

    @contextmanager
    def _on(self, line: SlotConnection) -> Iterator[Runtime]:
        """Work on this line. What a lost one has left is settled first."""
        try:
            yield self._take(line)
        finally:
            self.line = None

    def work_all(self, line: SlotConnection) -> bool:
        """Claim and run what waits, until nothing does or the relay stops; False where another line is needed."""
        with self._on(line) as work:
            self._work_on(line, work)
        return not self._goes_on

    def work_seen(self, line: SlotConnection) -> bool:
        """Look if that is due, and work if something is seen to wait; False where nothing was done."""
        with self._on(line) as work:
            self.sleep.look(line.connection)
            return self.sleep.is_called() and self._work_on(line, work)

    def drain(self, line: SlotConnection) -> bool:
        """Work until nothing waits, suspects included; False where another line is needed."""
        with self._on(line) as work:
            connection = line.connection
            while not (self.shared.stopping.is_set() or self._needs_line(line)):
                if not (self.work_once(connection, work) or self.drain_suspects(connection, work)):
                    return True
            return self.shared.stopping.is_set()

    def _work_on(self, line: SlotConnection, work: Runtime) -> bool:
        worked, self._is_rested = False, True
        while not self.shared.stopping.is_set():
            if self._needs_line(line):
                break
            if not self.work_once(line.connection, work):
                break
            worked = True
        return worked

    def _needs_line(self, line: SlotConnection) -> bool:
        """Whether the next job has to start on another line, because a handler left something on this one."""
        left = line.guard.left
        if left is None:
            return False
        self._goes_on = True
        self.shared.called_functions.ask_for(line.guard.called)
        if left not in self._told:
            self._told.add(left)
            logger.info("a handler's %s may outlive its transaction: its slot takes a new connection", left)
        return True

    def work_once(self, connection: Connection, work: Runtime) -> bool:
        """Claim and run the jobs of a turn; False where nothing waits."""
        self._claims.begin_walk()
        self.sleep.works()
        if any(self._run_suspect(connection, name, work) for name in self._suspected()):
            return True
        if len(self.queues) == 1:
            # A claim tells as much as a look.
            name = self.queues[0]
            self.shared.poller.go(name)
            return any(self._work_with(connection, name, script, work) for script in self._claims.sorts(name))
        while (turn := self._next_turn(connection)) is not None:
            if self._work_with(connection, *turn, work):
                return True
        return False

    def _suspected(self) -> tuple[str, ...]:
        found = self.shared.quarantine.queues
        return tuple(name for name in self.queues if name in found) if found else ()

    def _next_turn(self, connection: Connection) -> tuple[str, ClaimScript] | None:
        """Where to claim next, after a look if the last one is old, or if all that it named was claimed."""
        if self._claims.wants_look() and not self._is_rested:
            self._look(connection)
        self._is_rested = False
        turn = self._claims.take_turn()
        if turn is None and self._has_found:
            self._look(connection)
            turn = self._claims.take_turn()
        return turn

    def _look(self, connection: Connection) -> None:
        """Look at the queues of this slot."""
        lookout, begun = self.shared.poller, _now()
        taken = lookout.begin()
        rows = run_alone(connection, lookout.statement_for(self.queues))
        lookout.record(taken, rows, self.queues)
        self.shared.quarantine.queues.update(str(name) for name, _, _, suspected in rows if suspected)
        self._claims.look_seconds = _now() - begun
        self._claims.is_called_away = self._has_found = False

    def _work_with(self, connection: Connection, name: str, script: ClaimScript, work: Runtime) -> bool:
        """Run batches of one sort for a while; False where none waits."""
        report = self._run(connection, name, script, work)
        if report is None and self._claims.is_behind_cursor:
            # Behind the cursor is nothing any more: before it may be.
            report = self._run(connection, name, script, work)
        if report is not None:
            self._after(connection, report, work)
        return report is not None

    def _run_suspect(self, connection: Connection, name: str, work: Runtime) -> bool:
        """Run one suspect of a queue, if it is this slot's turn; False where none waits."""
        suspects = self.shared.quarantine
        if not suspects.take_turn(self):
            return False
        try:
            if not self.shared.lease.want():
                return False
            report = self._run_first_suspect(connection, name, work)
            if report is not None:
                self._after(connection, report, work)
            else:
                suspects.queues.discard(name)
            return report is not None
        finally:
            suspects.end_turn(self)

    def _run_first_suspect(self, connection: Connection, name: str, work: Runtime) -> BatchReport | None:
        try:
            return self._run(connection, name, self._claims.suspects(name), work)
        except (psycopg.Error, SQLAlchemyError) as error:
            if is_lost(connection) or self.running:
                raise
            # Not even claimed: the ready jobs do not wait for it. The lease's next beat finds the suspects again.
            logger.warning("suspects of queue %r could not be claimed: %s", name, describe_error(error))
            return None

    def drain_suspects(self, connection: Connection, work: Runtime) -> bool:
        """Look whether suspects wait, and run one; False where a drain has nothing more to wait for."""
        with connection.begin():
            rows = run_script(connection, suspect_queues(self.shared.schema, self.queues))[0].rows
        self.shared.quarantine.queues.update(str(row[0]) for row in rows)
        if rows and not self.shared.lease.want():
            self._lease_waits += 1
            return self.shared.lease.wait(_LEASE_WAIT_SECONDS) or self._lease_waits < _LEASE_WAITS
        return any(self._run_suspect(connection, str(row[0]), work) for row in rows)

    def _run(self, connection: Connection, name: str, script: ClaimScript, work: Runtime) -> BatchReport | None:
        try:
            report = self._run_or_recover(connection, self._claims.ask(name, script), work)
        except (psycopg.Error, SQLAlchemyError) as error:
            request = self._claims.request
            if self.progress is None and not is_lost(connection) and request is not None:
                # Nothing was claimed, and the transaction is over.
                if request.failed(error):
                    self._relieve(connection)
                    return self._run(connection, name, script, work)
                report = self._forgive(connection, request, work, error)
                if report is not None:
                    return report
            if is_lost(connection) or self.progress is None or self.is_seized():
                raise
            self.shared.emit(BatchRolledBack(self.progress.queue, self.running, describe_error(error)))
            end_transaction(connection)
            report = self._settle_doubt(connection, work, error)
            if report is None:
                raise
        if report is not None and self.leased_batch is not None:
            # Told now: settling the others may fail.
            self.publish(replace(report, claimed=0))
            report = replace(report, events=())
        self._relieve(connection)
        if report is None:
            self._claims.found_nothing(name, script)
        self.progress = None
        return report

    def _forgive(
        self, connection: Connection, request: ClaimRequest, work: Runtime, error: BaseException
    ) -> BatchReport | None:
        """A claim that was answered with an error killed nothing; one that was cancelled is too large.

        What failed for one row of several goes on one by one, to the row that is to blame. None where it would fail
        again.
        """
        if sqlstate_of(error) == _CANCELLED:
            self._claims.cancelled()
        # Whatever it is, it may ail this too: it is the claim's error that counts.
        with suppress(psycopg.Error, SQLAlchemyError):
            picked = self._picked(connection, request)
            if request.limit > 1 and is_of_a_row(error):
                self._claims.alone_for = request.limit
                return BatchReport(0, ())
            if picked:
                alike = self._claims.taking_alike(request.script, request.queue)
                asked = ((script, ClaimRequest(script, _COMPARED)) for script in alike)
                behind = [(script, job_id) for script, more in asked for job_id in self._picked(connection, more)]
                others = [other for other in behind if other[1] != picked[0]]
                first = request.script, picked[0]
                events = set_aside_first(connection, work.schema, first, others, error)
                return None if events is None else BatchReport(0, events)
        return None

    def _picked(self, connection: Connection, request: ClaimRequest) -> list[UUID]:
        with connection.begin():
            return forgive(connection, request)

    def _run_or_recover(self, connection: Connection, request: ClaimRequest, work: Runtime) -> BatchReport | None:
        try:
            run = run_held if request.script.leased else run_batches
            return run(connection, request, work, self)
        except TransactionEscaped as escaped:
            failure: TransactionEscaped | LeaseLost = escaped
        except LeaseLost as lost:
            failure = lost
        except (psycopg.Error, SQLAlchemyError, ConnectionLost):
            raise
        except BaseException as error:
            # By something of a handler's that is still on the connection: a listener, or a type that it registered.
            if self.progress is None or work.guard.left is None or not work.is_failure(error):
                raise
            give_up(connection)
            raise ConnectionSpoiled(describe_failure(error, self.progress.job)) from error
        progress = self.progress
        assert progress is not None
        progress.begin_recovery()
        end_transaction(connection)
        if isinstance(failure, JobRowHeld):
            self.shared.lease.excuse(progress.job)
            return held_up(connection, progress.job, work)
        if isinstance(failure, LeaseLost):
            return BatchReport(1, (JobLeaseLost(progress.job),))
        report = recover(connection, progress, work, failure)
        if report is None:
            self.shared.emit(BatchRolledBack(progress.queue, self.running, describe_error(failure)))
            # Whose fault it was shows when each runs alone.
            self._claims.alone_for = len(progress.jobs)
            return BatchReport(0, ())
        return report

    def started(self, progress: BatchState) -> None:
        """See `Pilot`."""
        self.progress = progress
        self._has_claimed(progress.queue, progress.jobs, progress.moved)

    def holds(self, held: LeasedBatch | None) -> None:
        """See `Holder`."""
        self.leased_batch = held
        if held is not None:
            self._has_claimed(held.queue, held.jobs, 0)

    def runs(self, progress: BatchState | None) -> None:
        """See `Holder`."""
        self.progress = progress

    def may_begin(self) -> bool:
        """See `Holder`."""
        return not self.shared.stopping.is_set() and self.shared.lease.want()

    def _has_claimed(self, queue: str, jobs: tuple[Job, ...], moved: int) -> None:
        self._claims.took(queue, jobs, moved)
        calls_another = self.sleep.is_asleep and self._claims.is_more(jobs, moved)
        self.sleep.found_jobs()
        if calls_another:
            self.shared.call(queue)

    def following(self, progress: BatchState) -> ClaimRequest | None:
        """See `Pilot`."""
        if not progress.is_leased:
            return self._claims.following(progress)
        held = self.leased_batch
        is_last = held is not None and held.is_worked_off and not progress.unknown
        return self.following_held(held) if held is not None and is_last else None

    def following_held(self, held: LeasedBatch) -> ClaimRequest | None:
        """See `Holder`."""
        return self._claims.following_held(held)

    def _relieve(self, connection: Connection) -> None:
        """Settle what the slot still holds of a claim that did not end in order."""
        if self.leased_batch is not None:
            report = release_waiting(connection, self.leased_batch, self.shared.schema)
            self.leased_batch = None
            self.publish(report)

    def ended(self, report: BatchReport) -> None:
        """See `Pilot`."""
        # Told once, also if the connection is lost before the next jobs are known.
        self.progress = None
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS
        self.publish(report)

    def _settle_doubt(self, connection: Connection, work: Runtime, error: BaseException) -> BatchReport | None:
        """What became of the batch that ended in `error`; None where it waits again as it was."""
        progress = self.progress
        if progress is None:
            return None
        progress.begin_recovery()
        report = _resolve_soon(connection, progress) if self._spoiled else find_outcome(connection, progress)
        if report is None:
            report = self._rolled_back(connection, progress, work, error)
        self.progress = None
        return report

    def _rolled_back(
        self, connection: Connection, progress: BatchState, work: Runtime, error: BaseException
    ) -> BatchReport | None:
        if isinstance(error, ConnectionLost) and progress.late_result is not None:
            return settle_on_new_connection(connection, progress, work, progress.late_result)
        if isinstance(error, ConnectionSpoiled) and progress.together == 1:
            return record_failed_attempt(connection, progress.job, error.failed, work, progress.jobs)
        if isinstance(error, ConnectionLost) and not isinstance(error, ConnectionSpoiled):
            # Whether a job did it is found out where it runs alone: in transaction mode its claim's mark sees to that.
            return return_to_suspects(connection, progress.job, work) if progress.is_leased else None
        if not progress.is_leased:
            with connection.begin():
                clear_marks(connection, self.shared.schema, progress.jobs)
        # Nobody's fault could be found while they shared a transaction: the next ones run alone.
        self._claims.alone_for = len(progress.jobs)
        job = progress.lone_job
        if job is None:
            return None
        if work.handler_of(job) is None:
            # It could not even be parked.
            return postpone(connection, job, work)
        return record_failed_attempt(connection, job, describe_failure(error, job), work)

    def _after(self, connection: Connection, report: BatchReport, work: Runtime) -> None:
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS
        self._has_found = True
        self._claims.alone_for = max(0, self._claims.alone_for - report.claimed)
        parked, queue = 0, report.parked_in
        try:
            if queue is not None:
                parked = self._park_unknown(connection, queue, work)
        finally:
            self.publish(report, parked)

    def _park_unknown(self, connection: Connection, queue: str, work: Runtime) -> int:
        kinds = work.registry.known_kinds(self.flavour)
        try:
            with connection.begin():
                return park_unknown(connection, self.shared.schema, queue, kinds)
        except psycopg.Error as error:
            if not is_of_a_row(error):
                raise
            logger.warning("jobs of unknown kinds in queue %r are put off one by one: %s", queue, describe_error(error))
        # One by one, as they are claimed.
        with connection.begin():
            park_unknown(connection, self.shared.schema, queue, kinds, only_marks=True)
        return 0

    def publish(self, report: BatchReport, parked: int = 0) -> None:
        """Count and emit what was committed."""
        with self.shared.lock:
            self.shared.counters.add(report)
        for event in report.events:
            if isinstance(event, JobsSuspected) or (isinstance(event, JobCrashed) and not event.died):
                self.shared.quarantine.queues.add(event.queue)
            self.shared.emit(replace(event, count=event.count + parked) if isinstance(event, JobsParked) else event)

    def pause_seconds(self, *, flagged: bool) -> float:
        """How long to sleep."""
        self._claims.expect_ready()
        return self.sleep.pause_seconds(flagged=flagged)

    def lost(self, error: BaseException) -> float:
        """Report a lost or refused connection; returns how long to wait before the next try."""
        if isinstance(error, ConnectionSpoiled):
            # Closed by us: the server is well.
            self._spoiled = error
            return 0.0
        self.sleep.want_look()
        pause = self._reconnect_seconds * random.uniform(0.5, 1.0)
        self._reconnect_seconds = min(self._reconnect_seconds * 2, _RECONNECT_CAP_SECONDS)
        if is_database_unavailable(error):
            self._lost_since = self._lost_since or _now()
            self.shared.emit(DatabaseLost(describe_error(error), pause))
        else:
            logger.warning(
                "the relay's statements fail, trying again: %s", describe_error(error), extra={"retry_seconds": pause}
            )
        return pause


def _resolve_soon(connection: Connection, progress: BatchState) -> BatchReport | None:
    """As `find_outcome`, where the server is about to see that we have closed the transaction's connection."""
    deadline = _now() + _RESOLVE_SECONDS
    while True:
        try:
            return find_outcome(connection, progress)
        except ConnectionLost:
            if _now() > deadline:
                raise
            pause(connection, _RETRY_SECONDS)


def is_database_unavailable(error: BaseException) -> bool:
    """Whether the server is gone, going, starting or full, and not merely at odds with a statement."""
    sqlstate = sqlstate_of(error)
    if sqlstate is None:
        return True
    # 25006: a standby, which will be promoted, or is not the server that was meant. A cancelled statement is no outage.
    return (sqlstate[:2] in ("08", "53", "57") and sqlstate != _CANCELLED) or sqlstate == "25006"


def describe_error(error: BaseException) -> str:
    """The type of an error, and its SQLSTATE or a known reason: driver texts may hold a host, a user or a value."""
    if isinstance(error, NoConnection):
        return type(error.__cause__).__name__
    original: object = error.orig if isinstance(error, DBAPIError) else error
    reason = sqlstate_of(error) or (outage_reason(error) if isinstance(error, DBAPIError | psycopg.Error) else None)
    return f"{type(original).__name__}{f' ({reason})' if reason else ''}"


def _now() -> float:
    return time.monotonic()
