"""The state of a claimed batch: which job runs, what was decided and sent so far, and who may end the batch."""

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

# The time to wait for the lock, which is held for a moment, or while a cancellation is on its way to the server.
_LOCK_SECONDS = 1.0
_TAKEN_AWAY = "the relay does not wait for this job any more"


class Phase(Enum):
    """The phases of a batch, by which its slot (the worker that runs it) and its relay agree on who ends the batch.

    In RUNNING the first of the two to change the phase decides. In COMMITTING the slot sends COMMIT; if that is
    refused, the batch is RUNNING again. In RECOVERING the slot finds out, after an error, what was committed. In SEIZED
    the relay has taken the batch away from the slot.
    """

    RUNNING = auto()
    COMMITTING = auto()
    RECOVERING = auto()
    SEIZED = auto()


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The report of a batch that has ended, made by its commit or its recovery, for the relay to publish.

    Attributes:
        claimed: The number of jobs of the batch.
        events: The events to publish.
    """

    claimed: int
    events: tuple[Event, ...]

    @property
    def parked_in(self) -> str | None:
        """The batch's queue if the batch parked jobs, whose kinds this relay cannot run now; None if it parked none."""
        return next((event.queue for event in self.events if isinstance(event, JobsParked)), None)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a batch, or of a claim that failed, with instructions for the slot's next claims.

    Attributes:
        report: The report; None if all jobs of the batch wait again, unchanged.
        claimed: The jobs of the next claim, which was sent with COMMIT; None if no claim was sent, or if it failed.
        left: Steps (statements that are normally sent with COMMIT) whose part after COMMIT is still to be sent, by
            `send_left`.
        run_alone: The number of next jobs that the slot should run one by one, to find the faulty one.
        was_too_large: True if the claim was cancelled because it took too long.
    """

    report: BatchReport | None
    claimed: Claimed | None = None
    left: tuple[Step, ...] = ()
    run_alone: int = 0
    was_too_large: bool = False


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The dead letters that a recovery wrote, kept in case the answer to their COMMIT is lost and recovery runs again.

    Attributes:
        xid: The id of the transaction that wrote the dead letters.
        reason: The text that the dead letters store.
        failed: The attempt that failed.
    """

    xid: str
    reason: str
    failed: Failed


@dataclass(slots=True)
class Ownership:
    """The right to end a batch, for which its slot (the worker that runs it) and its relay compete.

    Attributes:
        commit_was_sent: True if COMMIT was sent and is not known to be refused.
        phase: The batch's phase, changed only under the lock.
    """

    commit_was_sent: bool = False
    phase: Phase = Phase.RUNNING
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_seized(self) -> bool:
        """Return True if the relay has taken the batch away from its slot, which must not commit it."""
        return self.phase is Phase.SEIZED

    def begin_commit(self) -> None:
        """Enter COMMITTING, just before COMMIT is sent: from here on only the server decides the outcome.

        Raises:
            Abandoned: the relay has taken the batch away.
        """
        with self._lock:
            if self.phase is Phase.SEIZED:
                raise Abandoned(_TAKEN_AWAY)
            self.phase, self.commit_was_sent = Phase.COMMITTING, True

    def commit_refused(self) -> None:
        """Go back to RUNNING after the server refused COMMIT: nothing was committed, and the slot goes on."""
        with self._lock:
            self.phase, self.commit_was_sent = Phase.RUNNING, False

    def begin_recovery(self) -> None:
        """Enter RECOVERING: only the slot determines what was committed, and the relay cannot take the batch away.

        Raises:
            Abandoned: the relay has taken the batch away already.
        """
        with self._lock:
            if self.phase is Phase.SEIZED:
                raise Abandoned(_TAKEN_AWAY)
            self.phase = Phase.RECOVERING

    def seize(self) -> bool:
        """Take the batch away from its slot, and return True; return False if that is not possible.

        It is not possible while a COMMIT or a recovery is under way, if the batch was taken away already, or if the
        slot keeps this object's lock for longer than `_LOCK_SECONDS`.
        """
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
        """Hold the lock, so that the phase cannot change within the block; yield True if COMMIT was not sent yet.

        Within such a block the relay cancels a handler's statement; the cancellation cannot hit the COMMIT.
        """
        with self._lock:
            yield not self.commit_was_sent


