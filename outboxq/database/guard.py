"""Watches all that a handler does with its relay's connection (`Guard`), and undoes a failed job (`Savepoint`).

While a handler runs, statements that begin or end a transaction, such as COMMIT, are refused before they are sent,
because the transaction is the relay's. Statements that bypass SQLAlchemy, on the driver's own connection, are not
refused; the script that commits the job detects their effect on the transaction.

Each job works with a second `Connection` object over the relay's connection. It is closed after the job, so that a
thread which the job left running cannot use the connection during the next job. The guard also records if a handler may
have left session state on the server, such as a setting or a temporary table: then the next job gets another
connection.
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

# The fields of an SQLAlchemy connection that is closed for good, and in no transaction.
_CLOSED = {
    "_dbapi_connection": None,
    "_Connection__can_reconnect": False,
    "_transaction": None,
    "_nested_transaction": None,
    "outboxq_guard": None,
}
# A true value, as SQLAlchemy needs it; each listener that is added to a connection replaces it by True.
_HEARD_BY_US: Any = "outboxq"
_FACTORIES = ("row_factory", "cursor_factory", "server_cursor_factory")
# The driver's packages.
_DRIVERS = ("psycopg", "psycopg_binary", "psycopg_c")


class Savepoint(NestedTransaction):
    """The savepoint that is set before a job runs, so that the job's rows can be undone if it fails.

    `is_released` is True once the handler has released it: then the job's rows can only be undone together with all
    others of the transaction.
    """

    __slots__ = ("is_released",)

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.is_released = False

    @property
    def name(self) -> str:
        """The savepoint's name on the server."""
        return self._savepoint

    def undo(self) -> None:
        """Roll back to the savepoint, even if SQLAlchemy considers it rolled back already.

        SQLAlchemy does so even if it could not send the rollback. Also, the handler may have written rows through the
        driver's cursor since then.

        Raises:
            psycopg.Error, SQLAlchemyError: the savepoint no longer exists.
        """
        if self.is_active:
            self.rollback()
        else:
            run_script(self.connection, f"ROLLBACK TO SAVEPOINT {self.name}")

    def _do_commit(self) -> None:
        super()._do_commit()
        self.is_released = True


class ClaimSavepoint(Savepoint):
    """A job's savepoint without messages of its own: the claim's script sets it, the commit's script releases it."""

    __slots__ = ("_claim_name",)

    def __init__(self, connection: Connection, name: str) -> None:
        # As SQLAlchemy's own __init__, without the SAVEPOINT.
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
    """Callbacks of a `Guard`: a batch whose jobs share one savepoint uses them to send waiting writes in time."""

    def sees(self, statement: str, context: ExecutionContext | None) -> None:
        """Called before SQLAlchemy sends `statement`. An error raised here keeps the statement from being sent."""
        ...

    def hands_out(self) -> None:
        """Called before code takes the driver's connection or cursor; `sees` does not get statements sent by these."""
        ...


class WatchedConnection(Connection):
    """A relay's connection, which calls its guard's `hands_out` when code takes the driver's own connection from it.

    This includes code that has reached this object through a result of SQLAlchemy.
    """

    outboxq_guard: "Guard | None"

    @property
    def connection(self) -> PoolProxiedConnection:
        if self.outboxq_guard is not None:
            self.outboxq_guard.hands_out()
        return super().connection


