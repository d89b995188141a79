"""Slot connections: what the slots of a relay take while they work, and give back when they sleep.

The one that was used last is taken first. What is too many is closed a few seconds later; what is kept is warm for the
next job, with its claims prepared. A connection on which anything went wrong is closed instead of given back.
"""

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from outboxq.database.driver import driver_connection, give_up
from outboxq.database.engines import Engines
from outboxq.database.errors import opening
from outboxq.database.guard import Guard
from outboxq.execution.claim import PreparedClaims
from outboxq.execution.invoke import AsyncInvoker, Invoker, SyncInvoker
from outboxq.handlers.handler import Flavour
from outboxq.statements.durability import server_epoch
from outboxq.tables import SCHEMA

T = TypeVar("T")
EngineT = TypeVar("EngineT", Engine, AsyncEngine)

# A connection that was not used for so long is closed, unless it is kept: what comes and goes opens none.
LINGER_SECONDS = 5.0
# Slots that all sleep keep so many connections for the next job: with the listener's and the lease's four.
_WARM_CONNECTIONS = 2


@dataclass(slots=True, eq=False)
class SlotConnection:
    """A connection that is set up for claiming, and what is known of it. `epoch`: the run of the server behind it."""

    connection: Connection
    invoker: Invoker
    guard: Guard
    epoch: str
    # None behind a pooler, or if the user's settings forbid it.
    prepared: PreparedClaims | None
    asynchronous: AsyncConnection | None = None
    used_at: float = field(default_factory=time.monotonic)

    def run(self, action: Callable[["SlotConnection"], T]) -> Coroutine[Any, Any, T]:
        """Run sync code on an async connection, in the event loop."""
        assert self.asynchronous is not None
        return self.asynchronous.run_sync(lambda _: action(self))


def make_slot_connection(
    connection: Connection, invoker: Invoker, harmless: AbstractSet[str] = frozenset()
) -> SlotConnection:
    """Set a new connection up. `harmless`: functions that are known to leave nothing on it."""
    with connection.begin():
        epoch = server_epoch(connection)
    prepares = driver_connection(connection).prepare_threshold is not None
    return SlotConnection(
        connection, invoker, Guard(connection, harmless), epoch, PreparedClaims() if prepares else None
    )


class SpareConnections(Generic[EngineT]):
    """The connections that no slot uses.

    Args:
        kept: So many are kept for as long as the relay runs.
    """

    def __init__(self, engine: EngineT, schema: str, kept: int, harmless: AbstractSet[str]) -> None:
        self._engine: EngineT = engine
        self._options = connection_options(engine, schema)
        self._kept = kept
        self._harmless = harmless
        self._spares: list[SlotConnection] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def _take_spare(self) -> SlotConnection | None:
        """The one that was used last, for the thread that asks."""
        with self._lock:
            slot_connection = self._spares.pop() if self._spares else None
        if slot_connection is not None:
            slot_connection.guard.thread = threading.get_ident()
        return slot_connection

    def _keep_spare(self, slot_connection: SlotConnection) -> bool:
        """Take one back; False if the caller is to close it: a handler left something on it, or the relay has ended."""
        slot_connection.used_at = time.monotonic()
        with self._lock:
            is_kept = not self._is_closed and slot_connection.guard.left is None
            if is_kept:
                self._spares.append(slot_connection)
            return is_kept

    def _remove_unused(self) -> list[SlotConnection]:
        """Those that were not used for a while, for the caller to close."""
        oldest = time.monotonic() - LINGER_SECONDS
        with self._lock:
            over = self._spares[: max(0, len(self._spares) - self._kept)]
            unused = [spare for spare in over if spare.used_at <= oldest]
            del self._spares[: len(unused)]
            return unused

    def _remove_all(self, *, for_good: bool = False) -> list[SlotConnection]:
        """All of them, for the caller to close; `for_good`: from now on none is taken back."""
        with self._lock:
            self._is_closed |= for_good
            spares, self._spares = self._spares, []
            return spares


class SlotConnections(SpareConnections[Engine]):
    """The connections of the slots with sync handlers."""

    @contextmanager
    def borrow(self) -> Iterator[SlotConnection]:
        """One that no other slot uses, for the length of a block; after an error it is closed with all spare ones."""
        slot_connection = self._take_spare() or self._open()
        try:
            yield slot_connection
        except BaseException:
            # The others may be as old, and as lost.
            _close([slot_connection, *self._remove_all()])
            raise
        if not self._keep_spare(slot_connection):
            _close([slot_connection])

    def _open(self) -> SlotConnection:
        with opening():
            connection = self._engine.connect()
        try:
            return make_slot_connection(connection.execution_options(**self._options), SyncInvoker(), self._harmless)
        except BaseException:
            connection.invalidate()
            raise

    def trim(self) -> None:
        """Close what was not used for a while."""
        _close(self._remove_unused())

    def close(self) -> None:
        """Close what slots have given back, and will give back."""
        _close(self._remove_all(for_good=True))


