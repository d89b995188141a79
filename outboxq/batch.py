"""A batch on its way: claimed, executed, settled, certified.

In transaction mode in one transaction on one connection; under a lease the claim is committed first. Written once: a
thread calls it on its `Connection`, an event loop through `run_sync`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import assert_never

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outboxq import settle
from outboxq.claim import Anchor, anchor, claim
from outboxq.driver import is_lost, run_script, transaction_status
from outboxq.events import (
    Event,
    JobDied,
    JobDiscarded,
    JobDone,
    JobEvent,
    JobRetried,
    JobSnoozed,
    JobsParked,
    JobsSuspected,
)
from outboxq.execute import FREE_RETRIES, Abandoned, ConnectionLost, Result, TransactionEscaped, Unknown, Work, execute
from outboxq.failure import ErrorRecord, Failed, describe_failure, describe_reason
from outboxq.fault_points import fault_point
from outboxq.job import Job
from outboxq.retry import Backoff, DeadLetter, Discard, Done, Retry, Snooze
from outboxq.statements.claim import ClaimScript
from outboxq.statements.session import LOCAL_SETTINGS, local_timeouts, local_timeouts_off

# Held for a moment, but for a cancellation that is on its way to the server.
_LOCK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What one batch came to: what was committed."""

    claimed: int
    events: tuple[Event, ...]

    @property
    def parked(self) -> bool:
        """Whether there were jobs that nobody here can run."""
        return any(isinstance(event, JobsParked) for event in self.events)

    @property
    def suspected(self) -> bool:
        """Whether jobs whose claim had died were set aside."""
        return any(isinstance(event, JobsSuspected) for event in self.events)


@dataclass(frozen=True, slots=True)
class ClaimedQueue:
    """A queue, and the longest deadline of its handlers."""

    name: str
    timeout_seconds: float | None


@dataclass(slots=True)
class Progress:
    """How far a claimed batch has come: what is needed to find out, after an error, what stands of it.

    `anchor` is None until the transaction has begun, `begun` says that it was tried. `position` is the job that runs,
    until `deadline` (monotonic) if it has one; `epoch` is the run of the server that knows the transaction. `events` is
    what becomes of the jobs before it, should the transaction commit; `late_result` what a handler returned that never
    used the database, until the transaction of its settlement has begun.

    One of three has the last word, whoever comes first: COMMIT was sent by us (`certifying`), the slot finds out what
    stands (`recovering`; `recovery_xid` is what it wrote then), or the relay took the batch away (`seized`).
    """

    queue: str
    jobs: tuple[Job, ...]
    anchor: Anchor | None
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

    def begin(self, connection: Connection) -> Anchor:
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
    def held(self, deadline: float) -> Iterator[bool]:
        """Whether the job with this deadline still runs; meanwhile it is neither committed nor taken away."""
        with self._lock:
            yield self.deadline == deadline and not self.certifying

    def report(self) -> BatchReport:
        """What the batch came to, once its transaction is known to be committed."""
        events: list[Event] = list(self.events)
        if self.unknown:
            events.append(JobsParked(self.queue, tuple(sorted({job.kind for job in self.unknown})), len(self.unknown)))
        if self.moved:
            events.append(JobsSuspected(self.queue, self.moved))
        return BatchReport(len(self.jobs), tuple(events))


def run_batch(
    connection: Connection,
    queue: ClaimedQueue,
    script: ClaimScript,
    limit: int,
    work: Work,
    started: Callable[[Progress], None],
) -> BatchReport | None:
    """Claim up to `limit` jobs with `script`, run them, and commit; None where nothing waited.

    Args:
        started: Given the progress of what was claimed, before the first handler runs. After any error, `resolve` it.

    Raises:
        ConnectionLost, psycopg.Error, SQLAlchemyError: what stands of the batch is to be found out.
        TransactionEscaped: a handler ended the transaction: `recover` what it left.
        LeaseLost: nothing was committed, and another relay may have the job.
        Abandoned: the relay has taken the batch away.
    """
    fault_point("before-claim")
    with connection.begin():
        # The deadline behind the claim: it is the handlers', and a claim that has far to walk must not starve by it.
        claimed = claim(connection, script, limit, LOCAL_SETTINGS, local_timeouts(queue.timeout_seconds))
        if claimed.anchor is not None:
            progress = Progress(
                queue.name, claimed.jobs, claimed.anchor, claimed.moved, queue.timeout_seconds, work.epoch
            )
            started(progress)
            fault_point("after-claim")
            # Committed by the certificate inside; leaving the block only tells SQLAlchemy.
            return _work_off(connection, progress, work)
    if not claimed.jobs:
        return BatchReport(0, (JobsSuspected(queue.name, claimed.moved),)) if claimed.moved else None
    # The lease is committed. Were COMMIT's answer lost, the relay's sweep would find a job that nobody runs.
    progress = Progress(queue.name, claimed.jobs, None, epoch=work.epoch)
    started(progress)
    fault_point("after-claim")
    # The driver sends BEGIN with the first statement: none, while a handler works outside the database.
    with connection.begin():
        return _work_off(connection, progress, work)


def end_transaction(connection: Connection) -> None:
    """Roll back whatever a handler left open, for SQLAlchemy and for the driver below it."""
    connection.rollback()
    if transaction_status(connection) != TransactionStatus.IDLE:
        run_script(connection, "ROLLBACK")


