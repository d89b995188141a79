"""A batch on its way: claimed, executed, settled, certified, in one transaction on one connection.

Written once: a thread calls it on its `Connection`, an event loop through `run_sync`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import assert_never

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq import settle
from outboxq.claim import Batch, claim, claim_one
from outboxq.driver import is_lost, run_script, transaction_status
from outboxq.errors import TransactionEndedByHandler
from outboxq.events import Event, JobDied, JobDiscarded, JobDone, JobEvent, JobRetried, JobSnoozed, JobsParked
from outboxq.execute import FREE_RETRIES, Abandoned, ConnectionLost, Result, TransactionEscaped, Unknown, Work, execute
from outboxq.failure import ErrorRecord, Failed, describe_failure, describe_reason
from outboxq.fault_points import fault_point
from outboxq.job import Job
from outboxq.retry import Backoff, DeadLetter, Discard, Done, Retry, Snooze

PUT_OFF = timedelta(minutes=5)
COMMITTED_BY_HANDLER = "committed by its handler: some of its rows may stand, so it never runs again"


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What one batch came to: what was committed."""

    claimed: int
    events: tuple[Event, ...]

    @property
    def parked(self) -> bool:
        """Whether there were jobs that nobody here can run."""
        return any(isinstance(event, JobsParked) for event in self.events)


@dataclass(slots=True)
class Progress:
    """How far a claimed batch has come: what is needed to find out, after an error, what stands of it.

    `position` is the job that runs, `events` what becomes of those before it, should the transaction commit;
    `certifying` says that COMMIT was sent by us.
    """

    batch: Batch
    position: int = 0
    events: list[JobEvent] = field(default_factory=list)
    unknown: list[Job] = field(default_factory=list)
    certifying: bool = False
    recovery_xid: str | None = None

    @property
    def lone_job(self) -> Job | None:
        """The job, if it is the only one of its batch."""
        return self.batch.jobs[0] if len(self.batch.jobs) == 1 else None

    def report(self) -> BatchReport:
        """What the batch came to, once its transaction is known to be committed."""
        if not self.unknown:
            return BatchReport(len(self.batch.jobs), tuple(self.events))
        kinds = tuple(sorted({job.kind for job in self.unknown}))
        parked = JobsParked(self.unknown[0].queue, kinds, len(self.unknown))
        return BatchReport(len(self.batch.jobs), (*self.events, parked))


def run_batch(
    connection: Connection, script: str, limit: int, work: Work, started: Callable[[Progress], None]
) -> BatchReport | None:
    """Claim up to `limit` jobs with `script`, run them, and commit; None where nothing waited.

    Args:
        started: Given the progress of what was claimed, before the first handler runs. After any error, `resolve` it.

    Raises:
        ConnectionLost, psycopg.Error, SQLAlchemyError: what stands of the batch is to be found out.
    """
    progress: Progress | None = None
    fault_point("before-claim")
    try:
        with connection.begin():
            batch = claim(connection, script, limit)
            if batch is None:
                return None
            progress = Progress(batch)
            started(progress)
            fault_point("after-claim")
            # Committed by the certificate inside; leaving the block only tells SQLAlchemy.
            return _work_off(connection, progress, work)
    except TransactionEscaped as escaped:
        failure = escaped
    assert progress is not None
    end_transaction(connection)
    return _recover(connection, progress, work, failure)


def resolve(connection: Connection, progress: Progress) -> BatchReport | None:
    """Find out what stands of a batch that ended in an error, on a connection that works; None where nothing does.

    Committed by our certificate, whose answer was lost: everything stands. Committed although we never sent COMMIT: a
    handler did it, and the jobs behind it are put back.

    Raises:
        ConnectionLost: the server has not noticed yet that the transaction's connection is gone.
    """
    # An earlier recovery whose COMMIT was not answered: were it repeated, jobs put back and done since would run again.
    if progress.recovery_xid is not None and _was_committed(connection, progress.recovery_xid):
        return _recovered(progress)
    if not _was_committed(connection, progress.batch.xid):
        return None
    if progress.certifying:
        return progress.report()
    job = progress.batch.jobs[progress.position]
    return _recover_committed(connection, progress, describe_failure(TransactionEndedByHandler(), job))


