"""The short transactions of calls to the outside, on connections of their own.

A caller that holds one of its engine's connections cannot starve them, because they come from other pools.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.util import greenlet_spawn

from outboxq.config import check_schema
from outboxq.database.errors import sqlstate_of
from outboxq.effects.lock_keeper import Transaction
from outboxq.errors import ConfigError
from outboxq.tables import SCHEMA

T = TypeVar("T")

# Connections that were not used for so long are closed.
LINGER_SECONDS = 5.0
_KEEPER_ANSWER_SECONDS = 30.0
_READ_ONLY = "25006"


class _Pool:
    """A pool beside an engine's, which is closed now and then; what is in use then is closed when it comes back.

    SQLAlchemy would leave that one open in the old pool, which is not looked at any more.
    """

    def __init__(self, engine: Engine, schema: str) -> None:
        self._model = engine
        self._schema = schema
        self._is_over = False
        self.engine = self._make()

    def _make(self) -> Engine:
        options = {"isolation_level": "READ COMMITTED", "schema_translate_map": {SCHEMA: self._schema}}
        return beside(self._model).execution_options(**options)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction on one of its connections, committed at the end of the block."""
        engine = self.engine
        try:
            with engine.begin() as connection:
                yield connection
        finally:
            # Only now: closing the pool closes idle connections, and this one was in use until it was returned.
            if engine is not self.engine or self._is_over:
                engine.pool.dispose()

    def renew(self) -> None:
        """Begin a new pool, and close the old one after that."""
        old, self.engine = self.engine, self._make()
        old.pool.dispose()

    def end(self) -> None:
        """Keep nothing from now on, and close the pool after that."""
        self._is_over = True
        self.engine.pool.dispose()


class EngineTransactions:
    """Connections from pools beside the given engine's: a caller that holds one of that engine's cannot starve us.

    Three: claims that wait for a row must cost neither the locks of calls that are under way, nor their records. Each
    opens its first connection when it is needed.
    """

    def __init__(self, engine: Engine, schema: str) -> None:
        self.pools = self._claims, self._records, self._keeper = tuple(_Pool(engine, schema) for _ in range(3))
        self._used_at: float | None = None

    def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:
        """Run `work` in a transaction of its own, committed when it returns.

        `settles`: on a connection that no claim can use up.
        """
        self._used_at = time.monotonic()
        with (self._records if settles else self._claims).transaction() as connection:
            return _unless_standby(connection, work)

    def keeper_transaction(self) -> Transaction:
        """The same for the thread that keeps the locks; from any thread."""
        return self._keep

    def _keep(self, work: Callable[[Connection], T]) -> T:
        self._used_at = time.monotonic()
        with self._keeper.transaction() as connection:
            return work(connection)

    def trim(self) -> None:
        """Close what is idle, if nothing was needed for a while; what is in use is closed when it comes back."""
        if self._used_at is not None and time.monotonic() > self._used_at + LINGER_SECONDS:
            self._used_at = None
            for pool in self.pools:
                pool.renew()

    def dispose(self) -> None:
        """Close the pools, and whatever comes back later."""
        for pool in self.pools:
            pool.end()


class AsyncEngineTransactions:
    """Connections from pools beside an async engine's, in its event loop."""

    def __init__(self, engine: AsyncEngine, schema: str) -> None:
        self.was_used = False
        self._transactions = EngineTransactions(engine.sync_engine, schema)

    async def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:
        """Run `work` in a transaction of its own, committed when it returns."""
        self.was_used = True
        return await greenlet_spawn(lambda: self._transactions.run(work, settles=settles))

    async def trim(self) -> None:
        """Close what is idle, if nothing was needed for a while; what is in use is closed when it comes back."""
        await greenlet_spawn(self._transactions.trim)

    async def dispose(self) -> None:
        """Close the pools, and whatever comes back later."""
        await greenlet_spawn(self._transactions.dispose)

    def keeper_transaction(self) -> Transaction:
        """Through the caller's event loop: one that is blocked cannot keep its locks."""
        loop, keep = asyncio.get_running_loop(), self._transactions.keeper_transaction()

        def transact(work: Callable[[Connection], object]) -> object:
            return asyncio.run_coroutine_threadsafe(greenlet_spawn(keep, work), loop).result(_KEEPER_ANSWER_SECONDS)

        return transact


class ThreadTransactions:
    """A sync engine, for an event loop: each transaction in a thread."""

    def __init__(self, transactions: EngineTransactions) -> None:
        self._transactions = transactions

    async def dispose(self) -> None:
        """Close the pool."""
        await asyncio.to_thread(self._transactions.dispose)

    async def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:
        """Run `work` in a transaction of its own, in a thread."""
        return await asyncio.to_thread(self._transactions.run, work, settles=settles)

    def keeper_transaction(self) -> Transaction:
        """Needs no event loop."""
        return self._transactions.keeper_transaction()


def beside(engine: Engine) -> Engine:
    """Another pool with the same settings and the same way to connect (tokens, connectors, events of the pool)."""
    return Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=True)


class SavepointTransactions:
    """Savepoints in a transaction that is rolled back in the end: for tests of users' handlers."""

    def __init__(self, connection: Callable[[], Connection]) -> None:
        self._connection = connection

    def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:  # noqa: ARG002  # one connection
        """Run `work` in a savepoint of its own."""
        connection = self._connection()
        with connection.begin_nested():
            return work(connection)

    def keeper_transaction(self) -> Transaction:
        """Does nothing: the connection is the test's own, and no other sees these rows."""
        return lambda _: None


class AsyncSavepointTransactions:
    """Savepoints in a transaction of an event loop that is rolled back in the end."""

    def __init__(self, connection: Callable[[], Awaitable[AsyncConnection]]) -> None:
        self._connection = connection

    async def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:  # noqa: ARG002  # one connection
        """Run `work` in a savepoint of its own."""
        connection = await self._connection()
        async with connection.begin_nested():
            return await connection.run_sync(work)

    def keeper_transaction(self) -> Transaction:
        """Does nothing: no other connection sees these rows."""
        return lambda _: None


Transactions: TypeAlias = EngineTransactions | SavepointTransactions
AsyncTransactions: TypeAlias = AsyncEngineTransactions | ThreadTransactions | AsyncSavepointTransactions


def async_transactions(
    engine: AsyncEngine | Engine, schema: str | None
) -> AsyncEngineTransactions | ThreadTransactions:
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
