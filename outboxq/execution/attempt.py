"""Execute: run one handler inside the claim's transaction, contained by a session and a savepoint of its own.

Whatever a handler does, its rows are either all in the transaction or none of them, and the claim stands.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, RootTransaction
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from outboxq.codec.entities import EntityKey
from outboxq.database.driver import give_up, is_at_rest, is_lost, run_script, transaction_status
from outboxq.database.errors import sqlstate_of
from outboxq.database.guard import Guard
from outboxq.database.job_savepoint import Savepoint
from outboxq.effects.runners import AsyncEffectRunner, EffectAccess, EffectRunner
from outboxq.errors import (
    EffectInProgress,
    EffectRefused,
    HandlerError,
    HandlerRolledBack,
    HandlerTimedOut,
    OutboxqError,
    TransactionEndedByHandler,
)
from outboxq.execution.failure import Failed, R, describe_failure, withheld
from outboxq.execution.invoke import AttemptSession, HandlerSession, Invoker, Run, hand_over
from outboxq.execution.preload import load_entity, watch_unlocked
from outboxq.execution.settle import check_shared, current_xid
from outboxq.fault_points import fault_point
from outboxq.handlers.handler import AnyHandler
from outboxq.handlers.registry import Registry
from outboxq.handlers.retention import spoken
from outboxq.handlers.table_facts import Catalog
from outboxq.job import Job
from outboxq.outcomes import Done, Outcome, Snooze

# A deadlock or a serialization failure is repeated at once and for free this often; then it counts as an attempt.
FREE_RETRIES = 5
_SHARED = (
    "ctx.once is refused where jobs share a transaction (batch_size > 1): the others would wait for its call, and be "
    'repeated with it. Give the handler claim="lease", or its relay a batch size of 1'
)
_NOT_AT_REST = (
    "the handler left the driver's connection in the middle of something: a COPY or a stream that it had not finished, "
    "pipeline mode, or a statement of a thread or task of its own"
)
_DONE = Done()
_SHORTEST_SNOOZE_SECONDS = 0.05
_QUERY_CANCELED = "57014"


class ConnectionLost(OutboxqError):
    """The connection went away: the server has undone the claim, or committed it, and nothing is charged."""


class ConnectionSpoiled(ConnectionLost):
    """A handler left the connection so that nothing can be sent on it: it is closed, and its job pays."""

    def __init__(self, failed: Failed) -> None:
        super().__init__("a handler left a statement of its own unfinished")
        self.failed = failed


class Abandoned(OutboxqError):
    """The relay took this batch away from its slot: nothing of it may be committed there any more."""


class TransactionEscaped(OutboxqError):
    """A handler ended the claim's transaction, or left it where its savepoint cannot be found."""

    def __init__(self, job: Job, failed: Failed) -> None:
        super().__init__(f"the handler of {job.kind!r} ended the relay's transaction")
        self.job = job
        self.failed = failed


@dataclass(frozen=True, slots=True)
class UnknownKindResult:
    """No handler here can run this kind in this slot."""


Result: TypeAlias = Outcome | Failed | UnknownKindResult


