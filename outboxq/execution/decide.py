"""Decide which jobs of a claimed batch are not to run: those that have expired, and those that were cancelled."""

import math
import time
from uuid import UUID

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outboxq.database.driver import run_outside_transaction, run_script
from outboxq.execution.batch_state import BatchState
from outboxq.execution.runtime import CancelledResult, ExpiredResult, Runtime
from outboxq.job import UNIQUE_HEADER, Job
from outboxq.statements.transaction import clock_seconds


def expiries(connection: Connection, batch: BatchState, runtime: Runtime) -> dict[UUID, float]:
    """The expiry of each job that has one, on this process's clock: the database is asked how late it is there.

    A unique job that has not expired by now has begun: those who add one of its key rely on it from its claim on.
    """
    expiring = {job.id: job.expires_at for job in batch.jobs if job.expires_at is not None}
    if not expiring:
        return {}
    if runtime.guard.transaction_status == TransactionStatus.IDLE:
        # Under a lease no transaction is to be open while the handler works.
        rows = run_outside_transaction(connection, clock_seconds())
    else:
        rows = run_script(connection, clock_seconds())
    now = float(str(rows[0][0]))
    ahead = time.monotonic() - now
    unique = {job.id for job in batch.jobs if UNIQUE_HEADER in job.headers}
    return {
        job_id: at.timestamp() + ahead
        for job_id, at in expiring.items()
        if job_id not in unique or at.timestamp() <= now
    }


def result_without_run(batch: BatchState, job: Job, runtime: Runtime) -> CancelledResult | ExpiredResult | None:
    """The result of a job that is not to run any more; None for all others."""
    if batch.expires and time.monotonic() >= batch.expires.get(job.id, math.inf):
        return ExpiredResult()
    # Also one that comes back after its relay died, or to be retried: the request stands until the job is gone.
    cancelled = runtime.orders.cancelled
    return CancelledResult() if cancelled and job.id in cancelled else None
