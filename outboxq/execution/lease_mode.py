"""Lease mode: the jobs that a slot has claimed under its relay's lease, from the claim's COMMIT to their own.

Each handler runs by itself. Its rows are committed with its own job; jobs whose handlers wrote nothing wait until the
claim is worked off, and are removed together, each by its token, in the transaction that claims the next ones.

A claimed job waits for others, before its handler runs or after it. So a claim takes few jobs if handlers are slow, and
when it lasts longer than `held_seconds`, the waiting jobs are released: those that are done are removed, and those that
have not begun wait in the queue again, as if never claimed. The slot does that between two handlers, the enforcer of
deadlines during one.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outboxq.clock import clock
from outboxq.database.driver import (
    Answer,
    Script,
    end_transaction,
    is_listened_to,
    is_lost,
    pause,
    run_script,
    transaction_status,
)
from outboxq.database.errors import LOCK_NOT_AVAILABLE, sqlstate_of
from outboxq.events import Event, JobEvent, JobLeaseLost, JobsParked
from outboxq.execution.batch_state import BatchReport, Ended
from outboxq.execution.callback_batches import FinishBatches, batch_ids
from outboxq.execution.claim import Claimed, ClaimRequest
from outboxq.execution.errors import ConnectionLost
from outboxq.execution.keep import Keeper
from outboxq.execution.step import Step
from outboxq.fault_points import fault_point
from outboxq.job import Job
from outboxq.statements import limit
from outboxq.statements.by_index import NO_SCANS
from outboxq.statements.done import insert_finished
from outboxq.statements.lease_mode import finish_leased, release_leased, standing
from outboxq.statements.results import tell_waiters
from outboxq.statements.transaction import LOCAL_SETTINGS, local_timeouts

# The pause before a failed release is tried again.
_AGAIN_SECONDS = 1.0
# The interval at which a thread checks if another one has settled.
_CHECK_SECONDS = 0.01
# Tools that watch or cut a relay's sessions find the end of a job by these words.
_MARK = "/* as RELEASE SAVEPOINT oq_... */ "
# An operator's forgotten session may hold a row for ever. A reaper is done in a moment.
_PATIENCE = "SET LOCAL lock_timeout = '5s'"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseModeLimits:
    """Times of the claims of lease mode.

    Args:
        aim_seconds: The time that a claim should last; the number of jobs of the next claim follows from it.
        held_seconds: When a claim is this old, jobs that are done are committed, and jobs that have not begun are given
            back, at the next check.
    """

    aim_seconds: float = 0.05
    held_seconds: float = 0.2


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The jobs of a claim that are to be settled: those that ended, each with its event, and those that never ran.

    `unsure`: settling them was tried before, and the answer to its COMMIT was lost.
    """

    finished: tuple[JobEvent, ...]
    waiting: tuple[Job, ...]
    unsure: bool
    keeper: Keeper = field(default_factory=Keeper)
    stands_for: Mapping[UUID, tuple[UUID, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.finished or self.waiting)

    def add_to(self, script: Script, schema: str, *, keep: bool = True, free: bool = False) -> None:
        """Append the statements that settle the jobs, for a transaction that has just begun; "finished" has those lost.

        Args:
            keep: Write the finished rows of kinds with `keep=`.
            free: Settle only jobs whose rows no other transaction holds. The others stay under the lease, and a later
                beat of their relay takes them back.
        """
        done = (event.job for event in self.finished)
        rows = self.keeper.finished_rows(self.finished, self.stands_for) if keep else None
        kept = insert_finished(schema, rows, self.keeper.relay, gone=True) if rows is not None else ""
        # Their table refuses finished rows here, and not at COMMIT.
        checking = ("SET CONSTRAINTS ALL IMMEDIATE",) if kept else ()
        script.add("settings", *LOCAL_SETTINGS, _PATIENCE, NO_SCANS, *checking)
        if self.finished:
            script.add("finished", _MARK + finish_leased(schema, done, free=free, keeping=kept))
        if self.waiting:
            script.add("waiting", _MARK + release_leased(schema, self.waiting, free=free))
        if self.ended:
            script.add("ended", tell_waiters(schema, self.ended))

    @property
    def ended(self) -> list[UUID]:
        """The jobs that ended, of kinds whose results can be waited for."""
        return self.keeper.ended(self.finished, self.stands_for)

    def lost(self, answer: Answer) -> set[UUID]:
        """Return the jobs that were lost, by the answer to `add_to` and `add_question`."""
        lost = {job_id for (job_id,) in answer.rows.get("finished", ())}
        # A job whose row is gone is done: by the COMMIT whose answer was lost.
        return lost & {job_id for (job_id,) in answer.rows["standing"]} if self.is_asked else lost

    @property
    def is_asked(self) -> bool:
        """Return True if the jobs may have been settled before: then a query finds those that are in the table."""
        return self.unsure and bool(self.finished)

    def add_question(self, script: Script, schema: str) -> None:
        """Append the query for the jobs that are in the table, if they may have been settled before.

        After COMMIT, because only a new statement sees what was committed while the first one waited for a row; in the
        same string, because the answer to a separate query could be lost, and with it what was committed.
        """
        if self.is_asked:
            script.add("standing", standing(schema, (event.job for event in self.finished)))


@dataclass(slots=True)
class LeasedBatch:
    """The jobs of one claim, and their progress.

    The slot begins one after the other. If that lasts too long, the enforcer of deadlines takes the jobs not running.
    Only one of these two settles at a time, and the other waits: jobs that could not be settled come back here.
    """

    claimed: Claimed
    jobs: tuple[Job, ...]
    limits: LeaseModeLimits = field(default_factory=LeaseModeLimits)
    unknown: list[Job] = field(default_factory=list)
    keeper: Keeper = field(default_factory=Keeper)
    # The jobs that were taken along, by the id of the job that runs for them.
    stands_for: Mapping[UUID, tuple[UUID, ...]] = field(default_factory=dict)
    # The number of jobs of the claim that do not run: others run for them, or they wait for the next window.
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
    def queue(self) -> str:
        """The queue of the jobs."""
        return self.claimed.request.queue

    @property
    def is_worked_off(self) -> bool:
        """Return True if no job of the claim waits, or is being settled."""
        with self._lock:
            return not (self._waiting or self._finished or self._is_taken)

    @property
    def unsettled(self) -> int:
        """The number of jobs that wait, before their handler or after."""
        return len(self._waiting) + len(self._finished)

    def coalesce(self, jobs: tuple[Job, ...]) -> None:
        """Run only `jobs` of the claim; none has begun."""
        with self._lock:
            self.dropped += len(self.jobs) - len(jobs)
            self.jobs, self._waiting = jobs, deque(jobs)

    def begin(self, *, allowed: bool) -> Job | None:
        """Begin the next job, and return it: the first always, others if `allowed` while the claim is young."""
        with self._lock:
            if not self._waiting:
                return None
            is_first = len(self._waiting) == len(self.jobs)
            # By a clock that also counts the time for which this process was suspended.
            if not is_first and not (allowed and clock() - self.claimed_at < self.limits.held_seconds):
                return None
            return self._waiting.popleft()

    def finish(self, event: JobEvent) -> None:
        """Record that a handler has ended and wrote nothing."""
        with self._lock:
            self._finished.append(event)

    def parked(self) -> tuple[Event, ...]:
        """The event of the jobs that cannot run here, if any."""
        kinds = tuple(sorted({job.kind for job in self.unknown}))
        return (JobsParked(self.queue, kinds, len(self.unknown)),) if self.unknown else ()

    def take(self) -> Unsettled | None:
        """Take all waiting jobs, to be given to `settling`; return None if another thread has them."""
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
            # An error that is not the server's, such as a cancellation, may have come after COMMIT was sent.
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
        """Return True if the claim is too old while jobs wait; then False for a while.

        False until the first job has begun, which the slot always begins: only jobs that never began go back.
        """
        with self._lock:
            waits = len(self._waiting) < len(self.jobs) and bool(self._waiting or self._finished)
            wants = waits and not self._is_taken and clock() > self._release_after
            if wants:
                self._release_after = clock() + _AGAIN_SECONDS
            return wants

    def fitting(self) -> int:
        """The number of such jobs that fit into the time of a claim."""
        begun = len(self.jobs) - len(self._waiting)
        return int(begun * self.limits.aim_seconds / max(clock() - self.claimed_at, 1e-6))


def settle_leased(
    connection: Connection, leased: LeasedBatch, schema: str, next_claim: ClaimRequest | None = None
) -> Ended:
    """Settle the waiting jobs of a claim in the transaction of the next claim; return their events and that claim.

    If the next claim fails, the jobs are settled without it. If another transaction holds the row of a job, the others
    are settled, and that job stays under the lease. If the rows of finished jobs are refused, they are left out.

    Raises:
        ConnectionLost, psycopg.Error: all of the jobs wait on.
    """
    ids = batch_ids(leased.jobs)
    steps = (FinishBatches(schema, ids),) if ids else ()
    left, sent = (steps, ()) if is_listened_to(connection) else ((), steps)
    sending = _Sending(next_claim)
    while True:
        fault_point("before-commit")
        unsettled = _take(connection, leased)
        if unsettled.unsure:
            sending = replace(sending, next_claim=None)
        try:
            with leased.settling(unsettled, connection):
                answer = _send(connection, unsettled, schema, sending, sent)
            break
        except psycopg.Error as error:
            if is_lost(connection):
                raise ConnectionLost("the connection was lost while jobs were settled: all are, or none") from error
            if transaction_status(connection) != TransactionStatus.INERROR:
                # COMMIT itself was refused, usually for a lock that others have, and for no row.
                if sending.next_claim is None:
                    raise
                sending = replace(sending, next_claim=None)
                continue
            less = sending.after(error, leased.keeper)
            if less is None:
                # Perhaps an error of the claim: the jobs are settled alone when the slot has recovered.
                raise
            sending = less
            run_script(connection, "ROLLBACK")
    if sending.refusal is not None:
        leased.keeper.refused(sending.refusal)
    fault_point("after-commit")
    lost = unsettled.lost(answer)
    ended = tuple(JobLeaseLost(event.job) if event.job.id in lost else event for event in unsettled.finished)
    events = (*ended, *(event for step in sent for event in step.committed(answer.rows.get(step.name, ()))))
    if sending.next_claim is None or "claim" not in answer.rows:
        # A claim without rows in the answer is committed with the jobs: the lease's beats find jobs that no slot runs.
        return Ended(BatchReport(0, events), None, left)
    fault_point("before-claim")
    return Ended(BatchReport(0, events), sending.next_claim.read(answer), left)


@dataclass(frozen=True, slots=True)
class _Sending:
    """The way to settle the jobs of a claim: at first in the transaction of the next claim, after errors with less.

    `free`: without those whose rows are locked. `refusal`: without the rows of finished jobs, after this error.
    """

    next_claim: ClaimRequest | None
    free: bool = False
    refusal: psycopg.Error | None = None

    def after(self, error: psycopg.Error, keeper: Keeper) -> "_Sending | None":
        """Return the way to try after an error of the server; None if there is no other."""
        alone = replace(self, next_claim=None)
        if sqlstate_of(error) == LOCK_NOT_AVAILABLE and not self.free:
            return replace(alone, free=True)
        may_be_refusal = bool(keeper.kinds) and keeper.may_be_refusal(error)
        if self.next_claim is not None:
            return alone if self.next_claim.failed(error) or may_be_refusal else None
        # If it was the finished rows, it succeeds without them.
        return replace(self, refusal=error) if may_be_refusal and self.refusal is None else None


def _take(connection: Connection, leased: LeasedBatch) -> Unsettled:
    while (unsettled := leased.take()) is None:
        pause(connection, _CHECK_SECONDS)
    return unsettled


def _send(
    connection: Connection, unsettled: Unsettled, schema: str, sending: _Sending, steps: Sequence[Step]
) -> Answer:
    # One transaction: if the claim fails, the jobs wait on.
    script = Script()
    unsettled.add_to(script, schema, keep=sending.refusal is None, free=sending.free)
    if sending.next_claim is None:
        script.add("commit", "COMMIT")
    else:
        sending.next_claim.add_to(script)
    unsettled.add_question(script, schema)
    for step in steps:
        script.add(step.name, *step.after_commit())
    answer = script.send(connection)
    if not answer.is_committed:
        raise answer.error or AssertionError("COMMIT was answered with ROLLBACK")
    if answer.error is None:
        return answer
    if not is_lost(connection):
        run_script(connection, "ROLLBACK")
    if unsettled.is_asked and "standing" not in answer.rows:
        # Jobs that may be done wait for the next try.
        raise answer.error
    # The rest is for callback batches: left to the sweep.
    return replace(answer, error=None)


def release_waiting(connection: Connection, leased: LeasedBatch, schema: str) -> Ended:
    """Settle the waiting jobs of a claim, in their own transaction.

    Raises:
        ConnectionLost, psycopg.Error: the jobs wait on, and the slot or the enforcer tries again.
    """
    end_transaction(connection)
    with connection.begin():
        return Ended(None) if leased.is_worked_off else settle_leased(connection, leased, schema)


def take_slot(connection: Connection, schema: str, request: ClaimRequest) -> bool:
    """Take a slot of the limit of the request's queue until the transaction ends; return False if none is free.

    The server's deadlines are those of a job that is about to run in it.
    """
    most = request.script.most
    assert most is not None
    slot = limit.take_slot(schema, request.queue, most)
    return bool(run_script(connection, *local_timeouts(request.timeout_seconds), slot)[0][0])


def return_suspect(connection: Connection, schema: str, job: Job) -> None:
    """Put a suspect back that was claimed and did not begin, in the connection's transaction."""
    assert job.lease_token is not None
    run_script(
        connection,
        limit.return_suspect(schema, job.id, job.lease_token, job.crashes, in_group=job.group_key is not None),
    )
