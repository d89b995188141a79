"""Invoke: give a handler its context and its session, and call it.

Plain functions are called directly, coroutine functions in tasks of their own. A handler's session joins the relay's
transaction, and is made when the handler first uses it.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context as ContextVars
from contextvars import copy_context
from typing import Any, NamedTuple, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import psycopg
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import InvalidRequestError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.util import await_only, greenlet_spawn, memoized_property

from outboxq.awaited import close_unawaited
from outboxq.database.answers import count_coroutines, note
from outboxq.database.defects import contain
from outboxq.database.sessions import plain_session
from outboxq.effects.api import EffectAccess
from outboxq.errors import HandlerError, HandlerRolledBack, HandlerTimedOut
from outboxq.execution.errors import ROLLED_BACK
from outboxq.execution.surround import Surrounded, await_within, call_within
from outboxq.forks import await_here, call_here
from outboxq.handlers.call import HandlerCall
from outboxq.handlers.context import NO_STATE, AsyncContext, Context, JobContext
from outboxq.handlers.deferred import DEFERRED, Write, defer, send_at_commit, send_deferred
from outboxq.handlers.handler import AnyHandler, Flavour
from outboxq.handlers.unlocked import UnlockedChanges
from outboxq.job import Job
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession

T = TypeVar("T")
P = ParamSpec("P")
IS_OVER = "the job of this context is over: its session cannot be opened any more"
_HAS_ENDED = "the handler of this session has ended: await the tasks that use it, or give them sessions of their own"
_UNAWAITED = "the handler did not await {}: nothing has come of it"
# close_resets_only=False: a task or thread that the handler left behind must not write into another job's transaction.
SESSION_OPTIONS: dict[str, Any] = {
    "join_transaction_mode": "rollback_only",
    "expire_on_commit": False,
    "close_resets_only": False,
}


class Watch(NamedTuple):
    """Entities whose rows the job has not locked; their session checks before each flush if the handler changed them.

    `changes` logs such a change, which may overwrite another transaction's change of `entities`.
    """

    changes: UnlockedChanges
    entities: Sequence[object]

    def look(self) -> bool:
        """Log a change that the handler made to these entities; return False if a defect prevented this check."""
        try:
            self.changes.look(self.entities)
        except Exception as error:  # noqa: BLE001  # raised again, unless it is a defect
            contain(error)
            return False
        return True


class HandlerSession(OutboxSession):
    """The session of a handler. It begins the job's transaction at its first use, and records a rollback.

    Attributes:
        on_first_use: Called before the session uses its connection; begins the transaction and sets the savepoint. None
            if both exist already.
        engine: The engine of the future connection, as long as there is none. The session's `bind` is None then,
            because an engine would not belong to the job's transaction.
        watched: Entities without a row lock, which are checked for changes before each flush.
        is_rolled_back: True if the session's whole transaction was rolled back, and not only a savepoint.
    """

    on_first_use: Callable[[], None] | None = None
    engine: Engine | None = None
    is_rolled_back = False
    watched: Watch | None = None

    def watch(self, changes: UnlockedChanges, entities: Sequence[object]) -> None:
        """Check before each flush if the handler changed these entities, whose rows are unlocked; `changes` logs it."""
        if entities:
            self.watched = Watch(changes, entities)

    def look(self) -> None:
        """Check now if the handler changed entities whose rows are not locked; stop checking if the check fails."""
        if self.watched is not None and not self.watched.look():
            self.watched = None

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """Return the engine or connection to use; SQLAlchemy calls this before every use of a connection.

        At the first use, begin the job's transaction and savepoint. Once the handler locks rows by a statement of its
        own (FOR UPDATE), stop checking if it changes unlocked entities.
        """
        if self.on_first_use is not None:
            self.on_first_use()
        if self.watched is not None and getattr(kwargs.get("clause"), "_for_update_arg", None) is not None:
            # The handler locks rows itself, perhaps those of the watched entities.
            self.watched = None
        return super().get_bind(*args, **kwargs)

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        """Flush, after checking if the handler changed entities whose rows are not locked.

        SQLAlchemy calls this for every flush, also at commit.
        """
        if self.watched is not None:
            self.look()
        super().flush(objects)

    def peek_bind(self, **kwargs: Any) -> Engine | Connection:
        """Return the engine or connection that the session would use, without beginning a transaction or savepoint.

        Called to check that the session's database can hold jobs.
        """
        return super().get_bind(**kwargs) if self.engine is None else self.engine

    def check(self) -> None:
        """Raise an error if the handler has rolled back the session's whole transaction, in any way.

        Raises:
            HandlerRolledBack: the handler rolled it back, and then returned normally.
        """
        if self.is_rolled_back:
            raise HandlerRolledBack(ROLLED_BACK)


class JobSession:
    """The session of one job, opened at its first use.

    Attributes:
        made: The session; None until it is open.
        entities: The entities that were read before the session was opened (`job_entities.Entities`); None if there are
            none.
        failed: The error that opening the session for its entities raised; it is raised again at each later use,
            because the job must not be done without the entities' changes.
        is_over: True if the session cannot be opened any more: the job has ended, or only its end is left.
        lock: Held while the session is opened, and while the relay decides that it is not open: threads that the
            handler left running may use an entity at any time.
    """

    made: HandlerSession | None = None
    entities: Any = None
    failed: BaseException | None = None
    is_over = False
    _is_opening = False
    _runtime: Any

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.lock = threading.RLock()

    def open_session(self, make: Callable[..., HandlerSession]) -> HandlerSession:
        """Return a new session, made by `make`, on the job's own `Connection` object over the relay's connection."""
        session: HandlerSession = self._runtime.invoker.open_session(self._runtime.guard.lend(), make)
        return session

    def session(self) -> HandlerSession:
        """Return the job's session; open it at the first call.

        Raises:
            InvalidRequestError: the job has ended: the session would write into another job's transaction.
        """
        with self.lock:
            if self.made is not None:
                return self.made
            if self.is_over:
                raise InvalidRequestError(IS_OVER)
            if self.failed is not None:
                raise self.failed
            entities, self._is_opening = self.entities, True
            try:
                made = self.open_session(HandlerSession if entities is None else entities.make_session)
                dispatch: Any = made.dispatch
                # The object that represents the listeners of all sessions; without it, Python code would look up each
                # on use.
                for name, unlistened in dispatch._empty_listeners.items():  # noqa: SLF001  # as its `__getattr__` does
                    setattr(dispatch, name, unlistened)
                if entities is not None:
                    entities.move_to(made)
            except BaseException as error:
                self.failed = None if entities is None else error
                raise
            finally:
                self._is_opening = False
            self.made = made
        return made

    def reach(self) -> None:
        """Open the job's session, because code uses it through one of its entities, for example to load a relation.

        Raises:
            InvalidRequestError: the job, or its handler, has ended.
        """
        with self.lock:
            # Otherwise the opening itself would look at it.
            if not self._is_opening:
                if self.made is None and self._runtime.invoker.has_ended:
                    raise InvalidRequestError(_HAS_ENDED)
                self.session()

    def watch(self, changes: UnlockedChanges, entities: Sequence[object]) -> None:
        """Check before each flush if the handler changed these entities, whose rows are unlocked; `changes` logs it."""
        (self.made or self.entities or self.session()).watch(changes, entities)

    def close(self) -> bool:
        """Close the session for good; return False if closing fails because the transaction has changed.

        Errors of users' listeners are raised.
        """
        with self.lock:
            self.is_over, self.failed = True, None
            if self.entities is not None:
                self.entities.leave()
                self.entities = None
        try:
            if self.made is not None:
                self.made.close()
        except (SQLAlchemyError, psycopg.Error):
            return False
        return True


def _note_rollback(session: HandlerSession, ended: SessionTransaction) -> None:
    if ended.parent is None:
        session.is_rolled_back = True


def _send_deferred(session: HandlerSession) -> None:
    # Most handlers defer nothing.
    if DEFERRED in vars(session):
        send_deferred(session)


send_at_commit(HandlerSession, _send_deferred)
# A session that has not used its connection has no savepoint on it that would show a rollback.
event.listen(HandlerSession, "after_soft_rollback", _note_rollback)


class AsyncHandlerSession(AsyncOutboxSession):
    """The session of an async handler. It records the coroutines that its methods return: all must be awaited."""

    sync_session_class = HandlerSession


def _counted(name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    def counted(self: AsyncHandlerSession, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        coroutine = method(self, *args, **kwargs)
        note(coroutine, f"ctx.session.{name}(...)")
        return coroutine

    return counted


for _name, _method in inspect.getmembers(AsyncSession, inspect.isfunction):
    if inspect.iscoroutinefunction(_method) and not _name.startswith("_"):
        setattr(AsyncHandlerSession, _name, _counted(_name, _method))


def hand_over(deferred: list[Write], session: Session) -> None:
    """Move statements that a handler deferred before it had a session into its session, which sends them later."""
    if deferred:
        defer(session, *deferred)
        deferred.clear()


class Run(NamedTuple):
    """The parts of a handler's context without its session, from which an invoker makes the context.

    Attributes:
        state: The relay's state for `ctx.state`; None if there is none.
        effect_access: Returns the job's access to effects (`ctx.once`); None if this relay cannot call effects.
        deferred: The statements that the handler defers before it has a session.
        call: The call itself, which an operator may cancel.
    """

    job: Job
    state: object
    effect_access: Callable[[], EffectAccess | None]
    deferred: list[Write]
    call: HandlerCall


class _Opening(JobContext[Any, Any]):
    """A handler's context that opens its session when `ctx.session` is first read.

    It uses a property without a lock: `cached_property` in Python 3.11 has one lock for all instances, so a slot whose
    connection hangs would keep all others from their sessions.
    """

    def __init__(self, run: Run, session: Callable[[], OutboxSession | AsyncOutboxSession]) -> None:
        self.__dict__.update(
            job=run.job, state=NO_STATE if run.state is None else run.state, call=run.call, _run=run, _session=session
        )

    def _keep(self, write: Write) -> None:
        if "session" in self.__dict__:
            super()._keep(write)
        else:
            self.__dict__["_run"].deferred.append(write)

    @memoized_property
    def effect_access(self) -> EffectAccess | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # made later
        access: EffectAccess | None = self.__dict__["_run"].effect_access()
        return access

    @memoized_property
    def session(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  # made later
        session = self.__dict__["_session"]()
        deferred = self.__dict__["_run"].deferred
        if deferred:
            hand_over(deferred, plain_session(session, "ctx.session"))
        return session


class _OpeningContext(_Opening, Context[Any]):  # pyright: ignore[reportIncompatibleVariableOverride]  # made later
    """The context of a sync handler, which opens a sync session when `ctx.session` is first read."""


class _OpeningAsyncContext(_Opening, AsyncContext[Any]):  # pyright: ignore[reportIncompatibleVariableOverride]  # made later
    """The context of an async handler, which opens an async session when `ctx.session` is first read."""


# The arguments of a call; with arounds, an object that makes the arguments within these.
Args: TypeAlias = dict[str, object] | Surrounded
# The value that a handler returned, and None; or None, and its error.
HandlerEnd: TypeAlias = tuple[object, BaseException | None]
# Runs a function, with its arguments, in a context of its own.
Apart: TypeAlias = Callable[..., Any]


class Invoker(Protocol):
    """Calls sync or async handlers, and opens their sessions, for relay code on a sync `Connection`.

    `has_ended` is True if the handler's own code has ended, and not only its call.
    """

    flavour: Flavour
    # True if the handler's own code has ended, and not only its call.
    has_ended: bool

    def apart(self) -> Apart:
        """Return a function `run(attempt, *args)` that calls `attempt` with a new copy of the context variables.

        The copy keeps the next job from seeing context variables that this job's handler has set.
        """
        ...

    def open_session(
        self, lent: Connection | None, make: Callable[..., HandlerSession] = HandlerSession
    ) -> HandlerSession:
        """Return a new session that joins the transaction and savepoint of the job's connection.

        Args:
            lent: The `Connection` object that was made for the job, over the relay's connection; None if the connection
                is not known yet: then `bind_session` sets it later.
            make: Makes the plain session.
        """
        ...

    def bind_session(self, session: HandlerSession, lent: Connection) -> None:
        """Give a session that `open_session` made without a connection the `Connection` that is now lent to the job."""
        ...

    def call(self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: Args) -> object:
        """Run the handler to its end; return its value.

        Args:
            session: Returns the job's session, and opens it at the first call; called when the handler first reads it.
        """
        ...


class SyncInvoker:
    """Calls sync handlers, which are plain functions, directly in the slot's thread."""

    flavour: Flavour = "sync"
    has_ended = False

    def apart(self) -> Apart:
        """Return a function `run(attempt, *args)` that calls `attempt` with a new copy of the context variables."""
        return copy_context().run

    def open_session(
        self, lent: Connection | None, make: Callable[..., HandlerSession] = HandlerSession
    ) -> HandlerSession:
        """Return a new session that joins the open transaction: commit() commits nothing, and rollback() is noticed.

        This is SQLAlchemy's `join_transaction_mode="rollback_only"`.
        """
        return make(bind=lent, **SESSION_OPTIONS)

    def bind_session(self, session: HandlerSession, lent: Connection) -> None:
        """Give a session that was opened without a connection the `Connection` that is now lent to the job."""
        session.bind, session.engine = lent, None

    def call(self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: Args) -> object:
        """Call the handler, within its arounds (users' context managers) if it has any, and return its value."""
        ctx = _OpeningContext(run, cast("Callable[[], OutboxSession]", session))
        if isinstance(args, Surrounded):
            load = args.load
            return call_within(args.arounds, args.context_of(ctx), lambda: call_here(handler.function, ctx, **load()))
        return call_here(handler.function, ctx, **args)


