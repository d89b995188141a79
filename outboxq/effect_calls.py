"""Where calls to the outside meet the database and the caller's functions: from threads and from event loops.

The transactions are short and on connections of their own, which a caller that holds one of its engine's cannot starve.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar, assert_never, cast
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from outboxq.config import check_schema
from outboxq.effect_lock import Keeper, Transaction
from outboxq.effect_request import Request
from outboxq.errors import CallNotApplied, ConfigError
from outboxq.once import Ask, Call, Hold, LookUp, Pause, Step, Steps, Transact, once
from outboxq.statements.effects import select_deployment
from outboxq.tables import SCHEMA

T = TypeVar("T")

MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 0.5, 3600.0
_KEEPER_ANSWER_SECONDS = 30.0


class Transactions(Protocol):
    """Where the short transactions of sync callers run."""

    def run(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction of its own, committed when it returns."""
        ...

    def keeper_transaction(self) -> Transaction:
        """The same for the thread that keeps the locks."""
        ...


class AsyncTransactions(Protocol):
    """Where the short transactions of async callers run."""

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction of its own, committed when it returns."""
        ...

    def keeper_transaction(self) -> Transaction:
        """The same for the thread that keeps the locks; called in the event loop."""
        ...


class EngineTransactions:
    """Connections from a pool beside the given engine's: a caller that holds one of that engine's cannot starve us."""

    def __init__(self, engine: Engine, schema: str) -> None:
        self._engine = beside(engine).execution_options(
            isolation_level="READ COMMITTED", schema_translate_map={SCHEMA: schema}
        )

    def run(self, work: Callable[[Connection], T]) -> T:
        """See `Transactions`."""
        with self._engine.begin() as connection:
            return work(connection)

    def keeper_transaction(self) -> Transaction:
        """From any thread."""
        return self.run

    def dispose(self) -> None:
        """Close the pool."""
        self._engine.dispose()


class AsyncEngineTransactions:
    """As `EngineTransactions`, for an event loop."""

    def __init__(self, engine: AsyncEngine, schema: str) -> None:
        self.was_used = False
        self._engine = AsyncEngine(beside(engine.sync_engine)).execution_options(
            isolation_level="READ COMMITTED", schema_translate_map={SCHEMA: schema}
        )

    async def run(self, work: Callable[[Connection], T]) -> T:
        """See `AsyncTransactions`."""
        self.was_used = True
        async with self._engine.begin() as connection:
            return await connection.run_sync(work)

    async def dispose(self) -> None:
        """Close the pool."""
        await self._engine.dispose()

    def keeper_transaction(self) -> Transaction:
        """Through the caller's event loop: one that is blocked cannot keep its locks."""
        loop = asyncio.get_running_loop()

        def transact(work: Callable[[Connection], object]) -> object:
            return asyncio.run_coroutine_threadsafe(self.run(work), loop).result(_KEEPER_ANSWER_SECONDS)

        return transact


class ThreadTransactions:
    """A sync engine, for an event loop: each transaction in a thread."""

    def __init__(self, transactions: EngineTransactions) -> None:
        self._transactions = transactions

    async def dispose(self) -> None:
        """Close the pool."""
        await asyncio.to_thread(self._transactions.dispose)

    async def run(self, work: Callable[[Connection], T]) -> T:
        """See `AsyncTransactions`."""
        return await asyncio.to_thread(self._transactions.run, work)

    def keeper_transaction(self) -> Transaction:
        """Needs no event loop."""
        return self._transactions.run


def beside(engine: Engine) -> Engine:
    """Another pool with the same settings and the same way to connect (tokens, connectors, events of the pool)."""
    return Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=True)


class SavepointTransactions:
    """Savepoints in a transaction that is rolled back in the end: for tests of users' handlers."""

    def __init__(self, connection: Callable[[], Connection]) -> None:
        self._connection = connection

    def run(self, work: Callable[[Connection], T]) -> T:
        """See `Transactions`."""
        connection = self._connection()
        with connection.begin_nested():
            return work(connection)

    def keeper_transaction(self) -> Transaction:
        """None: the connection is the test's own, and nobody else sees these rows."""
        return lambda _: None


