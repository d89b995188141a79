"""Settle: the outcome of a job's attempt is written in the transaction of its handler's rows.

The decision on the outcome needs no connection. It is an object (`Settlement`), so that the decisions on many leased
jobs can be written later, together. In transaction mode success writes nothing: the claim has deleted the job. Under a
lease every write is refused once the lease is lost. `commit` commits, and checks that it did.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias, assert_never

from sqlalchemy import ColumnElement, Connection, Delete, Insert, Update
from sqlalchemy.exc import DBAPIError

from outboxq.database.driver import run_script
from outboxq.database.errors import DEADLOCK, LOCK_NOT_AVAILABLE, QUERY_CANCELED, sqlstate_of
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
from outboxq.statements.settle import (
    Bury,
    PutBack,
    errors_with,
    insert_dead,
    put_back,
    put_back_parked,
    remove,
    unchanged,
)

# lock_timeout; statement_timeout or a cancellation; a deadlock.
_GAVE_UP_WAITING = frozenset({LOCK_NOT_AVAILABLE, QUERY_CANCELED, DEADLOCK})


@dataclass(frozen=True, slots=True)
class Finish:
    """The change that ends a job without a dead letter: its row is deleted, unless the job's claim has deleted it."""

    job: Job


Change: TypeAlias = Finish | PutBack | Bury


@dataclass(frozen=True, slots=True)
class Settlement:
    """The change to write for a job's attempt, and the event to publish when the change is committed, if any."""

    change: Change
    event: JobEvent | None

    @property
    def job(self) -> Job:
        """The job as it was claimed."""
        return self.change.job


def settle_result(connection: Connection, job: Job, result: Result, runtime: Runtime, seconds: float) -> JobEvent:
    """Write the job's outcome, and return the event to publish when it is committed."""
    if isinstance(result, Done):
        # In transaction mode the job's claim has removed it already.
        if job.lease_token is not None:
            _write(connection, job, remove(job))
        if THEN_HEADER in job.headers:
            add_follower(connection, job)
        return event_of_end(job, result, runtime, seconds)
    if isinstance(result, CancelledResult):
        return _cancel(connection, job, runtime, seconds)
    settlement = _decide(job, result, runtime, seconds)
    assert settlement.event is not None, "it has no event: see `run`"
    write(connection, settlement.change)
    return settlement.event


def settlement_of(job: Job, result: Result, runtime: Runtime, seconds: float) -> Settlement | None:
    """Return the change that ends a job's attempt, decided without a connection; None if `settle_result` must decide.

    It must decide for a cancelled job, because the request for its cancellation must be queried, and for a done job
    with a next job in its chain, which must be added.
    """
    if isinstance(result, CancelledResult) or (isinstance(result, Done) and THEN_HEADER in job.headers):
        return None
    if type(result) is Done:
        # Most attempts succeed, and have no text to withhold.
        return Settlement(Finish(job), JobDone(job, seconds))
    return _decide(job, result, runtime, seconds)


def _decide(job: Job, result: Result, runtime: Runtime, seconds: float) -> Settlement:
    result = runtime.redacted(job, result)
    match result:
        case Done() | Discard():
            return Settlement(Finish(job), event_of_end(job, result, runtime, seconds))
        case ExpiredResult():
            return Settlement(Finish(job), JobExpired(job, seconds))
        case Failed(record) if result.permanent:
            reason = f"another attempt cannot help: {record.type}: {record.message}"
            return Settlement(_bury(job, reason, record), died(job, reason, record, result.error, seconds))
        case Failed(record):
            return _retry_or_bury(job, record, runtime, None, result.error, seconds)
        case Retry(delay, reason):
            record = ErrorRecord(job.attempt, "outboxq.Retry", runtime.reason(reason, job))
            pause = None if delay is None else max(delay.total_seconds(), 0.0)
            return _retry_or_bury(job, record, runtime, pause, None, seconds)
        case Snooze(delay):
            later = PutBack(job=job, attempt=job.attempt - 1, delay=delay, passes=passes(job, runtime))
            return Settlement(later, JobSnoozed(job, delay.total_seconds(), seconds))
        case DeadLetter(reason):
            described = runtime.reason(reason, job)
            record = ErrorRecord(job.attempt, "outboxq.DeadLetter", described)
            return Settlement(_bury(job, described, record), JobDied(job, described, seconds=seconds))
        case UnknownKindResult():
            return Settlement(_park(job), None)
        case GivenBack():
            return Settlement(_release(job), None)
        case CancelledResult() | SettledByClaim():
            raise AssertionError("it is settled by other statements: see `settle_result` and `run`")
    assert_never(result)