@functools.cache
def _greenlets() -> Callable[[], Any]:
    """Return `greenlet.getcurrent`; imported only here, because relays with sync handlers need no greenlet."""
    from greenlet import getcurrent

    found: Callable[[], Any] = getcurrent
    return found


class AsyncInvoker:
    """Calls coroutine functions for relay code that runs synchronously in a greenlet (SQLAlchemy's `run_sync`).

    `begin` makes the handler's coroutine; `call` makes it and awaits it through that greenlet.
    """

    flavour: Flavour = "async"
    has_ended = False

    def __init__(self, engine: AsyncEngine) -> None:
        self._greenlet = _greenlets()
        self._engine = engine
        self._session: AsyncOutboxSession | None = None
        # The task of the handler that runs, or of the last one.
        self.task: asyncio.Task[None] | None = None
        # The context variables from before a handler that the caller has started; None if it starts none.
        self.base: ContextVars | None = None

    def apart(self) -> Apart:
        """Return a function `run(attempt, *args)` that calls `attempt` with a new copy of the context variables.

        The handler's task gets this copy too, so the next job does not see variables that this job's handler has set.
        """
        return self._run_apart

    def _run_apart(self, attempt: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        # Not by Context.run(): no task can enter a context that is already entered.
        own = self._greenlet()
        before, own.gr_context = own.gr_context, copy_context() if self.base is None else self.base.copy()
        try:
            return attempt(*args, **kwargs)
        finally:
            own.gr_context = before

    def open_session(
        self, lent: Connection | None, make: Callable[..., HandlerSession] = HandlerSession
    ) -> HandlerSession:
        """Return a new sync session that joins the open transaction; keep an async session around it for the handler.

        Its commit() commits nothing, and its rollback() is noticed (`join_transaction_mode="rollback_only"`).
        """
        bind = None if lent is None else AsyncConnection(self._engine, lent)
        self._session = AsyncHandlerSession(bind=bind, sync_session_class=cast("Any", make), **SESSION_OPTIONS)
        # The class has it.
        del self._session.sync_session_class
        session = self._session.sync_session
        assert isinstance(session, HandlerSession)
        return session

    def bind_session(self, session: HandlerSession, lent: Connection) -> None:
        """Give the session, and the async one around it, the connection that is now lent to the job."""
        session.bind, session.engine = lent, None
        if self._session is not None and self._session.sync_session is session:
            self._session.bind = AsyncConnection(self._engine, lent)

    def begin(
        self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: Args, ended: list[HandlerEnd]
    ) -> Coroutine[Any, Any, None]:
        """Return a coroutine that runs the handler and appends its value or error to `ended`; it raises nothing."""

        def opened() -> AsyncOutboxSession:
            if ended:
                raise InvalidRequestError(_HAS_ENDED)
            plain = session()
            if self._session is None:
                # A batch handler in lease mode has no session, but an object that refuses each use.
                return cast("AsyncOutboxSession", plain)
            assert self._session.sync_session is plain
            return self._session

        self.has_ended = False
        return self._run(handler, _OpeningAsyncContext(run, opened), args, ended)

    def call(self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: Args) -> object:
        """Await the handler in a task of its own, and return its value.

        Because of that task, a cancellation of the handler, even a late one, does not hit the relay's own tasks.
        """
        ended: list[HandlerEnd] = []
        running = self.begin(handler, session, run, args, ended)
        await_only(self._in_task(running, self._greenlet().gr_context, ended))
        returned, error = ended[0]
        if error is not None:
            raise error
        return returned

    def cancel(self, call: HandlerCall) -> None:
        """Cancel the handler's task if this call has not ended; called in the thread of the event loop."""
        # The task of an earlier call has ended.
        if not call.is_over and self.task is not None:
            self.task.cancel()

    async def _in_task(
        self, running: Coroutine[Any, Any, None], context: ContextVars | None, ended: list[HandlerEnd]
    ) -> None:
        own = asyncio.current_task()
        assert own is not None
        cancelled = own.cancelling()
        # Not by the loop's create_task(): a user's task factory may not accept a context.
        self.task = asyncio.Task(running, loop=asyncio.get_running_loop(), context=context)
        try:
            await self.task
        except asyncio.CancelledError:
            # Only the handler's task was cancelled, after its last await: its result counts.
            if not ended or own.cancelling() > cancelled:
                raise

    async def _run(self, handler: AnyHandler, ctx: AsyncContext[Any], args: Args, ended: list[HandlerEnd]) -> None:
        """Await a handler, and append its value or its error to `ended`.

        The error is not raised here: a KeyboardInterrupt or SystemExit that leaves a task ends the event loop.
        """
        try:
            if ctx.call is not None and ctx.call.is_cancelled and not ctx.call.goes_on:
                # Cancelled before the task existed.
                raise asyncio.CancelledError
            made = count_coroutines()
            try:
                returned = await _within(handler.timeout_seconds, _awaited(handler, ctx, args))
            finally:
                forgotten = close_unawaited(made)
            if forgotten:
                raise HandlerError(_UNAWAITED.format(forgotten))
        except BaseException as error:  # noqa: BLE001  # the caller judges it
            ended.append((None, error))
        else:
            ended.append((returned, None))
        self.has_ended = True
        if self._session is not None:
            # Tasks that the handler left behind run before the relay goes on, and would use the session at the same
            # time.
            self._session.sync_session = self._session._proxied = cast("Session", _REFUSING)  # noqa: SLF001  # its methods call it


class _Refusing:
    """Replaces the plain session in an async session when its handler has ended: any use raises InvalidRequestError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise InvalidRequestError(_HAS_ENDED)


_REFUSING = _Refusing()


def _awaited(handler: AnyHandler, ctx: AsyncContext[Any], args: Args) -> Awaitable[object]:
    if not isinstance(args, Surrounded):
        running: Awaitable[object] = call_here(handler.function, ctx, **args)
        return running

    async def load_and_call() -> object:
        # In a greenlet, where plain code may wait for the database.
        return await await_here(handler.function(ctx, **await greenlet_spawn(args.load)))

    return await_within(args.arounds, args.context_of(ctx), load_and_call)


async def _within(seconds: float | None, running: Awaitable[object]) -> object:
    """Await a handler, and return its value; cancel it after `seconds`, if there is a limit.

    Raises:
        HandlerTimedOut: the handler reached the limit, even if it then swallowed the cancellation.
    """
    task, deadline = asyncio.current_task(), asyncio.timeout(seconds)
    assert task is not None
    try:
        async with deadline:
            try:
                returned = await await_here(running)
            finally:
                if task.cancelling():
                    # If the handler cancelled its own task without waiting, the cancellation arrives here.
                    await asyncio.sleep(0)
    except BaseException as error:
        # A CancelledError that passes through the timeout was not caused by it.
        if seconds is None or not deadline.expired() or isinstance(error, asyncio.CancelledError):
            raise
        # The TimeoutError was raised here; its cause shows the handler's place.
        stood = error.__cause__ or error
        raise HandlerTimedOut(seconds).with_traceback(stood.__traceback__) from error
    if seconds is not None and deadline.expired():
        raise HandlerTimedOut(seconds)
    return returned
