"""The relay's own SQL strings, sent through psycopg below SQLAlchemy: several statements in one round trip.

The same functions serve sync and async connections: for an async one, the caller is inside SQLAlchemy's `run_sync`, in
which a plain function can wait for a coroutine.
"""

import asyncio
import math
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from threading import get_ident
from typing import Any, TypeAlias

import psycopg
from psycopg.abc import PQGen
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.generators import execute
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from sqlalchemy import Connection
from sqlalchemy.util import await_only

from outboxq.database.errors import sqlstate_of

# The time for which a connection that only queries and listens waits for an answer.
ANSWER_SECONDS = 15.0

# epoll accepts at most 24 days; a time computed after the clock was set may exceed that.
_LONGEST_SECONDS = 86_400.0
# Looked up and not made, because it is read for each job.
_STATUSES = {int(status): status for status in TransactionStatus}

_DRIVERS = (psycopg.Connection, psycopg.AsyncConnection)
DriverConnection: TypeAlias = "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]"


# Rows of a statement, in the order in which the server sent them.
Rows: TypeAlias = Sequence[tuple[Any, ...]]

_STATEMENT = itemgetter(1)
# Integers, because they compare faster than enum members.
_COMMAND_OK, _TUPLES_OK = int(ExecStatus.COMMAND_OK), int(ExecStatus.TUPLES_OK)


# Errors of prepared statements: invalid_sql_statement_name, duplicate_prepared_statement, and feature_not_supported,
# "cached plan must not change result type".
_NO_SUCH, _THERE_ALREADY, _TABLE_CHANGED = "26000", "42P05", "0A000"
# If prepared statements are lost before this many executions, the next ones of this number are sent as text.
_WORTHWHILE = 20


