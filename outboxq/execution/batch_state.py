"""The state of a claimed batch: how far it has come, and its outcome."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from uuid import UUID

import psycopg
from sqlalchemy import Connection

from outboxq.database.errors import READ_ONLY
from outboxq.events import Event, JobEvent, JobsCoalesced, JobsParked, JobsSuspected
from outboxq.execution.claim import Claimed, ClaimTransaction, begin_transaction
from outboxq.execution.errors import Abandoned, WritesRefused
from outboxq.execution.failure import Failed
from outboxq.execution.runtime import Result, UnknownKindResult
from outboxq.execution.step import Step
from outboxq.handlers.call import HandlerCall
from outboxq.handlers.progress import ProgressNotes
from outboxq.job import Job
from outboxq.statements.transaction import LOCAL_SETTINGS, local_timeouts

# How long to wait for the lock, which is held for a moment, except while a cancellation is on its way to the server.
_LOCK_SECONDS = 1.0


class Phase(Enum):
    """Whether the slot or the relay decides on a batch: the first of them to leave RUNNING.

    The slot sends COMMIT (and goes back to RUNNING if that is refused), or finds out what stands after an error; the
    relay takes the batch away from the slot.
    """

    RUNNING = auto()
    COMMITTING = auto()
    RECOVERING = auto()
    SEIZED = auto()


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What was committed of a batch."""

    claimed: int
    events: tuple[Event, ...]

    @property
    def parked_in(self) -> str | None:
        """The queue in which jobs were found that this relay cannot run, if any were."""
        return next((event.queue for event in self.events if isinstance(event, JobsParked)), None)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a batch, or the claim of one, has ended.

    Attributes:
        report: What was committed; None if all of its jobs wait again as they were.
        claimed: What the claim that went along with COMMIT took; None without one, or if it failed.
        left: Steps whose statements after COMMIT are still to be sent, by `send_left`.
        run_alone: How many of the next jobs should run one by one, so that the faulty one shows.
        was_too_large: The claim took so long that it was cancelled.
    """

    report: BatchReport | None
    claimed: Claimed | None = None
    left: tuple[Step, ...] = ()
    run_alone: int = 0
    was_too_large: bool = False


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The dead letters that a recovery has written, whose COMMIT may not have been answered."""

    xid: str
    reason: str
    failed: Failed


