"""Progress: how far a claimed batch has come, and what it came to."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sqlalchemy import Connection

from outboxq.events import Event, JobEvent, JobsParked, JobsSuspected
from outboxq.execution.claim import ClaimTransaction, anchor
from outboxq.execution.errors import Abandoned
from outboxq.execution.runtime import Result
from outboxq.job import Job
from outboxq.statements.transaction import LOCAL_SETTINGS, local_timeouts

# Held for a moment, but for a cancellation that is on its way to the server.
_LOCK_SECONDS = 1.0

SegmentKind: TypeAlias = Literal["shared", "group", "alone"]


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What one batch came to: what was committed."""

    claimed: int
    events: tuple[Event, ...]

    @property
    def parked_in(self) -> str | None:
        """The queue in which jobs were found that this relay cannot run, if any were."""
        return next((event.queue for event in self.events if isinstance(event, JobsParked)), None)


@dataclass(slots=True)
class BatchState:
    """How far a claimed batch has come: what is needed to find out, after an error, what stands of it.

    `anchor` is None until the transaction has begun, `begun` says that it was tried. `position` is the job that runs,
    until `deadline` (monotonic) if it has one; `epoch` is the run of the server that knows the transaction. `events` is
    what becomes of the jobs before it, should the transaction commit; `late_result` what a handler returned that never
    used the database, until the transaction of its settlement has begun.

    `together` is how many jobs, from `position` on, one handler runs now. `one_run`: how all jobs run together, to be
    checked by COMMIT; `is_apart`: they did, and were undone by that. `deadlocked`: jobs that ran together were undone
    by a deadlock or a serialization failure.

    One of three has the last word, whoever comes first: COMMIT was sent by us (`certifying`), the slot finds out what
    stands (`recovering`; `recovery_xid` is what it wrote then, and `buried_because` why), or the relay took the batch
    away (`seized`).
    """

    queue: str
    jobs: tuple[Job, ...]
    anchor: ClaimTransaction | None
    moved: int = 0
    timeout_seconds: float | None = None
    epoch: str = ""
    position: int = 0
    deadline: float | None = None
    events: list[JobEvent] = field(default_factory=list)
    unknown: list[Job] = field(default_factory=list)
    late_result: Result | None = None
    certifying: bool = False
    recovering: bool = False
    begun: bool = False
    seized: bool = False
    recovery_xid: str | None = None
    buried_because: str = ""
    deadlocked: bool = False
    together: int = 1
    one_run: SegmentKind | None = None
    is_apart: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def job(self) -> Job:
        """The job that runs."""
        return self.jobs[self.position]

    @property
    def lone_job(self) -> Job | None:
        """The job, if it is the only one of its batch."""
        return self.jobs[0] if len(self.jobs) == 1 else None

    @property
    def is_leased(self) -> bool:
        """Whether its claim is committed already."""
        return self.jobs[0].lease_token is not None

    def begin(self, connection: Connection) -> ClaimTransaction:
        """The transaction of the batch, begun if it has not been."""
        if self.seized:
            raise Abandoned("the relay does not wait for this job any more")
        if self.anchor is None:
            self.begun = True
            self.anchor = anchor(connection, LOCAL_SETTINGS + local_timeouts(self.timeout_seconds))
        return self.anchor

    def begin_commit(self) -> None:
        """From here on the outcome is the server's alone."""
        with self._lock:
            if self.seized:
                raise Abandoned("the relay does not wait for this job any more")
            self.certifying = True

    def begin_recovery(self) -> None:
        """From here on its slot finds out what stands of it, and nobody else."""
        with self._lock:
            if self.seized:
                raise Abandoned("the relay does not wait for this job any more")
            self.recovering = True

    def seize(self) -> bool:
        """Take the batch away from its slot, once; False where its COMMIT, or its recovery, is under way."""
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return False
        try:
            if self.seized or self.certifying or self.recovering:
                return False
            self.seized = True
            return True
        finally:
            self._lock.release()

    @contextmanager
    def while_running(self, deadline: float) -> Iterator[bool]:
        """Whether the job with this deadline still runs; meanwhile it is neither committed nor taken away."""
        with self._lock:
            yield self.deadline == deadline and not self.certifying

    def blame_all(self, places: range) -> None:
        """Say of jobs that ran together, one of which ended their transaction, that none is known to be done."""
        self.position, self.together = places.start, len(places)
        del self.events[places.start :]

    def report(self) -> BatchReport:
        """What the batch came to, once its transaction is known to be committed."""
        events: list[Event] = list(self.events)
        if self.unknown:
            events.append(JobsParked(self.queue, tuple(sorted({job.kind for job in self.unknown})), len(self.unknown)))
        if self.moved:
            events.append(JobsSuspected(self.queue, self.moved))
        return BatchReport(len(self.jobs), tuple(events))
