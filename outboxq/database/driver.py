"""The relay's own strings, sent through the psycopg connection below SQLAlchemy: several statements, one round trip.

Written once for sync and async: on an async connection the caller is inside `run_sync`, whose greenlet may await.
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

# The time that a connection which only queries and listens waits for an answer.
ANSWER_SECONDS = 15.0

# epoll takes no more than 24 days, which a time that was computed from a clock that was set may exceed.
_LONGEST_SECONDS = 86_400.0
# Looked up, and not made: it is read for each job.
_STATUSES = {int(status): status for status in TransactionStatus}

_DRIVERS = (psycopg.Connection, psycopg.AsyncConnection)
DriverConnection: TypeAlias = "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]"


# Rows of a statement, in the order in which the server sent them.
Rows: TypeAlias = Sequence[tuple[Any, ...]]

_STATEMENT = itemgetter(1)
# Numbers, which are compared faster than members.
_COMMAND_OK, _TUPLES_OK = int(ExecStatus.COMMAND_OK), int(ExecStatus.TUPLES_OK)


# Errors of prepared statements: invalid_sql_statement_name, duplicate_prepared_statement, and feature_not_supported,
# "cached plan must not change result type".
_NO_SUCH, _THERE_ALREADY, _TABLE_CHANGED = "26000", "42P05", "0A000"
# If statements are lost before this many executions, as many are sent as text.
_WORTHWHILE = 20


@dataclass(slots=True)
class Script:
    """Single statements for one round trip, each with its owner, which gets its rows; none is found by its number."""

    parts: list[tuple[str, str]] = field(default_factory=list)

    def add(self, owner: str, *statements: str) -> "Script":
        """Append statements of one owner, each of them a single one."""
        for statement in statements:
            self.parts.append((owner, statement))
        return self

    def send(self, connection: Connection) -> "Answer":
        """Send all of them as one simple query; PostgreSQL executes none that comes after a failure.

        If the driver is to begin a transaction, BEGIN goes in front.
        """
        driver = driver_connection(connection)
        text = "; ".join(map(_STATEMENT, self.parts))
        try:
            results = _send(driver, text, begins=True)
        except psycopg.Error as error:
            # Without any result: the connection is lost, or could not be used.
            return Answer({}, False, error, "")
        rows: dict[str, Rows] = {}
        is_committed, failure, failed_at = False, None, ""
        # An error that no statement caused, such as the end of the server, comes in the place of the next result.
        for (owner, _), result in zip(self.parts, results, strict=False):
            status = result.status
            if status == _COMMAND_OK:
                is_committed = is_committed or result.command_status == b"COMMIT"
            elif status == _TUPLES_OK:
                try:
                    found = _rows_of(driver, result)
                except psycopg.Error as error:
                    # A value that Python cannot hold: the statements after it were executed all the same.
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
        is_committed: A COMMIT was executed, also if a later statement failed. False if the connection was lost before
            its result came: then it is not known.
        error: The failure, or None.
        failed_at: The owner of the statement that failed.
    """

    rows: Mapping[str, Rows]
    is_committed: bool
    error: psycopg.Error | None
    failed_at: str


def may_be_of_prepared(error: BaseException) -> bool:
    """Return True if an error may be of a statement that was prepared, or was not, and of no other."""
    return sqlstate_of(error) in (_NO_SUCH, _THERE_ALREADY, _TABLE_CHANGED)


class PreparedStatements:
    """The statements of one sort that a connection has prepared, as far as is known.

    The driver drops all prepared statements at a rollback, and behind a transaction pooler each transaction may come
    to another session. A statement that fails for this costs a round trip only. It is prepared again, unless the
    loss before was a moment ago: then statements are sent as text for a while.

    Attributes:
        names: The names of the statements that are prepared.
        is_plain: Statements are sent as plain text for now.
    """

    def __init__(self, *, prepares: bool = True) -> None:
        self.names: set[str] = set()
        self.is_plain = not prepares
        # Executions since the last loss; below zero while statements are sent as text.
        self._age: float = _WORTHWHILE if prepares else -math.inf

    def succeeded(self, name: str) -> None:
        """Record that the statement of this name was executed: it is prepared now, or was sent as text."""
        if not self.is_plain:
            self.names.add(name)
        self._age += 1
        self.is_plain = self._age < 0

    def failed(self, error: BaseException, name: str) -> bool:
        """Return True if a statement failed because it was prepared, or was not: it is worth another try."""
        if self.is_plain or not may_be_of_prepared(error):
            return False
        sqlstate = sqlstate_of(error)
        if sqlstate == _THERE_ALREADY:
            # By an earlier try that was rolled back: a name always has the same text.
            self.names.add(name)
            return True
        self.names.clear()
        if sqlstate == _TABLE_CHANGED:
            # The old plan stays under its name.
            self._age = -math.inf
        else:
            self._age = 0 if self._age >= _WORTHWHILE else -_WORTHWHILE
        self.is_plain = self._age < 0
        return True


