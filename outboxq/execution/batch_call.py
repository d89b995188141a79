"""The call of a batch handler, which receives several jobs at once: one call, one session and one savepoint for all."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outboxq.codec.entities import EntityKey
from outboxq.database.driver import transaction_status
from outboxq.emitter import drop_tracebacks
from outboxq.errors import HandlerError, HandlerRolledBack
from outboxq.execution.attempt import SharedSavepoint, check_rest
from outboxq.execution.batch_state import BatchState
from outboxq.execution.invoke import HandlerSession, Run
from outboxq.execution.plan import Segment
from outboxq.execution.preload import Locks, entity_keys, load_entity, load_together, watch_unlocked
from outboxq.execution.runtime import Runtime
from outboxq.execution.surround import Surrounded
from outboxq.fault_points import fault_point
from outboxq.handlers.context import BatchItem
from outboxq.handlers.handler import BatchHandler
from outboxq.job import Job
from outboxq.outcomes import Outcome


def call_batch_handler(
    connection: Connection,
    batch: BatchState,
    runtime: Runtime,
    segment: Segment,
    locks: Locks,
) -> Sequence[Outcome] | None:
    """Call a batch handler once, with all jobs of a segment (consecutive jobs of the batch); return each job's outcome.

    Return None if the call failed and all its rows are undone: the caller then runs each job alone.

    Raises:
        ConnectionLost: the transaction is gone with its connection.
        TransactionEscaped: the handler ended the transaction.
    """
    batch.running.position, batch.running.together = segment.places.start, len(segment.places)
    savepoint = SharedSavepoint(connection, runtime.guard, batch, batch.running.position)
    session = runtime.invoker.open_session(runtime.guard.lend())
    try:
        returned = _call(connection, batch, runtime, segment.arguments, session, savepoint, locks)
        # It does not matter if closing fails: COMMIT decides.
        _close(session, runtime)
    except BaseException as error:
        if not runtime.is_failure(error):
            raise
        # The error will come again when each job runs alone.
        failed = error
    else:
        # A task or thread that the call left behind must not reach the next call's rows.
        runtime.guard.take_back()
        batch.running.together = 1
        return returned
    finally:
        batch.running.end_call()
        runtime.guard.let_go()
    closed = _close(session, runtime)
    runtime.guard.take_back()
    savepoint.undo_all(failed, closed=closed)
    # No hook receives this error.
    drop_tracebacks(failed)
    batch.running.together = 1
    return None


def _call(
    connection: Connection,
    batch: BatchState,
    runtime: Runtime,
    arguments: Sequence[Mapping[str, object]],
    session: HandlerSession,
    savepoint: SharedSavepoint,
    locks: Locks,
) -> Sequence[Outcome]:
    jobs = batch.running_jobs
    handler = runtime.registry.find(jobs[0].kind)
    assert isinstance(handler, BatchHandler)
    absent = partial(runtime.absent, connection)
    load = partial(_load_items, handler, jobs, arguments, session, locks, absent)
    arounds = runtime.registry.arounds.get(handler.kind)
    args = load() if arounds is None else Surrounded(arounds.all, load, jobs)
    fault_point("before-handler")
    seconds = handler.timeout_seconds
    batch.running.deadline = None if seconds is None else time.monotonic() + seconds
    run = Run(jobs[0], runtime.state, lambda: None, [], batch.running.begin_call(jobs, runtime.notes))
    call: Callable[..., object] = runtime.invoker.call
    try:
        returned = call(handler.together, lambda: session, run, args)
    except BaseException as error:
        check_rest(runtime, jobs[0], error)
        raise
    check_rest(runtime, jobs[0])
    batch.running.deadline = None
    if run.call.is_cancelled:
        raise HandlerError("a job of the batch was cancelled: the others run by themselves")
    session.check()
    if not savepoint.savepoint.is_active:
        raise HandlerRolledBack("the batch handler rolled its session back, then returned as if done")
    if transaction_status(connection) == TransactionStatus.INERROR:
        raise HandlerError("the batch handler swallowed a database error, which had undone its rows")
    session.commit()
    savepoint.keep_all()
    fault_point("after-handler")
    # An around that returned an outcome instead of calling the handler did so for all jobs.
    return returned if isinstance(returned, list) else [handler.returned.outcome(returned)] * len(jobs)


def _load_items(
    handler: BatchHandler[Any, Any],
    jobs: Sequence[Job],
    arguments: Sequence[Mapping[str, object]],
    session: HandlerSession,
    locks: Locks,
    absent: Callable[[Job], None],
) -> dict[str, object]:
    """Return the handler's argument `items`: each job with its arguments, and with its entities in the session.

    Args:
        locks: The row locks that the batch has taken.
        absent: Called with a job if the row of one of its entities does not exist; raises an error if the row may come
            later.
    """
    # A reference keeps the entities: the session's identity map is weak.
    held = load_together(session, entity_keys(arguments), locks)
    given: list[dict[str, object]] = []
    loaded: list[tuple[EntityKey, object]] = []
    for job, values in zip(jobs, arguments, strict=True):
        given.append({**values})
        for name, key in values.items():
            if isinstance(key, EntityKey):
                may_lock = not locks.has(key.entity, key.identity)
                given[-1][name] = load_entity(session, name, key, partial(absent, job), may_lock=may_lock)
                loaded.append((key, given[-1][name]))
    watch_unlocked(session, handler.unlocked_changes, loaded)
    items = [BatchItem(handler.arguments(**values), job) for job, values in zip(jobs, given, strict=True)]
    del held
    return {"items": items}


def _close(session: Session, runtime: Runtime) -> bool:
    try:
        session.close()
    except BaseException as error:
        if not runtime.is_failure(error):
            raise
        # The error comes from a user's listener, or from a lost connection.
        return False
    return True
