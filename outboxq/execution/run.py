"""Run: the jobs of a claimed batch, together if their handlers allow it, else one by one. Nothing is committed here.

The outcome of each job is written in the batch's transaction; its event is published when that is committed.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import psycopg
from sqlalchemy import Connection

from outboxq.codec.entities import EntityKey
from outboxq.database.driver import is_listened_to, is_lost, run_script
from outboxq.database.errors import DEADLOCK
from outboxq.emitter import drop_tracebacks
from outboxq.errors import TransactionEndedByHandler
from outboxq.events import JobRetried, JobSnoozed
from outboxq.execution import settle
from outboxq.execution.attempt import Attempt, AttemptResult
from outboxq.execution.batch_call import call_batch_handler
from outboxq.execution.batch_state import BatchState
from outboxq.execution.errors import ESCAPED, BatchDeadlocked, ConnectionLost, TransactionEscaped
from outboxq.execution.failure import Failed
from outboxq.execution.families import ended_meanwhile, hold_back
from outboxq.execution.plan import Handlers, Segment, plan_segments
from outboxq.execution.preload import Locks, entity_keys, lock_ahead
from outboxq.execution.runtime import GivenBack, Result, Runtime, SettledByClaim, UnknownKindResult
from outboxq.execution.settle import settle_result
from outboxq.execution.shared_batch import run_shared
from outboxq.handlers.handler import AnyHandler
from outboxq.job import Job
from outboxq.statements.transaction import TIMEOUTS_OFF, local_timeouts, restored

# A deadlock or a serialization failure is repeated at once, without counting, this often; later ones count as attempts.
FREE_RETRIES = 5
_PUT_OFF = (JobRetried, JobSnoozed)
_AS_IT_IS = nullcontext()


def run(connection: Connection, batch: BatchState, runtime: Runtime, handlers: Handlers, *, shared: bool) -> None:
    """Run each job of a claimed batch unless its result was decided without a run, and write the outcomes of all jobs.

    Args:
        handlers: Handlers by kind, from `decide`.
        shared: True if jobs share the transaction, so that the deferred constraints are checked after each of them.

    Raises:
        ConnectionLost: the transaction is gone with its connection.
        TransactionEscaped: a handler ended the transaction.
        BatchDeadlocked: the batch must be rolled back, and its jobs claimed again and run alone.
        LeaseLost: another relay may have the job.
    """
    # The transaction is new, or went back to the end of the claim.
    guard = runtime.guard
    guard.is_altered, guard.added, guard.collects = False, {}, True
    begin = partial(_begin, connection, batch, shared=shared)
    try:
        if len(batch.jobs) == 1:
            job = batch.jobs[0]
            result = _run_alone(connection, batch, job, runtime, handlers, begin, shared=shared)
            settle_alone(connection, batch, job, runtime, result)
        else:
            _run_several(connection, batch, runtime, handlers, begin)
    finally:
        guard.collects = False
        # This also runs after interrupted handlers.
        guard.take_back()


def _run_several(
    connection: Connection, batch: BatchState, runtime: Runtime, handlers: Handlers, begin: Callable[[], str | None]
) -> None:
    """Run the jobs of a batch as `plan_segments` arranges them, some of them together, and write their outcomes."""
    locks, segments, decided_before = Locks(), plan_segments(batch, handlers), len(batch.decided)
    batch.tries.together = len(segments) == 1 and segments[0].kind != "alone"
    if not batch.tries.together:
        # Jobs that all run together lock rows when they load them.
        _lock_rows(connection, batch, runtime, handlers, locks)
    for segment in segments:
        # A shared run finds its events by position, and jobs that are given back have none.
        may_run_together = segment.kind != "alone" and len(batch.decided) == decided_before
        if may_run_together and _run_together(connection, batch, runtime, handlers, segment, locks):
            continue
        for position in segment.places:
            job = batch.jobs[position]
            decided = batch.decided.get(job.id) if batch.decided else None
            # `position` stays at a job that was settled here: its row shows, later, if the batch was committed.
            if isinstance(decided, SettledByClaim):
                continue
            if isinstance(decided, GivenBack):
                settle.release(connection, job)
                continue
            batch.running.position = position
            result = _run_alone(connection, batch, job, runtime, handlers, begin, shared=True)
            if isinstance(result, Failed) and result.transient and result.sqlstate == DEADLOCK:
                # COMMIT is not sent: the claim is undone with everything that the jobs wrote.
                raise BatchDeadlocked
            settle_alone(connection, batch, job, runtime, result)


def _run_together(
    connection: Connection, batch: BatchState, runtime: Runtime, handlers: Handlers, segment: Segment, locks: Locks
) -> bool:
    """Run the jobs of a segment (consecutive jobs of the batch) together; return False if all their rows are undone.

    The caller then runs each job alone.
    """
    longest = runtime.registry.timeout_seconds(batch.queue)
    if batch.running.timeout_seconds != longest:
        # The previous job ran alone, under its own deadline.
        _set_timeout(connection, batch, longest, shared=True)
    if segment.kind == "shared":
        is_run = run_shared(connection, batch, runtime, segment, locks)
    else:
        is_run = _call_batch_handler(connection, batch, runtime, segment, locks)
    if not is_run:
        batch.tries.together = False
        # Undoing a segment releases its locks; undoing the first segment releases all.
        locks.forget()
        _lock_rows(connection, batch, runtime, handlers, locks)
    return is_run


def _call_batch_handler(
    connection: Connection, batch: BatchState, runtime: Runtime, segment: Segment, locks: Locks
) -> bool:
    batch.running.begin()
    run_apart = runtime.invoker.apart()
    outcomes = run_apart(call_batch_handler, connection, batch, runtime, segment, locks)
    batch.running.end()
    if outcomes is None:
        return False
    _restore(connection, batch, runtime)
    seconds = batch.running.seconds / len(segment.places)
    for position, outcome in zip(segment.places, outcomes, strict=True):
        batch.running.position = position
        batch.events.append(settle_result(connection, batch.job, outcome, runtime, seconds))
    return True


def _lock_rows(connection: Connection, batch: BatchState, runtime: Runtime, handlers: Handlers, locks: Locks) -> None:
    """Lock the rows of all `Locked` arguments of the batch's jobs, before the first job runs.

    Every batch locks its rows in the same order; otherwise two batches with common rows could wait for each other.
    """
    locking = {
        kind: found
        for kind, found in handlers.items()
        if found is not None and found.signature().locks and not runtime.registry.loads_late(kind)
    }
    if not locking:
        return
    running = [job for job in batch.jobs if job.kind in locking and job.id not in batch.decided]
    keys = [key for job in running for key in _locked_keys(locking[job.kind], job, runtime)]
    try:
        lock_ahead(connection, keys, locks)
    except BaseException as error:
        # Each job locks its own rows when it runs, and fails alone if it cannot, for example because of a user's
        # listener.
        if is_lost(connection) or batch.transaction is None or not runtime.is_failure(error):
            raise
        run_script(connection, f"ROLLBACK TO SAVEPOINT {batch.transaction.inner_savepoint}")
        locks.forget()


def _locked_keys(handler: AnyHandler, job: Job, runtime: Runtime) -> Sequence[EntityKey]:
    try:
        return [key for key in entity_keys([handler.signature().decode(job.args)]) if key.locked]
    except BaseException as error:
        # Users' own types may raise anything; the error is recorded when the job runs.
        if not runtime.is_failure(error):
            raise
        return []


def _run_alone(
    connection: Connection,
    batch: BatchState,
    job: Job,
    runtime: Runtime,
    handlers: Handlers,
    begin: Callable[[], str | None],
    *,
    shared: bool,
) -> Result:
    """Run the handler of one job, and again after a failure such as a deadlock; return the last run's result.

    If the job's result was decided without a run, return that result at once.
    """
    # First: the event of a job that does not run must not have the previous job's time.
    batch.running.begin()
    decided = batch.decided.get(job.id) if batch.decided else None
    if decided is None and (batch.expires or runtime.orders.cancelled):
        decided = ended_meanwhile(batch, job, runtime)
    if decided is not None:
        return decided
    handler = handlers[job.kind]
    assert handler is not None, "jobs of unknown kinds are decided"
    if handler.timeout_seconds != batch.running.timeout_seconds:
        _set_timeout(connection, batch, handler.timeout_seconds, shared=shared)
    xid = batch.transaction.xid if shared and batch.transaction is not None else None
    return attempt(
        batch,
        runtime,
        lambda: Attempt(handler, job, runtime, xid, begin, batch.running).join(connection, runtime),
    )


def attempt(batch: BatchState, runtime: Runtime, make: Callable[[], Attempt]) -> AttemptResult:
    """Run a job's attempt, and again up to `FREE_RETRIES` times after a transient failure; return the last result.

    Transient failures are a deadlock, a serialization failure, and that of an outdated prepared statement. After a
    deadlock in a batch of several jobs, the job runs again only once.

    Args:
        make: Makes a new attempt of the job; called for each run.
    """
    if batch.running.deadline is None and batch.running.timeout_seconds is not None:
        batch.running.begin_deadline()
    free_retries, prepares = FREE_RETRIES, True
    try:
        while True:
            each = make()
            with _AS_IT_IS if prepares else each.guard.unprepared():
                result: AttemptResult = each.run() if each.has_started else runtime.invoker.apart()(each.run)
            if not (isinstance(result, Failed) and result.transient and free_retries):
                return result
            free_retries -= 1
            if result.prepared:
                # Otherwise the driver would execute the prepared statement again on this connection, for the next jobs
                # too.
                prepares, each.guard.left = False, each.guard.left or "stale prepared statement"
            if result.error is not None:
                # No hook receives this error.
                drop_tracebacks(result.error)
            if result.sqlstate == DEADLOCK and not batch.is_lone:
                # Other jobs of the batch may hold the locks that it waits for, up to COMMIT.
                free_retries = 0
    finally:
        batch.running.end_call()


def _set_timeout(connection: Connection, batch: BatchState, seconds: float | None, *, shared: bool) -> None:
    """Set a handler's deadline as the transaction's statement timeout, in place of the deadline set before.

    Args:
        seconds: The deadline; None for none.
        shared: False for a lone job.
    """
    if batch.transaction is not None:
        settings, inner = local_timeouts(seconds) or TIMEOUTS_OFF, batch.transaction.inner_savepoint
        # For a lone job, before the inner savepoint, because a rollback to it must not undo the settings.
        around = () if shared else (f"RELEASE SAVEPOINT {inner}", f"SAVEPOINT {inner}")
        run_script(connection, *around[:1], *settings, *around[1:])
    batch.running.timeout_seconds = seconds


def _begin(connection: Connection, batch: BatchState, *, shared: bool) -> str | None:
    """Begin the batch's transaction, unless it has begun.

    Return the name of its inner savepoint, for a lone job to use as its own. Return None if jobs share the transaction:
    each sets its own savepoint.
    """
    transaction = batch.begin(connection)
    return None if shared else transaction.inner_savepoint


def settle_alone(connection: Connection, batch: BatchState, job: Job, runtime: Runtime, result: Result) -> None:
    """Write the outcome of one job that ran by itself, or was decided without a run; add its event to the batch."""
    if isinstance(result, SettledByClaim):
        return
    seconds = batch.running.end()
    if job.lease_token is not None and not batch.was_begun:
        # The handler worked outside the database: its result must survive a lost connection.
        batch.late_result = result
    # Even if it has begun: the relay may have taken the batch away, and then no other job of it begins.
    batch.begin(connection)
    batch.late_result = None
    _restore(connection, batch, runtime)
    if isinstance(result, UnknownKindResult):
        settle.park(connection, job)
        hold_back(batch, job, runtime)
        return
    event = settle_result(connection, job, result, runtime, seconds)
    batch.events.append(event)
    if isinstance(event, _PUT_OFF):
        hold_back(batch, job, runtime)


def _restore(connection: Connection, batch: BatchState, runtime: Runtime) -> None:
    """Undo the settings that a handler changed in the transaction, such as its role, for the relay's own statements.

    Raises:
        TransactionEscaped: the handler had ended the transaction.
        psycopg.Error: the statements failed for another reason, such as a cancellation.
    """
    guard, transaction = runtime.guard, batch.transaction
    if transaction is None or not (guard.is_altered or guard.left):
        return
    if not batch.was_begun and is_listened_to(connection):
        # A user's listener may have set the transaction's role, which was not recorded.
        return
    script = restored(transaction.inner_savepoint, batch.running.timeout_seconds, is_noted=batch.was_begun)
    try:
        run_script(connection, script)
    except psycopg.Error as error:
        if is_lost(connection):
            raise ConnectionLost("the connection was lost after a handler") from error
        if error.sqlstate not in ESCAPED:
            raise
        if batch.is_leased:
            # The statements that settle the job would run outside the transaction, and might wait for one that the
            # handler prepared.
            raise TransactionEscaped(batch.job, runtime.describe(TransactionEndedByHandler(), batch.job)) from error
        # COMMIT detects the same, and the faulty job.
        return
    guard.is_altered = False