@dataclass(frozen=True, slots=True)
class Runtime:
    """What executing needs besides the job, fixed for the life of a slot's connection.

    Args:
        is_interruption: Whether an error that came out of a handler was put there by the caller of the handlers.
    """

    registry: Registry
    state: object
    invoker: Invoker
    guard: Guard
    schema: str
    max_crashes: int
    epoch: str
    caller: EffectRunner | AsyncEffectRunner | None
    sharing_queues: frozenset[str]
    is_interruption: Callable[[BaseException], bool]
    catalog: Catalog = field(default_factory=Catalog)

    def is_failure(self, error: BaseException) -> bool:
        """Whether an error that came out of a handler is a failed attempt of its job.

        It is, whatever the handler raised, KeyboardInterrupt and other BaseExceptions included: a job must not be able
        to end its relay. Only the relay's own interruption of a handler is not, and is to be raised again.
        """
        return not (isinstance(error, Abandoned | ConnectionLost) or self.is_interruption(error))

    def call(
        self,
        connection: Connection,
        handler: AnyHandler,
        session: Callable[[], Session],
        run: Run,
        arguments: dict[str, object],
    ) -> object:
        """Run a handler to its end; what it returned. Raises also what it raises.

        Raises:
            ConnectionSpoiled: nothing can be sent on the connection any more, not even to undo it.
        """
        try:
            returned = self.invoker.call(handler, session, run, arguments)
        except BaseException as error:
            if is_at_rest(connection):
                raise
            give_up(connection)
            if not self.is_failure(error):
                raise
            raise ConnectionSpoiled(describe_failure(error, run.job)) from error
        if self.guard.is_untouched or is_at_rest(connection):
            return returned
        give_up(connection)
        raise ConnectionSpoiled(describe_failure(HandlerError(_NOT_AT_REST), run.job))

    def permit(self, handler: AnyHandler, job: Job) -> EffectAccess[Any] | None:
        """Leave for this run to call the outside, or why it has none."""
        if self.caller is None:
            return None
        # Refused also where no other job came with it: a handler must not depend on how busy its queue is.
        is_shared = job.queue in self.sharing_queues and job.lease_token is None
        # Of the slot's flavour, as the handler is.
        caller: Any = self.caller
        return EffectAccess(caller, partial(self._retention, handler, job), _SHARED if is_shared else None)

    def _retention(self, handler: AnyHandler, job: Job, scope: str) -> timedelta:
        if not self.registry.may_call(scope, handler.kind):
            raise EffectRefused(
                f"scope {scope!r} is declared for other kinds than {handler.kind!r}: name it in jobs.scope(kinds=...)"
            )
        retention = self.registry.effect_retention(scope)
        horizon = handler.retry_horizon(job.max_attempts)
        # Checked at start for the handler's own attempts; a job may bring more of them.
        if retention < horizon:
            raise EffectRefused(
                f"effects of scope {scope!r} are remembered for {spoken(retention)}, and this job may still run "
                f"{spoken(horizon)} after its first attempt began (max_attempts={job.max_attempts}): remember them "
                f"longer with jobs.scope({scope!r}, retention=...), or give the job fewer attempts"
            )
        return retention

    def kept(self, job: Job, result: R) -> R:
        """What may be stored and told of what an attempt of this job came to."""
        handler = self.registry.handlers.get(job.kind)
        return withheld(result) if handler is not None and handler.messages == "withheld" else result

    def handler_of(self, job: Job) -> AnyHandler | None:
        """The job's handler, if it is one for this slot."""
        handler = self.registry.handlers.get(job.kind)
        return handler if handler is not None and handler.flavour == self.invoker.flavour else None


class AttemptSavepoint:
    """Where the rows of one attempt go: a savepoint in the relay's transaction.

    It begins when the handler first names its session, so that a handler which does not costs nothing; under a lease
    when the session is first used, so that a long call outside the database holds no transaction open.

    Args:
        begin: Called first; it begins the transaction, if need be. Returns the name of a savepoint that is there and
            stands for the attempt's own, or None to make one.
        in_transaction: Whether the server is in one already; else `begin` begins it.
    """

    def __init__(
        self, connection: Connection, guard: Guard, begin: Callable[[], str | None], *, in_transaction: bool
    ) -> None:
        self.savepoint: Savepoint | None = None
        self._root: RootTransaction | None = connection.get_transaction()
        self.in_transaction = in_transaction
        self._guard = guard
        self._begin = begin
        self._connection = connection
        guard.savepoint = None
        guard.on_first_use = self.open

    def open(self) -> None:
        """Begin, unless that was done."""
        if self.savepoint is not None:
            return
        # First: what follows goes through the guarded connection too.
        self._guard.on_first_use = None
        try:
            seal = self._begin()
            self.in_transaction = True
            self._guard.begin_savepoint(seal)
            self.savepoint = self._guard.savepoint
        except BaseException:
            # The handler may swallow it, and go on unguarded.
            self._guard.on_first_use = self.open
            raise

    @property
    def is_intact(self) -> bool:
        """Whether SQLAlchemy still knows the relay's transaction as it was."""
        root = self._root
        return root is not None and root.is_active and self._connection.get_transaction() is root


