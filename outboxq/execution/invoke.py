"""Invoke: give a handler its context and its session, and call it.

Plain functions are called directly, coroutines in tasks of their own. A session joins the relay's transaction; it is
made when the handler first uses it.
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
    """Entities whose rows are not locked, with the object that checks their changes."""

    changes: UnlockedChanges
    entities: Sequence[object]

    def look(self) -> bool:
        """Check the changes now; return False if that cannot be done."""
        try:
            self.changes.look(self.entities)
        except Exception as error:  # noqa: BLE001  # raised again, unless it is a defect
            contain(error)
            return False
        return True


class HandlerSession(OutboxSession):
    """The session of a handler.

    Attributes:
        on_first_use: Called before it uses its connection; None if transaction and savepoint exist already.
        engine: The engine of its connection, while it has none. Its `bind` is None then: an engine would be no part of
            the job's transaction.
        watched: Entities whose changes are checked before each flush.
        is_rolled_back: Its transaction was rolled back, and not just a savepoint.
    """

    on_first_use: Callable[[], None] | None = None
    engine: Engine | None = None
    is_rolled_back = False
    watched: Watch | None = None

    def watch(self, changes: UnlockedChanges, entities: Sequence[object]) -> None:
        """Check the changes of these entities before each flush, by `changes`."""
        if entities:
            self.watched = Watch(changes, entities)

    def look(self) -> None:
        """Check the changes of watched entities now."""
        if self.watched is not None and not self.watched.look():
            self.watched = None

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """SQLAlchemy's hook before every use of a connection."""
        if self.on_first_use is not None:
            self.on_first_use()
        if self.watched is not None and getattr(kwargs.get("clause"), "_for_update_arg", None) is not None:
            # The handler locks rows itself, perhaps those of the watched entities.
            self.watched = None
        return super().get_bind(*args, **kwargs)

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        """SQLAlchemy's hook for every flush, also an autoflush and that of a commit."""
        if self.watched is not None:
            self.look()
        super().flush(objects)

    def peek_bind(self, **kwargs: Any) -> Engine | Connection:
        """The engine or connection that the session would use; begins no savepoint."""
        return super().get_bind(**kwargs) if self.engine is None else self.engine

    def check(self) -> None:
        """Check that the handler did not roll the session's transaction back in any way.

        Raises:
            HandlerRolledBack: it did, and returned as if done.
        """
        if self.is_rolled_back:
            raise HandlerRolledBack(ROLLED_BACK)


class JobSession:
    """The session of one job, opened at its first use.

    Attributes:
        made: The session, once it is open.
        entities: Those that came before (`job_entities.Entities`); None without any.
        failed: The error of opening it for entities: the job must not be done without their changes.
        is_over: The job ended, or nothing but its end is left.
        lock: Held while it is opened, and by the relay while it decides that it is not: threads that the handler has
            left may look at an entity at any time.
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
        """Open the session, which `make` makes, when it is first needed."""
        session: HandlerSession = self._runtime.invoker.open_session(self._runtime.guard.lend(), make)
        return session

    def session(self) -> HandlerSession:
        """Return the session, open.

        Raises:
            InvalidRequestError: the job ended: the session would write into another job's transaction.
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
                # What stands for the listeners of all sessions; else each is looked up when it is used, by Python code.
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
        """Open the session, for code that found it by an entity.

        Raises:
            InvalidRequestError: the job, or its handler, has ended.
        """
        with self.lock:
            # Else the opening itself looks at it.
            if not self._is_opening:
                if self.made is None and self._runtime.invoker.has_ended:
                    raise InvalidRequestError(_HAS_ENDED)
                self.session()

    def watch(self, changes: UnlockedChanges, entities: Sequence[object]) -> None:
        """Check the changes of these entities before each flush, by `changes`."""
        (self.made or self.entities or self.session()).watch(changes, entities)

    def close(self) -> bool:
        """Close the session for good; return False if that fails, because the transaction is not as it was.

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
# A session that has not used its connection has no savepoint there that would show its rollback.
event.listen(HandlerSession, "after_soft_rollback", _note_rollback)


class AsyncHandlerSession(AsyncOutboxSession):
    """The session of an async handler: its coroutines are counted, none of which the handler may leave unawaited."""

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
    """Give a session the statements that were deferred before it was made."""
    if deferred:
        defer(session, *deferred)
        deferred.clear()


class Run(NamedTuple):
    """The parts of a handler's context, without its session.

    Attributes:
        deferred: The statements that the handler defers before it has a session.
        call: The call itself, which an operator may cancel.
    """

    job: Job
    state: object
    effect_access: Callable[[], EffectAccess | None]
    deferred: list[Write]
    call: HandlerCall


class _Opening(JobContext[Any, Any]):
    """A context that opens its session at the first use.

    By a property without a lock: `functools` in Python 3.11 has one lock for all instances, and a slot whose
    connection hangs would keep every other from its session.
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
    """A context that opens a sync session."""