# Without slots, so that a default is an attribute of the class until it is set: under a lease a state is made for each
# job.
@dataclass
class BatchState:
    """How far a claimed batch has come: what is needed to find out, after an error, what stands of it.

    Attributes:
        claimed: The claim that took the jobs; `jobs` are these, or have what is newest of those they stand for.
        transaction: The batch's transaction, once it has begun; `was_begun`: its BEGIN was tried.
        writes_refused: Its BEGIN was refused, because the server is a standby.
        epoch: The run of the server that knows the transaction.
        position: The job that runs, until `deadline` (monotonic) if it has one.
        call: The call of a handler that runs, or ran last.
        is_plain: No job has a key, a group, a batch or an expiry, so that none of what these need is looked for.
        together: How many jobs, from `position` on, one handler runs now.
        runs_together: All jobs run together, to be checked by COMMIT.
        runs_apart: The jobs ran together and were undone: now each runs alone.
        refused: How often COMMIT was refused, and the jobs ran again.
        expires: When each of the jobs that expire does (monotonic), by id.
        events: The events of the jobs before `position`, if the transaction commits.
        decided: Results that are known without a run, by the job's id; `decide` fills it.
        late_result: The result of a handler that never used the database, until its settlement has begun.
        commit_was_sent: COMMIT was sent, and is not known to be refused.
        blocked: The groups whose next jobs are given back: one of their jobs is put off, and holds them up.
        has_deadlocked: Jobs that ran together were undone by a deadlock or a serialization failure.
        dead_letters: The dead letters that a recovery of this batch has written.
        stands_for: The jobs that were taken along, by the id of the job that runs for them.
    """

    claimed: Claimed
    jobs: tuple[Job, ...]
    transaction: ClaimTransaction | None = None
    epoch: str = ""
    timeout_seconds: float | None = None
    stands_for: Mapping[UUID, tuple[UUID, ...]] = field(default_factory=dict)
    position: int = field(default=0, init=False)
    together: int = field(default=1, init=False)
    is_plain: bool = field(init=False)
    deadline: float | None = field(default=None, init=False)
    call: HandlerCall | None = field(default=None, init=False)
    runs_together: bool = field(default=False, init=False)
    runs_apart: bool = field(default=False, init=False)
    refused: int = field(default=0, init=False)
    expires: Mapping[UUID, float] = field(default_factory=dict, init=False)
    events: list[JobEvent] = field(default_factory=list, init=False)
    decided: dict[UUID, Result] = field(default_factory=dict, init=False)
    late_result: Result | None = field(default=None, init=False)
    blocked: set[str] = field(default_factory=set, init=False)
    was_begun: bool = field(default=False, init=False)
    writes_refused: WritesRefused | None = field(default=None, init=False)
    commit_was_sent: bool = field(default=False, init=False)
    has_deadlocked: bool = field(default=False, init=False)
    dead_letters: DeadLetters | None = field(default=None, init=False)
    _began_at: float = field(default=0.0, init=False)
    _ran_seconds: float | None = field(default=0.0, init=False)
    _phase: Phase = field(default=Phase.RUNNING, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    # Of the calls, which come one after the other.
    _call_lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @classmethod
    def of(cls, claimed: Claimed, epoch: str) -> "BatchState":
        """The state of jobs that were just claimed in transaction mode."""
        return cls(claimed, claimed.jobs, claimed.transaction, epoch, claimed.request.timeout_seconds)

    def __post_init__(self) -> None:
        self.is_plain = True
        for job in self.jobs:
            if (
                job.unique_key is not None
                or job.group_key is not None
                or job.batch_id is not None
                or job.expires_at is not None
            ):
                self.is_plain = False
                return

    @property
    def queue(self) -> str:
        """The queue of the jobs."""
        return self.claimed.request.queue

    @property
    def job(self) -> Job:
        """The job that runs."""
        return self.jobs[self.position]

    @property
    def running_jobs(self) -> tuple[Job, ...]:
        """The jobs that one handler runs now."""
        return self.jobs[self.position : self.position + self.together]

    @property
    def claimed_ids(self) -> tuple[UUID, ...]:
        """The ids of all jobs whose rows the claim has taken."""
        return (*(job.id for job in self.jobs), *chain.from_iterable(self.stands_for.values()))

    @property
    def parked(self) -> Sequence[Job]:
        """The jobs of kinds that no handler here can run."""
        decided = self.decided
        return [job for job in self.jobs if isinstance(decided.get(job.id), UnknownKindResult)]

    @property
    def coalesced(self) -> list[JobsCoalesced]:
        """The events of jobs that are taken along if the transaction commits; under a lease they have gone before."""
        others = {} if self.is_leased else self.stands_for
        return [JobsCoalesced(job, len(others[job.id])) for job in self.jobs if job.id in others]

    @property
    def is_lone(self) -> bool:
        """Whether the batch has one job only."""
        return len(self.jobs) == 1

    @property
    def is_leased(self) -> bool:
        """Whether the batch's claim is committed already, under a lease."""
        return self.jobs[0].lease_token is not None

    @property
    def is_seized(self) -> bool:
        """Whether the relay has taken the batch away from its slot."""
        return self._phase is Phase.SEIZED

    def begin(self, connection: Connection) -> ClaimTransaction:
        """Begin the batch's transaction, unless it has begun.

        Raises:
            WritesRefused: the server takes no writes; also at each later call, if a handler has swallowed that.
        """
        if self._phase is Phase.SEIZED:
            raise Abandoned("the relay does not wait for this job any more")
        if self.writes_refused is not None:
            raise self.writes_refused
        if self.transaction is None:
            self.was_begun = True
            try:
                self.transaction = begin_transaction(connection, *LOCAL_SETTINGS, *local_timeouts(self.timeout_seconds))
            except psycopg.Error as error:
                if error.sqlstate != READ_ONLY:
                    raise
                self.writes_refused = WritesRefused("the server takes no writes")
                raise self.writes_refused from error
        return self.transaction

    @property
    def seconds(self) -> float:
        """How long the job that runs has run until now, or the one that ran last did; its share if several run."""
        ran = self._ran_seconds
        return (time.perf_counter() - self._began_at if ran is None else ran) / self.together

    @property
    def running_seconds(self) -> float | None:
        """How long a handler has been running; None if none runs."""
        return None if self._ran_seconds is not None else time.perf_counter() - self._began_at

    def begin_run(self) -> None:
        """Record that a job, or the jobs of one handler, begin to run."""
        self._began_at, self._ran_seconds = time.perf_counter(), None

    def end_run(self) -> float:
        """Record that they have ended; how long they ran."""
        seconds = self._ran_seconds = time.perf_counter() - self._began_at
        return seconds

    def begin_call(self, jobs: tuple[Job, ...], notes: ProgressNotes | None) -> HandlerCall:
        """The call of a handler that is about to run these jobs."""
        call = self.call = HandlerCall(jobs, self._call_lock, notes)
        return call

    def end_call(self) -> None:
        """Record that the handler has ended: it has no deadline any more, and what is sent is not to be cancelled."""
        self.deadline = None
        if self.call is not None and not self.call.is_over:
            self.call.end()

    def begin_commit(self) -> None:
        """Enter COMMITTING: from here on the server alone decides the outcome."""
        self._leave_running(Phase.COMMITTING)

    def commit_refused(self) -> None:
        """Go back to RUNNING: nothing was committed, and the slot goes on with the batch."""
        with self._lock:
            self._phase, self.commit_was_sent = Phase.RUNNING, False

    def begin_recovery(self) -> None:
        """Enter RECOVERING: from here on the batch's slot, and nothing else, finds out what stands of it."""
        self._leave_running(Phase.RECOVERING)

    def _leave_running(self, phase: Phase) -> None:
        with self._lock:
            if self._phase is Phase.SEIZED:
                raise Abandoned("the relay does not wait for this job any more")
            self._phase = phase
            self.commit_was_sent |= phase is Phase.COMMITTING

    def seize(self) -> bool:
        """Take the batch away from its slot, once; False if its COMMIT, or its recovery, is under way."""
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return False
        try:
            if self._phase is not Phase.RUNNING:
                return False
            self._phase = Phase.SEIZED
            return True
        finally:
            self._lock.release()

    @contextmanager
    def while_running(self, deadline: float) -> Iterator[bool]:
        """Whether the job with this deadline still runs; meanwhile it is neither committed nor taken away."""
        with self._lock:
            yield self.deadline == deadline and not self.commit_was_sent

    def blame_all(self, places: range) -> None:
        """Drop the events of jobs that ran together: one of them ended the transaction, so none is known to be done."""
        self.position, self.together = places.start, len(places)
        del self.events[places.start :]

    def report(self, of_commit: tuple[Event, ...] = ()) -> BatchReport:
        """The report of the batch, once its transaction is known to be committed; with what its COMMIT has told."""
        events: list[Event] = [*self.events]
        if self.stands_for:
            events += self.coalesced
        if self.decided and (parked := self.parked):
            events.append(JobsParked(self.queue, tuple(sorted({job.kind for job in parked})), len(parked)))
        if self.claimed.moved:
            events.append(JobsSuspected(self.queue, self.claimed.moved))
        return BatchReport(len(self.jobs), (*events, *of_commit))