class Guard:
    """Watches what handlers do on a relay's connection, so that none commits or leaves state for the next job.

    Attributes:
        savepoint: The running job's savepoint; None between jobs, and before the savepoint is set.
        on_first_use: Sets the running job's savepoint, and is called at the job's first statement, whether that comes
            through its session or directly on the connection; None if the savepoint is set, or no job runs.
        watcher: Called before every statement, and when code takes the driver's own connection; None for no such calls.
        left: Words for session state that a handler may have left on the server; the next job then gets another
            connection.
        is_altered: True if a handler may have changed a setting or role of the transaction.
        thread: The id of the only thread that may send statements on the relay's own `Connection` object.
        lent: The `Connection` objects that `lend` has made for the running job.
    """

    def __init__(self, connection: Connection) -> None:
        self.savepoint: Savepoint | None = None
        self.on_first_use: Callable[[], None] | None = None
        self.watcher: Watcher | None = None
        # State of a handler that may outlive its transaction on this connection, in words without values.
        self.left: str | None = None
        # True if a transaction-local state differs from this connection's own, such as the meaning of a name, or a
        # role: after SET LOCAL search_path, or after an unknown statement.
        self.is_altered = False
        # While a batch runs: the unique jobs (`UniqueJob`) that its jobs add, by id; its COMMIT takes their keys.
        self.collects = False
        self.added: dict[str, Any] = {}
        self._connection = connection
        # A handler can reach the relay's own connection through its transactions; a thread that it left behind is
        # refused.
        self.thread = get_ident()
        self.lent: list[Connection] = []
        # The statement that SQLAlchemy is about to pass to the driver's cursor.
        self._announced: object = None
        # A test's own savepoint, around all jobs of the test.
        self._around = connection.get_nested_transaction()
        self._options = connection.get_execution_options()
        # The connection's events and transaction are tied to the object, so its class is changed instead of the object.
        self._class = type(connection)
        connection.__class__ = WatchedConnection
        connection.__dict__["outboxq_guard"] = self
        driver: Any = driver_connection(connection)
        self._factories = driver.cursor_factory, driver.server_cursor_factory
        driver.cursor_factory = _watched_cursor(driver.cursor_factory, self)
        driver.server_cursor_factory = _watched_cursor(driver.server_cursor_factory, self)
        # SQLAlchemy uses these options for every statement: if a job changed them, later jobs would read wrong rows.
        self._driver = driver
        self._libpq = driver.pgconn
        self._through = {name: getattr(driver, name) for name in _FACTORIES}
        for name, listener in self._listeners():
            event.listen(connection, name, listener)
        connection.__dict__["_has_events"] = _HEARD_BY_US

    def remove(self) -> None:
        """Stop watching, and restore the connection's class, cursors and listeners: other code continues to use it."""
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
        """Set the running job's savepoint, store it in `savepoint`, and return it.

        Args:
            claimed: The name of a savepoint that the script of the claim has set already. It is used instead of a new
                one, so that nothing is sent; None to set a new one.
        """
        # An earlier handler may have left a savepoint open: the objects would form a chain that grows with each claim.
        self._connection._nested_transaction = self._around  # noqa: SLF001  # nothing else drops them without a statement
        savepoint = Savepoint(self._connection) if claimed is None else ClaimSavepoint(self._connection, claimed)
        self.savepoint = savepoint
        return savepoint

    def lend(self) -> Connection:
        """Return a second `Connection` object over the relay's own connection and transaction, for one job.

        `take_back` closes only this object, so a thread that the job left running can no longer use the relay's
        connection.
        """
        lent = object.__new__(type(self._connection))
        # Both share one state: SQLAlchemy keeps transaction and savepoints in it.
        lent.__dict__ = self._connection.__dict__
        self.lent.append(lent)
        return lent

    def take_back(self) -> None:
        """Close the objects that `lend` has made, and remove the job's execution options from the connection.

        A thread that the job left running may still hold such an object, and can then send nothing by it. If the job
        has added an event listener to the connection, `left` records it, so that no other job gets the connection.
        """
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
        """Send the relay's own statements in this block, without a call of `watcher`, and without the job's options."""
        connection, watcher, self.watcher = self._connection, self.watcher, None
        options, connection._execution_options = connection._execution_options, self._options  # noqa: SLF001  # its setter merges
        try:
            yield
        finally:
            self.watcher, connection._execution_options = watcher, options  # noqa: SLF001  # its setter merges

    @property
    def transaction_status(self) -> int:
        """The driver's `TransactionStatus` as of its last answer, without I/O; UNKNOWN if the connection is lost."""
        status: int = self._libpq.transaction_status
        return status

    @property
    def has_own_options(self) -> bool:
        """True if the connection still has the relay's execution options.

        That is, the job has set none, such as a `schema_translate_map`.
        """
        return self._connection._execution_options is self._options  # noqa: SLF001  # the getter's object, without a call

    @property
    def is_as_given(self) -> bool:
        """True if the job has changed nothing on the connection apart from rows, so that SQLAlchemy may be bypassed.

        That is, the transaction works, the job has set no options and left no state, and it has sent nothing through
        the driver's own connection. `outboxq.database.direct` then sends statements by the driver, which is faster.
        """
        if self.is_altered or self.left is not None or not self.has_own_options:
            return False
        connection, block = self._connection, self._connection._trans_context_manager  # noqa: SLF001  # what SQLAlchemy looks at before each statement
        inner, own = connection.get_nested_transaction(), self.savepoint
        is_open = connection.in_transaction() and (block is None or block._transaction_is_active())  # noqa: SLF001  # SQLAlchemy refuses statements in a `with` block whose transaction ended
        return is_open and (inner is None or inner.is_active) and (own is None or own.is_active)

    def hands_out(self) -> None:
        """Called when code takes the driver's own connection: call `watcher` or, without one, `on_first_use`.

        If a handler runs, record in `left` that the connection may have state which the next job must not get.
        """
        if self.watcher is not None:
            self.watcher.hands_out()
        elif self.on_first_use is not None:
            # Otherwise statements of the driver's cursor would precede the job's savepoint, and survive the job's
            # failure.
            self.on_first_use()
        if self.is_handlers_turn:
            self.left = "the driver's own connection"

    def announce(self, query: object) -> None:
        """Record the text that outboxq sends next by a cursor, so that `sends` does not take it for a handler's."""
        self._announced = query

    def sends(self, query: object) -> None:
        """Called before a cursor of the driver sends an SQL text: record session state that a handler's text may leave.

        A text that came through SQLAlchemy, or that was given to `announce`, is ignored. For any other,
        `watcher.hands_out` is called too. `query` is None for a COPY or a stream, whose text is not read.
        """
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
        # `exec_driver_sql` also accepts bytes and the driver's SQL objects, which are not read.
        text = statement if isinstance(statement, str) else ""
        if self.watcher is not None:
            self.watcher.sees(text, context)
        savepoint = self.savepoint
        if savepoint is not None:
            # The compiled text is read, not the text as it is sent with all values.
            to_read, compiled = text, None if context is None else context.compiled
            if context is not None and compiled is not None and compiled.string is not None:
                # Sent in pieces: defaults that are read before an INSERT have its context too.
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
                # The job's savepoint is gone: rows that the handler writes now would survive its failure.
                raise HandlerRolledBack(
                    "the handler went on after it rolled its session back: use session.begin_nested()"
                )
            if reading.left_by:
                self._note(reading.left_by, {} if many else parameters)
        # Last, because the callbacks above may have sent something themselves.
        self._announced = statement

    def _read(self, statement: str) -> Reading:
        try:
            return read(statement)
        except Exception as error:  # noqa: BLE001  # raised again, unless it is a defect
            self._assume_worst(error)
            return Reading()

    def _note(self, leavings: Leavings, parameters: object) -> None:
        """Record a statement that sets session state: in `is_altered`, and in `left` if the state may stay."""
        self.is_altered = True
        try:
            given = parameters if isinstance(parameters, Mapping) else {}
            if any(given.get(name) is not True for name in leavings.only_local):
                self.left = self.left or "set_config"
            self.left = self.left or leavings.what
        except Exception as error:  # noqa: BLE001  # raised again, unless it is a defect
            self._assume_worst(error)

    def _assume_worst(self, error: Exception) -> None:
        """Log a defect of the code that reads statements, and treat the statement as one that leaves state.

        An error that is no defect of outboxq's is raised again.
        """
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
        """Return True if a statement can be sent now, because none is under way on the driver's connection. No I/O."""
        return is_at_rest(self._connection)

    def give_up(self) -> None:
        """Close the connection for good, even if a thread or task that a handler left running still uses it."""
        give_up(self._connection)

    def unprepared(self) -> AbstractContextManager[None]:
        """Return a block in which the driver prepares no statement on the server, for example because of a pooler."""
        return unprepared(self._connection)

    @property
    def is_handlers_turn(self) -> bool:
        """True while a handler runs, also before its savepoint is set."""
        return self.savepoint is not None or self.on_first_use is not None

    def let_go(self) -> None:
        """Record that the handler has ended: forget its savepoint, and call no callback for later statements."""
        self.savepoint = self.on_first_use = self.watcher = None