# Behind a pooler, or if the user's settings forbid it.
NOT_PREPARED = PreparedStatements(prepares=False)


@dataclass(frozen=True, slots=True)
class ServerSession:
    """The session of a connection, as far as claims and commits depend on it.

    Args:
        epoch: The run of its server.
        has_citus: True if its database has Citus.
        claims: The claims, and the statement that settles leased jobs, that it has prepared.
        finished_rows: Its prepared INSERT of finished rows.
    """

    epoch: str = ""
    has_citus: bool = False
    claims: PreparedStatements = NOT_PREPARED
    finished_rows: PreparedStatements = NOT_PREPARED

    def roll_back(self, connection: Connection) -> None:
        """Roll back by a statement: after its own rollback the driver drops all prepared statements."""
        if self.claims is not NOT_PREPARED and not is_lost(connection):
            run_script(connection, "ROLLBACK")


# For claims that know nothing of their connection: they are sent as plain text.
ANY_SERVER = ServerSession()


def dbapi_connection(connection: Connection) -> Any:
    """The connection that SQLAlchemy works with: psycopg's, or its adapter of an async one."""
    # Not by the property `connection`: a relay's connection records each time that the driver's is taken by that.
    proxied = connection._dbapi_connection  # noqa: SLF001  # the property also calls the guard
    return (Connection.connection.__get__(connection) if proxied is None else proxied).dbapi_connection


def driver_connection(connection: Connection) -> DriverConnection:
    """The psycopg connection below an SQLAlchemy connection.

    Raises:
        TypeError: another driver.
    """
    proxied = connection._dbapi_connection  # noqa: SLF001  # the property also calls the guard
    below = dbapi_connection(connection) if proxied is None else proxied.dbapi_connection
    if isinstance(below, _DRIVERS):
        return below
    # An async adapter names the one it wraps; the pool's `driver_connection` is gone once a connection is detached.
    driver = getattr(below, "driver_connection", below)
    if not isinstance(driver, _DRIVERS):
        raise TypeError(f"expected a psycopg connection, got {type(driver).__module__}")
    return driver


@contextmanager
def unprepared(connection: Connection) -> Iterator[None]:
    """Prepare no statement on the server: with a pooler the next transaction may have another backend."""
    driver = driver_connection(connection)
    before = driver.prepare_threshold
    driver.prepare_threshold = None
    try:
        yield
    finally:
        driver.prepare_threshold = before


def run_script(connection: Connection, *statements: str) -> Rows:
    """Send statements without parameters as one simple query; returns all of their rows, one after the other.

    PostgreSQL stops at the first statement that fails, and nothing after it is executed. If the driver is to begin a
    transaction, BEGIN goes in front of it.

    Raises:
        psycopg.Error: the first failure.
    """
    driver = driver_connection(connection)
    return _all_rows(driver, _send(driver, "; ".join(statements), begins=True))


def run_alone(connection: Connection, statement: str) -> Rows:
    """The rows of a statement that needs no transaction around it: one message, without BEGIN and COMMIT.

    Raises:
        psycopg.Error: it failed.
    """
    if is_listened_to(connection):
        # Such listeners set up users' transactions, with a role for example.
        with connection.begin():
            return run_script(connection, statement)
    return run_outside_transaction(connection, statement)


def run_outside_transaction(connection: Connection, statement: str) -> Rows:
    """The rows of a statement that PostgreSQL refuses inside of a transaction block.

    Raises:
        psycopg.Error: it failed.
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
    # Below the driver's cursor, whose work for each statement of a string would take as long as that statement.
    pgconn = driver.pgconn
    begins = begins and not driver.autocommit and pgconn.transaction_status == TransactionStatus.IDLE
    if begins:
        script = f"{_begin(driver)}; {script}"
    pgconn.send_query(script.encode(_encoding(driver)))
    results: list[PGresult] = yield from execute(pgconn)
    return results[1:] if begins and len(results) > 1 else results


def _begin(driver: DriverConnection) -> str:
    """The statement by which the driver would begin a transaction."""
    level, read_only, deferrable = driver.isolation_level, driver.read_only, driver.deferrable
    modes = [
        "" if level is None else f" ISOLATION LEVEL {level.name.replace('_', ' ')}",
        "" if read_only is None else f" READ {'ONLY' if read_only else 'WRITE'}",
        "" if deferrable is None else f" {'' if deferrable else 'NOT '}DEFERRABLE",
    ]
    return f"BEGIN{''.join(modes)}"


def _encoding(driver: DriverConnection) -> str:
    """Python's name for the encoding of the connection's texts."""
    # As the server reported to libpq: by the driver it takes several times as long. Some poolers report nothing.
    is_utf8 = driver.pgconn.parameter_status(b"client_encoding") in (b"UTF8", None)
    return "utf-8" if is_utf8 else driver.info.encoding


class _Reader(threading.local):
    """Reads rows in UTF-8 as the driver does by default, without a connection's own adapters; times in UTC."""

    def __init__(self) -> None:
        # Kept: it remembers how the columns that it has seen are read.
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


