"""Invoke: give a handler its context, and call it: plain functions where we stand, coroutines through `run_sync`."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context as ContextVars
from contextvars import copy_context
from typing import Any, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar, cast

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InvalidRequestError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from outboxq.database.guard import lend
from outboxq.effects.runners import AsyncEffectRunner, EffectAccess, EffectRunner
from outboxq.errors import HandlerTimedOut
from outboxq.handlers.context import AsyncContext, Context
from outboxq.handlers.deferred import Write, defer
from outboxq.handlers.handler import AnyHandler, Flavour
from outboxq.handlers.unlocked import UnlockedChanges
from outboxq.job import Job
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession

T = TypeVar("T")
P = ParamSpec("P")
_HAS_ENDED = "the handler of this session has ended: await the tasks that use it, or give them sessions of their own"


def nothing() -> None:
    """The opener of a session whose transaction and savepoint are there already."""


class HandlerSession(OutboxSession):
    """Calls `on_first_use` before it first uses its connection.

    Attributes:
        watched: Entities whose rows are not locked, and what is told of their changes before these are written.
    """

    on_first_use: Callable[[], None]
    watched: tuple[UnlockedChanges, Sequence[object]] | None = None

    def watch(self, changes: UnlockedChanges, entities: Sequence[object]) -> None:
        """Have `changes` told of what is changed of these entities."""
        if entities:
            self.watched = changes, entities

    def look(self) -> None:
        """Tell of what is changed at this moment."""
        if self.watched is not None:
            changes, entities = self.watched
            changes.look(entities)

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """SQLAlchemy's hook before every use of a connection."""
        self.on_first_use()
        if self.watched is not None and getattr(kwargs.get("clause"), "_for_update_arg", None) is not None:
            # The handler locks rows itself, and perhaps these.
            self.watched = None
        return super().get_bind(*args, **kwargs)

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        """What SQLAlchemy calls for every flush, an autoflush and that of a commit too."""
        self.look()
        super().flush(objects)

    def peek_bind(self, **kwargs: Any) -> Engine | Connection:
        """Where it leads to, for who sends nothing yet."""
        return super().get_bind(**kwargs)

    def rollback(self) -> None:
        """Joins first: what a session that has not joined rolls back, nobody sees, and its job would count as done."""
        if self.in_transaction() and self.is_active:
            self.connection()
        super().rollback()


class Run(NamedTuple):
    """What a handler's context is made of, besides its session.

    Attributes:
        deferred: What the handler defers before it has a session.
    """

    job: Job
    state: object
    permit: Callable[[], EffectAccess[Any] | None]
    deferred: list[Write]


def hand_over(deferred: list[Write], session: Session) -> None:
    """Have a session send what was deferred before it was there."""
    if deferred:
        defer(session, *deferred)
        deferred.clear()


class AttemptSession:
    """The session of one attempt, made when it is first asked for: a handler that needs none does not pay for it."""

    def __init__(self, make: Callable[[], HandlerSession]) -> None:
        self._make = make
        self._is_over = False
        self.made: HandlerSession | None = None

    def session(self) -> HandlerSession:
        """The session.

        Raises:
            InvalidRequestError: the attempt is over: it would write into another job's transaction.
        """
        if self.made is None:
            if self._is_over:
                raise InvalidRequestError("the job of this context is over: its session cannot be opened any more")
            self.made = self._make()
        return self.made

    def close(self) -> bool:
        """End it for good; False where that fails, because the transaction below it is not as it was.

        Raises also what users' listeners raise.
        """
        self._is_over = True
        try:
            if self.made is not None:
                self.made.close()
        except (SQLAlchemyError, psycopg.Error):
            return False
        return True


class _OpeningContext(Context[Any]):
    """Opens the session at its first use."""

    def __init__(self, run: Run, session: Callable[[], OutboxSession]) -> None:
        self.__dict__.update(job=run.job, state=run.state, _run=run, _session=session)

    def _keep(self, write: Write) -> None:
        if "session" in self.__dict__:
            super()._keep(write)
        else:
            self.__dict__["_run"].deferred.append(write)

    @functools.cached_property
    def effect_access(self) -> EffectAccess[EffectRunner] | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # made later
        access: EffectAccess[EffectRunner] | None = self.__dict__["_run"].permit()
        return access

    @functools.cached_property
    def session(self) -> OutboxSession:  # pyright: ignore[reportIncompatibleVariableOverride]  # made later
        session: OutboxSession = self.__dict__["_session"]()
        hand_over(self.__dict__["_run"].deferred, session)
        return session


class _OpeningAsyncContext(AsyncContext[Any]):
    """As `_OpeningContext`."""

    def __init__(self, run: Run, session: Callable[[], AsyncOutboxSession]) -> None:
        self.__dict__.update(job=run.job, state=run.state, _run=run, _session=session)

    def _keep(self, write: Write) -> None:
        if "session" in self.__dict__:
            super()._keep(write)
        else:
            self.__dict__["_run"].deferred.append(write)

    @functools.cached_property
    def effect_access(self) -> EffectAccess[AsyncEffectRunner] | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # made later
        access: EffectAccess[AsyncEffectRunner] | None = self.__dict__["_run"].permit()
        return access

    @functools.cached_property
    def session(self) -> AsyncOutboxSession:  # pyright: ignore[reportIncompatibleVariableOverride]  # made later
        session: AsyncOutboxSession = self.__dict__["_session"]()
        hand_over(self.__dict__["_run"].deferred, session.sync_session)
        return session


