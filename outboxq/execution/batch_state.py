"""The state of a claimed batch: how far it has come, and its outcome."""

import secrets
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

from outboxq.database.driver import run_script
from outboxq.database.errors import READ_ONLY
from outboxq.events import Event, JobEvent, JobsParked
from outboxq.execution.claim import Claimed, ClaimTransaction
from outboxq.execution.errors import Abandoned, WritesRefused
from outboxq.execution.failure import Failed
from outboxq.execution.runtime import GivenBack, Result, UnknownKindResult
from outboxq.execution.step import Step
from outboxq.handlers.call import HandlerCall
from outboxq.handlers.progress import ProgressNotes
from outboxq.job import Job
from outboxq.statements.claim import ANCHOR
from outboxq.statements.transaction import LOCAL_SETTINGS, NOTE_ROLE, local_timeouts

# The wait for the lock, which is held for a moment, or for as long as a cancellation is on its way to the server.
_LOCK_SECONDS = 1.0
_TAKEN_AWAY = "the relay does not wait for this job any more"


class Phase(Enum):
    """Phases of a batch. Its slot or the relay decides on it: the first to leave RUNNING.

    The slot sends COMMIT (and goes back to RUNNING if that is refused), or finds out what was committed after an
    error; the relay takes the batch away from the slot.
    """

    RUNNING = auto()
    COMMITTING = auto()
    RECOVERING = auto()
    SEIZED = auto()


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Number of jobs and events of a committed batch."""

    claimed: int
    events: tuple[Event, ...]

    @property
    def parked_in(self) -> str | None:
        """The queue, if it has jobs that this relay cannot run."""
        return next((event.queue for event in self.events if isinstance(event, JobsParked)), None)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a batch, or of the claim of one.

    Attributes:
        report: None if all of its jobs wait again as they were.
        claimed: The answer to the claim that went along with COMMIT; None without one, or if it failed.
        left: Steps whose statements after COMMIT are still to be sent, by `send_left`.
        run_alone: The number of next jobs that should run one by one, so that the faulty one shows.
        was_too_large: The claim took so long that it was cancelled.
    """

    report: BatchReport | None
    claimed: Claimed | None = None
    left: tuple[Step, ...] = ()
    run_alone: int = 0
    was_too_large: bool = False


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The dead letters that a recovery wrote; the answer to their COMMIT may be lost."""

    xid: str
    reason: str
    failed: Failed


@dataclass(slots=True)
class Ownership:
    """The right to decide on a batch; `commit_was_sent`: its COMMIT was sent, and is not known to be refused."""

    commit_was_sent: bool = False
    phase: Phase = Phase.RUNNING
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_seized(self) -> bool:
        """Return True if the relay has taken the batch away from its slot."""
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
        """Enter RECOVERING: from here on the slot alone finds out what was committed of the batch."""
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
        """Yield True if COMMIT was not sent; inside, the batch is neither committed nor taken away."""
        with self._lock:
            yield not self.commit_was_sent


@dataclass(slots=True)
class Running:
    """The run of a batch's job now, or the last one.

    Attributes:
        position: The job that runs, until `deadline` (monotonic) if it has one.
        together: The number of jobs, from `position` on, that one handler runs.
        timeout_seconds: The longest time of a statement, as it is set in the transaction.
        call: The call of a handler.
    """

    timeout_seconds: float | None = None
    position: int = 0
    together: int = 1
    deadline: float | None = None
    call: HandlerCall | None = None
    _began_at: float = 0.0
    _ran_seconds: float | None = 0.0
    # Shared by the calls, which come one after the other.
    _call_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seconds(self) -> float:
        """The time that the job runs, or that the last one ran; its share if several run."""
        ran = self._ran_seconds
        return (time.perf_counter() - self._began_at if ran is None else ran) / self.together

    @property
    def seconds_now(self) -> float | None:
        """The time that a handler has been running; None if none runs."""
        return None if self._ran_seconds is not None else time.perf_counter() - self._began_at

    def begin(self) -> None:
        """Record that a job, or the jobs of one handler, begin to run."""
        self._began_at, self._ran_seconds = time.perf_counter(), None

    def begin_deadline(self) -> None:
        """Count the handler's deadline from now on."""
        self.deadline = None if self.timeout_seconds is None else time.monotonic() + self.timeout_seconds

    def end(self) -> float:
        """Record that they have ended; return their time."""
        seconds = self._ran_seconds = time.perf_counter() - self._began_at
        return seconds

    def begin_call(self, jobs: tuple[Job, ...], notes: ProgressNotes | None) -> HandlerCall:
        """Make the call of a handler that is about to run these jobs."""
        call = self.call = HandlerCall(jobs, self._call_lock, notes)
        return call

    def end_call(self) -> None:
        """End the call, unless the handler has ended it, and its deadline, which holds for undoing its rows too."""
        self.deadline = None
        self.end_handler()

    def end_handler(self) -> None:
        """Record that the handler has ended; waits for a cancellation that is on its way to the server.

        Statements sent from now on are the relay's own: no cancellation may hit them.
        """
        call = self.call
        if call is None or call.is_over:
            return
        with call.lock:
            call.is_over = True
        if call.has_noted and call.notes is not None:
            call.notes.clear([job.id for job in call.jobs])


