"""Execute: run one handler inside the claim's transaction, contained by a session and a savepoint of its own.

Whatever a handler does, its rows are either all in the transaction or none of them, and the claim stands.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, NestedTransaction, RootTransaction
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from outboxq.codec import EntityKey
from outboxq.context import AsyncContext, Context
from outboxq.driver import is_lost, run_script, sqlstate_of, transaction_status
from outboxq.effect_calls import AsyncCaller, Caller, Permit
from outboxq.enqueue import AsyncOutboxSession, OutboxSession
from outboxq.errors import (
    EffectInProgress,
    EffectRefused,
    EntityGone,
    HandlerError,
    HandlerRolledBack,
    HandlerTimedOut,
    OutboxqError,
    TransactionEndedByHandler,
)
from outboxq.failure import Failed, describe_failure
from outboxq.fault_points import fault_point
from outboxq.guard import Guard
from outboxq.handlers import AnyHandler, Flavour, Registry
from outboxq.job import Job
from outboxq.retention import spoken
from outboxq.retry import DeadLetter, Discard, Done, Outcome, Retry, Snooze
from outboxq.settle import check_shared, current_xid

# A deadlock or a serialization failure is repeated at once and for free this often; then it counts as an attempt.
FREE_RETRIES = 5
_SHARED = (
    "ctx.once is refused where jobs share a transaction (batch_size > 1): the others would wait for its call, and be "
    'repeated with it. Give the handler claim="lease", or its relay a batch size of 1'
)
_SHORTEST_SNOOZE_SECONDS = 0.05
_QUERY_CANCELED = "57014"


class ConnectionLost(OutboxqError):
    """The connection went away: the server has undone the claim, or committed it, and nothing is charged."""


class Abandoned(OutboxqError):
    """The relay took this batch away from its slot: nothing of it may be committed there any more."""


class TransactionEscaped(OutboxqError):
    """A handler ended the claim's transaction, or left it where its savepoint cannot be found."""

    def __init__(self, job: Job, failed: Failed) -> None:
        super().__init__(f"the handler of {job.kind!r} ended the relay's transaction")
        self.job = job
        self.failed = failed


@dataclass(frozen=True, slots=True)
class Unknown:
    """No handler here can run this kind in this slot."""


Result: TypeAlias = Outcome | Failed | Unknown