class NoGuard(Guard):
    """A guard that watches nothing, for the call of a handler that has no connection yet (a job with a lease)."""

    def __init__(self) -> None:
        self.savepoint, self.on_first_use, self.watcher = None, None, None
        self.left: str | None = None
        self.is_altered, self.collects = False, False
        self.added: dict[str, Any] = {}
        self.lent: list[Connection] = []

    @property
    def transaction_status(self) -> int:
        """IDLE, because there is no connection and so no transaction."""
        return TransactionStatus.IDLE

    def is_at_rest(self) -> bool:
        """Return True, because there is no connection on which a statement could be under way."""
        return True

    def take_back(self) -> None:
        """Do nothing: no connection was lent."""

    def unprepared(self) -> AbstractContextManager[None]:
        """Return a block without effect, because there is no connection on which a statement could be prepared."""
        return nullcontext()


def guard_of(connection: Connection) -> "Guard | None":
    """Return the guard of a relay's connection, also for an object that `Guard.lend` has made; None for any other."""
    guard: Guard | None = connection.__dict__.get("outboxq_guard")
    return guard


def is_same(connection: Connection, other: Connection | None) -> bool:
    """Return True if both are one object, or share one transaction because `Guard.lend` made one from the other."""
    return other is not None and connection.__dict__ is other.__dict__


def keep_cancelled(context: ExceptionContext) -> None:
    """Keep a relay's connection when a statement on it was cancelled: a listener to SQLAlchemy's event "handle_error".

    SQLAlchemy would discard the connection if the coroutine is cancelled during a statement. But the handler itself may
    have set the time-out that cancels it: psycopg has then ended the query in the server, and the job's savepoint can
    undo the rest, as after any error.
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
    """Return a subclass of `factory` whose cursors report each use to the guard.

    SQLAlchemy calls no listeners for statements that a handler sends by the driver's cursor.
    """

    class Watched(factory):  # type: ignore[misc]  # the user's own, or the driver's
        @property
        def connection(self) -> object:
            if guard.savepoint is not None or guard.on_first_use is not None:
                # The driver itself also reads its cursors' connection for each statement, because of the types that it
                # adapts.
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
