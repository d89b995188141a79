"""Settle: the outcome of a job's attempt is written in the transaction of its handler's rows.

In transaction mode success writes nothing: the claim has deleted the job. Under a lease every write is refused once
the lease was lost. `commit` commits, and checks that it did.
"""

from datetime import timedelta
from typing import assert_never

from sqlalchemy import Connection, Delete, Insert, Update
from sqlalchemy.exc import DBAPIError

from outboxq.database.driver import run_script
from outboxq.database.errors import sqlstate_of
from outboxq.error_record import ErrorRecord
from outboxq.errors import LeaseLost, TransactionEndedByHandler
from outboxq.events import (
    JobCancelled,
    JobDied,
    JobDiscarded,
    JobDone,
    JobEvent,
    JobExpired,
    JobRetried,
    JobSnoozed,
)
from outboxq.execution.chain import add_follower
from outboxq.execution.failure import Failed, kept_errors
from outboxq.execution.runtime import (
    CancelledResult,
    ExpiredResult,
    GivenBack,
    Result,
    Runtime,
    SettledByClaim,
    UnknownKindResult,
)
from outboxq.handlers.returned import DoneWithResult
from outboxq.job import THEN_HEADER, Job
from outboxq.outcomes import DeadLetter, Discard, Done, Retry, Snooze
from outboxq.statements import cancel, transaction
from outboxq.statements.settle import errors_with, insert_dead, put_back, put_back_parked, remove, unchanged

# lock_timeout; statement_timeout or a cancellation; a deadlock.
_GAVE_UP_WAITING = frozenset({"55P03", "57014", "40P01"})


def settle_result(connection: Connection, job: Job, result: Result, runtime: Runtime, seconds: float) -> JobEvent:
    """Write the job's outcome, and return the event to send once that is committed."""
    if isinstance(result, Done):
        # In transaction mode the job's claim has removed it already.
        if job.lease_token is not None:
            _write(connection, job, remove(job))
        if THEN_HEADER in job.headers:
            add_follower(connection, job)
        return event_of_end(job, result, runtime, seconds)
    result = runtime.redacted(job, result)
    match result:
        case Discard():
            finish(connection, job)
            return event_of_end(job, result, runtime, seconds)
        case Failed(record) if result.permanent:
            reason = f"another attempt cannot help: {record.type}: {record.message}"
            dead_letter(connection, job, reason, record)
            return died(job, reason, record, result.error, seconds)
        case Failed(record):
            return _retry_or_dead_letter(connection, job, record, runtime, None, result.error, seconds)
        case Retry(delay, reason):
            record = ErrorRecord(job.attempt, "outboxq.Retry", runtime.reason(reason, job))
            pause = None if delay is None else max(delay.total_seconds(), 0.0)
            return _retry_or_dead_letter(connection, job, record, runtime, pause, None, seconds)
        case Snooze(delay):
            snooze(connection, job, delay, passes=passes(job, runtime))
            return JobSnoozed(job, delay.total_seconds(), seconds)
        case DeadLetter(reason):
            described = runtime.reason(reason, job)
            dead_letter(connection, job, described, ErrorRecord(job.attempt, "outboxq.DeadLetter", described))
            return JobDied(job, described, seconds=seconds)
        case CancelledResult() | ExpiredResult():
            return _drop(connection, job, result, runtime, seconds)
        case UnknownKindResult() | SettledByClaim() | GivenBack():
            raise AssertionError("it has no event: see `run`")
    assert_never(result)


def _drop(
    connection: Connection, job: Job, result: CancelledResult | ExpiredResult, runtime: Runtime, seconds: float
) -> JobEvent:
    """End a job that has expired, or was cancelled: as its request wants it, together with the request.

    A request that is gone was answered before the job came back from the dead letters, and one that is older than the
    job was for an earlier job of its id: then the job runs again.
    """
    if isinstance(result, ExpiredResult):
        finish(connection, job)
        return JobExpired(job, seconds)
    # A job with a key may have taken over the time of one that was added after the request.
    created_at = job.created_at if job.unique_key is None else None
    outcome = connection.execute(cancel.take_request(job.id, created_at)).scalar_one_or_none()
    if outcome is None:
        runtime.orders.cancelled.discard(job.id)
        snooze(connection, job, timedelta(0))
        return JobSnoozed(job, 0.0, seconds)
    if outcome == "dead":
        dead_letter(connection, job, cancel.CANCELLED)
        return JobDied(job, cancel.CANCELLED, seconds=seconds)
    finish(connection, job)
    return JobCancelled(job, seconds)


def event_of_end(job: Job, result: Done | Discard, runtime: Runtime, seconds: float) -> JobEvent:
    """Make the event of a job that ended."""
    if isinstance(result, Discard):
        return JobDiscarded(job, runtime.reason(result.reason, job), seconds)
    return JobDone(job, seconds, result.result if isinstance(result, DoneWithResult) else None)