@dataclass(slots=True)
class Tries:
    """The tries so far to run the jobs of a batch.

    Attributes:
        together: All jobs run together, to be checked by COMMIT.
        apart: The jobs ran together and were undone: now each runs alone.
        refused: The number of times that COMMIT was refused, and a lone job ran again.
        has_deadlocked: Jobs that ran together were undone by a deadlock or a serialization failure.
    """

    together: bool = False
    apart: bool = False
    refused: int = 0
    has_deadlocked: bool = False


@dataclass(slots=True)
class BatchState:
    """The progress of a claimed batch, from which a recovery finds out, after an error, what was committed.

    Attributes:
        claimed: The claim that took the jobs; `jobs` are these, with the newest content of those they run for.
        transaction: The batch's transaction, once it has begun; `was_begun`: its BEGIN was tried.
        writes_refused: The refusal of its BEGIN, because the server is a standby.
        stands_for: The jobs that were taken along, by the id of the job that runs for them.
        expires: The time (monotonic) at which jobs expire, by id.
        decided: Results that are known without a run, by the job's id; `decide` fills it.
        of_claim: The events of the claim and of what was decided, if the transaction commits.
        events: Those of the jobs before the one that runs.
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
    of_claim: list[Event] = field(default_factory=list)
    events: list[JobEvent] = field(default_factory=list)
    was_begun: bool = False
    writes_refused: WritesRefused | None = None
    late_result: Result | None = None
    dead_letters: DeadLetters | None = None

    @classmethod
    def of(cls, claimed: Claimed) -> "BatchState":
        """Make the state of jobs that were just claimed in transaction mode."""
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

    def parked(self, jobs: Sequence[Job]) -> list[JobsParked]:
        """The event of those of these jobs whose kinds cannot run here now; none without any."""
        kinds = [job.kind for job in jobs if isinstance(self.decided.get(job.id), UnknownKindResult)]
        return [JobsParked(self.queue, tuple(sorted(set(kinds))), len(kinds))] if kinds else []

    @property
    def has_parked(self) -> bool:
        """Return True if it has jobs of kinds that cannot run here now."""
        return any(isinstance(event, JobsParked) for event in self.of_claim)

    @property
    def is_lone(self) -> bool:
        """Return True if the batch has one job only."""
        return len(self.jobs) == 1

    @property
    def is_leased(self) -> bool:
        """Return True if the batch's claim is committed already, under a lease."""
        return self.jobs[0].lease_token is not None

    def begin(self, connection: Connection) -> ClaimTransaction:
        """Begin the batch's transaction, unless it has begun.

        Raises:
            WritesRefused: the server takes no writes; also at each later call, if a handler swallowed the first.
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

    def forget_outcomes(self) -> None:
        """Forget how jobs ended: their transaction is back at the end of the claim."""
        self.events.clear()
        for job_id in [each for each, result in self.decided.items() if isinstance(result, GivenBack)]:
            del self.decided[job_id]

    def report(self, of_commit: tuple[Event, ...] = ()) -> BatchReport:
        """Make the report of a batch that is known to be committed, with the events of its COMMIT."""
        return BatchReport(len(self.jobs), (*self.events, *self.of_claim, *of_commit))


def begin_transaction(connection: Connection, *settings: str) -> ClaimTransaction:
    """Begin the transaction of a leased job."""
    savepoint = f"oq_{secrets.token_hex(8)}"
    inner = f"{savepoint}_inner"
    anchor = f"SELECT {ANCHOR}, {NOTE_ROLE}"
    ((xid, pid, _),) = run_script(connection, *settings, anchor, f"SAVEPOINT {savepoint}", f"SAVEPOINT {inner}")
    return ClaimTransaction(savepoint, inner, xid, pid)
