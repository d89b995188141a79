"""The short transactions of effects, on connections of their own.

The connections come from separate pools, so that callers who hold all connections of their engine do not block them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.util import greenlet_spawn

from outboxq.config import check_schema
from outboxq.database.errors import sqlstate_of
from outboxq.effects.lock_keeper import Transaction
from outboxq.errors import ConfigError
from outboxq.forks import cut_off_in_children, forget_in_children
from outboxq.tables import SCHEMA, mapped_schema

T = TypeVar("T")

# Connections that were unused for this long are closed.
LINGER_SECONDS = 5.0
_KEEPER_ANSWER_SECONDS = 30.0
_READ_ONLY = "25006"


class SidePool:
    """A separate pool with the settings of a user's engine and its way to connect: tokens, connectors, events.

    `renew` and `end` close the idle connections at once. A connection that is in use is closed when it is returned;
    SQLAlchemy would leave it open, in a pool that no code uses any more.
    """

    def __init__(self, engine: Engine, schema: str) -> None:
        self._model = engine
        self._schema = schema
        self._is_over = False
        self.engine = self._make()
        forget_in_children(self)

    def forget(self) -> None:
        """Begin with a new pool in a forked child: the connections belong to the parent."""
        self.engine = self._make()

    def _make(self) -> Engine:
        options = {"isolation_level": "READ COMMITTED", "schema_translate_map": {SCHEMA: self._schema}}
        model = self._model
        pool = model.pool.recreate()
        event.listen(pool, "connect", _cut_off_in_children)
        beside = Engine(pool, model.dialect, model.url, hide_parameters=True)
        return beside.execution_options(**options)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Run the block in a transaction on a connection of the pool, and commit it at the end.

        A connection to a server that cannot write, such as a standby, is not used again: the next connection may find
        the primary.
        """
        engine = self.engine
        try:
            with engine.begin() as connection:
                try:
                    yield connection
                except DBAPIError as error:
                    if sqlstate_of(error) == _READ_ONLY:
                        connection.invalidate()
                    raise
        finally:
            # Closed here: `renew` and `end` closed only idle connections, and this one was in use.
            if engine is not self.engine or self._is_over:
                engine.pool.dispose()

    def renew(self) -> None:
        """Make a new pool, and close the idle connections of the old one."""
        old, self.engine = self.engine, self._make()
        old.pool.dispose()

    def end(self) -> None:
        """Close the pool for good: idle connections now, and each other connection when it is returned."""
        self._is_over = True
        self.engine.pool.dispose()


def _cut_off_in_children(connection: DBAPIConnection, _record: object) -> None:
    # An async driver's adapter names the connection that it wraps. Producers may use other drivers than psycopg.
    driver: Any = getattr(connection, "driver_connection", connection)
    if hasattr(driver, "fileno"):
        cut_off_in_children(driver)


class EngineTransactions:
    """Transactions on connections from three separate pools: for claims, records and the lock keeper.

    Claims that wait for a row must delay neither the records of calls that are under way, nor the extension of their
    locks. Each pool opens its first connection when it is needed.

    Args:
        schema: The schema of outboxq's tables; None takes it from the engine's `schema_translate_map`.
    """

    def __init__(self, engine: Engine, schema: str | None) -> None:
        self.schema = check_schema(schema or mapped_schema(engine))
        self.pools = self._claims, self._records, self._keeper = tuple(SidePool(engine, self.schema) for _ in range(3))
        self._used_at: float | None = None

    def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:
        """Run `work` in a transaction of its own, committed when it returns.

        `settles`: True to use the pool for records, whose connections no waiting claim can occupy.
        """
        self._used_at = time.monotonic()
        with (self._records if settles else self._claims).transaction() as connection:
            return work(connection)

    def keeper_transaction(self) -> Transaction:
        """Return the function with which the lock keeper runs its transactions, in any thread."""
        return self._keep

    def _keep(self, work: Callable[[Connection], T]) -> T:
        self._used_at = time.monotonic()
        with self._keeper.transaction() as connection:
            return work(connection)

    def trim(self) -> None:
        """Close connections if none was used for `LINGER_SECONDS`; one that is in use is closed when it is returned."""
        if self._used_at is not None and time.monotonic() > self._used_at + LINGER_SECONDS:
            self._used_at = None
            for pool in self.pools:
                pool.renew()

    def dispose(self) -> None:
        """Close the pools; a connection in use is closed when it is returned."""
        for pool in self.pools:
            pool.end()