def _retry_or_dead_letter(
    connection: Connection,
    job: Job,
    record: ErrorRecord,
    runtime: Runtime,
    pause_seconds: float | None,
    error: BaseException | None,
    seconds: float,
) -> JobEvent:
    policy = runtime.registry.handlers[job.kind].retry
    limit = job.max_attempts or policy.max_attempts
    if job.attempt >= limit:
        reason = f"gave up after {job.attempt} of {limit} attempts: {record.type}"
        dead_letter(connection, job, reason, record)
        return died(job, reason, record, error, seconds)
    delay_seconds = policy.delay(job.attempt).total_seconds() if pause_seconds is None else pause_seconds
    retry(connection, job, record, timedelta(seconds=delay_seconds), passes=passes(job, runtime))
    return JobRetried(job, record.type, record.message, record.where, delay_seconds, error, record, seconds)


def died(job: Job, reason: str, record: ErrorRecord, error: BaseException | None, seconds: float) -> JobDied:
    """Make the event of a job that moves to the dead letters for a failed attempt."""
    return JobDied(job, reason, record.where, record.type, record.message, error, record, seconds)


def finish(connection: Connection, job: Job) -> None:
    """Remove a job that ended. In transaction mode its claim has removed it already.

    Raises:
        LeaseLost: another relay may have the job by now; nothing of this run may be committed.
    """
    if job.lease_token is not None:
        _write(connection, job, remove(job))


def passes(job: Job, runtime: Runtime) -> bool:
    """Return True if later jobs of its group go on while this one is put off. One of an unknown kind holds them up."""
    if job.group_key is None:
        return False
    # If several jobs of a group run at a time, there is no order to keep. An operator's setting is in the table.
    declared = runtime.registry.limits.get(job.queue)
    several = declared is not None and (declared.per_group or 1) > 1
    handler = runtime.handler_of(job)
    return handler is not None and (several or handler.on_failure == "pass")


def retry(connection: Connection, job: Job, record: ErrorRecord, delay: timedelta, *, passes: bool = False) -> None:
    """Put the job back to run after `delay`, with this attempt counted and its error recorded.

    Args:
        passes: Later jobs of its group go on until then.
    """
    errors = errors_with(kept_errors(job.errors), record.as_json())
    _write(connection, job, put_back(job, attempt=job.attempt, errors=errors, delay=delay, passes=passes))


def snooze(connection: Connection, job: Job, delay: timedelta, *, passes: bool = False) -> None:
    """Put the job back to run after `delay`, without counting the attempt."""
    _write(connection, job, put_back(job, attempt=job.attempt - 1, errors=job.errors, delay=delay, passes=passes))


def release(connection: Connection, job: Job, record: ErrorRecord | None = None) -> None:
    """Put a job back to run at once, its attempt not counted; `record` says why it did not end, if it had begun."""
    errors = job.errors if record is None else errors_with(kept_errors(job.errors), record.as_json())
    _write(connection, job, put_back(job, attempt=job.attempt - 1, errors=errors, delay=None))


def park(connection: Connection, job: Job) -> None:
    """Put a job of an unknown kind back for later, without counting an attempt."""
    _write(connection, job, put_back_parked(job))


def dead_letter(connection: Connection, job: Job, reason: str, record: ErrorRecord | None = None) -> None:
    """Move the job to the dead letters."""
    finish(connection, job)
    errors = job.errors if record is None else errors_with(kept_errors(job.errors), record.as_json())
    connection.execute(insert_dead(job, reason=reason, errors=errors))


def is_unchanged(connection: Connection, job: Job) -> bool:
    """Return True if the row still is as the claim found it, or, under a lease, as the claim left it."""
    return connection.execute(unchanged(job)).first() is not None


def check_shared(connection: Connection, xid: str) -> None:
    """Check deferred constraints now: COMMIT would not show which job of the transaction has violated one.

    They stay deferred.

    Raises:
        psycopg.Error: the first violation of a deferred constraint.
        TransactionEndedByHandler: this is not the claim's transaction any more.
    """
    rows = run_script(
        connection,
        "SAVEPOINT oq_constraints; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO SAVEPOINT oq_constraints; "
        f"RELEASE SAVEPOINT oq_constraints; {transaction.current_xid()}",
    )
    if rows[-1][0] != xid:
        raise TransactionEndedByHandler


def current_xid(connection: Connection) -> object:
    """The id of the open transaction, or None if it has written nothing."""
    return run_script(connection, transaction.current_xid())[0][0]


class JobRowHeld(LeaseLost):
    """Another transaction held the row of a leased job for longer than the deadlines allow. The job has not failed."""


def _write(connection: Connection, job: Job, statement: Insert | Update | Delete) -> None:
    try:
        written = connection.execute(statement).rowcount
    except DBAPIError as error:
        # The statement waited for the job's row; in transaction mode it waits for nothing.
        if job.lease_token is not None and sqlstate_of(error) in _GAVE_UP_WAITING:
            raise JobRowHeld(job.id) from error
        raise
    # The fence: without the row that has this job's token, nothing of this run may be committed.
    if written != 1 and job.lease_token is not None:
        raise LeaseLost(job.id)