# The thread that uses each connection by libpq.
libpq_users = weakref.WeakKeyDictionary[PGconn, int]()


def run_on_libpq(connection: PGconn, script: str, answer_seconds: float | None = None) -> list[tuple[str | None, ...]]:
    """Run statements on a thread's own connection; returns, as texts, the rows of the statement that has any.

    It does not wait for ever, as libpq's own call would: the other end of a connection may be gone.

    Args:
        answer_seconds: How long the other end may take nothing and send nothing; `ANSWER_SECONDS` if None. A long
            script or answer may take longer, as long as it moves.

    Raises:
        psycopg.Error: one failed, and those after it were not executed.
        psycopg.OperationalError: it was not answered in time.
    """
    libpq_users[connection] = get_ident()
    seconds = ANSWER_SECONDS if answer_seconds is None else answer_seconds
    connection.send_query(script.encode())
    _flush(connection, seconds)
    rows: list[tuple[str | None, ...]] = []
    failed: psycopg.Error | None = None
    # libpq has to be called until there is no more result.
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
    # The driver's sockets do not block: bytes that they do not take at once stay in libpq's buffer.
    while connection.flush():
        if _wait(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, seconds) & selectors.EVENT_READ:
            # A server that cannot get rid of its notifications does not read either.
            connection.consume_input()


def _next_result(connection: PGconn, seconds: float) -> PGresult | None:
    # Busy also between the last result and the end of the answer, which may come in pieces: libpq would wait for the
    # rest inside its own call, for ever, and psycopg keeps the interpreter's lock while it does.
    while connection.is_busy():
        _wait(connection, selectors.EVENT_READ, seconds)
        connection.consume_input()
    return connection.get_result()


def _wait(connection: PGconn, events: int, seconds: float) -> int:
    """Wait until the connection's socket is ready for one of these events; returns those for which it is.

    Raises:
        psycopg.OperationalError: none within `seconds`.
    """
    ready = _select([connection.socket], events, seconds)
    if not ready:
        raise psycopg.OperationalError(f"a connection was not answered within {seconds:g} s")
    return ready


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def wait_readable(files: "list[socket.socket | int]", seconds: float) -> bool:
    """Wait until one of these can be read; False if none could within `seconds`, or within a day."""
    return bool(_select(files, selectors.EVENT_READ, seconds))


def _select(files: "list[socket.socket | int]", events: int, seconds: float) -> int:
    """Wait until one of these is ready for one of the events; returns the events, 0 if none within `seconds`."""
    # Not select(): it refuses file descriptors from 1024 on.
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, events)
        ready = 0
        for _, found in selector.select(min(seconds, _LONGEST_SECONDS)):
            ready |= found
        return ready


def pause(connection: Connection, seconds: float) -> None:
    """Sleep; other tasks go on if the connection is an async one."""
    if isinstance(driver_connection(connection), psycopg.AsyncConnection):
        await_only(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def transaction_status(connection: Connection) -> TransactionStatus:
    """The status of the transaction by the last answer to the driver; no I/O. UNKNOWN once the connection is lost."""
    if connection.invalidated:
        return TransactionStatus.UNKNOWN
    return _STATUSES[driver_connection(connection).pgconn.transaction_status]


def end_transaction(connection: Connection) -> None:
    """Roll back all that was left open, for SQLAlchemy and for the driver below it."""
    connection.rollback()
    if transaction_status(connection) != TransactionStatus.IDLE:
        run_script(connection, "ROLLBACK")


def is_listened_to(connection: Connection) -> bool:
    """Return True if the engine has users' listeners for the begin or end of transactions (SET LOCAL ROLE, a tenant).

    They see what SQLAlchemy begins, not what a script of ours does.
    """
    listeners = connection.engine.dispatch
    return bool(listeners.begin or listeners.commit)


def is_lost(connection: Connection) -> bool:
    """Return True if the connection to the server is gone."""
    return transaction_status(connection) == TransactionStatus.UNKNOWN


def is_at_rest(connection: Connection) -> bool:
    """Return True if a statement can be sent: none is under way, and nothing else waits to send one; no I/O.

    It cannot after an unfinished COPY or stream, whose driver's lock would be waited for endlessly, nor in the
    driver's pipeline mode, which refuses statements of ours.
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
