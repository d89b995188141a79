"""Lines: the connections that the slots of a relay take while they work, and give back when they sleep.

The one that was used last is taken first. What is over grows cold, and is closed a few seconds later; what is kept is
warm for the next job, with its claims prepared. A line on which anything went wrong is closed instead of given back.
"""

import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from outboxq.database.driver import driver_connection, give_up
from outboxq.database.errors import opening
from outboxq.database.guard import Guard
from outboxq.execution.claim import PreparedClaims
from outboxq.execution.invoke import AsyncInvoker, Invoker, SyncInvoker
from outboxq.statements.server import server_epoch
from outboxq.tables import SCHEMA

T = TypeVar("T")

# A line that was not used for so long is closed, up to those that are kept: what comes and goes opens none.
LINGER_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class SlotConnection:
    """A connection that is set up for claiming, and what is known of it. `epoch`: the run of the server behind it."""

    connection: Connection
    invoker: Invoker
    guard: Guard
    epoch: str
    # Nothing is prepared where there is a pooler, or for reasons of the user's.
    prepared: PreparedClaims | None
    asynchronous: AsyncConnection | None = None
    used_at: float = field(default_factory=time.monotonic)

    async def run(self, action: Callable[["SlotConnection"], T]) -> T:
        """Run what is written for both worlds, in the event loop."""
        assert self.asynchronous is not None
        return await self.asynchronous.run_sync(lambda _: action(self))


def make_line(connection: Connection, invoker: Invoker, harmless: AbstractSet[str] = frozenset()) -> SlotConnection:
    """Set a new connection up. `harmless`: functions that are known to leave nothing on it."""
    with connection.begin():
        epoch = server_epoch(connection)
    prepares = driver_connection(connection).prepare_threshold is not None
    return SlotConnection(
        connection, invoker, Guard(connection, harmless), epoch, PreparedClaims() if prepares else None
    )


class SpareConnections:
    """The lines that no slot uses.

    Args:
        kept: So many are kept for as long as the relay runs.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._lines: list[SlotConnection] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def take(self) -> SlotConnection | None:
        """The one that was used last, for the thread that asks."""
        with self._lock:
            line = self._lines.pop() if self._lines else None
        if line is not None:
            line.guard.thread = threading.get_ident()
        return line

    def put_back(self, line: SlotConnection) -> bool:
        """A slot needs it no longer; False where the caller is to close it: a handler left something, or it is late."""
        line.used_at = time.monotonic()
        with self._lock:
            is_taken = not self._is_closed and line.guard.left is None
            if is_taken:
                self._lines.append(line)
            return is_taken

    def cold(self) -> list[SlotConnection]:
        """Those that were not used for a while, for the caller to close."""
        oldest = time.monotonic() - LINGER_SECONDS
        with self._lock:
            over = self._lines[: max(0, len(self._lines) - self._kept)]
            cold = [line for line in over if line.used_at <= oldest]
            del self._lines[: len(cold)]
            return cold

    def all(self, *, for_good: bool = False) -> list[SlotConnection]:
        """All of them, for the caller to close; `for_good`, and none is given back any more."""
        with self._lock:
            self._is_closed |= for_good
            lines, self._lines = self._lines, []
            return lines


class SlotConnections:
    """The lines of the slots with sync handlers."""

    def __init__(self, engine: Engine, schema: str, kept: int, harmless: AbstractSet[str]) -> None:
        self._engine = engine
        self._harmless = harmless
        self._options = connection_options(engine, schema)
        self._spares = SpareConnections(kept)

    @contextmanager
    def line(self) -> Iterator[SlotConnection]:
        """One of them, for the length of a block."""
        line = self._spares.take() or self._open()
        try:
            yield line
        except BaseException:
            # The others may be as old, and as lost.
            _close([line, *self._spares.all()])
            raise
        if not self._spares.put_back(line):
            _close([line])

    def _open(self) -> SlotConnection:
        with opening():
            connection = self._engine.connect()
        try:
            return make_line(connection.execution_options(**self._options), SyncInvoker(), self._harmless)
        except BaseException:
            connection.invalidate()
            raise

    def trim(self) -> None:
        """Close what was not used for a while."""
        _close(self._spares.cold())

    def close(self) -> None:
        """Close what slots have given back, and will give back."""
        _close(self._spares.all(for_good=True))


def _close(lines: list[SlotConnection]) -> None:
    """Session settings must not leak into the pool of the user's engine: never returned to it."""
    for line in lines:
        with suppress(SQLAlchemyError):
            give_up(line.connection)
            line.connection.close()


class AsyncSlotConnections:
    """As `SlotConnections`, in the event loop."""

    def __init__(self, engine: AsyncEngine, schema: str, kept: int, harmless: AbstractSet[str]) -> None:
        self._engine = engine
        self._harmless = harmless
        self._options = connection_options(engine, schema)
        self._spares = SpareConnections(kept)

    def line(self) -> "_Borrowed":
        """One of them, for the length of a block."""
        return _Borrowed(self)

    async def take(self) -> SlotConnection:
        """One that no other slot uses."""
        return self._spares.take() or await self._open()

    async def put_back(self, line: SlotConnection, *, failed: bool) -> None:
        """It is needed no longer; after a failure, it is closed with all that are spare."""
        if failed:
            await _close_async([line, *self._spares.all()])
        elif not self._spares.put_back(line):
            await _close_async([line])

    async def _open(self) -> SlotConnection:
        with opening():
            connection = await self._engine.connect()
        try:
            await connection.execution_options(**self._options)
            line = await connection.run_sync(make_line, AsyncInvoker(connection), self._harmless)
        except BaseException:
            await connection.invalidate()
            raise
        line.asynchronous = connection
        return line

    async def trim(self) -> None:
        """Close what was not used for a while."""
        await _close_async(self._spares.cold())

    async def close(self) -> None:
        """Close what slots have given back, and will give back."""
        await _close_async(self._spares.all(for_good=True))


class _Borrowed:
    """A line for the length of a block. No generator: those of a loop are closed by its `shutdown_asyncgens()`."""

    def __init__(self, lines: AsyncSlotConnections) -> None:
        self._lines = lines

    async def __aenter__(self) -> SlotConnection:
        self._line = await self._lines.take()
        return self._line

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._lines.put_back(self._line, failed=kind is not None)


async def _close_async(lines: list[SlotConnection]) -> None:
    for line in lines:
        with suppress(SQLAlchemyError):
            assert line.asynchronous is not None
            await line.run(lambda line: give_up(line.connection))
            await line.asynchronous.close()


def connection_options(engine: Engine | AsyncEngine, schema: str) -> dict[str, Any]:
    """READ COMMITTED, and this installation's tables for whatever a slot or a handler writes through SQLAlchemy."""
    options: dict[str, Any] = {"isolation_level": "READ COMMITTED"}
    mapped: dict[str | None, str | None] = engine.get_execution_options().get("schema_translate_map") or {}
    if mapped.get(SCHEMA, SCHEMA) != schema:
        options["schema_translate_map"] = {**mapped, SCHEMA: schema}
    return options