@dataclass(slots=True)
class Running:
    """The handler's run that goes on in a batch, or the last one that ended; the relay reads it to enforce deadlines.

    Attributes:
        position: The index in the batch of the job that runs; of the first one if several run together.
        together: The number of jobs, from `position` on, that one handler runs.
        timeout_seconds: The longest time of a statement, as it is set in the transaction; None if none is set.
        deadline: The time (monotonic) by which the handler must have ended; None if it has no limit.
        call: The call of the handler that runs, or of the last one.
    """

    timeout_seconds: float | None = None
    position: int = 0
    together: int = 1
    deadline: float | None = None
    call: HandlerCall | None = None
    _began_at: float = 0.0
    _ran_seconds: float | None = 0.0
    # Shared by the calls, which follow one another.
    _call_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seconds(self) -> float:
        """The seconds that the present run, or the last one, took; if several jobs run together, one job's share."""
        ran = self._ran_seconds
        return (time.perf_counter() - self._began_at if ran is None else ran) / self.together

    @property
    def seconds_now(self) -> float | None:
        """The time in seconds that a handler has been running; None if none runs."""
        return None if self._ran_seconds is not None else time.perf_counter() - self._began_at

    def begin(self) -> None:
        """Record the time at which a job, or the jobs of one handler, begin to run."""
        self._began_at, self._ran_seconds = time.perf_counter(), None

    def begin_together(self, jobs: int, timeout_seconds: float | None) -> None:
        """Record that one call begins to run several leased jobs, with this deadline for the whole call."""
        self.together, self.timeout_seconds = jobs, timeout_seconds
        self.begin()

    def begin_deadline(self) -> None:
        """Set the handler's deadline to `timeout_seconds` from now; to None if no timeout is set."""
        self.deadline = None if self.timeout_seconds is None else time.monotonic() + self.timeout_seconds

    def end(self) -> float:
        """Record that the run has ended; return its time in seconds."""
        seconds = self._ran_seconds = time.perf_counter() - self._began_at
        return seconds

    def begin_call(self, jobs: tuple[Job, ...], notes: ProgressNotes | None) -> HandlerCall:
        """Make, store and return the call of a handler for these jobs, by which an operator can cancel the handler.

        Args:
            notes: Receives the handler's progress; None if progress is not recorded.
        """
        call = self.call = HandlerCall(jobs, self._call_lock, notes)
        return call

    def end_call(self) -> None:
        """Remove the handler's deadline, and end its call unless that was done.

        Called when the handler's rows have been kept or undone.
        """
        self.deadline = None
        self.end_handler()

    def end_handler(self) -> None:
        """Record that the handler has ended, and clear its progress; first wait for a cancellation that is being sent.

        A cancellation asks the server to stop the statement that runs at that moment. If it arrived after the handler's
        end, it would stop one of the relay's own statements.
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
    """A record of how the jobs of a batch were run so far, to choose how they run again.

    Attributes:
        together: True if all jobs run together, so that only COMMIT checks their deferred constraints.
        apart: True if the jobs ran together and were undone, so that each now runs alone.
        refused: The number of times that COMMIT was refused and the batch's only job then ran again.
        has_deadlocked: True if a deadlock or a serialization failure undid jobs that ran together.
    """

    together: bool = False
    apart: bool = False
    refused: int = 0
    has_deadlocked: bool = False


@dataclass(slots=True)
class BatchState:
    """The progress of a claimed batch; after an error, a recovery uses it to determine what was committed.

    Attributes:
        claimed: The claim that took the jobs.
        jobs: The claim's jobs, with the newest content of jobs coalesced into them.
        transaction: The batch's transaction, once it has begun.
        stands_for: By the id of a job that runs, the ids of the jobs that were merged (coalesced) into it.
        running: The run of a handler that goes on.
        owner: The right to end the batch.
        tries: How the jobs were run so far.
        expires: The time (monotonic) at which jobs expire, by id.
        decided: Results that are known without a run, by the job's id; `decide` fills it.
        of_claim: The events of the claim and of decided jobs, published if the transaction commits.
        events: The events of the jobs before the one that runs.
        was_begun: True if `begin` tried to begin the transaction; False if the claim began it.
        writes_refused: The error of BEGIN if the server is a standby.
        late_result: The result of a leased job whose handler never used the database, until a transaction to write it
            has begun; a recovery writes it if the connection is lost.
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
        """Make the state of a batch that was just claimed in transaction mode."""
        return cls(claimed, claimed.jobs, claimed.transaction, running=Running(claimed.request.timeout_seconds))

    @property
    def queue(self) -> str:
        """The queue of the jobs."""
        return self.claimed.request.queue

    @property
    def job(self) -> Job:
        """The job that runs now."""
        return self.jobs[self.running.position]

    @property
    def running_jobs(self) -> tuple[Job, ...]:
        """The jobs that one handler runs now."""
        running = self.running
        return self.jobs[running.position : running.position + running.together]

    @property
    def claimed_ids(self) -> tuple[UUID, ...]:
        """The ids of all jobs that the batch has taken from the queue: its jobs, and those merged into them."""
        return (*(job.id for job in self.jobs), *chain.from_iterable(self.stands_for.values()))

    def parked(self, jobs: Sequence[Job]) -> list[JobsParked]:
        """Return a list with one event about the parked ones of `jobs`; an empty list if none is parked."""
        kinds = [job.kind for job in jobs if isinstance(self.decided.get(job.id), UnknownKindResult)]
        return [JobsParked(self.queue, tuple(sorted(set(kinds))), len(kinds))] if kinds else []

    @property
    def has_parked(self) -> bool:
        """Return True if the claim contained jobs that are parked, because no handler here may run their kinds now."""
        return any(isinstance(event, JobsParked) for event in self.of_claim)

    @property
    def is_lone(self) -> bool:
        """Return True if the batch has only one job."""
        return len(self.jobs) == 1

    @property
    def is_leased(self) -> bool:
        """Return True if the batch's claim is committed already, under a lease."""
        return self.jobs[0].lease_token is not None

    def begin(self, connection: Connection) -> ClaimTransaction:
        """Begin the batch's transaction, unless it has begun; return the transaction.

        Raises:
            Abandoned: the relay has taken the batch away.
            WritesRefused: the server accepts no writes; raised again at each later call, because a handler may swallow
                the first.
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
        """Treat all jobs at these places as running ones, and drop their events: one of them ended the transaction.

        It is not known which job did so, so none of them counts as done.
        """
        self.running.position, self.running.together = places.start, len(places)
        del self.events[places.start :]

    def forget_outcomes(self) -> None:
        """Drop the jobs' events and `GivenBack` results, because all rows since the claim were undone.

        `GivenBack` marks jobs that wait for an earlier job of their group. All jobs now run again.
        """
        self.events.clear()
        for job_id in [each for each, result in self.decided.items() if isinstance(result, GivenBack)]:
            del self.decided[job_id]

    def report(self, of_commit: tuple[Event, ...] = ()) -> BatchReport:
        """Return the report of a batch that is known to be committed.

        Args:
            of_commit: The events of statements that were sent with its COMMIT.
        """
        return BatchReport(len(self.jobs), (*self.events, *self.of_claim, *of_commit))


def begin_transaction(connection: Connection, *settings: str) -> ClaimTransaction:
    """Begin the transaction of a leased job, with these settings and two savepoints as a claim sets them; return it."""
    savepoint = f"oq_{secrets.token_hex(8)}"
    inner = f"{savepoint}_inner"
    anchor = f"SELECT {ANCHOR}, {NOTE_ROLE}"
    ((xid, pid, _),) = run_script(connection, *settings, anchor, f"SAVEPOINT {savepoint}", f"SAVEPOINT {inner}")
    return ClaimTransaction(savepoint, inner, xid, pid)
