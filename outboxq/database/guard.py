"""The guard on a relay's connection, and a job's savepoint. All that a handler does with the connection passes here.

While a handler runs, transaction verbs are refused before they are sent. Statements around SQLAlchemy,
on the driver's own connection, are not seen; the script that commits finds what they did to the transaction.

Each job works with a connection that is lent to it and closed after it, so that a thread which it has left cannot use
the next job's. The guard also records if a handler may have left session state on the server: then the slot starts its
next job on another connection.
"""

import sys
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any, Protocol

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, ExceptionContext, NestedTransaction, PoolProxiedConnection, event
from sqlalchemy.engine.interfaces import ExecuteStyle, ExecutionContext
from sqlalchemy.exc import InvalidRequestError

from outboxq.database.closing import give_up
from outboxq.database.defects import contain
from outboxq.database.driver import driver_connection, is_at_rest, run_script, transaction_status, unprepared
from outboxq.database.sql_text import Leavings, Reading, read, readings
from outboxq.errors import HandlerRolledBack, TransactionVerbRefused

# The fields of a connection that SQLAlchemy has closed for good, and that is in no transaction.
_CLOSED = {
    "_dbapi_connection": None,
    "_Connection__can_reconnect": False,
    "_transaction": None,
    "_nested_transaction": None,
    "outboxq_guard": None,
}
# A true value, as SQLAlchemy needs it; each listener that is put on a connection replaces it by True.
_HEARD_BY_US: Any = "outboxq"
_FACTORIES = ("row_factory", "cursor_factory", "server_cursor_factory")
# The packages of the driver.
_DRIVERS = ("psycopg", "psycopg_binary", "psycopg_c")


class Savepoint(NestedTransaction):
    """A running job's own savepoint. Once it `is_released`, what came after it can no longer be undone."""

    __slots__ = ("is_released",)

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.is_released = False

    @property
    def name(self) -> str:
        """Its name in the server."""
        return self._savepoint

    def undo(self) -> None:
        """Roll back to the savepoint, even if SQLAlchemy says that it did.

        SQLAlchemy says so also if it could send nothing, and rows may have come after it by the driver's cursor.

        Raises:
            psycopg.Error, SQLAlchemyError: the savepoint is gone.
        """
        if self.is_active:
            self.rollback()
        else:
            run_script(self.connection, f"ROLLBACK TO SAVEPOINT {self.name}")

    def _do_commit(self) -> None:
        super()._do_commit()
        self.is_released = True


class ClaimSavepoint(Savepoint):
    """The savepoint of a claim, which is there already and which COMMIT's script releases: neither costs a statement.

    It shows a made-up name, so that a handler cannot name the true one.
    """

    __slots__ = ("_claim_name",)

    def __init__(self, connection: Connection, name: str) -> None:
        # As SQLAlchemy's own __init__, but without the SAVEPOINT.
        self.connection = connection
        self.is_active = True
        self.is_released = False
        self._savepoint = "outboxq_sealed"
        self._claim_name = name
        self._previous_nested = connection._nested_transaction  # noqa: SLF001  # SQLAlchemy has no way to adopt it
        connection._nested_transaction = self  # noqa: SLF001  # the place of the innermost savepoint

    @property
    def name(self) -> str:
        return self._claim_name

    def _close_impl(self, deactivate_from_connection: bool, warn_already_deactive: bool) -> None:
        self._savepoint = self._claim_name
        super()._close_impl(deactivate_from_connection, warn_already_deactive)

    def _do_commit(self) -> None:
        if not self.is_active:
            super()._do_commit()
        self.is_active = False
        self._deactivate_from_connection()
        self.is_released = True


class Watcher(Protocol):
    """Callbacks for everything that is sent on the connection through SQLAlchemy, or may be sent around it.

    The relay's own scripts (`run_script`) call none of these.
    """

    def sees(self, statement: str, context: ExecutionContext | None) -> None:
        """Called before a statement is sent. An error that this raises keeps it from being sent."""
        ...

    def hands_out(self) -> None:
        """Called before the driver's own connection or cursor, whose statements are not seen, is taken or used."""
        ...


class WatchedConnection(Connection):
    """A connection that reports when the driver's own is taken from it, also by way of a result.

    `outboxq_guard` is None once it was lent and taken back.
    """

    outboxq_guard: "Guard | None"

    @property
    def connection(self) -> PoolProxiedConnection:
        if self.outboxq_guard is not None:
            self.outboxq_guard.hands_out()
        return super().connection


