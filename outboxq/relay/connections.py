"""Connections: slots and dispatchers borrow them while they work, and calls while they use `ctx.session`.

The connection that was used last is lent first. `WARM_CONNECTIONS` unused connections stay open, with the statements of
claims prepared; others are closed after `linger_seconds` without use. A connection is closed after an error.

The calls of a dispatcher share a limited number of connections. A call has a connection from the first use of its
session to its COMMIT. Other calls wait for a connection in the order of their requests, within their own deadlines.
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_only

from outboxq.codec.text import name_and_line
from outboxq.database.closing import give_up
from outboxq.database.driver import PreparedStatements, ServerSession, driver_connection
from outboxq.database.errors import describe_error, opening
from outboxq.database.guard import Guard
from outboxq.emitter import HOOKS_OPTION
from outboxq.execution.batch_state import Ownership
from outboxq.execution.errors import Abandoned
from outboxq.execution.invoke import AsyncInvoker, Invoker, SyncInvoker
from outboxq.forks import cut_off_in_children
from outboxq.handlers.row_writes import Catalog
from outboxq.relay.watch import call_soon
from outboxq.statements.server import server_run
from outboxq.tables import SCHEMA

logger = logging.getLogger("outboxq.relay")

# The connections that stay open while all slots sleep. Together with the listener's and the lease's, an idle relay has
# four.
WARM_CONNECTIONS = 2
# The interval at which a waiting thread checks if its job was taken away.
_CHECK_SECONDS = 0.5
_TAKEN_AWAY = "the relay does not wait for this job any more"
_RECONNECT_FIRST_SECONDS, _RECONNECT_CAP_SECONDS = 0.1, 5.0
# The shortest time between two log lines about calls that wait.
_LOG_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class SlotConnection:
    """A connection that is set up for claiming, with the objects that belong to it.

    Attributes:
        invoker: Calls the handlers.
        guard: Watches the connection while handlers use it.
        server: Facts about the server, and which statements are prepared on the connection.
        catalog: The facts of tables that were read through the connection.
        used_at: The time (monotonic) at which the connection was opened or last given back.
    """

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
    """The connections of a relay's slots with handlers of one flavour (sync or async).

    Connections for async handlers are used in greenlets of the event loop.

    Args:
        given: The engine that opens the connections.
        kept: The number of unused connections that stay open while the relay runs.
        linger_seconds: Further unused connections are closed after this time, so that a relay with intermittent work
            need not always open new ones.
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
        """Lend a connection while the block runs.

        If the block raises, close this connection and all unused ones, which may be lost too.
        """
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
            # Not if a handler spoiled the connection, or the relay has ended.
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
        """Close connections that were unused for `linger_seconds`, but keep `kept` unused ones open."""
        oldest = time.monotonic() - self.linger_seconds
        with self._lock:
            over = self._spares[: max(0, len(self._spares) - self.kept)]
            unused = [spare for spare in over if spare.used_at <= oldest]
            del self._spares[: len(unused)]
        _close(unused)

    def close(self) -> None:
        """Close all unused connections; from now on each borrowed one is closed when it is given back."""
        _close(self._remove_all(for_good=True))

    def _remove_all(self, *, for_good: bool = False) -> list[SlotConnection]:
        with self._lock:
            self._is_closed |= for_good
            spares, self._spares = self._spares, []
            return spares


def _close(slot_connections: list[SlotConnection]) -> None:
    """Close connections for good: their session settings must not return to the pool of the user's engine."""
    for slot_connection in slot_connections:
        try:
            give_up(slot_connection.connection)
            slot_connection.connection.close()
        except SQLAlchemyError:
            continue
        except Exception as error:  # noqa: BLE001  # users' listeners raise what they like, and the server has ended it
            logger.warning("code on the relay's connection raised an error as it was closed: %s", name_and_line(error))


def connection_options(engine: Engine | AsyncEngine, schema: str) -> dict[str, Any]:
    """Return SQLAlchemy's execution options for a relay's connection: READ COMMITTED, and a `schema_translate_map`.

    The map makes outboxq's tables those of the schema `schema`, and keeps the entries that the `engine` has.
    """
    # Without hooks, because the COMMIT of a handler's session commits nothing yet.
    options: dict[str, Any] = {"isolation_level": "READ COMMITTED", HOOKS_OPTION: ()}
    mapped: dict[str | None, str | None] = engine.get_execution_options().get("schema_translate_map") or {}
    if mapped.get(SCHEMA, SCHEMA) != schema:
        options["schema_translate_map"] = {**mapped, SCHEMA: schema}
    return options


