"""What becomes of a job by the outcome of its attempt, written in the transaction of its handler's rows."""

from datetime import timedelta
from typing import assert_never

from sqlalchemy import Connection

from outboxq.events import JobDied, JobDiscarded, JobDone, JobEvent, JobRetried, JobSnoozed
from outboxq.execution import settle
from outboxq.execution.failure import ErrorRecord, Failed, describe_reason
from outboxq.execution.runtime import Result, Runtime, UnknownKindResult
from outboxq.job import Job
from outboxq.outcomes import DeadLetter, Discard, Done, Retry, Snooze


def settle_result(connection: Connection, job: Job, result: Result, runtime: Runtime, seconds: float) -> JobEvent:
    """Write what becomes of the job, and return the event to send once that is committed."""
    result = runtime.kept(job, result)
    match result:
        case Done() | Discard():
            settle.finish(connection, job)
            return event_of_end(job, result, seconds)
        case Failed(record) if result.permanent:
            reason = f"{record.type}: another attempt cannot help"
            settle.dead_letter(connection, job, reason, record)
            return JobDied(job, reason, record.where)
        case Failed(record):
            return _retry_or_dead_letter(connection, job, record, runtime, None)
        case Retry(delay, reason):
            record = ErrorRecord(job.attempt, "outboxq.Retry", describe_reason(reason, job))
            pause = None if delay is None else max(delay.total_seconds(), 0.0)
            return _retry_or_dead_letter(connection, job, record, runtime, pause)
        case Snooze(delay):
            settle.snooze(connection, job, delay)
            return JobSnoozed(job, delay.total_seconds())
        case DeadLetter(reason):
            described = describe_reason(reason, job)
            settle.dead_letter(connection, job, described)
            return JobDied(job, described)
        case UnknownKindResult():
            raise AssertionError("unknown kinds are parked, not settled")
    assert_never(result)


def event_of_end(job: Job, result: Done | Discard, seconds: float) -> JobEvent:
    """The event of a job that is over."""
    if isinstance(result, Discard):
        return JobDiscarded(job, describe_reason(result.reason, job))
    return JobDone(job, seconds)


def _retry_or_dead_letter(
    connection: Connection, job: Job, record: ErrorRecord, runtime: Runtime, pause_seconds: float | None
) -> JobEvent:
    policy = runtime.registry.find(job.kind).retry
    limit = job.max_attempts or policy.max_attempts
    if job.attempt >= limit:
        reason = f"gave up after {job.attempt} of {limit} attempts: {record.type}"
        settle.dead_letter(connection, job, reason, record)
        return JobDied(job, reason, record.where)
    delay_seconds = policy.delay(job.attempt).total_seconds() if pause_seconds is None else pause_seconds
    settle.retry(connection, job, record, timedelta(seconds=delay_seconds))
    return JobRetried(job, record.type, record.message, record.where, delay_seconds)