class Guard:
    """Watches one connection. `savepoint` is the running job's own, or None between jobs.

    `on_first_use` begins it, if a handler runs whose savepoint has not begun: also for statements that a handler
    sends through the connection instead of its session. `watcher` is called before every statement, and when the
    driver's connection is taken. `thread` is the one that it belongs to. `lent` are the connections of the running job.
    """

    def __init__(self, connection: Connection) -> None:
        self.savepoint: Savepoint | None = None
        self.on_first_use: Callable[[], None] | None = None
        self.watcher: Watcher | None = None
        # State of a handler that may outlive its transaction on this connection, in words that hold no value.
        self.left: str | None = None
        # Whether something holds for the rest of the transaction that does not hold on this connection, such as the
        # meaning of a name, or a role: by a SET LOCAL search_path, or by an unknown statement.
        self.is_altered = False
        # While a batch runs: the unique jobs (`UniqueJob`) that its jobs add, by id; its COMMIT takes their keys.
        self.collects = False
        self.added: dict[str, Any] = {}
        self._connection = connection
        # A handler can reach the relay's own connection by its transactions; a thread that it has left is refused.
        self.thread = get_ident()
        self.lent: list[Connection] = []
        # The statement that SQLAlchemy is about to give to the driver's cursor.
        self._announced: object = None
        # A test's own savepoint, around all of its jobs.
        self._around = connection.get_nested_transaction()
        self._options = connection.get_execution_options()
        # The connection's events and transaction are tied to the object, so its class changes, and not the object.
        self._class = type(connection)
        connection.__class__ = WatchedConnection
        connection.__dict__["outboxq_guard"] = self
        driver: Any = driver_connection(connection)
        self._factories = driver.cursor_factory, driver.server_cursor_factory
        driver.cursor_factory = _watched_cursor(driver.cursor_factory, self)
        driver.server_cursor_factory = _watched_cursor(driver.server_cursor_factory, self)
        # Every statement of SQLAlchemy's uses these: changed by a job, they would give later jobs wrong rows.
        self._driver = driver
        self._libpq = driver.pgconn
        self._through = {name: getattr(driver, name) for name in _FACTORIES}
        for name, listener in self._listeners():
            event.listen(connection, name, listener)
        connection.__dict__["_has_events"] = _HEARD_BY_US

    def remove(self) -> None:
        """Stop watching a connection that others go on to use."""
        self._connection.__class__ = self._class
        del self._connection.__dict__["outboxq_guard"]
        driver: Any = driver_connection(self._connection)
        driver.cursor_factory, driver.server_cursor_factory = self._factories
        for name, listener in self._listeners():
            event.remove(self._connection, name, listener)
        self._connection.__dict__["_has_events"] = True

    def _listeners(self) -> Iterator[tuple[str, Callable[..., None]]]:
        yield "before_cursor_execute", self._before_execute
        yield "commit", self._before_commit
        yield "rollback", self._before_rollback

    def begin_savepoint(self, claimed: str | None) -> Savepoint:
        """Begin the running job's own savepoint, and return it.

        Args:
            claimed: The name of the claim's own, which exists already and is used instead: nothing is sent.
        """
        # An earlier handler may have left a savepoint open: these would become a chain, for as long as claims follow.
        self._connection._nested_transaction = self._around  # noqa: SLF001  # nothing else drops them without a statement
        savepoint = Savepoint(self._connection) if claimed is None else ClaimSavepoint(self._connection, claimed)
        self.savepoint = savepoint
        return savepoint

    def lend(self) -> Connection:
        """The connection for one job, until `take_back`: the same in all but that it can be closed by itself."""
        lent = object.__new__(type(self._connection))
        # One state for both: SQLAlchemy keeps transaction and savepoints there.
        lent.__dict__ = self._connection.__dict__
        self.lent.append(lent)
        return lent

    def take_back(self) -> None:
        """Close what was lent, against threads that its job has left, and undo what the job set on it."""
        while self.lent:
            self.lent.pop().__dict__ = {**self._connection.__dict__, **_CLOSED}
        self._connection._execution_options = self._options  # noqa: SLF001  # set in place, and only ever added to
        if self._connection._has_events is not _HEARD_BY_US and self.left is None:  # noqa: SLF001  # event.listen() sets it
            self.left = "a listener on the connection"
        if self.left is not None:
            for name, factory in self._through.items():
                setattr(self._driver, name, factory)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Send the relay's own statements within the block: unwatched, and without options that the job has set."""
        connection, watcher, self.watcher = self._connection, self.watcher, None
        options, connection._execution_options = connection._execution_options, self._options  # noqa: SLF001  # its setter merges
        try:
            yield
        finally:
            self.watcher, connection._execution_options = watcher, options  # noqa: SLF001  # its setter merges

    @property
    def transaction_status(self) -> int:
        """The driver's `TransactionStatus`, without I/O; UNKNOWN once the connection is lost."""
        status: int = self._libpq.transaction_status
        return status

    @property
    def has_own_options(self) -> bool:
        """Return True if the running job has set nothing on its connection, such as a `schema_translate_map`."""
        return self._connection._execution_options is self._options  # noqa: SLF001  # the getter's object, without a call

    @property
    def is_as_given(self) -> bool:
        """Return True if the transaction works, nothing of the running job's holds in it, and all it sent was seen."""
        if self.is_altered or self.left is not None or not self.has_own_options:
            return False
        connection, block = self._connection, self._connection._trans_context_manager  # noqa: SLF001  # what SQLAlchemy looks at before each statement
        inner, own = connection.get_nested_transaction(), self.savepoint
        is_open = connection.in_transaction() and (block is None or block._transaction_is_active())  # noqa: SLF001  # SQLAlchemy refuses statements in a `with` block whose transaction ended
        return is_open and (inner is None or inner.is_active) and (own is None or own.is_active)

    def hands_out(self) -> None:
        """Called when the driver's own connection is taken."""
        if self.watcher is not None:
            self.watcher.hands_out()
        elif self.on_first_use is not None:
            # Else statements of the driver's cursor would come before the job's savepoint, and survive its failure.
            self.on_first_use()
        if self.is_handlers_turn:
            self.left = "the driver's own connection"

    def announce(self, query: object) -> None:
        """Record that the next statement of a cursor is this one of our own."""
        self._announced = query

    def sends(self, query: object) -> None:
        """Called with what one of the driver's cursors sends: for SQLAlchemy, or by itself."""
        announced, self._announced = self._announced, None
        if query is not None and query is announced:
            return
        if self.watcher is not None:
            self.watcher.hands_out()
        if self.is_handlers_turn and isinstance(query, str):
            if leavings := (readings.get(query) or self._read(query)).left_by:
                self._note(leavings, {})
        elif self.is_handlers_turn:
            self.left = "the driver's own cursor"

    def _before_execute(
        self,
        connection: Connection,
        _cursor: object,
        statement: object,
        parameters: object,
        context: ExecutionContext | None,
        many: bool,
    ) -> None:
        if connection is self._connection and get_ident() != self.thread:
            raise InvalidRequestError("this connection is the relay's, and no job's: use ctx.session.connection()")
        if self.on_first_use is not None:
            self.on_first_use()
        # `exec_driver_sql` takes bytes and SQL objects of the driver's too, which are not read.
        text = statement if isinstance(statement, str) else ""
        if self.watcher is not None:
            self.watcher.sees(text, context)
        savepoint = self.savepoint
        if savepoint is not None:
            # Not the text as it is sent, with all values, but as it was compiled.
            to_read, compiled = text, None if context is None else context.compiled
            if context is not None and compiled is not None and compiled.string is not None:
                # Sent in pieces. Defaults that are read before an INSERT have its context too.
                is_piece = context.execute_style is ExecuteStyle.INSERTMANYVALUES and text.startswith("INSERT ")
                if is_piece or text is context.statement:
                    to_read = compiled.string
            reading = readings.get(to_read) or self._read(to_read)
            if reading.refused_verb:
                raise TransactionVerbRefused(
                    f"the handler sent {reading.refused_verb}, but its transaction is the relay's: return to commit, "
                    "raise to roll back"
                )
            if not savepoint.is_active and not text.startswith("ROLLBACK TO"):
                # The job's savepoint is gone: rows that the handler wrote now would survive its own failure.
                raise HandlerRolledBack(
                    "the handler went on after it rolled its session back: use session.begin_nested()"
                )
            if reading.left_by:
                self._note(reading.left_by, {} if many else parameters)
        # Last: those above may have sent something themselves.
        self._announced = statement

    def _read(self, statement: str) -> Reading:
        try:
            return read(statement)
        except Exception as error:  # noqa: BLE001  # raised again, unless it is a defect
            self._assume_worst(error)
            return Reading()

    def _note(self, leavings: Leavings, parameters: object) -> None:
        """Record what a handler's statement may leave on the connection."""
        self.is_altered = True
        try:
            given = parameters if isinstance(parameters, Mapping) else {}
            if any(given.get(name) is not True for name in leavings.only_local):
                self.left = self.left or "set_config"
            self.left = self.left or leavings.what
        except Exception as error:  # noqa: BLE001  # raised again, unless it is a defect
            self._assume_worst(error)

    def _assume_worst(self, error: Exception) -> None:
        """Report a defect of the code that reads statements, which the handler must not meet: anything may be left."""
        contain(error)
        self.left, self.is_altered = self.left or "a statement that could not be read", True

    def _before_commit(self, _connection: object) -> None:
        if self.is_handlers_turn:
            raise TransactionVerbRefused("the handler committed the relay's connection: return, and the relay commits")

    def _before_rollback(self, _connection: object) -> None:
        if self.is_handlers_turn:
            raise TransactionVerbRefused(
                "the handler rolled back the relay's connection: raise, and the relay undoes it"
            )

    def is_at_rest(self) -> bool:
        """Return True if nothing is under way on the driver's connection, so that it takes a statement. No I/O."""
        return is_at_rest(self._connection)

    def give_up(self) -> None:
        """Close the connection for good."""
        give_up(self._connection)

    def unprepared(self) -> AbstractContextManager[None]:
        """Prepare no statement on the server within the block."""
        return unprepared(self._connection)

    @property
    def is_handlers_turn(self) -> bool:
        """Return True if a handler runs."""
        return self.savepoint is not None or self.on_first_use is not None

    def let_go(self) -> None:
        """Record that no handler runs any more."""
        self.savepoint = self.on_first_use = self.watcher = None