@dataclass(slots=True)
class Script:
    """Statements that are sent in one round trip.

    `parts` has each statement with its owner: a name that the caller chooses, by which `Answer.rows` has the rows of
    its statements.
    """

    parts: list[tuple[str, str]] = field(default_factory=list)

    def add(self, owner: str, *statements: str) -> "Script":
        """Append statements of one owner, each string a single statement; return this script."""
        for statement in statements:
            self.parts.append((owner, statement))
        return self

    def send(self, connection: Connection) -> "Answer":
        """Send all statements in one message; PostgreSQL executes none after a failure.

        Errors are not raised but returned. If the driver would begin a transaction now, BEGIN is put in front.
        """
        driver = driver_connection(connection)
        text = "; ".join(map(_STATEMENT, self.parts))
        try:
            results = _send(driver, text, begins=True)
        except psycopg.Error as error:
            # There is no result: the connection is lost, or could not be used.
            return Answer({}, False, error, "")
        rows: dict[str, Rows] = {}
        is_committed, failure, failed_at = False, None, ""
        # An error that no statement caused, such as the server's shutdown, arrives in place of the next result.
        for (owner, _), result in zip(self.parts, results, strict=False):
            status = result.status
            if status == _COMMAND_OK:
                is_committed = is_committed or result.command_status == b"COMMIT"
            elif status == _TUPLES_OK:
                try:
                    found = _rows_of(driver, result)
                except psycopg.Error as error:
                    # The value cannot be held by Python: the later statements were executed nevertheless.
                    failure, failed_at = failure or error, failed_at or owner
                else:
                    rows[owner] = [*rows[owner], *found] if owner in rows else found
            else:
                failure, failed_at = error_from_result(result, encoding=_encoding(driver)), owner
        if failure is None and len(results) != len(self.parts):
            raise AssertionError(f"{len(self.parts)} statements were answered by {len(results)} results")
        return Answer(rows, is_committed, failure, failed_at)


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of a script up to its end, or up to its first failure.

    Attributes:
        rows: The rows of each owner's statements, by owner; an owner without an entry has none.
        is_committed: True if a COMMIT was executed, even if a later statement failed. If the connection was lost before
            its result came, this is False, and the outcome is not known.
        error: The failure that stopped the script, or an error in reading its rows; None without either.
        failed_at: The owner of the statement that failed; empty if there is none, or if the connection failed.
    """

    rows: Mapping[str, Rows]
    is_committed: bool
    error: psycopg.Error | None
    failed_at: str


def may_be_of_prepared(error: BaseException) -> bool:
    """Return True if an error may have come up only because a statement was prepared, so that another try can succeed.

    The server then reports that the statement's name exists already, that it is missing, or that its plan is outdated.
    """
    return sqlstate_of(error) in (_NO_SUCH, _THERE_ALREADY, _TABLE_CHANGED)


class PreparedStatements:
    """Remembers the statements for one purpose, such as claims, that are presumably prepared on a connection's server.

    The record may be wrong: the driver drops all prepared statements at a rollback, and with a transaction pooler each
    transaction may run in another server session. A statement that fails for this reason costs one more round trip. It
    is prepared again, unless fewer than 20 executions (`_WORTHWHILE`) came after the previous loss: then the next 20
    are sent as plain text.

    Attributes:
        names: The names of the statements that are presumably prepared.
        is_plain: True while statements are sent as plain text.
    """

    def __init__(self, *, prepares: bool = True) -> None:
        self.names: set[str] = set()
        self.is_plain = not prepares
        # Executions since the last loss; negative while statements are sent as text.
        self._age: float = _WORTHWHILE if prepares else -math.inf

    def succeeded(self, name: str) -> None:
        """Record that the statement of this name was executed, and so is prepared unless it was sent as text."""
        if not self.is_plain:
            self.names.add(name)
        self._age += 1
        self.is_plain = self._age < 0

    def failed(self, error: BaseException, name: str) -> bool:
        """Return True if the statement failed only because it was prepared, or because its prepared form is missing.

        The caller should then send it again. `names` and `is_plain` have been changed, so that the next try either
        prepares the statement or sends it as text.
        """
        if self.is_plain or not may_be_of_prepared(error):
            return False
        sqlstate = sqlstate_of(error)
        if sqlstate == _THERE_ALREADY:
            # Prepared by an earlier try that was rolled back: a name always has the same text.
            self.names.add(name)
            return True
        self.names.clear()
        if sqlstate == _TABLE_CHANGED:
            # The old plan is still stored under this name.
            self._age = -math.inf
        else:
            self._age = 0 if self._age >= _WORTHWHILE else -_WORTHWHILE
        self.is_plain = self._age < 0
        return True


# The connection goes through a pooler, or the user's settings forbid prepared statements.
NOT_PREPARED = PreparedStatements(prepares=False)


@dataclass(frozen=True, slots=True)
class ServerSession:
    """The server session of a connection: facts that claims and commits need.

    Args:
        epoch: A text that changes whenever the server restarts.
        has_citus: True if the database has the extension Citus.
        claims: Remembers which statements are prepared: those that claim jobs, and the one that records the outcomes of
            jobs with a lease.
        finished_rows: Remembers if the INSERT of rows of finished jobs is prepared.
    """

    epoch: str = ""
    has_citus: bool = False
    claims: PreparedStatements = NOT_PREPARED
    finished_rows: PreparedStatements = NOT_PREPARED

    def roll_back(self, connection: Connection) -> None:
        """Send ROLLBACK so that prepared statements remain: the driver's own rollback would drop them.

        If the connection can have none, or is lost, do nothing: the caller rolls back by SQLAlchemy anyway.
        """
        if self.claims is not NOT_PREPARED and not is_lost(connection):
            run_script(connection, "ROLLBACK")


# Used by claims without a known session: they are sent as plain text.
ANY_SERVER = ServerSession()


def dbapi_connection(connection: Connection) -> Any:
    """Return the connection below an SQLAlchemy one: psycopg's, or SQLAlchemy's adapter around an async one."""
    # The property `connection` is not used, because a relay's connection records each read of it.
    proxied = connection._dbapi_connection  # noqa: SLF001  # the property also calls the guard
    return (Connection.connection.__get__(connection) if proxied is None else proxied).dbapi_connection


def driver_connection(connection: Connection) -> DriverConnection:
    """Return the psycopg connection below an SQLAlchemy connection.

    Raises:
        TypeError: the connection is another driver's.
    """
    proxied = connection._dbapi_connection  # noqa: SLF001  # the property also calls the guard
    below = dbapi_connection(connection) if proxied is None else proxied.dbapi_connection
    if isinstance(below, _DRIVERS):
        return below
    # An async adapter names the connection that it wraps; the pool's `driver_connection` is gone once a connection is
    # detached.
    driver = getattr(below, "driver_connection", below)
    if not isinstance(driver, _DRIVERS):
        raise TypeError(f"expected a psycopg connection, got {type(driver).__module__}")
    return driver


@contextmanager
def unprepared(connection: Connection) -> Iterator[None]:
    """Prepare no statement on the server in this block.

    With a transaction pooler, the next transaction may run in another server session, in which a statement that was
    prepared before is missing.
    """
    driver = driver_connection(connection)
    before = driver.prepare_threshold
    driver.prepare_threshold = None
    try:
        yield
    finally:
        driver.prepare_threshold = before


def run_script(connection: Connection, *statements: str) -> Rows:
    """Send statements without parameters in one message; return the rows of all of them, one after the other.

    PostgreSQL stops at the first statement that fails, and nothing after it is executed. If the driver would begin a
    transaction now, BEGIN is put in front.

    Raises:
        psycopg.Error: the first failure.
    """
    driver = driver_connection(connection)
    return _all_rows(driver, _send(driver, "; ".join(statements), begins=True))


def run_alone(connection: Connection, statement: str) -> Rows:
    """Send a statement that needs no transaction as a single message, without BEGIN and COMMIT; return its rows.

    If users' code listens to the begin or commit of transactions, the statement is sent in a transaction after all.

    Raises:
        psycopg.Error: the statement failed.
    """
    if is_listened_to(connection):
        # Such listeners set up users' transactions, by setting a role for example.
        with connection.begin():
            return run_script(connection, statement)
    return run_outside_transaction(connection, statement)


def run_outside_transaction(connection: Connection, statement: str) -> Rows:
    """Send a statement that PostgreSQL refuses inside a transaction block, without BEGIN; return its rows.

    Raises:
        psycopg.Error: the statement failed.
    """
    driver = driver_connection(connection)
    return _all_rows(driver, _send(driver, statement, begins=False))


def _send(driver: DriverConnection, script: str, *, begins: bool) -> list[PGresult]:
    if isinstance(driver, psycopg.AsyncConnection):
        return await_only(_send_async(driver, script, begins=begins))
    with driver.lock:
        return driver.wait(_sent(driver, script, begins=begins))


async def _send_async(driver: "psycopg.AsyncConnection[Any]", script: str, *, begins: bool) -> list[PGresult]:
    async with driver.lock:
        return await driver.wait(_sent(driver, script, begins=begins))


def _sent(driver: DriverConnection, script: str, *, begins: bool) -> PQGen[list[PGresult]]:
    # Below the driver's cursor, whose work for each statement of a string would take as long as the statement itself.
    pgconn = driver.pgconn
    begins = begins and not driver.autocommit and pgconn.transaction_status == TransactionStatus.IDLE
    if begins:
        script = f"{_begin(driver)}; {script}"
    pgconn.send_query(script.encode(_encoding(driver)))
    results: list[PGresult] = yield from execute(pgconn)
    return results[1:] if begins and len(results) > 1 else results


def _begin(driver: DriverConnection) -> str:
    """Return the statement with which the driver would begin a transaction."""
    level, read_only, deferrable = driver.isolation_level, driver.read_only, driver.deferrable
    modes = [
        "" if level is None else f" ISOLATION LEVEL {level.name.replace('_', ' ')}",
        "" if read_only is None else f" READ {'ONLY' if read_only else 'WRITE'}",
        "" if deferrable is None else f" {'' if deferrable else 'NOT '}DEFERRABLE",
    ]
    return f"BEGIN{''.join(modes)}"


def _encoding(driver: DriverConnection) -> str:
    """Return Python's name of the connection's text encoding."""
    # As the server reported it to libpq: the driver's own way takes several times as long. Some poolers report nothing.
    is_utf8 = driver.pgconn.parameter_status(b"client_encoding") in (b"UTF8", None)
    return "utf-8" if is_utf8 else driver.info.encoding


class _Reader(threading.local):
    """Converts the rows of connections in UTF-8 to Python values as psycopg does by default; one for each thread.

    Converters that were registered on a single connection are not used.
    """

    def __init__(self) -> None:
        # Kept, because it remembers how to read the columns that it has seen.
        self.transformer = Transformer()


_reader = _Reader()


def _all_rows(driver: DriverConnection, results: Sequence[PGresult]) -> Rows:
    rows: Rows = ()
    for result in results:
        status = result.status
        if status == _TUPLES_OK:
            found = _rows_of(driver, result)
            rows = [*rows, *found] if rows else found
        elif status != _COMMAND_OK:
            raise error_from_result(result, encoding=_encoding(driver))
    return rows


def _rows_of(driver: DriverConnection, result: PGresult) -> Rows:
    transformer = _reader.transformer if _encoding(driver) == "utf-8" else Transformer(driver)
    transformer.set_pgresult(result)
    rows: Rows = transformer.load_rows(0, result.ntuples, tuple)
    return rows


# The thread that uses each connection through libpq.
libpq_users = weakref.WeakKeyDictionary[PGconn, int]()


def run_on_libpq(connection: PGconn, script: str, answer_seconds: float | None = None) -> list[tuple[str | None, ...]]:
    """Run statements on a connection that only this thread uses; return the rows of the last that has any, as texts.

    Unlike libpq's own call, this never waits for ever if the other end of the connection is gone.

    Args:
        answer_seconds: The longest time in which no byte may be sent or received; `ANSWER_SECONDS` if None. A long
            script or answer may take longer in all, as long as bytes move.

    Raises:
        psycopg.Error: a statement failed, and those after it were not executed.
        psycopg.OperationalError: no byte was sent or received for that time.
    """
    libpq_users[connection] = get_ident()
    seconds = ANSWER_SECONDS if answer_seconds is None else answer_seconds
    connection.send_query(script.encode())
    _flush(connection, seconds)
    rows: list[tuple[str | None, ...]] = []
    failed: psycopg.Error | None = None
    # libpq must be called until it returns no more results.
    while (result := _next_result(connection, seconds)) is not None:
        if result.status == ExecStatus.TUPLES_OK:
            rows = _rows(result)
        elif result.status != ExecStatus.COMMAND_OK:
            failed = failed or error_from_result(result)
    if failed is not None:
        raise failed
    return rows


def _rows(result: PGresult) -> list[tuple[str | None, ...]]:
    return [
        tuple(_text(result.get_value(row, column)) for column in range(result.nfields)) for row in range(result.ntuples)
    ]


def _flush(connection: PGconn, seconds: float) -> None:
    # The driver's sockets do not block: bytes that a socket does not accept at once stay in libpq's buffer.
    while connection.flush():
        if _wait(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, seconds) & selectors.EVENT_READ:
            # A server that cannot send its notifications does not read either.
            connection.consume_input()


def _next_result(connection: PGconn, seconds: float) -> PGresult | None:
    # libpq is also busy between the last result and the end of the answer, which may arrive in pieces: it would wait
    # for the remainder inside its own call, for ever, and psycopg holds the interpreter's lock during that call.
    while connection.is_busy():
        _wait(connection, selectors.EVENT_READ, seconds)
        connection.consume_input()
    return connection.get_result()


def _wait(connection: PGconn, events: int, seconds: float) -> int:
    """Wait until the connection's socket is ready for one of these events; return the ready ones as a bit mask.

    Raises:
        psycopg.OperationalError: the socket was not ready within `seconds`.
    """
    ready = _select([connection.socket], events, seconds)
    if not ready:
        raise psycopg.OperationalError(f"a connection was not answered within {seconds:g} s")
    return ready


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def wait_readable(files: "list[socket.socket | int]", seconds: float) -> bool:
    """Wait until one of these files can be read; return False if none can within `seconds` (at most a day)."""
    return bool(_select(files, selectors.EVENT_READ, seconds))


def _select(files: "list[socket.socket | int]", events: int, seconds: float) -> int:
    """Wait until a file is ready for one of `events`; return the ready events, or 0 after `seconds` (at most a day)."""
    # Not select(): it refuses file descriptors from 1024 on.
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, events)
        ready = 0
        for _, found in selector.select(min(seconds, _LONGEST_SECONDS)):
            ready |= found
        return ready


def pause(connection: Connection, seconds: float) -> None:
    """Sleep for `seconds`; if the connection is an async one, the event loop runs other tasks in that time."""
    if isinstance(driver_connection(connection), psycopg.AsyncConnection):
        await_only(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def transaction_status(connection: Connection) -> TransactionStatus:
    """Return the transaction's status by the server's last answer, without I/O; UNKNOWN if the connection is lost."""
    if connection.invalidated:
        return TransactionStatus.UNKNOWN
    return _STATUSES[driver_connection(connection).pgconn.transaction_status]


def end_transaction(connection: Connection) -> None:
    """Roll back the open transaction: SQLAlchemy's, and then also one that was begun below SQLAlchemy on the driver."""
    connection.rollback()
    if transaction_status(connection) != TransactionStatus.IDLE:
        run_script(connection, "ROLLBACK")


def is_listened_to(connection: Connection) -> bool:
    """Return True if users' code listens to the begin or commit of the engine's transactions.

    Such code may set a role or a tenant (SET LOCAL ROLE). Listeners are called for transactions that SQLAlchemy begins,
    not for those that outboxq's scripts begin.
    """
    listeners = connection.engine.dispatch
    return bool(listeners.begin or listeners.commit)


def is_lost(connection: Connection) -> bool:
    """Return True if the connection to the server is gone."""
    return transaction_status(connection) == TransactionStatus.UNKNOWN


def is_at_rest(connection: Connection) -> bool:
    """Return True if a statement can be sent: none is under way, and no other code waits to send one. There is no I/O.

    The result is False after an unfinished COPY or stream, which keeps the driver's lock for ever, and in the driver's
    pipeline mode, which refuses outboxq's statements. It is True for an invalidated connection.
    """
    if connection.invalidated:
        return True
    driver = driver_connection(connection)
    pgconn = driver.pgconn
    return not (
        driver.lock.locked()
        or pgconn.transaction_status == TransactionStatus.ACTIVE
        or pgconn.pipeline_status != PipelineStatus.OFF
    )