def _retry_or_bury(
    job: Job,
    record: ErrorRecord,
    runtime: Runtime,
    pause_seconds: float | None,
    error: BaseException | None,
    seconds: float,
) -> Settlement:
    policy = runtime.registry.handlers[job.kind].retry
    limit = job.max_attempts or policy.max_attempts
    if job.attempt >= limit:
        reason = f"gave up after {job.attempt} of {limit} attempts: {record.type}"
        return Settlement(_bury(job, reason, record), died(job, reason, record, error, seconds))
    delay_seconds = policy.delay(job.attempt).total_seconds() if pause_seconds is None else pause_seconds
    later, may_pass = timedelta(seconds=delay_seconds), passes(job, runtime)
    retry = PutBack(job=job, attempt=job.attempt, record=record.as_json(), delay=later, passes=may_pass)
    event = JobRetried(job, record.type, record.message, record.where, delay_seconds, error, record, seconds)
    return Settlement(retry, event)


def _cancel(connection: Connection, job: Job, runtime: Runtime, seconds: float) -> JobEvent:
    """End a cancelled job by the outcome that the request for its cancellation names, and delete the request.

    The request may be gone: it was carried out before, and the job has come back from the dead letters since. Or the
    request is older than the job, and was for an earlier job with the same id. In both cases the job runs again.
    """
    # A job with a coalescing key may have taken over the creation time of a job that was added after the request.
    created_at = job.created_at if job.unique_key is None else None
    outcome = connection.execute(cancel.take_request(job.id, created_at)).scalar_one_or_none()
    if outcome is None:
        runtime.orders.cancelled.discard(job.id)
        write(connection, PutBack(job=job, attempt=job.attempt - 1, delay=timedelta(0)))
        return JobSnoozed(job, 0.0, seconds)
    if outcome == "dead":
        dead_letter(connection, job, cancel.CANCELLED)
        return JobDied(job, cancel.CANCELLED, seconds=seconds)
    finish(connection, job)
    return JobCancelled(job, seconds)


def event_of_end(job: Job, result: Done | Discard, runtime: Runtime, seconds: float) -> JobEvent:
    """Make the event of a job that is done or was discarded."""
    if isinstance(result, Discard):
        return JobDiscarded(job, runtime.reason(result.reason, job), seconds)
    return JobDone(job, seconds, result.result if isinstance(result, DoneWithResult) else None)


def died(job: Job, reason: str, record: ErrorRecord, error: BaseException | None, seconds: float) -> JobDied:
    """Make the event of a job that moves to the dead letters for a failed attempt."""
    return JobDied(job, reason, record.where, record.type, record.message, error, record, seconds)


def finish(connection: Connection, job: Job) -> None:
    """Delete the row of a leased job that ended; in transaction mode do nothing, because the claim has deleted the row.

    Raises:
        LeaseLost: another relay may have the job by now; nothing of this run may be committed.
    """
    if job.lease_token is not None:
        _write(connection, job, remove(job))


def passes(job: Job, runtime: Runtime) -> bool:
    """Return True if later jobs of the job's group may run while this job is put off; False if it has no group.

    A job of a kind that cannot run here holds up its group, because only its handler's options allow later jobs to
    pass.
    """
    if job.group_key is None:
        return False
    # If several jobs of a group may run at a time, there is no order to keep. An operator's setting is in the table.
    declared = runtime.registry.limits.get(job.queue)
    several = declared is not None and (declared.per_group or 1) > 1
    handler = runtime.handler_of(job)
    return handler is not None and (several or handler.on_failure == "pass")


