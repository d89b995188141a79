"""Calls the optional features of a claim and a commit, such as expiry, cancellation and unique keys.

The code that claims and commits knows none of them by name. `decide` finds the jobs of a claim that end without a run:
a job has expired, was cancelled, has no handler here, or was settled by its claim (`coalesce`). `steps_of` finds the
steps that a COMMIT needs: sets of statements sent together with it, each defined in a file of its own.
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
    """Record in `batch.decided` those jobs of a new claim that end without a run, with their results.

    Return each kind's handler, or None for a kind that cannot run here now. Called once for a claim; also merges jobs
    with coalescing keys, and adds the events of the claim to the batch.
    """
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
    """Return the result of a job that has expired or was cancelled by now; None for any other job.

    Called again just before a job runs, because it may have waited for others of its batch.
    """
    if batch.expires and time.monotonic() >= batch.expires.get(job.id, math.inf):
        return ExpiredResult()
    # This includes a retried job, and one whose relay died: the request exists until the job is gone.
    cancelled = runtime.orders.cancelled
    return CancelledResult() if cancelled and job.id in cancelled else None


def hold_back(batch: BatchState, job: Job, runtime: Runtime) -> None:
    """After a job was put off, let the later jobs of its group in the batch wait too, if the group keeps its order.

    Their result becomes `GivenBack`; `run` puts them back.
    """
    if job.group_key is not None and not passes(job, runtime):
        for later in batch.jobs[batch.running.position + 1 :]:
            if later.group_key == job.group_key:
                batch.decided.setdefault(later.id, GivenBack())


def _expiries(connection: Connection, batch: BatchState, runtime: Runtime) -> dict[UUID, float]:
    """Return the times (monotonic) at which jobs of the batch expire, by id, after a query of the database's time.

    A unique job that has not expired by now is left out: it will run even if its time passes while it waits for others
    of its batch, because from its claim on, producers that add the same key rely on it.
    """
    expiring = {job.id: job.expires_at for job in batch.jobs if job.expires_at is not None}
    if not expiring:
        return {}
    if runtime.guard.transaction_status == TransactionStatus.IDLE:
        # Under a lease no transaction may be open while the handler runs.
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
    """Return the steps (statements sent with COMMIT) for the jobs of a batch that end by these events; often none.

    For leased jobs that used no session, use `steps_of_many`.

    Args:
        stands_for: By the id of a job that ran, the ids of the jobs merged into it; by default those of the batch.
    """
    found: list[Step] = []
    if runtime.keeper.kinds:
        stands_for = batch.stands_for if stands_for is None else stands_for
        found += runtime.keeper.steps(runtime.schema, events, stands_for, runtime.prepared_rows)
    if runtime.guard.added:
        found.append(TakeKeys(runtime.schema, runtime.guard.added))
    # Under a lease a batch is one job, and another job of its claim may be in the same callback batch.
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
    """Return the steps (statements sent with COMMIT) for leased jobs of any claims whose handlers used no session.

    Unlike `steps_of`, this returns no step for finished rows (kept results). The statement that removes the jobs writes
    these rows, because another relay may have taken some of the jobs.

    Args:
        jobs: The jobs that have ended.
        stands_for: By the id of a job that ran, the ids of the jobs merged into it.
    """
    found: list[Step] = []
    if ended := keeper.ended(events, stands_for):
        found.append(TellWaiters(schema, ended))
    if ids := batch_ids(jobs):
        found.append(FinishBatches(schema, ids))
    return found