def execute(
    connection: Connection,
    handler: AnyHandler | None,
    job: Job,
    work: Runtime,
    *,
    shared_xid: str | None,
    begin: Callable[[], str | None],
) -> Result:
    """Run the job's handler, if this slot has one; afterwards the transaction holds all of its rows, or none.

    All if it is done.

    Args:
        shared_xid: The claim's transaction, where other jobs share it. Then this job is failed now for what its
            deferred constraints would raise at COMMIT; a job alone meets them in the certificate.
        begin: Called before the handler's session is first used. See `AttemptSavepoint`.

    Raises:
        ConnectionLost: the transaction is gone with its connection.
        TransactionEscaped: the handler ended the transaction.
    """
    if handler is None:
        return UnknownKindResult()
    free_retries = FREE_RETRIES
    while True:
        result = work.invoker.apart(_attempt, connection, handler, job, work, shared_xid, begin)
        if not (isinstance(result, Failed) and result.transient and free_retries):
            return result
        free_retries -= 1


def _attempt(
    connection: Connection,
    handler: AnyHandler,
    job: Job,
    work: Runtime,
    shared_xid: str | None,
    begin: Callable[[], str | None],
) -> Result:
    # Without a lease it is the claim's own.
    in_transaction = job.lease_token is None or transaction_status(connection) == TransactionStatus.INTRANS
    place = AttemptSavepoint(connection, work.guard, begin, in_transaction=in_transaction)
    if place.in_transaction and work.invoker.flavour == "async":
        # Where its session is first named, a coroutine cannot send anything.
        try:
            place.open()
        except BaseException:
            work.guard.let_go()
            raise
    opened = AttemptSession(partial(_open_session, connection, work, place))
    begun = time.monotonic()
    result: Result
    kept = False
    try:
        result = _run(connection, handler, job, work, opened, place)
        if isinstance(result, Done):
            if opened.made is not None:
                _keep(connection, opened.made, place, shared_xid)
            fault_point("after-handler")
            # Last: an error behind it would be a failure whose rows stand.
            kept = True
    except EffectInProgress as busy:
        # Nobody's fault: counting it could bury a job because its predecessor was killed.
        result = Snooze(timedelta(seconds=max(busy.retry_after_seconds, _SHORTEST_SNOOZE_SECONDS)))
    except BaseException as error:
        if not work.is_failure(error):
            raise
        result = describe_failure(_with_deadline(error, handler, time.monotonic() - begun), job)
    finally:
        work.guard.let_go()
    closed = True
    try:
        closed = opened.close()
    except BaseException as error:
        if not work.is_failure(error):
            raise
        # A listener of the user's. What the handler itself raised says more.
        result, kept = result if isinstance(result, Failed) else describe_failure(error, job), False
    work.guard.take_back()
    if kept and closed:
        return result
    intact = closed and place.is_intact
    if not (_undone(connection, place, intact=intact) and _is_still(connection, shared_xid)):
        # SQLAlchemy's own account of it is better than ours, where SQLAlchemy saw it.
        if intact or not isinstance(result, Failed):
            result = describe_failure(TransactionEndedByHandler(), job)
        raise TransactionEscaped(job, result)
    return result


def _open_session(connection: Connection, work: Runtime, place: AttemptSavepoint) -> HandlerSession:
    session = work.invoker.open_session(connection, place.open)
    if place.in_transaction:
        # What goes around the session, on the driver's cursor, has to lie behind the savepoint too.
        place.open()
    return session