class Invoker(Protocol):
    """How a handler of one flavour gets its session and is called, from code that stands on a sync `Connection`."""

    flavour: Flavour

    def apart(self, attempt: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one attempt in a context of its own: no variable that its handler sets is seen by the next job."""
        ...

    def open_session(self, connection: Connection, opener: Callable[[], None]) -> HandlerSession:
        """A fresh session that joins the connection's savepoint, which `on_first_use` begins if need be."""
        ...

    def call(self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: dict[str, object]) -> object:
        """Run the handler to its end, with what `session` gives when it is first asked for."""
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

    def apart(self, attempt: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one attempt in a context of its own."""
        return copy_context().run(attempt, *args, **kwargs)

    def open_session(self, connection: Connection, opener: Callable[[], None]) -> HandlerSession:
        """Joined by "rollback_only": the handler's commit() commits nothing, its rollback() is seen."""
        session = HandlerSession(bind=lend(connection), **SESSION_OPTIONS)
        session.on_first_use = opener
        return session

    def call(self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: dict[str, object]) -> object:
        """Run the handler to its end."""
        return handler.function(_OpeningContext(run, cast("Callable[[], OutboxSession]", session)), **args)


class AsyncInvoker:
    """Coroutines, awaited through the greenlet of `run_sync`: the event loop runs them as if it had called them."""

    flavour: Flavour = "async"

    def __init__(self, connection: AsyncConnection) -> None:
        # Installed wherever SQLAlchemy has coroutines.
        from greenlet import getcurrent

        self._greenlet: Callable[[], Any] = getcurrent
        self._connection = connection
        self._session: AsyncOutboxSession | None = None
        # Of the handler that runs, or of the last one.
        self.task: asyncio.Task[None] | None = None

    def apart(self, attempt: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one attempt in a context of its own, that of its handler's task too."""
        # Not by Context.run(), within which no task can run in it.
        own = self._greenlet()
        before, own.gr_context = own.gr_context, copy_context()
        try:
            return attempt(*args, **kwargs)
        finally:
            own.gr_context = before

    def open_session(self, connection: Connection, opener: Callable[[], None]) -> HandlerSession:
        """As `SyncInvoker`; the async session is the same one, seen from the handler's side."""
        lent = AsyncConnection(self._connection.engine, lend(connection))
        self._session = AsyncOutboxSession(bind=lent, sync_session_class=HandlerSession, **SESSION_OPTIONS)
        session = self._session.sync_session
        assert isinstance(session, HandlerSession)
        session.on_first_use = opener
        return session

    def call(self, handler: AnyHandler, session: Callable[[], Session], run: Run, args: dict[str, object]) -> object:
        """Await the handler to its end, in a task of its own: what it has cancelled later is over by then."""

        def opened() -> AsyncOutboxSession:
            if ended:
                raise InvalidRequestError(_HAS_ENDED)
            plain = session()
            assert self._session is not None
            assert self._session.sync_session is plain
            return self._session

        async def begin() -> object:
            return await _within(handler.timeout_seconds, handler.function(_OpeningAsyncContext(run, opened), **args))

        ended: list[Callable[[], object]] = []
        await_only(self._in_task(self._note_end(begin, ended), self._greenlet().gr_context, ended))
        return ended[0]()

    async def _in_task(
        self, running: Coroutine[Any, Any, None], context: ContextVars | None, ended: list[Callable[[], object]]
    ) -> None:
        own = asyncio.current_task()
        assert own is not None
        cancelled = own.cancelling()
        # Not by the loop: a factory of tasks that the user gave it may know of no context.
        self.task = asyncio.Task(running, loop=asyncio.get_running_loop(), context=context)
        try:
            await self.task
        except asyncio.CancelledError:
            # Of the handler's task alone, and behind its last await: it has ended as it did.
            if not ended or own.cancelling() > cancelled:
                raise

    async def _note_end(self, begin: Callable[[], Awaitable[object]], ended: list[Callable[[], object]]) -> None:
        """Await a handler, and put what gives its result, or raises its error, into the list.

        An event loop ends by a KeyboardInterrupt or a SystemExit that comes out of one of its tasks.
        """
        try:
            returned = await begin()
        except BaseException as error:  # noqa: BLE001  # raised again by who waits
            ended.append(functools.partial(_raise, error))
        else:
            ended.append(lambda: returned)
        if self._session is not None:
            # Tasks that it left behind come before us, and would use it beside us.
            self._session.sync_session = self._session._proxied = cast("Session", _ENDED)  # noqa: SLF001  # what add() and its like go by


class _Ended:
    """What stands in an async session for the plain one, when its handler has ended."""

    def __getattr__(self, name: str) -> NoReturn:
        raise InvalidRequestError(_HAS_ENDED)


_ENDED = _Ended()


async def _within(seconds: float | None, running: Awaitable[object]) -> object:
    """Await a handler, cancelled at its deadline; one that swallows the cancellation has failed all the same."""
    running = _with_its_cancellations(running)
    if seconds is None:
        return await running
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            returned = await running
    except BaseException as error:
        # A cancellation that the timeout let through is another one than its own.
        if not deadline.expired() or isinstance(error, asyncio.CancelledError):
            raise
        # asyncio's own error was raised by us, and its cause where the handler stood.
        stood = error.__cause__ or error
        raise HandlerTimedOut(seconds).with_traceback(stood.__traceback__) from error
    if deadline.expired():
        raise HandlerTimedOut(seconds)
    return returned


async def _with_its_cancellations(running: Awaitable[object]) -> object:
    """Await a handler, and the cancellation of its task that it asked for and did not wait for."""
    task = asyncio.current_task()
    assert task is not None
    try:
        return await running
    finally:
        if task.cancelling():
            await asyncio.sleep(0)


def _raise(error: BaseException) -> NoReturn:
    raise error