def _bury(job: Job, reason: str, record: ErrorRecord | None) -> Bury:
    return Bury(job=job, reason=reason, record=None if record is None else record.as_json())


def _release(job: Job, record: ErrorRecord | None = None) -> PutBack:
    return PutBack(job=job, attempt=job.attempt - 1, record=None if record is None else record.as_json())


def _park(job: Job) -> PutBack:
    return PutBack(job=job, attempt=job.attempt - 1, parks=True)


def release(connection: Connection, job: Job, record: ErrorRecord | None = None) -> None:
    """Put a job back to run at once, without counting the attempt.

    Args:
        record: The reason why the job did not end, if its run began; None otherwise.
    """
    write(connection, _release(job, record))


def park(connection: Connection, job: Job) -> None:
    """Put a job back whose kind cannot run here, for another relay or a later try, without counting an attempt."""
    write(connection, _park(job))


def dead_letter(connection: Connection, job: Job, reason: str, record: ErrorRecord | None = None) -> None:
    """Move the job to the dead letters."""
    write(connection, _bury(job, reason, record))


def write(connection: Connection, change: Change) -> None:
    """Write the change of one job: delete its row, put it back, or move it to the dead letters.

    Raises:
        LeaseLost: another relay may have the job by now; nothing of this run may be committed.
    """
    job = change.job
    if isinstance(change, Finish):
        finish(connection, job)
    elif isinstance(change, Bury):
        finish(connection, job)
        connection.execute(insert_dead(job, reason=change.reason, errors=_errors(job, change.record)))
    elif change.parks:
        _write(connection, job, put_back_parked(job))
    else:
        attempt, errors = change.attempt, _errors(job, change.record)
        _write(connection, job, put_back(job, attempt=attempt, errors=errors, delay=change.delay, passes=change.passes))


def _errors(job: Job, record: str | None) -> "str | ColumnElement[str]":
    return job.errors if record is None else errors_with(kept_errors(job.errors), record)


def is_unchanged(connection: Connection, job: Job) -> bool:
    """Return True if the job's row is in the table as this batch's claim found it or, under a lease, left it."""
    return connection.execute(unchanged(job)).first() is not None


def check_shared(connection: Connection, xid: str) -> None:
    """Check the deferred constraints after one of several jobs: COMMIT would not show which job violates one.

    The constraints stay deferred.

    Args:
        xid: The id of the claim's transaction.

    Raises:
        psycopg.Error: the first violation of a deferred constraint.
        TransactionEndedByHandler: this is no longer the claim's transaction.
    """
    rows = run_script(
        connection,
        "SAVEPOINT oq_constraints; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO SAVEPOINT oq_constraints; "
        f"RELEASE SAVEPOINT oq_constraints; {transaction.current_xid()}",
    )
    if rows[-1][0] != xid:
        raise TransactionEndedByHandler


def current_xid(connection: Connection) -> object:
    """Return the id of the open transaction, or None if it has written nothing."""
    return run_script(connection, transaction.current_xid())[0][0]


class JobRowHeld(LeaseLost):
    """Another transaction held a leased job's row for longer than the deadlines allow. The job has not failed."""


def _write(connection: Connection, job: Job, statement: Insert | Update | Delete) -> None:
    try:
        written = connection.execute(statement).rowcount
    except DBAPIError as error:
        # The statement waited for the job's row; in transaction mode it waits for no row.
        if job.lease_token is not None and sqlstate_of(error) in _GAVE_UP_WAITING:
            raise JobRowHeld(job.id) from error
        raise
    # The fence: without the row with this job's token, nothing of this run may be committed.
    if written != 1 and job.lease_token is not None:
        raise LeaseLost(job.id)