def charge(connection: Connection, job: Job, error: BaseException, work: Work) -> BatchReport:
    """Count an attempt of a job that fails outside its handler, or takes its connection with it, time after time.

    Another relay may have taken it meanwhile. Where it cannot even be settled, it is put off instead, so that it does
    not hold up its queue.
    """
    try:
        with connection.begin():
            again = claim_one(connection, work.schema, str(job.id))
            if again is None:
                return BatchReport(0, ())
            event = settle_result(connection, again.jobs[0], describe_failure(error, again.jobs[0]), work, 0.0)
            settle.certify(connection, again.savepoint)
        return BatchReport(1, (event,))
    except (psycopg.Error, SQLAlchemyError):
        if is_lost(connection):
            raise
        end_transaction(connection)
        with connection.begin():
            settle.put_off(connection, job, PUT_OFF)
        return BatchReport(1, ())


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
    """
    for position, job in enumerate(progress.batch.jobs):
        progress.position = position
        begun = time.perf_counter()
        result = execute(connection, job, work, shared_xid=progress.batch.xid if shared else None)
        if isinstance(result, Unknown):
            progress.unknown.append(job)
            settle.park(connection, job)
        else:
            progress.events.append(settle_result(connection, job, result, work, time.perf_counter() - begun))


def _work_off(connection: Connection, progress: Progress, work: Work) -> BatchReport:
    alone = progress.lone_job is not None
    for tries_left in range(FREE_RETRIES, -1, -1):
        execute_all(connection, progress, work, shared=not alone)
        if work.abandoned():
            raise Abandoned(f"{len(progress.batch.jobs)} jobs were not done within the time to drain")
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
    progress.certifying = True
    try:
        settle.certify(connection, progress.batch.savepoint)
        fault_point("after-commit")
    except psycopg.Error:
        # An answer that is an error: nothing was committed. Without an answer, nobody knows.
        progress.certifying = is_lost(connection)
        raise


def _refused_at_commit(
    connection: Connection, progress: Progress, work: Work, error: psycopg.Error, *, last: bool
) -> bool:
    """A lone job whose certificate failed, mostly for a deferred constraint: undo its rows, record it, commit that.

    Returns:
        False where it is to run once more, for free: a deadlock or a serialization failure.
    """
    job = progress.batch.jobs[0]
    failed = describe_failure(error, job)
    progress.events.clear()
    progress.unknown.clear()
    try:
        run_script(connection, f"ROLLBACK TO SAVEPOINT {progress.batch.savepoint}")
    except psycopg.Error as gone:
        if is_lost(connection):
            raise ConnectionLost("the connection was lost after COMMIT was refused") from gone
        raise TransactionEscaped(job, failed) from gone
    if failed.transient and not last:
        return False
    progress.events.append(settle_result(connection, job, failed, work, 0.0))
    _certify(connection, progress)
    return True


def settle_result(connection: Connection, job: Job, result: Result, work: Work, seconds: float) -> JobEvent:
    """Write what becomes of the job, and return the event to send once that is committed."""
    handler = work.registry.find(job.kind)
    match result:
        case Done():
            return JobDone(job, seconds)
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


def _was_committed(connection: Connection, xid: str) -> bool:
    with connection.begin():
        status = run_script(connection, f"SELECT pg_xact_status('{int(xid)}'::xid8)")[0].rows[0][0]
    if status == "in progress":
        raise ConnectionLost("it is not known yet whether the last transaction was committed")
    return status == "committed"


def _recover(connection: Connection, progress: Progress, work: Work, escaped: TransactionEscaped) -> BatchReport:
    """After a handler ended the transaction: find out what stands, and leave no job lost or half done.

    Between that handler's COMMIT and ours the jobs behind it are in no table; only the death of this process in that
    window loses them, and only a handler that commits on the driver's own connection opens it.
    """
    if _was_committed(connection, progress.batch.xid):
        return _recover_committed(connection, progress, escaped.failed)
    with connection.begin():
        # Rolled back: every job waits again, and this one pays. Another relay may have taken it meanwhile.
        again = claim_one(connection, work.schema, str(escaped.job.id))
        if again is None:
            return BatchReport(len(progress.batch.jobs), ())
        event = settle_result(connection, again.jobs[0], escaped.failed, work, 0.0)
        settle.certify(connection, again.savepoint)
    return BatchReport(len(progress.batch.jobs), (event,))


def _recover_committed(connection: Connection, progress: Progress, failed: Failed) -> BatchReport:
    jobs, position = progress.batch.jobs, progress.position
    with connection.begin():
        settle.bury(connection, jobs[position], COMMITTED_BY_HANDLER, failed.record)
        for job in jobs[position + 1 :]:
            settle.give_back(connection, job)
        progress.recovery_xid = str(settle.current_xid(connection))
    return _recovered(progress)


def _recovered(progress: Progress) -> BatchReport:
    jobs = progress.batch.jobs
    return BatchReport(len(jobs), (*progress.events, JobDied(jobs[progress.position], COMMITTED_BY_HANDLER)))