class _OpeningAsyncContext(_Opening, AsyncContext[Any]):  # pyright: ignore[reportIncompatibleVariableOverride]  # made later
    """A context that opens an async session."""


# The arguments of a call; if there are arounds, an object that makes them within these.
Args: TypeAlias = dict[str, object] | Surrounded
# The value that a handler returned, and None; or None, and its error.
HandlerEnd: TypeAlias = tuple[object, BaseException | None]
# Runs a function, with its arguments, in a context of its own.
Apart: TypeAlias = Callable[..., Any]


class Invoker(Protocol):
    """Opens the sessions of one flavour's handlers and calls them, from code on a sync `Connection`."""

    flavour: Flavour
    # The handler's own code has ended, and not just its call.
    has_ended: bool

    def apart(self) -> Apart:
        """Return a function that runs one attempt in its own context: the next job sees none of its variables."""
        ...

    def open_session(
        self, lent: Connection | None, make: Callable[..., HandlerSession] = HandlerSession
    ) -> HandlerSession:
        """Open a session that joins the savepoint of a connection that is lent to the job.

        Args:
            lent: None if the connection is not known before `bind_session`.
            make: Makes the plain session.
        """
        ...

    def bind_session(self, session: HandlerSession, lent: Connection) -> None:
        """Bind a session of `open_session` to a connection that is lent to the job."""
        ...

    def call(self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: Args) -> object:
        """Run the handler to its end; `session` is called when the handler first uses its session."""
        ...


class SyncInvoker:
    """Calls plain functions, in the slot's thread."""

    flavour: Flavour = "sync"
    has_ended = False

    def apart(self) -> Apart:
        """A function that runs one attempt in its own context."""
        return copy_context().run

    def open_session(
        self, lent: Connection | None, make: Callable[..., HandlerSession] = HandlerSession
    ) -> HandlerSession:
        """A session joined by "rollback_only": the handler's commit() commits nothing, its rollback() is seen."""
        return make(bind=lent, **SESSION_OPTIONS)

    def bind_session(self, session: HandlerSession, lent: Connection) -> None:
        """Bind the session."""
        session.bind, session.engine = lent, None

    def call(self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: Args) -> object:
        """Run the handler to its end."""
        ctx = _OpeningContext(run, cast("Callable[[], OutboxSession]", session))
        if isinstance(args, Surrounded):
            load = args.load
            return call_within(args.arounds, args.context_of(ctx), lambda: call_here(handler.function, ctx, **load()))
        return call_here(handler.function, ctx, **args)


@functools.cache
def _greenlets() -> Callable[[], Any]:
    """The function that returns the current greenlet; installed if SQLAlchemy has coroutines."""
    from greenlet import getcurrent

    found: Callable[[], Any] = getcurrent
    return found