def _with_deadline(error: BaseException, handler: AnyHandler, seconds: float) -> BaseException:
    """The error, named for what it is where the server cancelled a statement because of the handler's deadline."""
    limit = handler.timeout_seconds
    if limit is None or sqlstate_of(error) != _QUERY_CANCELED or seconds < limit * 0.99:
        return error
    return HandlerTimedOut(limit).with_traceback(error.__traceback__)


def _run(
    connection: Connection,
    handler: AnyHandler,
    job: Job,
    work: Runtime,
    opened: AttemptSession,
    place: AttemptSavepoint,
) -> Outcome:
    arguments = handler.signature().decode(job.args)
    keys = {name: value for name, value in arguments.items() if isinstance(value, EntityKey)}
    if keys:
        session = opened.session()
        arguments |= {name: load_entity(session, name, key) for name, key in keys.items()}
        watch_unlocked(session, handler.unlocked_changes, [(key, arguments[name]) for name, key in keys.items()])
    fault_point("before-handler")
    run = Run(job, work.state, partial(work.permit, handler, job), [])
    outcome = handler.returned.outcome(work.call(connection, handler, opened.session, run, arguments))
    if not isinstance(outcome, Done):
        return outcome
    if run.deferred:
        hand_over(run.deferred, opened.session())
    if opened.made is None and place.savepoint is None:
        # It never came near the database.
        return _DONE
    check_not_undone(connection, place.savepoint)
    return _DONE


def check_not_undone(connection: Connection, savepoint: Savepoint | None) -> None:
    """Whether what a handler wrote is still there, of one that returned as if it were.

    Raises:
        HandlerError: it is not.
    """
    if savepoint is not None and not savepoint.is_active:
        raise HandlerRolledBack(
            "the handler rolled its session back, then returned as if done: raise instead, "
            "or use session.begin_nested() for the part that may fail"
        )
    if transaction_status(connection) == TransactionStatus.INERROR:
        raise HandlerError("the handler swallowed a database error, which had undone its rows: let it raise")


def _keep(connection: Connection, session: Session, place: AttemptSavepoint, shared_xid: str | None) -> None:
    # commit() and not flush(): it also ends the handler's open savepoints and flushes until nothing is left. Joined by
    # "rollback_only", it commits nothing.
    session.commit()
    if place.savepoint is None:
        return
    if shared_xid is not None:
        check_shared(connection, shared_xid)
    place.savepoint.commit()


def _undone(connection: Connection, place: AttemptSavepoint, *, intact: bool) -> bool:
    """Go back to before the handler; False where the transaction is not there any more, or not as we left it."""
    if is_lost(connection):
        raise ConnectionLost("the connection was lost while a handler ran")
    savepoint = place.savepoint
    if savepoint is None:
        if place.in_transaction:
            return intact and transaction_status(connection) == TransactionStatus.INTRANS
        if transaction_status(connection) != TransactionStatus.IDLE:
            # Begun by the handler itself, on the driver's own connection: nothing of it may be committed with its job.
            run_script(connection, "ROLLBACK")
        return intact
    # Released by the handler itself, its rows stand: taken for undone, they would be committed with its failure.
    if not intact or savepoint.is_released or transaction_status(connection) == TransactionStatus.IDLE:
        return False
    try:
        savepoint.undo()
    except (psycopg.Error, SQLAlchemyError) as error:
        if is_lost(connection):
            raise ConnectionLost("the connection was lost while a handler was undone") from error
        return False
    return transaction_status(connection) == TransactionStatus.INTRANS


def _is_still(connection: Connection, shared_xid: str | None) -> bool:
    return shared_xid is None or current_xid(connection) == shared_xid


def is_cancellation(error: BaseException) -> bool:
    """Whether the running task is cancelled, and the error is not one that a handler raised or met in an await."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:
        # No event loop in this thread: a sync handler raised it.
        return False
    return task is not None and task.cancelling() > 0