class LazySession(OutboxSession):
    """Calls `opener` before it first uses its connection."""

    opener: Callable[[], None]

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """SQLAlchemy's hook before every use of a connection."""
        self.opener()
        return super().get_bind(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Run:
    """What a handler's context is made of, besides its session."""

    job: Job
    state: object
    permit: Permit[Any] | None


class Invoker(Protocol):
    """How a handler of one flavour gets its session and is called, from code that stands on a sync `Connection`."""

    flavour: Flavour

    def open_session(self, connection: Connection, opener: Callable[[], None]) -> Session:
        """A fresh session that joins the connection's savepoint, which `opener` begins if need be."""
        ...

    def call(self, handler: AnyHandler, session: Session, run: Run, args: dict[str, object]) -> object:
        """Run the handler to its end."""
        ...


# close_resets_only=False: a task or thread that the handler left behind must not write into another job's transaction.
SESSION_OPTIONS: dict[str, Any] = {
    "join_transaction_mode": "rollback_only",
    "expire_on_commit": False,
    "close_resets_only": False,
}


class SyncInvoker:
    """Plain functions, called where we stand."""

    flavour: Flavour = "sync"

    def open_session(self, connection: Connection, opener: Callable[[], None]) -> Session:
        """Joined by "rollback_only": the handler's commit() commits nothing, its rollback() is seen."""
        session = LazySession(bind=connection, **SESSION_OPTIONS)
        session.opener = opener
        return session

    def call(self, handler: AnyHandler, session: Session, run: Run, args: dict[str, object]) -> object:
        """Run the handler to its end."""
        assert isinstance(session, OutboxSession)
        return handler.function(Context(run.job, run.state, session, run.permit), **args)


class AsyncInvoker:
    """Coroutines, awaited through the greenlet of `run_sync`: the event loop runs them as if it had called them."""

    flavour: Flavour = "async"

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._session: AsyncOutboxSession | None = None

    def open_session(self, connection: Connection, opener: Callable[[], None]) -> Session:
        """As `SyncInvoker`; the async session is the same one, seen from the handler's side."""
        del connection
        self._session = AsyncOutboxSession(bind=self._connection, sync_session_class=LazySession, **SESSION_OPTIONS)
        session = self._session.sync_session
        assert isinstance(session, LazySession)
        session.opener = opener
        return session

    def call(self, handler: AnyHandler, session: Session, run: Run, args: dict[str, object]) -> object:
        """Await the handler to its end."""
        opened, self._session = self._session, None
        assert opened is not None
        assert opened.sync_session is session
        running = handler.function(AsyncContext(run.job, run.state, opened, run.permit), **args)
        return await_only(_within(handler.timeout_seconds, running))


async def _within(seconds: float | None, running: Awaitable[object]) -> object:
    """Await a handler, cancelled at its deadline; one that swallows the cancellation has failed all the same."""
    if seconds is None:
        return await running
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            returned = await running
    except Exception as error:
        if not deadline.expired():
            raise
        # asyncio's own error was raised by us, and its cause where the handler stood.
        stood = error.__cause__ or error
        raise HandlerTimedOut(seconds).with_traceback(stood.__traceback__) from error
    if deadline.expired():
        raise HandlerTimedOut(seconds)
    return returned


@dataclass(frozen=True, slots=True)
class Work:
    """What executing needs besides the job, fixed for the life of a slot's connection."""

    registry: Registry
    state: object
    invoker: Invoker
    guard: Guard
    schema: str
    max_crashes: int
    epoch: str
    caller: Caller | AsyncCaller | None
    shares_transactions: bool

    def permit(self, handler: AnyHandler, job: Job) -> Permit[Any] | None:
        """Leave for this run to call the outside, or why it has none."""
        if self.caller is None:
            return None
        # Refused also where no other job came with it: a handler must not depend on how busy its queue is.
        is_shared = self.shares_transactions and job.lease_token is None
        # Of the slot's flavour, as the handler is.
        caller: Any = self.caller
        return Permit(caller, partial(self._retention, handler, job), _SHARED if is_shared else None)

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

    def handler_of(self, job: Job) -> AnyHandler | None:
        """The job's handler, if it is one for this slot."""
        handler = self.registry.handlers.get(job.kind)
        return handler if handler is not None and handler.flavour == self.invoker.flavour else None


class Place:
    """Where the rows of one attempt go: a savepoint in the relay's transaction.

    With `begin` both begin when the handler first uses its session, so that a long call outside the database holds no
    transaction open.
    """

    def __init__(self, connection: Connection, guard: Guard, begin: Callable[[], object] | None) -> None:
        self.savepoint: NestedTransaction | None = None
        self._root: RootTransaction | None = connection.get_transaction()
        self._connection = connection
        self._guard = guard
        self._begin = begin
        if begin is None:
            self.open()
        else:
            guard.opener = self.open

    def open(self) -> None:
        """Begin, unless that was done."""
        if self.savepoint is not None:
            return
        # First: what follows goes through the guarded connection too.
        self._guard.opener = None
        if self._begin is not None:
            self._begin()
        self.savepoint = self._guard.savepoint = self._connection.begin_nested()

    @property
    def is_intact(self) -> bool:
        """Whether SQLAlchemy still knows the relay's transaction as it was."""
        root = self._root
        return root is not None and root.is_active and self._connection.get_transaction() is root


def execute(
    connection: Connection, job: Job, work: Work, *, shared_xid: str | None, begin: Callable[[], object] | None = None
) -> Result:
    """Run the job's handler; afterwards the transaction holds all of its rows if it is done, else none.

    Args:
        shared_xid: The claim's transaction, where other jobs share it. Then this job is failed now for what its
            deferred constraints would raise at COMMIT; a job alone meets them in the certificate.
        begin: Called before the handler's session is first used, where the transaction has not begun.

    Raises:
        ConnectionLost: the transaction is gone with its connection.
        TransactionEscaped: the handler ended the transaction.
    """
    handler = work.handler_of(job)
    if handler is None:
        return Unknown()
    for _ in range(FREE_RETRIES):
        result = _attempt(connection, handler, job, work, shared_xid, begin)
        if not (isinstance(result, Failed) and result.transient):
            return result
        if transaction_status(connection) != TransactionStatus.IDLE:
            begin = None
    return _attempt(connection, handler, job, work, shared_xid, begin)


def _attempt(
    connection: Connection,
    handler: AnyHandler,
    job: Job,
    work: Work,
    shared_xid: str | None,
    begin: Callable[[], object] | None,
) -> Result:
    place = Place(connection, work.guard, begin)
    session = work.invoker.open_session(connection, place.open)
    begun = time.monotonic()
    result: Result
    kept = False
    try:
        result = _run(connection, handler, job, work, session, place)
        if isinstance(result, Done):
            _keep(connection, session, place, shared_xid)
            kept = True
            fault_point("after-handler")
    except asyncio.CancelledError as error:
        if _being_cancelled():
            raise
        result = describe_failure(error, job)
    except Abandoned:
        raise
    except EffectInProgress as busy:
        # Nobody's fault: counting it could bury a job because its predecessor was killed.
        result = Snooze(timedelta(seconds=max(busy.retry_after_seconds, _SHORTEST_SNOOZE_SECONDS)))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code ends here; the error is recorded with the job
        result = describe_failure(_with_deadline(error, handler, time.monotonic() - begun), job)
    finally:
        work.guard.savepoint = work.guard.opener = None
    closed = _closed(session)
    if kept and closed:
        return result
    intact = closed and place.is_intact
    if not (_undone(connection, place.savepoint, intact=intact) and _is_still(connection, shared_xid)):
        # SQLAlchemy's own account of it is better than ours, where SQLAlchemy saw it.
        if intact or not isinstance(result, Failed):
            result = describe_failure(TransactionEndedByHandler(), job)
        raise TransactionEscaped(job, result)
    return result


def _with_deadline(error: BaseException, handler: AnyHandler, seconds: float) -> BaseException:
    """The error, named for what it is where the server cancelled a statement because of the handler's deadline."""
    limit = handler.timeout_seconds
    if limit is None or sqlstate_of(error) != _QUERY_CANCELED or seconds < limit * 0.99:
        return error
    return HandlerTimedOut(limit).with_traceback(error.__traceback__)


def _run(connection: Connection, handler: AnyHandler, job: Job, work: Work, session: Session, place: Place) -> Outcome:
    arguments = handler.signature().decode(job.args)
    loaded = {name: _load(session, name, value) for name, value in arguments.items()}
    fault_point("before-handler")
    returned = work.invoker.call(handler, session, Run(job, work.state, work.permit(handler, job)), loaded)
    if isinstance(returned, Retry | Snooze | DeadLetter | Discard):
        return returned
    if not (returned is None or isinstance(returned, Done)):
        raise HandlerError(
            f"the handler returned {_described(returned)}: return None when done, or an outcome such as Retry(delay)"
        )
    if place.savepoint is not None and not place.savepoint.is_active:
        raise HandlerRolledBack(
            "the handler rolled its session back, then returned as if done: raise instead, "
            "or use session.begin_nested() for the part that may fail"
        )
    if transaction_status(connection) == TransactionStatus.INERROR:
        raise HandlerError("the handler swallowed a database error, which had undone its rows: let it raise")
    return Done()


def _described(returned: object) -> str:
    if inspect.iscoroutine(returned):
        # Never awaited: close it, or Python warns.
        returned.close()
        return "a coroutine, but is not an async function"
    return f"the class {returned.__name__}" if isinstance(returned, type) else f"a {type(returned).__name__}"


def _load(session: Session, name: str, value: object) -> object:
    """An entity argument's row, in the handler's session; other values as they are."""
    if not isinstance(value, EntityKey):
        return value
    key = tuple(value.primary_key) if isinstance(value.primary_key, list | tuple) else value.primary_key
    entity = session.get(value.entity, key)
    if entity is None and not value.optional:
        raise EntityGone(name, value.entity.__name__)
    return entity


def _keep(connection: Connection, session: Session, place: Place, shared_xid: str | None) -> None:
    # commit() and not flush(): it also ends the handler's open savepoints and flushes until nothing is left. Joined by
    # "rollback_only", it commits nothing.
    session.commit()
    if shared_xid is not None:
        check_shared(connection, shared_xid)
    if place.savepoint is not None:
        place.savepoint.commit()


def _undone(connection: Connection, savepoint: NestedTransaction | None, *, intact: bool) -> bool:
    """Go back to before the handler; False where the transaction is not there any more, or not as we left it."""
    if is_lost(connection):
        raise ConnectionLost("the connection was lost while a handler ran")
    if savepoint is None:
        if transaction_status(connection) != TransactionStatus.IDLE:
            # Begun by the handler itself, on the driver's own connection: nothing of it may be committed with its job.
            run_script(connection, "ROLLBACK")
        return intact
    if not intact or transaction_status(connection) == TransactionStatus.IDLE:
        return False
    if savepoint.is_active:
        try:
            savepoint.rollback()
        except SQLAlchemyError as error:
            if is_lost(connection):
                raise ConnectionLost("the connection was lost while a handler was undone") from error
            return False
    return transaction_status(connection) == TransactionStatus.INTRANS


def _is_still(connection: Connection, shared_xid: str | None) -> bool:
    return shared_xid is None or current_xid(connection) == shared_xid


def _closed(session: Session) -> bool:
    """End the handler's session for good; False where it fails, because the transaction below it is not as it was."""
    try:
        session.close()
    except (SQLAlchemyError, psycopg.Error):
        return False
    return True


def _being_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        # No event loop in this thread: a sync handler raised it.
        return False
    return task is not None and task.cancelling() > 0
