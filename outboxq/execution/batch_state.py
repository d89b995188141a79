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
_TAKEN_AWAY = "the relay does not wait for this job any more"


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


@dataclass(slots=True)
class Ownership:
    """Who decides on a batch; `commit_was_sent`: its COMMIT was sent, and is not known to be refused."""

    commit_was_sent: bool = False
    phase: Phase = Phase.RUNNING
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_seized(self) -> bool:
        """Whether the relay has taken the batch away from its slot."""
        return self.phase is Phase.SEIZED

    def begin_commit(self) -> None:
        """Enter COMMITTING: from here on the server alone decides the outcome."""
        with self._lock:
            if self.phase is Phase.SEIZED:
                raise Abandoned(_TAKEN_AWAY)
            self.phase, self.commit_was_sent = Phase.COMMITTING, True

    def commit_refused(self) -> None:
        """Go back to RUNNING: nothing was committed, and the slot goes on with the batch."""
        with self._lock:
            self.phase, self.commit_was_sent = Phase.RUNNING, False

    def begin_recovery(self) -> None:
        """Enter RECOVERING: from here on the batch's slot, and nothing else, finds out what stands of it."""
        with self._lock:
            if self.phase is Phase.SEIZED:
                raise Abandoned(_TAKEN_AWAY)
            self.phase = Phase.RECOVERING

    def seize(self) -> bool:
        """Take the batch away from its slot, once; False if its COMMIT, or its recovery, is under way."""
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return False
        try:
            if self.phase is not Phase.RUNNING:
                return False
            self.phase = Phase.SEIZED
            return True
        finally:
            self._lock.release()

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Whether COMMIT was not sent yet; meanwhile the batch is neither committed nor taken away."""
        with self._lock:
            yield not self.commit_was_sent


@dataclass(slots=True)
class Running:
    """What runs of a batch now, or ran last.

    Attributes:
        position: The job that runs, until `deadline` (monotonic) if it has one.
        together: How many jobs, from `position` on, one handler runs.
        timeout_seconds: How long a statement of the transaction may take, as it is set there.
        call: The call of a handler.
    """

    timeout_seconds: float | None = None
    position: int = 0
    together: int = 1
    deadline: float | None = None
    call: HandlerCall | None = None
    _began_at: float = 0.0
    _ran_seconds: float | None = 0.0
    # Of the calls, which come one after the other.
    _call_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seconds(self) -> float:
        """How long the job that runs has run until now, or the one that ran last did; its share if several run."""
        ran = self._ran_seconds
        return (time.perf_counter() - self._began_at if ran is None else ran) / self.together

    @property
    def seconds_now(self) -> float | None:
        """How long a handler has been running; None if none runs."""
        return None if self._ran_seconds is not None else time.perf_counter() - self._began_at

    def begin(self) -> None:
        """Record that a job, or the jobs of one handler, begin to run."""
        self._began_at, self._ran_seconds = time.perf_counter(), None

    def end(self) -> float:
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


@dataclass(slots=True)
class Tries:
    """How the jobs of a batch were tried so far.

    Attributes:
        together: All jobs run together, to be checked by COMMIT.
        apart: The jobs ran together and were undone: now each runs alone.
        refused: How often COMMIT was refused, and a lone job ran again.
        has_deadlocked: Jobs that ran together were undone by a deadlock or a serialization failure.
    """

    together: bool = False
    apart: bool = False
    refused: int = 0
    has_deadlocked: bool = False


@dataclass(slots=True)
class BatchState:
    """How far a claimed batch has come: what is needed to find out, after an error, what stands of it.

    Attributes:
        claimed: The claim that took the jobs; `jobs` are these, or have what is newest of those they stand for.
        transaction: The batch's transaction, once it has begun; `was_begun`: its BEGIN was tried.
        writes_refused: Its BEGIN was refused, because the server is a standby.
        stands_for: The jobs that were taken along, by the id of the job that runs for them.
        expires: When each of the jobs that expire does (monotonic), by id.
        decided: Results that are known without a run, by the job's id; `decide` fills it.
        events: The events of the jobs before the one that runs, if the transaction commits.
        blocked: The groups whose next jobs are given back: one of their jobs is put off, and holds them up.
        late_result: The result of a handler that never used the database, until its settlement has begun.
        dead_letters: The dead letters that a recovery of this batch has written.
    """

    claimed: Claimed
    jobs: tuple[Job, ...]
    transaction: ClaimTransaction | None = None
    stands_for: Mapping[UUID, tuple[UUID, ...]] = field(default_factory=dict)
    running: Running = field(default_factory=Running)
    owner: Ownership = field(default_factory=Ownership)
    tries: Tries = field(default_factory=Tries)
    expires: Mapping[UUID, float] = field(default_factory=dict)
    decided: dict[UUID, Result] = field(default_factory=dict)
    events: list[JobEvent] = field(default_factory=list)
    blocked: set[str] = field(default_factory=set)
    was_begun: bool = False
    writes_refused: WritesRefused | None = None
    late_result: Result | None = None
    dead_letters: DeadLetters | None = None

    @classmethod
    def of(cls, claimed: Claimed) -> "BatchState":
        """The state of jobs that were just claimed in transaction mode."""
        return cls(claimed, claimed.jobs, claimed.transaction, running=Running(claimed.request.timeout_seconds))

    @property
    def queue(self) -> str:
        """The queue of the jobs."""
        return self.claimed.request.queue

    @property
    def job(self) -> Job:
        """The job that runs."""
        return self.jobs[self.running.position]

    @property
    def running_jobs(self) -> tuple[Job, ...]:
        """The jobs that one handler runs now."""
        running = self.running
        return self.jobs[running.position : running.position + running.together]

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

    def begin(self, connection: Connection) -> ClaimTransaction:
        """Begin the batch's transaction, unless it has begun.

        Raises:
            WritesRefused: the server takes no writes; also at each later call, if a handler has swallowed that.
        """
        if self.owner.phase is Phase.SEIZED:
            raise Abandoned(_TAKEN_AWAY)
        if self.writes_refused is not None:
            raise self.writes_refused
        if self.transaction is None:
            self.was_begun = True
            try:
                timeouts = local_timeouts(self.running.timeout_seconds)
                self.transaction = begin_transaction(connection, *LOCAL_SETTINGS, *timeouts)
            except psycopg.Error as error:
                if error.sqlstate != READ_ONLY:
                    raise
                self.writes_refused = WritesRefused("the server takes no writes")
                raise self.writes_refused from error
        return self.transaction

    def blame_all(self, places: range) -> None:
        """Drop the events of jobs that ran together: one of them ended the transaction, so none is known to be done."""
        self.running.position, self.running.together = places.start, len(places)
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