@dataclass(slots=True, eq=False)
class Place:
    """One call's right to have one of the limited number of connections, or its wait for that right.

    Args:
        is_async: True if the call runs in greenlets of the event loop.
        owner: Shows if the relay has taken the call's job away, so that the call needs no connection any more.

    Attributes:
        is_abandoned: True if the relay no longer waits for the end of the call.
        connected: The connection, while the call has one.
        held: A list with the `CallConnections` that gave the right; empty while the call does not have the right.
        is_waiting: True while the call waits for a connection.
    """

    is_async: bool
    owner: Ownership
    is_abandoned: bool = False
    connected: SlotConnection | None = None
    held: "list[CallConnections]" = field(default_factory=list)
    is_waiting: bool = False

    def is_wanted(self) -> bool:
        """Return True while the call may need a connection: until the relay takes the job away or gives the call up."""
        return not (self.is_abandoned or self.owner.is_seized)

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, in the call's task or thread."""
        if self.is_async:
            await_only(asyncio.sleep(seconds))
        else:
            time.sleep(seconds)

    def free(self) -> None:
        """Pass the right to have a connection on to another call, even if a stuck thread still uses the connection.

        Does nothing if the right was passed on already.
        """
        with suppress(IndexError):
            self.held.pop().give_place()


class _Waiter:
    """Makes a call that runs in a thread wait until it may hold a connection, or its job is taken away."""

    def __init__(self) -> None:
        self._is_woken = threading.Event()

    def wake(self) -> None:
        self._is_woken.set()

    def wait(self, is_wanted: Callable[[], bool]) -> None:
        while not self._is_woken.wait(_CHECK_SECONDS):
            if not is_wanted():
                raise Abandoned(_TAKEN_AWAY)


class _AsyncWaiter:
    """Makes a call that runs in a task wait until it may hold a connection.

    If the relay takes the call's job away, it cancels the task, which ends the wait.
    """

    def __init__(self) -> None:
        self._loop, self._is_woken = asyncio.get_running_loop(), asyncio.Event()

    def wake(self) -> None:
        call_soon(self._loop, self._is_woken.set)

    def wait(self, _: Callable[[], bool]) -> None:
        await_only(self._is_woken.wait())


class CallConnections:
    """Lends connections to calls, `most` at a time, in the order in which the calls requested them.

    Args:
        connections: Opens, keeps and closes the connections.
        name: The names of the calls' queues, for the log.

    Attributes:
        waiting: The number of calls that wait for a connection.
        given: The engine that opens the connections; `engine` is its sync engine.
    """

    def __init__(self, connections: SlotConnections, most: int, name: str) -> None:
        self.most = most
        self.waiting = 0
        self.given, self.engine = connections.given, connections.engine
        self._connections = connections
        self._name = name
        self._free = most
        # A woken call has its place already: a later call cannot take it.
        self._waiters: deque[_Waiter | _AsyncWaiter] = deque()
        self._lock = threading.Lock()
        self._logged_at = float("-inf")

    @property
    def used(self) -> int:
        """The number of connections that calls hold."""
        return self.most - self._free

    @contextmanager
    def borrow(self, place: "Place") -> Iterator[SlotConnection]:
        """Lend the call of `place` a connection while the block runs.

        Waits first, until fewer than `most` calls have a connection and until the database can be reached.

        Raises:
            Abandoned: the relay took the job away while the call waited.
        """
        place.is_waiting = True
        try:
            self._take_place(place)
            place.held.append(self)
            with ExitStack() as stack:
                place.connected = self._connect(stack, place)
                place.is_waiting = False
                yield place.connected
        finally:
            place.connected, place.is_waiting = None, False
            place.free()

    def give_place(self) -> None:
        """Give the right to have a connection, which one call needs no more, to the call that has waited longest.

        If no call waits, keep the right for a later call.
        """
        with self._lock:
            waiter = self._waiters.popleft() if self._waiters else None
            if waiter is None:
                self._free += 1
        if waiter is not None:
            waiter.wake()

    def _take_place(self, place: "Place") -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            self.waiting += 1
            waiter = _AsyncWaiter() if place.is_async else _Waiter()
            self._waiters.append(waiter)
        self._log_waiting()
        try:
            waiter.wait(place.is_wanted)
        except BaseException:
            with self._lock:
                has_place = waiter not in self._waiters
                if not has_place:
                    self._waiters.remove(waiter)
            if has_place:
                # The place was given at the same moment, and now belongs to the next call.
                self.give_place()
            raise
        finally:
            with self._lock:
                self.waiting -= 1

    def _connect(self, stack: ExitStack, place: "Place") -> SlotConnection:
        pause_seconds = _RECONNECT_FIRST_SECONDS
        while True:
            try:
                return stack.enter_context(self._connections.borrow())
            except Exception as error:  # noqa: BLE001  # users' engines raise what they like; the job is not to blame
                # A handler in the middle of its work waits: otherwise its calls to other services would be repeated.
                logger.debug("a call waits for the database: %s", describe_error(error))
            if not place.is_wanted():
                raise Abandoned(_TAKEN_AWAY)
            place.pause(pause_seconds * random.uniform(0.5, 1.0))
            pause_seconds = min(pause_seconds * 2, _RECONNECT_CAP_SECONDS)

    def _log_waiting(self) -> None:
        now = time.monotonic()
        if now >= self._logged_at + _LOG_SECONDS:
            self._logged_at = now
            logger.warning(
                "calls of %s wait for one of %d connections: let handlers use ctx.session later or for less time, or "
                "raise call_connections",
                self._name,
                self.most,
            )