class AsyncEngineTransactions:
    """`EngineTransactions` for an event loop; transactions of a sync engine run in threads.

    Raises:
        ConfigError: the argument is no engine.
    """

    def __init__(self, engine: AsyncEngine | Engine, schema: str | None) -> None:
        if not isinstance(engine, AsyncEngine | Engine):
            raise ConfigError(f"AsyncEffects takes an AsyncEngine or an Engine, got {type(engine).__name__}")
        self.was_used = False
        self._is_sync = isinstance(engine, Engine)
        self._transactions = EngineTransactions(engine if isinstance(engine, Engine) else engine.sync_engine, schema)
        self.schema = self._transactions.schema

    async def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:
        """Run `work` in a transaction of its own, committed when it returns."""
        self.was_used = True
        return await self._apart(partial(self._transactions.run, work, settles=settles))

    async def trim(self) -> None:
        """Close connections if none was used for `LINGER_SECONDS`; one that is in use is closed when it is returned."""
        await self._apart(self._transactions.trim)

    async def dispose(self) -> None:
        """Close the pools; a connection in use is closed when it is returned."""
        await self._apart(self._transactions.dispose)

    async def _apart(self, work: Callable[[], T]) -> T:
        return await (asyncio.to_thread(work) if self._is_sync else greenlet_spawn(work))

    def keeper_transaction(self) -> Transaction:
        """Return the function with which the lock keeper, in its own thread, runs a transaction.

        With a sync engine the transaction runs in that thread, otherwise through the event loop, with a limit of 30
        seconds in case the loop is blocked.
        """
        keep = self._transactions.keeper_transaction()
        if self._is_sync:
            return keep
        loop = asyncio.get_running_loop()

        def transact(work: Callable[[Connection], object]) -> object:
            return asyncio.run_coroutine_threadsafe(greenlet_spawn(keep, work), loop).result(_KEEPER_ANSWER_SECONDS)

        return transact


class SavepointTransactions:
    """Runs the transactions of `once` as savepoints of a test's own transaction, which is rolled back at the end."""

    def __init__(self, connection: Callable[[], Connection]) -> None:
        self._connection = connection

    def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:  # noqa: ARG002  # one connection
        """Run `work` in a savepoint of its own."""
        connection = self._connection()
        with connection.begin_nested():
            return work(connection)

    def keeper_transaction(self) -> Transaction:
        """Return a function that does nothing: no other connection sees the rows, so no lock must be extended."""
        return lambda _: None


class AsyncSavepointTransactions:
    """Runs the transactions of `once` as savepoints of an async test's transaction, which is rolled back at the end."""

    def __init__(self, connection: Callable[[], Awaitable[AsyncConnection]]) -> None:
        self._connection = connection

    async def run(self, work: Callable[[Connection], T], *, settles: bool = False) -> T:  # noqa: ARG002  # one connection
        """Run `work` in a savepoint of its own."""
        connection = await self._connection()
        async with connection.begin_nested():
            return await connection.run_sync(work)

    def keeper_transaction(self) -> Transaction:
        """Return a function that does nothing: no other connection sees the rows, so no lock must be extended."""
        return lambda _: None


Transactions: TypeAlias = EngineTransactions | SavepointTransactions
AsyncTransactions: TypeAlias = AsyncEngineTransactions | AsyncSavepointTransactions