class AsyncSavepointTransactions:
    """As `SavepointTransactions`."""

    def __init__(self, connection: Callable[[], Awaitable[AsyncConnection]]) -> None:
        self._connection = connection

    async def run(self, work: Callable[[Connection], T]) -> T:
        """See `AsyncTransactions`."""
        connection = await self._connection()
        async with connection.begin_nested():
            return await connection.run_sync(work)

    def keeper_transaction(self) -> Transaction:
        """None: see `SavepointTransactions`."""
        return lambda _: None


class Caller:
    """Makes calls once, where the caller stands."""

    def __init__(self, transactions: Transactions, lease_seconds: float) -> None:
        self.lease = timedelta(seconds=check_lease(lease_seconds))
        self._transactions = transactions
        self._keeper = Keeper(transactions.keeper_transaction(), lease_seconds)
        self._deployment: UUID | None = None

    def run(self, request: Request, call: Callable[[str], object], ask: Callable[[str], LookUp[Any]] | None) -> object:
        """What the call comes to, or came to; see `once` for what it raises."""
        if self._deployment is None:
            self._deployment = self._transactions.run(_read_deployment)
        hold = Hold(request)
        with self._keeper.keeping(hold):
            return self._drive(once(request, hold, self._deployment), call, ask)

    def _drive(self, steps: Steps[object], call: Callable[[str], object], ask: Callable[[str], Any] | None) -> object:
        try:
            step = next(steps)
            while True:
                try:
                    answer = self._perform(step, call, ask)
                except BaseException as error:  # noqa: BLE001  # the protocol decides, and raises it again
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value

    def _perform(self, step: Step, call: Callable[[str], object], ask: Callable[[str], Any] | None) -> object:
        match step:
            case Transact(work):
                return self._transactions.run(work)
            case Call(provider_key):
                return _not_awaitable(call(provider_key))
            case Ask(provider_key):
                assert ask is not None
                return ask(provider_key)
            case Pause(seconds):
                time.sleep(seconds)
                return None
        assert_never(step)