class NoGuard(Guard):
    """The guard of a call that has no connection yet: it watches nothing."""

    def __init__(self) -> None:
        self.savepoint, self.on_first_use, self.watcher = None, None, None
        self.left: str | None = None
        self.is_altered, self.collects = False, False
        self.added: dict[str, Any] = {}
        self.lent: list[Connection] = []

    @property
    def transaction_status(self) -> int:
        """IDLE."""
        return TransactionStatus.IDLE

    def is_at_rest(self) -> bool:
        """Return True."""
        return True

    def take_back(self) -> None:
        """Nothing was lent."""

    def unprepared(self) -> AbstractContextManager[None]:
        """Nothing is sent."""
        return nullcontext()


def guard_of(connection: Connection) -> "Guard | None":
    """The guard on a relay's connection, or on one lent from it; None on any other."""
    guard: Guard | None = connection.__dict__.get("outboxq_guard")
    return guard


def is_same(connection: Connection, other: Connection | None) -> bool:
    """Return True if one of them is the other, or lent from it."""
    return other is not None and connection.__dict__ is other.__dict__


def keep_cancelled(context: ExceptionContext) -> None:
    """Keep a relay's connection on which a coroutine is cancelled; SQLAlchemy would give it up. For "handle_error".

    The cause may be a timeout of the handler's own: psycopg has cancelled its query in the server, and the savepoint
    contains that as it does any error.
    """
    connection = context.connection
    if connection is None or guard_of(connection) is None:
        return
    if isinstance(context.original_exception, CancelledError) and transaction_status(connection) in (
        TransactionStatus.INTRANS,
        TransactionStatus.INERROR,
    ):
        context.is_disconnect = False


def _watched_cursor(factory: type[Any], guard: "Guard") -> type[Any]:
    """The driver's cursors, which lead to its connection too, and can be used around SQLAlchemy themselves."""

    class Watched(factory):  # type: ignore[misc]  # the user's own, or the driver's
        @property
        def connection(self) -> object:
            if guard.savepoint is not None or guard.on_first_use is not None:
                # The driver too reads the connection of its cursors, for the types that it adapts: for each statement.
                caller = sys._getframe(1).f_globals  # noqa: SLF001  # documented; a walk of the stack is slow
                if str(caller.get("__name__", "")).partition(".")[0] not in _DRIVERS:
                    guard.hands_out()
            return super().connection

        def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
            guard.sends(query)
            return super().execute(query, *args, **kwargs)

        def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
            guard.sends(query)
            return super().executemany(query, *args, **kwargs)

        def stream(self, *args: Any, **kwargs: Any) -> Any:
            guard.sends(None)
            return super().stream(*args, **kwargs)

        def copy(self, *args: Any, **kwargs: Any) -> Any:
            guard.sends(None)
            return super().copy(*args, **kwargs)

    return Watched
