"""Puts leased jobs back into their queue: interrupted jobs unchanged, and jobs whose run was lost as suspects.

A suspect is a job that ran when its relay died or lost it; it runs alone next, so that another crash affects no other
job.
"""

from uuid import UUID

from sqlalchemy import Connection

from outboxq.database.driver import run_script
from outboxq.error_record import ErrorRecord
from outboxq.errors import LeaseLost
from outboxq.events import JobCrashed, JobLeaseLost
from outboxq.execution import settle
from outboxq.execution.aside import Rows, take_one
from outboxq.execution.batch_state import BatchReport
from outboxq.execution.runtime import Runtime
from outboxq.job import Job
from outboxq.statements.lease import take_back, take_back_locked


def release(connection: Connection, job: Job, record: ErrorRecord | None = None) -> tuple[JobLeaseLost, ...]:
    """Put back a leased job that did not end, to run at once, without counting the attempt.

    Return an event if the lease was lost, and nothing was written.

    Args:
        record: The reason why the job did not end, if it began; None otherwise.
    """
    try:
        with connection.begin():
            settle.release(connection, job, record)
    except LeaseLost:
        return (JobLeaseLost(job),)
    return ()


def take_back_lost(
    connection: Connection, job: Job, runtime: Runtime, message: str = "the connection was lost while the job ran"
) -> BatchReport:
    """Take back a leased job whose run was lost although its relay lives, as if the relay had died.

    The job becomes a suspect, which runs alone next, or a dead letter after `max_crashes` crashes.

    Args:
        message: The reason, stored with the job.
    """
    assert job.lease_token is not None
    schema, token = runtime.schema, job.lease_token

    def run(statement: str) -> Rows:
        with connection.begin():
            return run_script(connection, statement)

    def taking(most: int) -> str:
        return take_back(schema, job.id, token, most, message, in_group=job.group_key is not None)

    rows = take_one(run, taking, runtime.max_crashes, schema, job.id)
    return BatchReport(1, tuple(crashed(row) for row in rows))


def take_back_held(connection: Connection, job: Job, runtime: Runtime) -> BatchReport:
    """Take back a leased job that could not be settled, because another transaction held its row: the job runs again.

    If the row is still held, nothing is done: the statement by which relays periodically renew leases takes the job
    back later.
    """
    assert job.lease_token is not None
    statement = take_back_locked(
        runtime.schema, job.id, job.lease_token, job.crashes, in_group=job.group_key is not None
    )
    with connection.begin():
        rows = run_script(connection, statement)
    return BatchReport(1, tuple(crashed(row) for row in rows))


def crashed(row: tuple[object, ...]) -> JobCrashed:
    """Make the event of a job that was taken back, from the row that the statement returned about it.

    Args:
        row: Id, queue, kind, crashes, and True if the job is now a dead letter; Python values or, if libpq read them,
            texts.
    """
    job_id, queue, kind, crashes, died = row
    return JobCrashed(UUID(str(job_id)), str(queue), str(kind), int(str(crashes)), str(died) in ("t", "True"))