class AsyncCaller:
    """Makes calls once, in an event loop.

    Args:
        keep: Runs the keeper's transactions from its thread; by default through the event loop.
    """

    def __init__(self, transactions: AsyncTransactions, lease_seconds: float, keep: Transaction | None = None) -> None:
        self._keep = keep
        self.lease = timedelta(seconds=check_lease(lease_seconds))
        self._transactions = transactions
        self._keepers: dict[asyncio.AbstractEventLoop, Keeper] = {}
        self._deployment: UUID | None = None

    async def transact(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a short transaction of its own, to its end also where we are cancelled meanwhile."""
        answer, cancelled = await self._to_its_end(work)
        if cancelled is not None:
            raise cancelled
        return answer

    def keeping(self, hold: Hold) -> AbstractContextManager[None]:
        """Within the block, the lock is extended."""
        loop = asyncio.get_running_loop()
        if loop not in self._keepers:
            keep = self._keep or self._transactions.keeper_transaction()
            keeper = Keeper(keep, self.lease.total_seconds())
            self._keepers = {loop: keeper}
        return self._keepers[loop].keeping(hold)

    async def deployment(self) -> UUID:
        """The id of this deployment; read once."""
        if self._deployment is None:
            self._deployment = await self._transactions.run(_read_deployment)
        return self._deployment

    async def run(
        self,
        request: Request,
        call: Callable[[str], Awaitable[object]],
        ask: Callable[[str], Awaitable[LookUp[Any]]] | None,
    ) -> object:
        """See `Caller.run`."""
        deployment = await self.deployment()
        hold = Hold(request)
        with self.keeping(hold):
            return await self._drive(once(request, hold, deployment), call, ask)

    async def drive(self, steps: Steps[T]) -> T:
        """What steps come to that transact and pause, and call nobody."""
        return cast("T", await self._drive(steps, _call_nobody, None))

    async def _drive(
        self,
        steps: Steps[object],
        call: Callable[[str], Awaitable[object]],
        ask: Callable[[str], Awaitable[Any]] | None,
    ) -> object:
        # A cancellation lets what was decided be written to its end, and goes on before the next step.
        cancelled: asyncio.CancelledError | None = None
        answer: object
        try:
            step = next(steps)
            while True:
                try:
                    if isinstance(step, Transact):
                        answer, interruption = await self._to_its_end(step.run)
                        cancelled = cancelled or interruption
                    else:
                        answer = await self._perform(step, call, ask, cancelled)
                except BaseException as error:  # noqa: BLE001  # the protocol decides, and raises it again
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            if cancelled is not None:
                raise cancelled from None
            return end.value
        except Exception:
            if cancelled is not None:
                raise cancelled from None
            raise

    async def _to_its_end(self, work: Callable[[Connection], T]) -> tuple[T, asyncio.CancelledError | None]:
        task = asyncio.ensure_future(self._transactions.run(work))
        try:
            return await asyncio.shield(task), None
        except asyncio.CancelledError as error:
            return await task, error

    async def _perform(
        self,
        step: Call | Ask | Pause,
        call: Callable[[str], Awaitable[object]],
        ask: Callable[[str], Any] | None,
        cancelled: asyncio.CancelledError | None,
    ) -> object:
        if cancelled is not None:
            # It is known not to have been called: recorded as that, and not as unknown.
            raise CallNotApplied("cancelled before the call") if isinstance(step, Call) else cancelled
        match step:
            case Call(provider_key):
                return await _awaited(call(provider_key))
            case Ask(provider_key):
                assert ask is not None
                return await _awaited(ask(provider_key))
            case Pause(seconds):
                await asyncio.sleep(seconds)
                return None
        assert_never(step)


def async_transactions(
    engine: AsyncEngine | Engine, schema: str | None
) -> "AsyncEngineTransactions | ThreadTransactions":
    """The short transactions of async callers on this engine.

    Raises:
        ConfigError: not an engine.
    """
    if isinstance(engine, AsyncEngine):
        return AsyncEngineTransactions(engine, schema_of(engine.sync_engine, schema))
    if isinstance(engine, Engine):
        return ThreadTransactions(EngineTransactions(engine, schema_of(engine, schema)))
    raise ConfigError(f"AsyncEffects takes an AsyncEngine or an Engine, got {type(engine).__name__}")


def check_lease(seconds: float) -> float:
    """Refuse a lock that would run out before it is kept, or block a key for ever.

    Raises:
        ConfigError: out of range.
    """
    if not MIN_LEASE_SECONDS <= seconds <= MAX_LEASE_SECONDS:
        raise ConfigError(
            f"the lease on a call takes {MIN_LEASE_SECONDS:g} to {MAX_LEASE_SECONDS:g} seconds, got {seconds}"
        )
    return seconds


def schema_of(engine: Engine, given: str | None) -> str:
    """The schema of outboxq's tables: as given, or as the engine's `schema_translate_map` has it."""
    translated = engine.get_execution_options().get("schema_translate_map") or {}
    return check_schema(given or translated.get(SCHEMA) or SCHEMA)


def _read_deployment(connection: Connection) -> UUID:
    found: UUID = connection.execute(select_deployment()).scalar_one()
    return found


async def _call_nobody(_provider_key: str) -> NoReturn:
    raise AssertionError("these steps hold no call")


async def _awaited(value: Awaitable[object] | object) -> object:
    # A plain function has done its work by now: what it did must be recorded, not refused.
    return await value if inspect.isawaitable(value) else value


def _not_awaitable(value: object) -> object:
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            # Never awaited: close it, or Python warns.
            value.close()
        raise CallNotApplied(
            "`call` is an async function, and nobody awaits it here: use an async handler, or AsyncEffects"
        )
    return value
