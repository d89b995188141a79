"""A slot: one connection that claims and runs one batch at a time, and sleeps where nothing waits.

On a sync `Connection`, for both worlds; the thin loops around it are in `serve.py`.
"""

import concurrent.futures
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from outboxq.batch import ClaimedQueue, end_transaction, run_batches
from outboxq.callers import Callers
from outboxq.claim import Aside, ClaimRequest, PreparedClaims, clear_marks, park_unknown
from outboxq.cursors import Position, Sweeps
from outboxq.driver import driver_connection, is_lost, run_alone, run_script, sqlstate_of
from outboxq.engines import outage_reason
from outboxq.errors import LeaseLost
from outboxq.events import (
    BatchRolledBack,
    DatabaseBack,
    DatabaseLost,
    Emitter,
    JobCrashed,
    JobDied,
    JobDone,
    JobLeaseLost,
    JobRetried,
    JobsParked,
)
from outboxq.execute import ConnectionLost, TransactionEscaped, Work
from outboxq.failure import describe_failure
from outboxq.guard import Guard
from outboxq.handlers import Flavour
from outboxq.held import Held, relieve, run_held
from outboxq.invoke import Invoker
from outboxq.job import Job
from outboxq.lease import Lease, Suspects
from outboxq.listener import Listener, Sleeper
from outboxq.lookout import Lookout
from outboxq.progress import BatchReport, Progress
from outboxq.recover import charge, lost_with, recover, resolve, settle_late
from outboxq.registry import Registry
from outboxq.statements.claim import ClaimScript, ClaimStatements
from outboxq.statements.durability import server_epoch
from outboxq.statements.lease import suspect_queues
from outboxq.statements.listen import calls_away
from outboxq.statements.session import local_timeouts

logger = logging.getLogger("outboxq.relay")

FIRST_PAUSE_SECONDS = 0.01
# Without the sleep flag nobody promises to wake us: look again at least this often.
UNFLAGGED_PAUSE_SECONDS = 1.0
# So long, at least and at most, a slot claims with each COMMIT the next jobs of the same sort; then it looks at all of
# its queues again. Where that takes long, as over a slow network, less often: it may take this part of the time.
_FOLLOW_LEAST_SECONDS, _FOLLOW_MOST_SECONDS, _WALK_SHARE = 0.1, 1.0, 0.05
# A drain that meets suspects waits so often, and so long each time, for its lease.
_LEASE_WAITS, _LEASE_WAIT_SECONDS = 500, 0.02
_NO_LIMIT = 1_000_000
_RECONNECT_FIRST_SECONDS = 0.1
_RECONNECT_CAP_SECONDS = 10.0


@dataclass(slots=True)
class Tally:
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
        self.failed += of[JobRetried] + of[JobDied] + of[JobCrashed]
        self.died += of[JobDied] + sum(event.died for event in crashes)
        self.leases_lost += of[JobLeaseLost]


@dataclass(slots=True, eq=False)
class Shared:
    """What all slots of a relay share."""

    registry: Registry
    state: object
    schema: str
    batch_size: int
    poll_seconds: float
    until_empty: bool
    emit: Emitter
    listener: Listener | None
    lookout: Lookout
    lease: Lease
    suspects: Suspects
    sweeps: Sweeps
    max_crashes: int
    callers: Callers
    stopping: threading.Event
    tally: Tally
    lock: threading.Lock


