"""Slot connections: slots and dispatchers borrow them while they work, and calls while they use their session.

The connection that was used last is taken first. A few connections stay open, with their claims prepared for the next
job; others are closed after some seconds. A connection on which anything went wrong is closed, not given back.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.codec.text import name_and_line
from outboxq.database.closing import give_up
from outboxq.database.driver import PreparedStatements, ServerSession, driver_connection
from outboxq.database.errors import opening
from outboxq.database.guard import Guard
from outboxq.emitter import HOOKS_OPTION
from outboxq.execution.invoke import AsyncInvoker, Invoker, SyncInvoker
from outboxq.forks import cut_off_in_children
from outboxq.handlers.row_writes import Catalog
from outboxq.statements.server import server_run
from outboxq.tables import SCHEMA

logger = logging.getLogger("outboxq.relay")

# The connections that stay open while all slots sleep. With the listener's and the lease's an idle relay has four.
WARM_CONNECTIONS = 2


@dataclass(slots=True, eq=False)
class SlotConnection:
    """A connection that is set up for claiming."""

    connection: Connection
    invoker: Invoker
    guard: Guard
    server: ServerSession
    catalog: Catalog = field(default_factory=Catalog)
    used_at: float = field(default_factory=time.monotonic)


def make_slot_connection(connection: Connection, invoker: Invoker) -> SlotConnection:
    cut_off_in_children(driver_connection(connection))
    with connection.begin():
        run = server_run(connection)
    prepares = driver_connection(connection).prepare_threshold is not None
    prepared = (PreparedStatements(), PreparedStatements()) if prepares else ()
    return SlotConnection(connection, invoker, Guard(connection), ServerSession(*run, *prepared))


@dataclass(eq=False)
class SlotConnections:
    """The connections of the slots of one flavour; those of async slots are used in greenlets of the event loop.

    Args:
        given: The engine that opens them.
        kept: The number of connections that stay open while the relay runs.
        linger_seconds: Others are closed when unused for this long, so that work that comes and goes opens no new ones.
    """

    given: Engine | AsyncEngine
    schema: str
    kept: int
    linger_seconds: float

    def __post_init__(self) -> None:
        self.engine = self.given.sync_engine if isinstance(self.given, AsyncEngine) else self.given
        self._options = connection_options(self.engine, self.schema)
        self._spares: list[SlotConnection] = []
        self._is_closed = False
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self) -> Iterator[SlotConnection]:
        """Lend a connection, within the block; after an error it is closed, with all spare connections."""
        with self._lock:
            slot_connection = self._spares.pop() if self._spares else None
        if slot_connection is None:
            slot_connection = self._open()
        else:
            slot_connection.guard.thread = threading.get_ident()
        try:
            yield slot_connection
        except BaseException:
            # The spare connections may be lost too.
            _close([slot_connection, *self._remove_all()])
            raise
        slot_connection.used_at = time.monotonic()
        with self._lock:
            # Not if a handler spoiled it, or the relay has ended.
            is_kept = not self._is_closed and slot_connection.guard.left is None
            if is_kept:
                self._spares.append(slot_connection)
        if not is_kept:
            _close([slot_connection])

    def _open(self) -> SlotConnection:
        with opening():
            connection = self.engine.connect()
        try:
            connection.execution_options(**self._options)
            invoker: Invoker = SyncInvoker()
            if isinstance(self.given, AsyncEngine):
                invoker = AsyncInvoker(self.given)
            return make_slot_connection(connection, invoker)
        except BaseException:
            connection.invalidate()
            raise

    def trim(self) -> None:
        """Close connections that were unused for a while."""
        oldest = time.monotonic() - self.linger_seconds
        with self._lock:
            over = self._spares[: max(0, len(self._spares) - self.kept)]
            unused = [spare for spare in over if spare.used_at <= oldest]
            del self._spares[: len(unused)]
        _close(unused)

    def close(self) -> None:
        """Close the connections that slots have given back, and those that they will give back."""
        _close(self._remove_all(for_good=True))

    def _remove_all(self, *, for_good: bool = False) -> list[SlotConnection]:
        with self._lock:
            self._is_closed |= for_good
            spares, self._spares = self._spares, []
            return spares


def _close(slot_connections: list[SlotConnection]) -> None:
    """Close connections for good: their session settings must not get into the pool of the user's engine."""
    for slot_connection in slot_connections:
        try:
            give_up(slot_connection.connection)
            slot_connection.connection.close()
        except SQLAlchemyError:
            continue
        except Exception as error:  # noqa: BLE001  # users' listeners raise what they like, and the server has ended it
            logger.warning("code on the relay's connection raised an error as it was closed: %s", name_and_line(error))


def connection_options(engine: Engine | AsyncEngine, schema: str) -> dict[str, Any]:
    """READ COMMITTED, and this installation's schema for the tables that slots and handlers use through SQLAlchemy."""
    # Without hooks: the COMMIT of a handler's session commits nothing yet.
    options: dict[str, Any] = {"isolation_level": "READ COMMITTED", HOOKS_OPTION: ()}
    mapped: dict[str | None, str | None] = engine.get_execution_options().get("schema_translate_map") or {}
    if mapped.get(SCHEMA, SCHEMA) != schema:
        options["schema_translate_map"] = {**mapped, SCHEMA: schema}
    return options