def _close(slot_connections: list[SlotConnection]) -> None:
    """Session settings must not leak into the pool of the user's engine: never returned to it."""
    for slot_connection in slot_connections:
        with suppress(SQLAlchemyError):
            give_up(slot_connection.connection)
            slot_connection.connection.close()


class AsyncSlotConnections(SpareConnections[AsyncEngine]):
    """The connections of the slots with async handlers, in the event loop."""

    @property
    def engine(self) -> AsyncEngine:
        """Where they come from."""
        return self._engine

    def borrow(self) -> "_Borrowed":
        """One that no other slot uses, for the length of a block; after an error it is closed with all spare ones."""
        return _Borrowed(self)

    async def take(self) -> SlotConnection:
        """One that no other slot uses."""
        return self._take_spare() or await self._open()

    async def give_back(self, slot_connection: SlotConnection, *, failed: bool) -> None:
        """It is needed no longer."""
        if failed:
            await _close_async([slot_connection, *self._remove_all()])
        elif not self._keep_spare(slot_connection):
            await _close_async([slot_connection])

    async def _open(self) -> SlotConnection:
        with opening():
            connection = await self._engine.connect()
        try:
            await connection.execution_options(**self._options)
            slot_connection = await connection.run_sync(make_slot_connection, AsyncInvoker(connection), self._harmless)
        except BaseException:
            await connection.invalidate()
            raise
        slot_connection.asynchronous = connection
        return slot_connection

    async def trim(self) -> None:
        """Close what was not used for a while."""
        await _close_async(self._remove_unused())

    async def close(self) -> None:
        """Close what slots have given back, and will give back."""
        await _close_async(self._remove_all(for_good=True))


class _Borrowed:
    """A connection for the length of a block. No generator: a loop's `shutdown_asyncgens()` would close it."""

    def __init__(self, connections: AsyncSlotConnections) -> None:
        self._connections = connections

    async def __aenter__(self) -> SlotConnection:
        self._borrowed = await self._connections.take()
        return self._borrowed

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._connections.give_back(self._borrowed, failed=kind is not None)


async def _close_async(slot_connections: list[SlotConnection]) -> None:
    for slot_connection in slot_connections:
        with suppress(SQLAlchemyError):
            assert slot_connection.asynchronous is not None
            await slot_connection.run(lambda own: give_up(own.connection))
            await slot_connection.asynchronous.close()


@dataclass(frozen=True, slots=True)
class SlotPools:
    """The connections of all slots of a relay: one pool for each flavour that has slots."""

    sync: SlotConnections | None
    asynchronous: AsyncSlotConnections | None

    @classmethod
    def make(
        cls,
        engines: Engines,
        flavours: AbstractSet[Flavour],
        schema: str,
        harmless: AbstractSet[str],
        *,
        keeps_warm: bool,
    ) -> "SlotPools":
        """Opens no connection. A relay that waits for jobs keeps some of them warm."""
        kept = _WARM_CONNECTIONS // len(flavours) if keeps_warm else 0
        sync, asynchronous = engines.sync, engines.asynchronous
        return cls(
            SlotConnections(sync, schema, kept, harmless) if sync is not None and "sync" in flavours else None,
            AsyncSlotConnections(asynchronous, schema, kept, harmless)
            if asynchronous is not None and "async" in flavours
            else None,
        )

    def trim(self) -> None:
        """Close the connections that were not needed for a while."""
        if self.sync is not None:
            self.sync.trim()

    async def trim_in_loop(self) -> None:
        """The same for those of the event loop."""
        if self.asynchronous is not None:
            await self.asynchronous.trim()

    def dispose(self, in_loop: Callable[[Awaitable[None]], object]) -> None:
        """Close all of them; what needs the event loop is given to `in_loop`."""
        if self.sync is not None:
            self.sync.close()
        if self.asynchronous is not None:
            in_loop(self.asynchronous.close())


def connection_options(engine: Engine | AsyncEngine, schema: str) -> dict[str, Any]:
    """READ COMMITTED, and this installation's tables for whatever a slot or a handler writes through SQLAlchemy."""
    options: dict[str, Any] = {"isolation_level": "READ COMMITTED"}
    mapped: dict[str | None, str | None] = engine.get_execution_options().get("schema_translate_map") or {}
    if mapped.get(SCHEMA, SCHEMA) != schema:
        options["schema_translate_map"] = {**mapped, SCHEMA: schema}
    return options
