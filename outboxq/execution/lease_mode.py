"""Held: the jobs that a slot has claimed under its relay's lease, from the claim's COMMIT to their own.

Each handler runs by itself. What it writes is committed with its own job; jobs whose handlers wrote nothing wait until
the claim is worked off, and are removed together, each by its token, in the transaction that claims the next ones.

A job that waits, before its handler or behind it, waits for others. So a claim takes few jobs where handlers are slow,
and when it lasts longer than `HELD_SECONDS` it is relieved: what is done is removed, and what has not begun waits in
the queue again, as if it had never been claimed. The slot does that between two handlers, the relay's watch during one.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import psycopg
from sqlalchemy import Connection

from outboxq.clock import clock
from outboxq.database.driver import is_lost, pause, run_script
from outboxq.database.errors import sqlstate_of
from outboxq.events import Event, JobEvent, JobLeaseLost, JobsParked
from outboxq.execution.attempt import ConnectionLost, Runtime
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.execution.claim import Claimed, ClaimRequest, claim
from outboxq.execution.transaction_mode import Pilot, end_transaction, is_listened_to, work_off
from outboxq.fault_points import fault_point
from outboxq.job import Job
from outboxq.statements.lease_mode import BY_KEYS, finish_held, give_back_held, standing
from outboxq.statements.transaction import LOCAL_SETTINGS

# As long as that a claim is meant to last; so many more or fewer jobs does the next one take.
AIM_SECONDS = 0.05
# A handler's end is committed, and a job that has not begun is given back, at the latest when a claim is that old and
# somebody has looked.
HELD_SECONDS = 0.2
# A relief that failed is tried again so much later.
_AGAIN_SECONDS = 1.0
# Who has to wait until another thread has settled looks so often whether it has.
_LOOK_SECONDS = 0.01
# Whoever watches or cuts a relay's sessions knows by these words what ends a job.
_MARK = "/* as RELEASE SAVEPOINT oq_... */ "
# An operator's forgotten session may hold a row for ever. A reaper is done in a moment.
_PATIENCE = "SET LOCAL lock_timeout = '5s'; "
_LOCK_NOT_AVAILABLE = "55P03"


@dataclass(frozen=True, slots=True)
class Unsettled:
    """What is to be settled of the jobs of a claim: those that are over, each with its event, and those that never ran.

    `unsure`: it was tried before, and the answer to its COMMIT was lost.
    """

    finished: tuple[JobEvent, ...]
    waiting: tuple[Job, ...]
    unsure: bool

    def __bool__(self) -> bool:
        return bool(self.finished or self.waiting)

    def script(self, schema: str, *, free: bool = False) -> str:
        """The statements that settle it, for a transaction that has just begun; the first one names the lost jobs.

        Args:
            free: Only what no other transaction holds. The rest stays under the lease, and its relay's beat takes it
                back when nobody holds it any more.
        """
        done = (event.job for event in self.finished)
        finishing = f"{finish_held(schema, done, free=free)}; " if self.finished else ""
        giving_back = f"{give_back_held(schema, self.waiting, free=free)}; " if self.waiting else ""
        return f"{LOCAL_SETTINGS}{_PATIENCE}{BY_KEYS}{_MARK}{finishing}{giving_back}"

    def question(self, schema: str) -> str:
        """What is asked behind COMMIT: which of the jobs are there, where they may have been settled before.

        Behind it, because only a new statement sees what was committed while the first one waited for it; and with it,
        because an answer of its own could be lost with all that was committed.
        """
        jobs = (event.job for event in self.finished)
        return f"; {standing(schema, jobs)}" if self.unsure and self.finished else ""


@dataclass(slots=True)
class LeasedBatch:
    """The jobs of one claim, and how far they have come.

    The slot begins one after the other. The relay's watch takes away what does not run, where that lasts too long. One
    of them settles at a time, and the other waits for it: what could not be settled comes back, and nobody else has it.
    """

    queue: str
    jobs: tuple[Job, ...]
    unknown: list[Job] = field(default_factory=list)
    claimed_at: float = field(init=False)
    _waiting: deque[Job] = field(init=False)
    _finished: list[JobEvent] = field(default_factory=list)
    _unsure: bool = False
    _is_taken: bool = False
    _relieved_after: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._waiting = deque(self.jobs)
        self.claimed_at = clock()
        self._relieved_after = self.claimed_at + HELD_SECONDS

    @property
    def is_worked_off(self) -> bool:
        """Whether nothing of it waits any more, nor is just being settled."""
        with self._lock:
            return not (self._waiting or self._finished or self._is_taken)

    @property
    def unsettled(self) -> int:
        """How many jobs wait, before their handler or behind it."""
        return len(self._waiting) + len(self._finished)

    def begin(self, *, allowed: bool) -> Job | None:
        """The job whose turn it is; the first one always, the others while it is allowed and the claim is young."""
        with self._lock:
            if not self._waiting:
                return None
            is_first = len(self._waiting) == len(self.jobs)
            # The age counts also what this process did not notice, because it stood still.
            if not is_first and not (allowed and clock() - self.claimed_at < HELD_SECONDS):
                return None
            return self._waiting.popleft()

    def finish(self, event: JobEvent) -> None:
        """A handler has ended and wrote nothing."""
        with self._lock:
            self._finished.append(event)

    def parked(self) -> tuple[Event, ...]:
        """What is to be told of the jobs that nobody here can run."""
        kinds = tuple(sorted({job.kind for job in self.unknown}))
        return (JobsParked(self.queue, kinds, len(self.unknown)),) if self.unknown else ()

    def take(self) -> Unsettled | None:
        """Everything that waits, for who settles it, until it is `settled` or `put_back`; None where another does."""
        with self._lock:
            if self._is_taken:
                return None
            rest = Unsettled(tuple(self._finished), tuple(self._waiting), self._unsure)
            self._is_taken = True
            self._finished.clear()
            self._waiting.clear()
            return rest

    def settled(self) -> None:
        """What was taken is settled."""
        with self._lock:
            self._is_taken = False

    def put_back(self, rest: Unsettled, *, unsure: bool) -> None:
        """It could not be settled; `unsure` where it may have been."""
        with self._lock:
            self._is_taken = False
            self._finished[:0] = rest.finished
            self._waiting.extendleft(reversed(rest.waiting))
            self._unsure |= unsure

    def wants_relief(self) -> bool:
        """Whether it is older than it should be while jobs wait; then not again for a while.

        Not before the first job has begun, which its slot begins in any case: what is given back has never begun.
        """
        with self._lock:
            waits = len(self._waiting) < len(self.jobs) and bool(self._waiting or self._finished)
            wants = waits and not self._is_taken and clock() > self._relieved_after
            if wants:
                self._relieved_after = clock() + _AGAIN_SECONDS
            return wants

    def fitting(self) -> int:
        """How many such jobs fit into the time that a claim is meant to last."""
        begun = len(self.jobs) - len(self._waiting)
        return int(begun * AIM_SECONDS / max(clock() - self.claimed_at, 1e-6))


class Holder(Pilot, Protocol):
    """A pilot whose jobs are held under a lease. Its `following` is asked where nothing of a claim waits any more."""

    def holds(self, held: LeasedBatch | None) -> None:
        """Jobs were claimed and none has begun; None where all of them are settled."""
        ...

    def runs(self, progress: BatchState | None) -> None:
        """A handler is about to begin, or none any more. After any error, `resolve` this progress."""
        ...

    def may_begin(self) -> bool:
        """Whether the lease is held, and the relay is not stopping."""
        ...

    def following_held(self, held: LeasedBatch) -> ClaimRequest | None:
        """The claim that goes with the COMMIT of the last of these jobs, if any should."""
        ...


def run_held(connection: Connection, request: ClaimRequest, work: Runtime, holder: Holder) -> BatchReport | None:
    """Claim under the lease, run the jobs, settle them, and so on while `holder` says so; the last claim's report.

    None where nothing waited. After any error `release_waiting` what is held.

    Raises:
        LeaseLost: nothing of the job that ran was committed, and another relay may have it.
        ConnectionLost, psycopg.Error, SQLAlchemyError, TransactionEscaped, Abandoned: see `run_batches`.
    """
    fault_point("before-claim")
    with connection.begin():
        claimed: Claimed | None = claim(connection, request)
    report = None
    # BEGIN is sent with the first statement: none, while handlers work outside the database.
    with connection.begin():
        while claimed is not None and claimed.jobs:
            if report is not None:
                holder.ended(report)
            # Committed. Were COMMIT's answer lost, the relay's sweep would find jobs that nobody runs.
            held = LeasedBatch(claimed.request.queue, claimed.jobs)
            holder.holds(held)
            fault_point("after-claim")
            report, claimed = _work_off_held(connection, held, work, holder)
            holder.holds(None)
    return report


def _work_off_held(
    connection: Connection, held: LeasedBatch, work: Runtime, holder: Holder
) -> tuple[BatchReport, Claimed | None]:
    """Run what is held and settle it; what was claimed with that."""
    claimed: Claimed | None = None
    # What one leaves on the connection must not meet the next: those behind it wait in the queue again.
    while (job := held.begin(allowed=not work.guard.left and holder.may_begin())) is not None:
        claimed = _run_one(connection, held, job, work, holder)
    holder.runs(None)
    events = held.parked()
    if not held.is_worked_off:
        # Without a claim that follows, claims do not grow: to listeners each job has a transaction of its own.
        ends_here = work.guard.left or is_listened_to(connection)
        following = None if ends_here else holder.following_held(held)
        settled, claimed = _settle(connection, held, work.schema, following)
        events += settled
    return BatchReport(len(held.jobs), events), claimed


def _run_one(connection: Connection, held: LeasedBatch, job: Job, work: Runtime, holder: Holder) -> Claimed | None:
    progress = BatchState(held.queue, (job,), None, epoch=work.epoch)
    holder.runs(progress)
    claimed = work_off(connection, progress, work, holder)
    if progress.anchor is None:
        held.finish(progress.events[0])
    elif progress.unknown:
        # Told with what is parked along with it.
        held.unknown.append(job)
    else:
        holder.ended(BatchReport(0, tuple(progress.events)))
    return claimed


def _settle(
    connection: Connection, held: LeasedBatch, schema: str, following: ClaimRequest | None = None, *, free: bool = False
) -> tuple[tuple[Event, ...], Claimed | None]:
    """Settle all that waits, in the transaction of the next claim. `free`: as `Unsettled.script`."""
    fault_point("before-commit")
    while (rest := held.take()) is None:
        pause(connection, _LOOK_SECONDS)
    if rest.unsure:
        following = None
    try:
        # One transaction: where the claim fails, what was to be settled waits on.
        end = "COMMIT" if following is None else following.text()
        results = run_script(connection, rest.script(schema, free=free) + end + rest.question(schema))
        if not any(result.tag == "COMMIT" for result in results):
            raise AssertionError(f"COMMIT was not answered, but {results[-1].tag}")
    except psycopg.Error as error:
        held.put_back(rest, unsure=is_lost(connection))
        if is_lost(connection):
            raise ConnectionLost("the connection was lost while jobs were settled: all of them are, or none") from error
        if sqlstate_of(error) == _LOCK_NOT_AVAILABLE and not free:
            run_script(connection, "ROLLBACK")
            return _settle(connection, held, schema, free=True)
        if following is None or not following.failed(error):
            # Of the claim, perhaps: by themselves they are settled when the slot has recovered.
            raise
        run_script(connection, "ROLLBACK")
        return _settle(connection, held, schema)
    except BaseException:
        # Cancelled with the loop's patience: COMMIT may have been on its way.
        held.put_back(rest, unsure=True)
        raise
    held.settled()
    fault_point("after-commit")
    missing: set[object] = set()
    if rest.finished:
        finished = next(result for result in results if result.tag.startswith("SELECT"))
        missing = {job_id for (job_id,) in finished.rows}
        results.remove(finished)
        if rest.unsure:
            # Whose row is gone is done: by the COMMIT whose answer was lost.
            missing &= {job_id for (job_id,) in results[-1].rows}
    if following is not None:
        fault_point("before-claim")
    return _events(rest, missing), None if following is None else following.read(results)


def _events(rest: Unsettled, missing: "set[object]") -> tuple[Event, ...]:
    if not missing:
        return rest.finished
    return tuple(JobLeaseLost(event.job) if event.job.id in missing else event for event in rest.finished)


def release_waiting(connection: Connection, held: LeasedBatch, schema: str) -> BatchReport:
    """Settle what waits of a claim, by itself.

    Raises:
        ConnectionLost, psycopg.Error: it waits on, and whoever holds it tries again.
    """
    end_transaction(connection)
    with connection.begin():
        return BatchReport(0, () if held.is_worked_off else _settle(connection, held, schema)[0])