class AsyncInvoker:
    """Calls coroutine functions: makes their coroutines, or awaits these through the greenlet of `run_sync`."""

    flavour: Flavour = "async"
    has_ended = False

    def __init__(self, engine: AsyncEngine) -> None:
        self._greenlet = _greenlets()
        self._engine = engine
        self._session: AsyncOutboxSession | None = None
        # The task of the handler that runs, or of the last one.
        self.task: asyncio.Task[None] | None = None
        # The variables from before a handler that the caller has started; None if it starts none.
        self.base: ContextVars | None = None

    def apart(self) -> Apart:
        """A function that runs one attempt in its own context, which its handler's task gets too."""
        return self._run_apart

    def _run_apart(self, attempt: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        # Not by Context.run(): no task can enter a context that is entered.
        own = self._greenlet()
        before, own.gr_context = own.gr_context, copy_context() if self.base is None else self.base.copy()
        try:
            return attempt(*args, **kwargs)
        finally:
            own.gr_context = before

    def open_session(
        self, lent: Connection | None, make: Callable[..., HandlerSession] = HandlerSession
    ) -> HandlerSession:
        """A session joined by "rollback_only", with an async session around it for the handler."""
        bind = None if lent is None else AsyncConnection(self._engine, lent)
        self._session = AsyncHandlerSession(bind=bind, sync_session_class=cast("Any", make), **SESSION_OPTIONS)
        # The class has it.
        del self._session.sync_session_class
        session = self._session.sync_session
        assert isinstance(session, HandlerSession)
        return session

    def bind_session(self, session: HandlerSession, lent: Connection) -> None:
        """Bind the session, and the async one around it."""
        session.bind, session.engine = lent, None
        if self._session is not None and self._session.sync_session is session:
            self._session.bind = AsyncConnection(self._engine, lent)

    def begin(
        self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: Args, ended: list[HandlerEnd]
    ) -> Coroutine[Any, Any, None]:
        """Return the coroutine that runs the handler to its end, and appends that to `ended`; it raises nothing."""

        def opened() -> AsyncOutboxSession:
            if ended:
                raise InvalidRequestError(_HAS_ENDED)
            plain = session()
            assert self._session is not None
            assert self._session.sync_session is plain
            return self._session

        self.has_ended = False
        return self._run(handler, _OpeningAsyncContext(run, opened), args, ended)

    def call(self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: Args) -> object:
        """Await the handler to its end, in its own task: a later cancellation of that task hits nothing else."""
        ended: list[HandlerEnd] = []
        running = self.begin(handler, session, run, args, ended)
        await_only(self._in_task(running, self._greenlet().gr_context, ended))
        returned, error = ended[0]
        if error is not None:
            raise error
        return returned

    def cancel(self, call: HandlerCall) -> None:
        """Cancel the task of this call, if it runs; called in the event loop."""
        # The task of an earlier call is done.
        if not call.is_over and self.task is not None:
            self.task.cancel()

    async def _in_task(
        self, running: Coroutine[Any, Any, None], context: ContextVars | None, ended: list[HandlerEnd]
    ) -> None:
        own = asyncio.current_task()
        assert own is not None
        cancelled = own.cancelling()
        # Not by the loop's create_task(): the user's task factory may not take a context.
        self.task = asyncio.Task(running, loop=asyncio.get_running_loop(), context=context)
        try:
            await self.task
        except asyncio.CancelledError:
            # Only the handler's task was cancelled, after its last await: its result counts.
            if not ended or own.cancelling() > cancelled:
                raise

    async def _run(self, handler: AnyHandler, ctx: AsyncContext[Any], args: Args, ended: list[HandlerEnd]) -> None:
        """Await a handler, and append its value, or its error.

        The error is not raised here: a KeyboardInterrupt or SystemExit that leaves a task ends the event loop.
        """
        try:
            if ctx.call is not None and ctx.call.is_cancelled:
                # Cancelled before there was a task.
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
            # Tasks that the handler left behind run before the relay goes on, and would use the session with it.
            self._session.sync_session = self._session._proxied = cast("Session", _REFUSING)  # noqa: SLF001  # its methods call it


class _Refusing:
    """Replaces the plain session of an async session when its handler has ended."""

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
    """Await a handler, and cancel it at its deadline; one that swallows the cancellation has failed too."""
    task, deadline = asyncio.current_task(), asyncio.timeout(seconds)
    assert task is not None
    try:
        async with deadline:
            try:
                returned = await await_here(running)
            finally:
                if task.cancelling():
                    # If the handler cancelled its own task and did not wait, the cancellation comes here.
                    await asyncio.sleep(0)
    except BaseException as error:
        # A CancelledError that the timeout let through is not its own.
        if seconds is None or not deadline.expired() or isinstance(error, asyncio.CancelledError):
            raise
        # The TimeoutError was raised here; its cause at the handler's place.
        stood = error.__cause__ or error
        raise HandlerTimedOut(seconds).with_traceback(stood.__traceback__) from error
    if seconds is not None and deadline.expired():
        raise HandlerTimedOut(seconds)
    return returned