def execute_all(connection: Connection, progress: Progress, work: Work, *, shared: bool) -> None:
    """Execute and settle each job of a claimed batch; its events become true when the transaction commits.

    Args:
        shared: Check each job as one that shares its transaction with others.

    Raises:
        ConnectionLost, TransactionEscaped: see `execute`.
        LeaseLost: another relay may have the job.
    """
    for position, job in enumerate(progress.jobs):
        progress.position = position
        begun = time.perf_counter()
        result = _execute_one(connection, progress, job, work, shared=shared)
        if not progress.begun:
            # The handler worked outside the database: should this connection be gone by now, its work is not.
            progress.late_result = result
        progress.begin(connection)
        progress.late_result = None
        if isinstance(result, Unknown):
            progress.unknown.append(job)
            settle.park(connection, job)
        else:
            progress.events.append(settle_result(connection, job, result, work, time.perf_counter() - begun))


def _execute_one(connection: Connection, progress: Progress, job: Job, work: Work, *, shared: bool) -> Result:
    handler = work.handler_of(job)
    seconds = None if handler is None else handler.timeout_seconds
    if seconds != progress.timeout_seconds and handler is not None:
        # The transaction was set up for the longest deadline of its queue, or the last job's.
        if progress.anchor is not None:
            run_script(connection, local_timeouts(seconds) or local_timeouts_off())
        progress.timeout_seconds = seconds
    progress.deadline = None if seconds is None else time.monotonic() + seconds
    try:
        xid = progress.anchor.xid if shared and progress.anchor is not None else None
        begin = None if progress.anchor is not None else partial(progress.begin, connection)
        return execute(connection, job, work, shared_xid=xid, begin=begin)
    finally:
        progress.deadline = None


def _work_off(connection: Connection, progress: Progress, work: Work) -> BatchReport:
    alone = progress.lone_job is not None
    for tries_left in range(FREE_RETRIES, -1, -1):
        execute_all(connection, progress, work, shared=not alone)
        try:
            _certify(connection, progress)
        except psycopg.Error as error:
            if is_lost(connection):
                raise ConnectionLost("the connection was lost at COMMIT: either everything stands, or none") from error
            if not alone:
                # Every job passed its own check; who is to blame shows when each runs alone.
                raise
            if not _refused_at_commit(connection, progress, work, error, last=tries_left == 0):
                continue
        break
    return progress.report()


def _certify(connection: Connection, progress: Progress) -> None:
    fault_point("before-commit")
    progress.begin_commit()
    assert progress.anchor is not None
    try:
        settle.certify(connection, progress.anchor.savepoint)
    except psycopg.Error:
        # An answer that is an error: nothing was committed. Without an answer, nobody knows.
        progress.certifying = is_lost(connection)
        raise
    fault_point("after-commit")


def _refused_at_commit(
    connection: Connection, progress: Progress, work: Work, error: psycopg.Error, *, last: bool
) -> bool:
    """A lone job whose certificate failed, mostly for a deferred constraint: undo its rows, record it, commit that.

    Returns:
        False where it is to run once more, for free: a deadlock or a serialization failure.
    """
    assert progress.anchor is not None
    failed = describe_failure(error, progress.job)
    progress.events.clear()
    progress.unknown.clear()
    try:
        run_script(connection, f"ROLLBACK TO SAVEPOINT {progress.anchor.savepoint}")
    except psycopg.Error as gone:
        if is_lost(connection):
            raise ConnectionLost("the connection was lost after COMMIT was refused") from gone
        raise TransactionEscaped(progress.job, failed) from gone
    # Gone with the savepoint: what was set for the handler alone.
    progress.timeout_seconds = work.registry.timeout_seconds(progress.queue)
    if failed.transient and not last:
        return False
    progress.events.append(settle_result(connection, progress.job, failed, work, 0.0))
    _certify(connection, progress)
    return True


def settle_result(connection: Connection, job: Job, result: Result, work: Work, seconds: float) -> JobEvent:
    """Write what becomes of the job, and return the event to send once that is committed."""
    handler = work.registry.find(job.kind)
    match result:
        case Done():
            settle.finish(connection, job)
            return JobDone(job, seconds)
        case Failed(record) if result.permanent:
            reason = f"{record.type}: another attempt cannot help"
            settle.bury(connection, job, reason, record)
            return JobDied(job, reason, record.where)
        case Failed(record):
            return _retry_or_bury(connection, job, record, handler.retry, None)
        case Retry(delay, reason):
            record = ErrorRecord(job.attempt, "outboxq.Retry", describe_reason(reason, job))
            pause = None if delay is None else max(delay.total_seconds(), 0.0)
            return _retry_or_bury(connection, job, record, handler.retry, pause)
        case Snooze(delay):
            settle.snooze(connection, job, delay)
            return JobSnoozed(job, delay.total_seconds())
        case DeadLetter(reason):
            described = describe_reason(reason, job)
            settle.bury(connection, job, described)
            return JobDied(job, described)
        case Discard(reason):
            settle.finish(connection, job)
            return JobDiscarded(job, describe_reason(reason, job))
        case Unknown():
            raise AssertionError("unknown kinds are parked, not settled")
    assert_never(result)


def _retry_or_bury(
    connection: Connection, job: Job, record: ErrorRecord, policy: Backoff, pause_seconds: float | None
) -> JobEvent:
    limit = job.max_attempts or policy.max_attempts
    if job.attempt >= limit:
        reason = f"gave up after {job.attempt} of {limit} attempts: {record.type}"
        settle.bury(connection, job, reason, record)
        return JobDied(job, reason, record.where)
    delay_seconds = policy.delay(job.attempt).total_seconds() if pause_seconds is None else pause_seconds
    settle.retry(connection, job, record, timedelta(seconds=delay_seconds))
    return JobRetried(job, record.type, record.message, record.where, delay_seconds)