class Slot:
    """The claims of one slot, and its pauses."""

    def __init__(self, shared: Shared, flavour: Flavour, queues: tuple[str, ...], wake: Callable[[], None]) -> None:
        self.shared = shared
        self.flavour: Flavour = flavour
        self.queues = queues
        self.sleeper = Sleeper(queues, wake)
        self.progress: Progress | None = None
        # What is claimed under the lease besides the job that runs.
        self.held: Held | None = None
        self._statements = {name: ClaimStatements(shared.schema, name, shared.lease.owner) for name in queues}
        self._queues = {name: ClaimedQueue(name, shared.registry.timeout_seconds(name)) for name in queues}
        self._due_first = dict.fromkeys(queues, False)
        self._batch_sizes = {name: shared.registry.batch_size(name, shared.batch_size) for name in queues}
        # Of jobs in a claim: deadlocks grow with the locks that a batch holds.
        self._most = _NO_LIMIT
        self._asides = {name: Aside(calls_away(shared.schema, queues, name), self._is_called) for name in queues}
        self._most_leased = dict.fromkeys(queues, 1)
        self._positions = {name: Position(name, shared.sweeps) for name in queues}
        self._prepared: PreparedClaims | None = None
        self._request: ClaimRequest | None = None
        self._asked = self._queues[queues[0]]
        self._follow_until = 0.0
        self._is_called_away = False
        self._walks_since: float | None = None
        self._asleep = False
        self._lease_waits = 0
        self._alone_for = 0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._looked = shared.lookout.latest
        self._lost_since: float | None = None
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS

    @property
    def running(self) -> int:
        """How many jobs are claimed here."""
        progress, held = self.progress, self.held
        return (0 if progress is None else len(progress.jobs)) + (0 if held is None else held.unsettled)

    def is_seized(self) -> bool:
        """Whether the relay has taken the batch away from this slot, which then has nothing more to say about it."""
        progress = self.progress
        return progress is not None and progress.seized

    def prepare(self, connection: Connection, invoker: Invoker) -> Work:
        """Set the connection up for claiming."""
        # Turned off where there is a pooler, or for reasons of the user's.
        prepares = driver_connection(connection).prepare_threshold is not None
        self._prepared = PreparedClaims() if prepares else None
        work = self.work_on(connection, invoker)
        if self._lost_since is not None:
            self.shared.emit(DatabaseBack(_now() - self._lost_since))
            self._lost_since = None
        self._relieve(connection)
        report = self._settle_doubt(connection, work, ConnectionLost("the connection was lost while the job ran"))
        if report is not None:
            self.tell(report)
        return work

    def work_on(self, connection: Connection, invoker: Invoker) -> Work:
        """What executing on this connection needs."""
        shared = self.shared
        with connection.begin():
            epoch = server_epoch(connection)
        caller = shared.callers.sync if self.flavour == "sync" else shared.callers.asynchronous
        return Work(
            shared.registry,
            shared.state,
            invoker,
            Guard(connection),
            shared.schema,
            shared.max_crashes,
            epoch,
            caller,
            sharing_queues=frozenset(name for name, size in self._batch_sizes.items() if size > 1),
        )

    def work_once(self, connection: Connection, work: Work) -> bool:
        """Claim and run one batch from the first queue that has one; False where nothing waits."""
        self._walks_since = _now()
        return any(self._work_on_queue(connection, name, work) for name in self.queues)

    def _work_on_queue(self, connection: Connection, name: str, work: Work) -> bool:
        if name in self.shared.suspects.queues and self._run_suspect(connection, name, work):
            return True
        return any(self._work_with(connection, name, script, work) for script in self._scripts(name))

    def _work_with(self, connection: Connection, name: str, script: ClaimScript, work: Work) -> bool:
        """Run batches of one sort for a while; False where none waits."""
        report = self._run(connection, name, script, work)
        if report is None and self._is_behind_cursor():
            # Behind the cursor is nothing any more: before it may be.
            report = self._run(connection, name, script, work)
        if report is not None:
            self._after(connection, name, report, work)
        return report is not None

    def _is_behind_cursor(self) -> bool:
        return self._request is not None and self._request.cursor is not None

    def _run_suspect(self, connection: Connection, name: str, work: Work) -> bool:
        """Run one suspect of a queue, if it is this slot's turn; False where none waits."""
        suspects = self.shared.suspects
        if not suspects.take_turn(self):
            return False
        try:
            if not self.shared.lease.want():
                return False
            report = self._run(connection, name, self._statements[name].lease_suspect, work)
            if report is not None:
                self._after(connection, name, report, work)
            else:
                suspects.queues.discard(name)
            return report is not None
        finally:
            suspects.end_turn(self)

    def drain_suspects(self, connection: Connection, work: Work) -> bool:
        """Look whether suspects wait, and run one; False where a drain has nothing more to wait for."""
        with connection.begin():
            rows = run_script(connection, suspect_queues(self.shared.schema, self.queues))[0].rows
        self.shared.suspects.queues.update(str(row[0]) for row in rows)
        if rows and not self.shared.lease.want():
            self._lease_waits += 1
            return self.shared.lease.wait(_LEASE_WAIT_SECONDS) or self._lease_waits < _LEASE_WAITS
        return any(self._run_suspect(connection, str(row[0]), work) for row in rows)

    def _scripts(self, name: str) -> tuple[ClaimScript, ...]:
        # Alternating, so that neither a backlog of ready jobs nor one of due jobs starves the other.
        statements = self._statements[name]
        if self.shared.registry.claims[name] == "lease":
            ready, due = statements.lease_ready, statements.lease_due
        else:
            ready, due = statements.ready, statements.due
        self._due_first[name] = not self._due_first[name]
        return (due, ready) if self._due_first[name] else (ready, due)

    def _run(self, connection: Connection, name: str, script: ClaimScript, work: Work) -> BatchReport | None:
        try:
            report = self._run_or_recover(connection, self._ask(name, script), work)
        except (psycopg.Error, SQLAlchemyError) as error:
            if self.progress is None and not is_lost(connection) and self._request and self._request.failed(error):
                # Nothing was claimed, and the transaction is over.
                self._relieve(connection)
                return self._run(connection, name, script, work)
            if is_lost(connection) or self.progress is None or self.is_seized():
                raise
            self.shared.emit(BatchRolledBack(name, self.running, describe_error(error)))
            end_transaction(connection)
            report = self._settle_doubt(connection, work, error)
            if report is None:
                raise
        self._relieve(connection)
        if report is None and script.is_keyed:
            self._positions[name].move_to_start()
        self.progress = None
        return report

    def _ask(self, name: str, script: ClaimScript) -> ClaimRequest:
        queue = self._queues[name]
        cursor = self._positions[name].start() if script.is_keyed else None
        self._asked = queue
        limit = self._limit(name, script)
        self._request = ClaimRequest(script, limit, cursor, local_timeouts(queue.timeout_seconds), self._prepared)
        return self._request

    def _limit(self, name: str, script: ClaimScript) -> int:
        if self._alone_for or script is self._statements[name].lease_suspect:
            return 1
        return min(self._batch_sizes[name], self._most_leased[name] if script.leased else self._most)

    def _run_or_recover(self, connection: Connection, request: ClaimRequest, work: Work) -> BatchReport | None:
        try:
            run = run_held if request.script.leased else run_batches
            return run(connection, self._asked, request, work, self)
        except TransactionEscaped as escaped:
            failure: TransactionEscaped | LeaseLost = escaped
        except LeaseLost as lost:
            failure = lost
        progress = self.progress
        assert progress is not None
        progress.begin_recovery()
        end_transaction(connection)
        if isinstance(failure, LeaseLost):
            return BatchReport(1, (JobLeaseLost(progress.job),))
        return recover(connection, progress, work, failure)

    def started(self, progress: Progress) -> None:
        """See `Pilot`."""
        self.progress = progress
        self._has_claimed(progress.queue, progress.jobs, progress.moved)

    def holds(self, held: Held | None) -> None:
        """See `Holder`."""
        self.held = held
        if held is not None:
            self._has_claimed(held.queue, held.jobs, 0)

    def runs(self, progress: Progress | None) -> None:
        """See `Holder`."""
        self.progress = progress

    def may_begin(self) -> bool:
        """See `Holder`."""
        return not self.shared.stopping.is_set() and self.shared.lease.want()

    def _has_claimed(self, queue: str, jobs: tuple[Job, ...], moved: int) -> None:
        self._pause_seconds = FIRST_PAUSE_SECONDS
        if self._walks_since is not None:
            self._is_called_away = False
            self._follow_until = _now() + follow_seconds(_now() - self._walks_since)
            self._walks_since = None
        request = self._request
        assert request is not None
        if request.script.is_keyed:
            self._positions[queue].move(request, jobs, moved)
        if self._asleep and self.shared.listener is not None:
            self._asleep = False
            self.shared.listener.wake_up(self.sleeper)

    def following(self, progress: Progress) -> ClaimRequest | None:
        """See `Pilot`. Now and then the queues before this one, other sorts of jobs and suspects have their turn."""
        if progress.is_leased:
            held = self.held
            is_last = held is not None and held.is_worked_off and not progress.unknown
            return self.following_held(held) if held is not None and is_last else None
        request = self._request
        assert request is not None
        half = max(1, len(progress.jobs) // 2)
        self._most = _power_of_two(half) if progress.deadlocked else min(self._most * 2, _NO_LIMIT)
        is_full = len(progress.jobs) >= request.limit and not (self._alone_for or progress.unknown)
        return self._ask_on(progress.queue, request.script) if is_full else None

    def following_held(self, held: Held) -> ClaimRequest | None:
        """See `Holder`. The faster its handlers were, the more jobs the next claim takes."""
        request = self._request
        assert request is not None
        most = max(1, min(2 * request.limit, held.fitting()))
        self._most_leased[held.queue] = _power_of_two(most)
        is_suspect = request.script is self._statements[held.queue].lease_suspect
        is_full = len(held.jobs) >= request.limit and not (self._alone_for or is_suspect or held.unknown)
        return self._ask_on(held.queue, request.script) if is_full else None

    def _ask_on(self, name: str, script: ClaimScript) -> ClaimRequest | None:
        if self.shared.stopping.is_set():
            return None
        if _now() <= self._follow_until:
            return self._ask(name, script)
        if self._is_called_away or self._has_suspects() or not script.is_keyed or script.leased:
            return None
        return replace(self._ask(name, script), aside=self._asides[name])

    def _is_called(self, row: tuple[object, ...]) -> None:
        """Whether the slot goes to look at its other queues after the jobs that it has just claimed."""
        self._is_called_away = row[0] is True
        if not self._is_called_away:
            self._follow_until = _now() + follow_seconds(0.0)

    def _relieve(self, connection: Connection) -> None:
        """Settle what the slot still holds of a claim that did not end in order."""
        if self.held is not None:
            report = relieve(connection, self.held, self.shared.schema)
            self.held = None
            self.tell(report)

    def ended(self, report: BatchReport) -> None:
        """See `Pilot`."""
        # Told once, also if the connection is lost before the next jobs are known.
        self.progress = None
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS
        self.tell(report)

    def _settle_doubt(self, connection: Connection, work: Work, error: BaseException) -> BatchReport | None:
        """What became of the batch that ended in `error`; None where it waits again as it was."""
        progress = self.progress
        if progress is None:
            return None
        progress.begin_recovery()
        report = resolve(connection, progress)
        if report is None:
            report = self._rolled_back(connection, progress, work, error)
        self.progress = None
        return report

    def _rolled_back(
        self, connection: Connection, progress: Progress, work: Work, error: BaseException
    ) -> BatchReport | None:
        if isinstance(error, ConnectionLost) and progress.late_result is not None:
            return settle_late(connection, progress, work, progress.late_result)
        if isinstance(error, ConnectionLost):
            # Whether a job did it is found out where it runs alone: in transaction mode its claim's mark sees to that.
            return lost_with(connection, progress.job, work) if progress.is_leased else None
        if not progress.is_leased:
            with connection.begin():
                clear_marks(connection, self.shared.schema, progress.jobs)
        # Nobody's fault could be found while they shared a transaction: the next ones run alone.
        self._alone_for = len(progress.jobs)
        job = progress.lone_job
        return None if job is None else charge(connection, job, describe_failure(error, job), work)

    def _after(self, connection: Connection, name: str, report: BatchReport, work: Work) -> None:
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS
        self._alone_for = max(0, self._alone_for - report.claimed)
        if report.suspected:
            self.shared.suspects.queues.add(name)
        parked = 0
        try:
            if report.parked:
                with connection.begin():
                    parked = park_unknown(connection, self.shared.schema, name, work.registry.known_kinds(self.flavour))
        finally:
            self.tell(report, parked)

    def tell(self, report: BatchReport, parked: int = 0) -> None:
        """Count and emit what was committed."""
        with self.shared.lock:
            self.shared.tally.add(report)
        for event in report.events:
            if isinstance(event, JobCrashed) and not event.died:
                self.shared.suspects.queues.add(event.queue)
            self.shared.emit(replace(event, count=event.count + parked) if isinstance(event, JobsParked) else event)

    def fall_asleep(self) -> "concurrent.futures.Future[bool] | None":
        """Ask for the sleep flags; None where this relay does not listen."""
        if self.shared.listener is None:
            return None
        self._asleep = True
        return self.shared.listener.fall_asleep(self.sleeper)

    def work_seen(self, connection: Connection, work: Work, *, fresh: bool) -> bool:
        """As `work_once`, where a look says that something waits.

        Args:
            fresh: Whether nothing but a look that begins now will do.
        """
        shared = self.shared
        taken = shared.lookout.take(None if fresh else self._looked)
        if taken is not None:
            rows = run_alone(connection, shared.lookout.statement)
            shared.lookout.saw(taken, rows)
            shared.suspects.queues.update(str(name) for name, _, _, suspected in rows if suspected)
        if not (shared.lookout.is_waiting(self.queues) or self._has_suspects()):
            return False
        return self.work_once(connection, work)

    def _has_suspects(self) -> bool:
        return not self.shared.suspects.queues.isdisjoint(self.queues)

    def pause_seconds(self, *, flagged: bool) -> float:
        """How long to sleep: up to the next scheduled job, and growing up to the poll interval since the last look."""
        shared = self.shared
        growing = min(self._pause_seconds, UNFLAGGED_PAUSE_SECONDS, shared.poll_seconds)
        self._pause_seconds = min(self._pause_seconds * 2, shared.poll_seconds)
        self._looked = shared.lookout.latest
        if self._has_suspects():
            return growing
        pause = (shared.poll_seconds if flagged else growing) * random.uniform(0.8, 1.0)
        due = shared.lookout.due_in_seconds(self.queues)
        # Due, and yet not claimed: another transaction runs it. Not a reason to spin.
        return min(max(self._looked.begun_at + pause - _now(), 0.0), due if due > 0 else growing)

    def lost(self, error: BaseException) -> float:
        """Report a lost or refused connection; returns how long to wait before the next try."""
        pause = self._reconnect_seconds * random.uniform(0.5, 1.0)
        self._reconnect_seconds = min(self._reconnect_seconds * 2, _RECONNECT_CAP_SECONDS)
        if is_outage(error):
            self._lost_since = self._lost_since or _now()
            self.shared.emit(DatabaseLost(describe_error(error), pause))
        else:
            logger.warning(
                "the relay's statements fail, trying again: %s", describe_error(error), extra={"retry_seconds": pause}
            )
        return pause


def follow_seconds(walk_seconds: float) -> float:
    """How long a slot stays with one sort of jobs, after a look at all of its queues that took so long."""
    return min(max(walk_seconds / _WALK_SHARE, _FOLLOW_LEAST_SECONDS), _FOLLOW_MOST_SECONDS)


def _power_of_two(limit: int) -> int:
    """The next lower one: a backend keeps each claim that it has prepared, and there is one for each limit."""
    return 1 << (limit.bit_length() - 1)


def is_outage(error: BaseException) -> bool:
    """Whether the server is gone, going, starting or full, and not merely at odds with a statement."""
    sqlstate = sqlstate_of(error)
    # 25006: a standby, which will be promoted, or is not the server that was meant.
    return sqlstate is None or sqlstate[:2] in ("08", "53", "57") or sqlstate == "25006"


def describe_error(error: BaseException) -> str:
    """The type of an error, and its SQLSTATE or a known reason: driver texts may hold a host, a user or a value."""
    original: object = error.orig if isinstance(error, DBAPIError) else error
    reason = sqlstate_of(error) or (outage_reason(error) if isinstance(error, DBAPIError | psycopg.Error) else None)
    return f"{type(original).__name__}{f' ({reason})' if reason else ''}"


def _now() -> float:
    return time.monotonic()
