"""The short transactions of calls to the outside, on connections of their own.

A caller that holds one of its engine's connections cannot starve them, because they come from other pools.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple, Protocol, Self, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.util import greenlet_spawn

from outboxq.config import check_schema
from outboxq.database.sessions import sqlstate_of
from outboxq.effects.lock_keeper import Transaction
from outboxq.errors import ConfigError
from outboxq.tables import SCHEMA

T = TypeVar("T")

# Connections that nobody has used for so long are closed.
LINGER_SECONDS = 5.0
_KEEPER_ANSWER_SECONDS = 30.0
_READ_ONLY = "25006"


class Transactions(Protocol):
    """Where the short transactions of sync callers run."""

    def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:
        """Run `work` in a transaction of its own, committed when it returns.

        `settles`: on a connection that no claim can use up.
        """
        ...

    def keeper_transaction(self) -> Transaction:
        """The same for the thread that keeps the locks."""
        ...


class AsyncTransactions(Protocol):
    """Where the short transactions of async callers run."""

    async def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:
        """As `Transactions.run`."""
        ...

    def keeper_transaction(self) -> Transaction:
        """The same for the thread that keeps the locks; called in the event loop."""
        ...


class _Pool:
    """A pool beside an engine's, which is closed now and then; what is in use then is closed when it comes back.

    SQLAlchemy would leave that one open in the old pool, where nobody looks any more.
    """

    def __init__(self, engine: Engine, schema: str) -> None:
        self._model = engine
        self._schema = schema
        self._is_over = False
        self.engine = self._make()

    def _make(self) -> Engine:
        options = {"isolation_level": "READ COMMITTED", "schema_translate_map": {SCHEMA: self._schema}}
        return beside(self._model).execution_options(**options)

    def is_current(self, engine: Engine) -> bool:
        """Whether connections of this engine may be kept. Asked behind the return of one."""
        return engine is self.engine and not self._is_over

    def renew(self) -> Engine:
        """Begin a new pool; the old one is to be closed after that."""
        old, self.engine = self.engine, self._make()
        return old

    def end(self) -> Engine:
        """Keep nothing from now on; the pool is to be closed after that."""
        self._is_over = True
        return self.engine


class _Pools(NamedTuple):
    """Three: claims that wait for a row must cost neither the locks of calls that are under way, nor their records."""

    claims: _Pool
    records: _Pool
    keeper: _Pool

    @classmethod
    def beside(cls, engine: Engine, schema: str) -> Self:
        """One after another opens its first connection when it is needed."""
        return cls(*(_Pool(engine, schema) for _ in cls._fields))


class EngineTransactions:
    """Connections from pools beside the given engine's: a caller that holds one of that engine's cannot starve us."""

    def __init__(self, engine: Engine, schema: str) -> None:
        self._pools = _Pools.beside(engine, schema)
        self._used_at: float | None = None

    def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:
        """See `Transactions`."""
        with self._transaction(self._pools.records if settles else self._pools.claims) as connection:
            return _unless_standby(connection, work)

    def keeper_transaction(self) -> Transaction:
        """From any thread."""
        return self._keep

    def _keep(self, work: Callable[[Connection], T]) -> T:
        with self._transaction(self._pools.keeper) as connection:
            return work(connection)

    @contextmanager
    def _transaction(self, pool: _Pool) -> Iterator[Connection]:
        self._used_at = time.monotonic()
        engine = pool.engine
        try:
            with engine.begin() as connection:
                yield connection
        finally:
            # Only now: closing the pool closes idle connections, and this one was in use until it was returned.
            if not pool.is_current(engine):
                engine.pool.dispose()

    def trim(self) -> None:
        """Close what is idle, if nothing was needed for a while; what is in use is closed when it comes back."""
        if self._used_at is not None and time.monotonic() > self._used_at + LINGER_SECONDS:
            self._used_at = None
            for pool in self._pools:
                pool.renew().pool.dispose()

    def dispose(self) -> None:
        """Close the pools, and whatever comes back later."""
        for pool in self._pools:
            pool.end().pool.dispose()


class AsyncEngineTransactions:
    """As `EngineTransactions`, for an event loop."""

    def __init__(self, engine: AsyncEngine, schema: str) -> None:
        self.was_used = False
        self._used_at: float | None = None
        self._pools = _Pools.beside(engine.sync_engine, schema)

    async def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:
        """See `AsyncTransactions`."""
        self.was_used = True
        async with self._transaction(self._pools.records if settles else self._pools.claims) as connection:
            return await connection.run_sync(_unless_standby, work)

    async def _keep(self, work: Callable[[Connection], T]) -> T:
        async with self._transaction(self._pools.keeper) as connection:
            return await connection.run_sync(work)

    @asynccontextmanager
    async def _transaction(self, pool: _Pool) -> AsyncIterator[AsyncConnection]:
        self._used_at = time.monotonic()
        engine = pool.engine
        try:
            async with AsyncEngine(engine).begin() as connection:
                yield connection
        finally:
            if not pool.is_current(engine):
                await greenlet_spawn(engine.pool.dispose)

    async def trim(self) -> None:
        """Close the connections that were not used for a while."""
        if self._used_at is not None and time.monotonic() > self._used_at + LINGER_SECONDS:
            self._used_at = None
            for pool in self._pools:
                await greenlet_spawn(pool.renew().pool.dispose)

    async def dispose(self) -> None:
        """Close the pools, and whatever comes back later."""
        for pool in self._pools:
            await greenlet_spawn(pool.end().pool.dispose)

    def keeper_transaction(self) -> Transaction:
        """Through the caller's event loop: one that is blocked cannot keep its locks."""
        loop = asyncio.get_running_loop()

        def transact(work: Callable[[Connection], object]) -> object:
            return asyncio.run_coroutine_threadsafe(self._keep(work), loop).result(_KEEPER_ANSWER_SECONDS)

        return transact


class ThreadTransactions:
    """A sync engine, for an event loop: each transaction in a thread."""

    def __init__(self, transactions: EngineTransactions) -> None:
        self._transactions = transactions

    async def dispose(self) -> None:
        """Close the pool."""
        await asyncio.to_thread(self._transactions.dispose)

    async def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:
        """See `AsyncTransactions`."""
        return await asyncio.to_thread(self._transactions.run, work, settles=settles)

    def keeper_transaction(self) -> Transaction:
        """Needs no event loop."""
        return self._transactions.keeper_transaction()


def beside(engine: Engine) -> Engine:
    """Another pool with the same settings and the same way to connect (tokens, connectors, events of the pool)."""
    return Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=True)


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


def schema_of(engine: Engine, given: str | None) -> str:
    """The schema of outboxq's tables: as given, or as the engine's `schema_translate_map` has it."""
    translated = engine.get_execution_options().get("schema_translate_map") or {}
    return check_schema(given or translated.get(SCHEMA) or SCHEMA)


def _unless_standby(connection: Connection, work: Callable[[Connection], T]) -> T:
    """Run `work`; a connection to a server that cannot write is not used again: the next one may find the primary."""
    try:
        return work(connection)
    except DBAPIError as error:
        if sqlstate_of(error) == _READ_ONLY:
            connection.invalidate()
        raise
