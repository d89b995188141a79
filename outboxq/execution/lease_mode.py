"""Lease mode: the jobs that a slot has claimed under its relay's lease, from the claim's COMMIT to their own.

Each handler runs by itself. What it writes is committed with its own job; jobs whose handlers wrote nothing wait until
the claim is worked off, and are removed together, each by its token, in the transaction that claims the next ones.

A claimed job waits for others, before its handler runs or after it. So a claim takes few jobs if handlers are slow, and
when it lasts longer than `held_seconds`, the waiting jobs are released: those that are done are removed, and those that
have not begun wait in the queue again, as if they had never been claimed. The slot does that between two handlers, the
enforcer of deadlines during one.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outboxq.clock import clock
from outboxq.database.driver import ScriptResult, end_transaction, is_lost, pause, run_script, transaction_status
from outboxq.database.errors import LOCK_NOT_AVAILABLE, sqlstate_of
from outboxq.events import Event, JobEvent, JobLeaseLost, JobsParked
from outboxq.execution.batch_state import BatchReport
from outboxq.execution.claim import Claimed, ClaimRequest
from outboxq.execution.errors import ConnectionLost
from outboxq.execution.keep import Keeper
from outboxq.fault_points import fault_point
from outboxq.job import Job
from outboxq.statements.done import GIVING_WAY, keep_jobs
from outboxq.statements.lease_mode import BY_KEYS, finish_leased, release_leased, standing
from outboxq.statements.results import tell_waiters
from outboxq.statements.transaction import LOCAL_SETTINGS

# A release that failed is tried again so much later.
_AGAIN_SECONDS = 1.0
# How often a thread that waits until another one has settled checks whether it has.
_CHECK_SECONDS = 0.01
# Tools that watch or cut a relay's sessions know by these words what ends a job.
_MARK = "/* as RELEASE SAVEPOINT oq_... */ "
# An operator's forgotten session may hold a row for ever. A reaper is done in a moment.
_PATIENCE = "SET LOCAL lock_timeout = '5s'; "


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseModeLimits:
    """How long the claims of lease mode last.

    Args:
        aim_seconds: How long a claim is meant to last; the number of jobs of the next claim follows from it.
        held_seconds: When a claim is this old, jobs that are done are committed, and jobs that have not begun are given
            back, at the next check.
    """

    aim_seconds: float = 0.05
    held_seconds: float = 0.2


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The jobs of a claim that are to be settled: those that are over, each with its event, and those that never ran.

    `unsure`: settling them was tried before, and the answer to its COMMIT was lost.
    """

    finished: tuple[JobEvent, ...]
    waiting: tuple[Job, ...]
    unsure: bool
    keeper: Keeper = field(default_factory=Keeper)
    stands_for: Mapping[UUID, tuple[UUID, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.finished or self.waiting)

    def script(self, schema: str, *, keep: bool = True, free: bool = False) -> str:
        """The statements that settle the jobs, for a transaction that has just begun; the first returns the lost ones.

        Args:
            keep: With the rows of those of them whose kinds keep finished jobs.
            free: Settle only jobs whose rows no other transaction holds. The others stay under the lease, and a later
                beat of their relay takes them back.
        """
        done = (event.job for event in self.finished)
        rows = self.keeper.kept(self.finished, self.stands_for) if keep else None
        kept = keep_jobs(schema, rows, self.keeper.relay, gone=True) + GIVING_WAY if rows is not None else ""
        finishing = f"{finish_leased(schema, done, free=free, keeping=kept)}; " if self.finished else ""
        # What their table refuses is refused with them, and not by COMMIT.
        checking = "SET CONSTRAINTS ALL IMMEDIATE; " if kept else ""
        telling = f"{tell_waiters(schema, self.ended)}; " if self.ended else ""
        giving_back = f"{release_leased(schema, self.waiting, free=free)}; " if self.waiting else ""
        return f"{LOCAL_SETTINGS}{_PATIENCE}{BY_KEYS}{checking}{_MARK}{finishing}{giving_back}{telling}"

    @property
    def ended(self) -> list[UUID]:
        """The jobs that are over, of kinds whose results can be waited for."""
        return self.keeper.ended(self.finished, self.stands_for)

    def question(self, schema: str) -> str:
        """The query after COMMIT: which of the jobs are in the table, if they may have been settled before.

        After COMMIT, because only a new statement sees what was committed while the first one waited for a row; in the
        same string, because the answer to a query of its own could be lost, and with it what was committed.
        """
        jobs = (event.job for event in self.finished)
        return f"; {standing(schema, jobs)}" if self.unsure and self.finished else ""


@dataclass(slots=True)
class LeasedBatch:
    """The jobs of one claim, and how far they have come.

    The slot begins one after the other. If that lasts too long, the enforcer of deadlines takes the jobs not running.
    Only one of these two settles at a time, and the other waits: jobs that could not be settled come back here.
    """

    queue: str
    jobs: tuple[Job, ...]
    limits: LeaseModeLimits = field(default_factory=LeaseModeLimits)
    unknown: list[Job] = field(default_factory=list)
    keeper: Keeper = field(default_factory=Keeper)
    # The jobs that were taken along, by the id of the job that runs for them.
    stands_for: Mapping[UUID, tuple[UUID, ...]] = field(default_factory=dict)
    # How many jobs of the claim do not run: others of it run for them, or they wait for the next window of their keys.
    dropped: int = 0
    claimed_at: float = field(init=False)
    _waiting: deque[Job] = field(init=False)
    _finished: list[JobEvent] = field(default_factory=list)
    _unsure: bool = False
    _is_taken: bool = False
    _release_after: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._waiting = deque(self.jobs)
        self.claimed_at = clock()
        self._release_after = self.claimed_at + self.limits.held_seconds

    @property
    def is_worked_off(self) -> bool:
        """Whether no job of the claim waits any more, or is just being settled."""
        with self._lock:
            return not (self._waiting or self._finished or self._is_taken)

    @property
    def unsettled(self) -> int:
        """How many jobs wait, before their handler or behind it."""
        return len(self._waiting) + len(self._finished)

    def coalesce(self, jobs: tuple[Job, ...]) -> None:
        """Have only `jobs` run, of the claim, of which none has begun."""
        with self._lock:
            self.dropped += len(self.jobs) - len(jobs)
            self.jobs, self._waiting = jobs, deque(jobs)

    def begin(self, *, allowed: bool) -> Job | None:
        """The job whose turn it is: the first one always, others if `allowed` and while the claim is young."""
        with self._lock:
            if not self._waiting:
                return None
            is_first = len(self._waiting) == len(self.jobs)
            # By a clock that also counts the time for which this process stood still.
            if not is_first and not (allowed and clock() - self.claimed_at < self.limits.held_seconds):
                return None
            return self._waiting.popleft()

    def finish(self, event: JobEvent) -> None:
        """Record that a handler has ended and wrote nothing."""
        with self._lock:
            self._finished.append(event)

    def parked(self) -> tuple[Event, ...]:
        """The event of the jobs that no handler here can run, if there are any."""
        kinds = tuple(sorted({job.kind for job in self.unknown}))
        return (JobsParked(self.queue, kinds, len(self.unknown)),) if self.unknown else ()

    def take(self) -> Unsettled | None:
        """Take ownership of all waiting jobs, to be given to `settling`; None if another thread has them."""
        with self._lock:
            if self._is_taken:
                return None
            jobs = tuple(self._finished), tuple(self._waiting)
            taken = Unsettled(*jobs, self._unsure, self.keeper, self.stands_for)
            self._is_taken = True
            self._finished.clear()
            self._waiting.clear()
            return taken

    @contextmanager
    def settling(self, taken: Unsettled, connection: Connection) -> Iterator[None]:
        """Settle jobs that were taken; after any error they wait again, as `unsure` if they may have been settled."""
        try:
            yield
        except BaseException as error:
            # An error that is no answer of the server, such as a cancellation, may have come after COMMIT was sent.
            self._put_back(taken, unsure=not isinstance(error, psycopg.Error) or is_lost(connection))
            raise
        with self._lock:
            self._is_taken = False

    def _put_back(self, taken: Unsettled, *, unsure: bool) -> None:
        with self._lock:
            self._is_taken = False
            self._finished[:0] = taken.finished
            self._waiting.extendleft(reversed(taken.waiting))
            self._unsure |= unsure

    def wants_release(self) -> bool:
        """Whether the claim is too old while jobs wait; after a True, False for a while.

        False until the first job has begun, which the slot begins in any case: only jobs that never began go back.
        """
        with self._lock:
            waits = len(self._waiting) < len(self.jobs) and bool(self._waiting or self._finished)
            wants = waits and not self._is_taken and clock() > self._release_after
            if wants:
                self._release_after = clock() + _AGAIN_SECONDS
            return wants

    def fitting(self) -> int:
        """How many such jobs fit into the time that a claim is meant to last."""
        begun = len(self.jobs) - len(self._waiting)
        return int(begun * self.limits.aim_seconds / max(clock() - self.claimed_at, 1e-6))


def settle_leased(
    connection: Connection, leased: LeasedBatch, schema: str, next_claim: ClaimRequest | None = None
) -> tuple[tuple[Event, ...], Claimed | None]:
    """Settle the waiting jobs of a claim in the transaction of the next claim; returns their events and that claim.

    If the next claim fails, the jobs are settled without it. If another transaction holds the row of a job, the others
    are settled, and that job stays under the lease. If the rows of finished jobs are refused, they are left out.

    Raises:
        ConnectionLost, psycopg.Error: all of the jobs wait on.
    """
    sending = _Sending(next_claim)
    while True:
        fault_point("before-commit")
        unsettled = _take(connection, leased)
        if unsettled.unsure:
            sending = replace(sending, next_claim=None)
        try:
            with leased.settling(unsettled, connection):
                results = _send(connection, unsettled, schema, sending)
            break
        except psycopg.Error as error:
            if is_lost(connection):
                raise ConnectionLost("the connection was lost while jobs were settled: all are, or none") from error
            if transaction_status(connection) != TransactionStatus.INERROR:
                # COMMIT itself was refused, mostly for a lock that others have, and for no row.
                if sending.next_claim is None:
                    raise
                sending = replace(sending, next_claim=None)
                continue
            less = sending.after(error, leased.keeper)
            if less is None:
                # Perhaps an error of the claim: the jobs are settled by themselves when the slot has recovered.
                raise
            sending = less
            run_script(connection, "ROLLBACK")
    if sending.refusal is not None:
        leased.keeper.refused(sending.refusal)
    fault_point("after-commit")
    events = _events(unsettled, results)
    if sending.next_claim is None:
        return events, None
    fault_point("before-claim")
    return events, sending.next_claim.read(results)


@dataclass(frozen=True, slots=True)
class _Sending:
    """How the jobs of a claim are settled: at first in the transaction of the next claim, and after errors with less.

    `free`: without those whose rows are locked. `refusal`: without the rows of finished jobs, after this error.
    """

    next_claim: ClaimRequest | None
    free: bool = False
    refusal: psycopg.Error | None = None

    def after(self, error: psycopg.Error, keeper: Keeper) -> "_Sending | None":
        """What to send after an error of the server; None if it would be the same again."""
        alone = replace(self, next_claim=None)
        if sqlstate_of(error) == LOCK_NOT_AVAILABLE and not self.free:
            return replace(alone, free=True)
        may_be_refusal = bool(keeper.kinds) and keeper.may_be_refusal(error)
        if self.next_claim is not None:
            return alone if self.next_claim.failed(error) or may_be_refusal else None
        # Whether the rows of finished jobs were refused shows without them.
        return replace(self, refusal=error) if may_be_refusal and self.refusal is None else None


def _take(connection: Connection, leased: LeasedBatch) -> Unsettled:
    while (unsettled := leased.take()) is None:
        pause(connection, _CHECK_SECONDS)
    return unsettled


def _send(connection: Connection, unsettled: Unsettled, schema: str, sending: _Sending) -> list[ScriptResult]:
    # One transaction: if the claim fails, the jobs wait on.
    end = "COMMIT" if sending.next_claim is None else sending.next_claim.text()
    settling = unsettled.script(schema, keep=sending.refusal is None, free=sending.free)
    results = run_script(connection, settling + end + unsettled.question(schema))
    if not any(result.tag == "COMMIT" for result in results):
        raise AssertionError(f"COMMIT was not answered, but {results[-1].tag}")
    return results


def _events(unsettled: Unsettled, results: list[ScriptResult]) -> tuple[Event, ...]:
    """The events of the jobs that were over; takes the results of their statements out of `results`."""
    if not unsettled.finished:
        return ()
    # In this order: what was lost, and what was told to waiters.
    places = [place for place, result in enumerate(results) if result.tag.startswith("SELECT")]
    if unsettled.ended:
        del results[places[1]]
    lost = {job_id for (job_id,) in results.pop(places[0]).rows}
    if unsettled.unsure:
        # A job whose row is gone is done: by the COMMIT whose answer was lost.
        lost &= {job_id for (job_id,) in results[-1].rows}
    return tuple(JobLeaseLost(event.job) if event.job.id in lost else event for event in unsettled.finished)


def release_waiting(connection: Connection, leased: LeasedBatch, schema: str) -> BatchReport:
    """Settle the waiting jobs of a claim, in a transaction of their own.

    Raises:
        ConnectionLost, psycopg.Error: the jobs wait on, and the slot or the enforcer tries again.
    """
    end_transaction(connection)
    with connection.begin():
        return BatchReport(0, () if leased.is_worked_off else settle_leased(connection, leased, schema)[0])
