"""One attempt: a handler runs inside the relay's transaction, contained by a session and a savepoint of its own.

Whatever a handler does, its rows are either all in the transaction or none of them, and the claim stands.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outboxq.codec.entities import EntityKey
from outboxq.database.driver import sqlstate_of, transaction_status
from outboxq.errors import EffectInProgress, HandlerTimedOut, TransactionEndedByHandler
from outboxq.execution.containment import AttemptSavepoint
from outboxq.execution.errors import TransactionEscaped
from outboxq.execution.failure import Failed, describe_failure
from outboxq.execution.handler_session import AttemptSession, HandlerSession, hand_over
from outboxq.execution.invoke import Run
from outboxq.execution.preload import load_entity, watch_unlocked
from outboxq.execution.runtime import Runtime
from outboxq.execution.settle import current_xid
from outboxq.fault_points import fault_point
from outboxq.handlers.handler import AnyHandler
from outboxq.job import Job
from outboxq.outcomes import Done, Outcome, Snooze

_SHORTEST_SNOOZE_SECONDS = 0.05
_QUERY_CANCELED = "57014"


def attempt(
    connection: Connection,
    handler: AnyHandler,
    job: Job,
    runtime: Runtime,
    shared_xid: str | None,
    begin: Callable[[], str | None],
) -> Outcome | Failed:
    """Run a job's handler once; afterwards the transaction holds all of its rows if it is done, and else none.

    Args:
        shared_xid: The claim's transaction, if other jobs share it. Then this job is failed now for what its deferred
            constraints would raise at COMMIT; a job alone meets them there.
        begin: Begins the relay's transaction if need be; names the savepoint that stands for the attempt's, or None.

    Raises:
        ConnectionLost: the transaction is gone with its connection.
        TransactionEscaped: the handler ended the transaction.
    """
    # Without a lease it is the claim's own.
    in_transaction = job.lease_token is None or transaction_status(connection) == TransactionStatus.INTRANS
    containment = AttemptSavepoint(connection, runtime.guard, begin, in_transaction=in_transaction)
    session = AttemptSession(partial(_open_session, connection, runtime, containment))
    began = time.monotonic()
    result: Outcome | Failed
    if in_transaction and runtime.invoker.flavour == "async":
        _open_for_coroutine(runtime, containment)
    try:
        arguments = _arguments(job, handler, session)
        run = Run(job, runtime.state, partial(runtime.permit, handler, job), [])
        fault_point("before-handler")
        with runtime.at_rest(connection, job):
            returned = runtime.invoker.call(handler, session.session, run, arguments)
        result = handler.returned.outcome(returned)
        if isinstance(result, Done):
            _keep(run, session, containment, shared_xid)
            # Last: an error behind it would be a failure whose rows stand.
            fault_point("after-handler")
    except BaseException as error:
        if not runtime.is_failure(error):
            raise
        result = _result_of(error, handler, job, time.monotonic() - began)
    finally:
        runtime.guard.let_go()
    return _closed(connection, job, runtime, session, containment, result, shared_xid)


def _open_for_coroutine(runtime: Runtime, containment: AttemptSavepoint) -> None:
    """Begin the savepoint now: where its session is first named, a coroutine cannot send anything."""
    try:
        containment.open()
    except BaseException:
        runtime.guard.let_go()
        raise


def _open_session(connection: Connection, runtime: Runtime, containment: AttemptSavepoint) -> HandlerSession:
    session = runtime.invoker.open_session(connection, containment.open)
    if containment.in_transaction:
        # What goes around the session, on the driver's cursor, has to lie behind the savepoint too.
        containment.open()
    return session


def _arguments(job: Job, handler: AnyHandler, session: AttemptSession) -> dict[str, object]:
    """The job's arguments, with its entities loaded."""
    arguments = handler.signature().decode(job.args)
    keys = {name: value for name, value in arguments.items() if isinstance(value, EntityKey)}
    if keys:
        opened = session.session()
        arguments |= {name: load_entity(opened, name, key) for name, key in keys.items()}
        watch_unlocked(opened, handler.unlocked_changes, [(key, arguments[name]) for name, key in keys.items()])
    return arguments


def _keep(run: Run, session: AttemptSession, containment: AttemptSavepoint, shared_xid: str | None) -> None:
    if run.deferred:
        hand_over(run.deferred, session.session())
    if session.made is None and containment.savepoint is None:
        # It never came near the database.
        return
    containment.check()
    if session.made is not None:
        # commit() and not flush(): it also ends the handler's open savepoints and flushes until nothing is left. Joined
        # by "rollback_only", it commits nothing.
        session.made.commit()
        containment.keep(shared_xid)


def _result_of(error: BaseException, handler: AnyHandler, job: Job, seconds: float) -> Outcome | Failed:
    if isinstance(error, EffectInProgress):
        # Counting it could bury a job because its predecessor was killed.
        return Snooze(timedelta(seconds=max(error.retry_after_seconds, _SHORTEST_SNOOZE_SECONDS)))
    limit = handler.timeout_seconds
    if limit is not None and sqlstate_of(error) == _QUERY_CANCELED and seconds >= limit * 0.99:
        # The server cancelled a statement because of the handler's deadline.
        error = HandlerTimedOut(limit).with_traceback(error.__traceback__)
    return describe_failure(error, job)


def _closed(
    connection: Connection,
    job: Job,
    runtime: Runtime,
    session: AttemptSession,
    containment: AttemptSavepoint,
    result: Outcome | Failed,
    shared_xid: str | None,
) -> Outcome | Failed:
    """Close the attempt's session, and undo its rows unless it is done."""
    closed = True
    try:
        closed = session.close()
    except BaseException as error:
        if not runtime.is_failure(error):
            raise
        # A listener of the user's. What the handler itself raised says more.
        result = result if isinstance(result, Failed) else describe_failure(error, job)
    runtime.guard.take_back()
    if closed and isinstance(result, Done):
        return result
    intact = closed and containment.is_intact
    is_undone = containment.undo(intact=intact)
    if not is_undone or (shared_xid is not None and current_xid(connection) != shared_xid):
        # SQLAlchemy's own account of it is better than ours, if SQLAlchemy saw it.
        if intact or not isinstance(result, Failed):
            result = describe_failure(TransactionEndedByHandler(), job)
        raise TransactionEscaped(job, result)
    return result
