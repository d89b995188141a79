"""The families that the core does not name: what decides a job without a run, and what rides on its COMMIT.

A job is decided if it has expired, was cancelled, has no handler here, or is settled by its claim (`coalesce`). Then
it is settled like all others. The steps of a COMMIT have a file each.
"""

import math
import time
from collections.abc import Mapping, Sequence
from uuid import UUID

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outboxq.database.driver import run_outside_transaction, run_script
from outboxq.events import Event, JobsSuspected
from outboxq.execution.batch_state import BatchState
from outboxq.execution.callback_batches import FinishBatches, batch_ids
from outboxq.execution.coalesce import coalesce
from outboxq.execution.keep import Keeper, TellWaiters
from outboxq.execution.plan import Handlers
from outboxq.execution.runtime import CancelledResult, ExpiredResult, GivenBack, Runtime, UnknownKindResult
from outboxq.execution.settle import passes
from outboxq.execution.step import Step
from outboxq.execution.unique_keys import TakeKeys
from outboxq.job import UNIQUE_HEADER, Job
from outboxq.statements.transaction import clock_seconds


def decide(connection: Connection, batch: BatchState, runtime: Runtime) -> Handlers:
    """Fill `batch.decided`, once for a claim, and the events of the claim; return the handlers, by kind."""
    claimed, extras = batch.claimed, batch.claimed.extras
    if claimed.moved:
        batch.of_claim.append(JobsSuspected(batch.queue, claimed.moved))
    if "unique_key" in extras and runtime.coalesces:
        coalesce(connection, batch, runtime.schema)
    # A run takes over the expiry of the newest job of its key.
    if "expires_at" in extras or "unique_key" in extras:
        batch.expires = _expiries(connection, batch, runtime)
    known, paused = runtime.registry.by_flavour[runtime.invoker.flavour], runtime.orders.paused
    handlers, decided = {job.kind: known.get(job.kind) for job in batch.jobs}, batch.decided
    if paused:
        handlers |= dict.fromkeys(kind for kind in handlers if (batch.queue, kind) in paused)
    if batch.expires or runtime.orders.cancelled or None in handlers.values():
        for job in batch.jobs:
            if job.id not in decided:
                result = ended_meanwhile(batch, job, runtime)
                if result is not None:
                    decided[job.id] = result
                elif handlers[job.kind] is None:
                    decided[job.id] = UnknownKindResult()
        batch.of_claim += batch.parked(batch.jobs)
    return handlers


def ended_meanwhile(batch: BatchState, job: Job, runtime: Runtime) -> CancelledResult | ExpiredResult | None:
    """Return the result of a job that has expired or was cancelled, also while it waited for others of its batch."""
    if batch.expires and time.monotonic() >= batch.expires.get(job.id, math.inf):
        return ExpiredResult()
    # Also a job that is retried, or comes back after its relay died: the request exists until the job is gone.
    cancelled = runtime.orders.cancelled
    return CancelledResult() if cancelled and job.id in cancelled else None


def hold_back(batch: BatchState, job: Job, runtime: Runtime) -> None:
    """Decide that later jobs of the batch wait behind this one, if it was put off and holds up its group."""
    if job.group_key is not None and not passes(job, runtime):
        for later in batch.jobs[batch.running.position + 1 :]:
            if later.group_key == job.group_key:
                batch.decided.setdefault(later.id, GivenBack())


def _expiries(connection: Connection, batch: BatchState, runtime: Runtime) -> dict[UUID, float]:
    """Return when jobs expire, on this process's clock: the database is queried for its time.

    A unique job that has not expired by now has begun: producers of its key rely on it from its claim on.
    """
    expiring = {job.id: job.expires_at for job in batch.jobs if job.expires_at is not None}
    if not expiring:
        return {}
    if runtime.guard.transaction_status == TransactionStatus.IDLE:
        # Under a lease no transaction may be open while the handler works.
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


def steps_of(
    batch: BatchState,
    events: Sequence[Event],
    runtime: Runtime,
    stands_for: Mapping[UUID, tuple[UUID, ...]] | None = None,
) -> list[Step]:
    """Make the steps of a transaction in which jobs of a batch end by these events; none for plain jobs.

    `steps_of_many` makes those of leased jobs that used no session.

    Args:
        stands_for: Jobs that others run for; by default the batch's.
    """
    found: list[Step] = []
    if runtime.keeper.kinds:
        stands_for = batch.stands_for if stands_for is None else stands_for
        found += runtime.keeper.steps(runtime.schema, events, stands_for, runtime.prepared_rows)
    if runtime.guard.added:
        found.append(TakeKeys(runtime.schema, runtime.guard.added))
    # Under a lease a batch is one job, and another one of its claim may have the callback batch.
    if "batch_id" in batch.claimed.extras and (ids := batch_ids(batch.jobs)):
        found.append(FinishBatches(runtime.schema, ids))
    return found


def steps_of_many(
    jobs: Sequence[Job],
    events: Sequence[Event],
    schema: str,
    keeper: Keeper,
    stands_for: Mapping[UUID, tuple[UUID, ...]],
) -> list[Step]:
    """Make the steps of a transaction that settles leased jobs of any claims, whose handlers used no session.

    Their finished rows go into the statement that removes the jobs: another relay may have taken some of them.

    Args:
        jobs: The jobs that have ended.
        stands_for: Jobs that others run for.
    """
    found: list[Step] = []
    if ended := keeper.ended(events, stands_for):
        found.append(TellWaiters(schema, ended))
    if ids := batch_ids(jobs):
        found.append(FinishBatches(schema, ids))
    return found
