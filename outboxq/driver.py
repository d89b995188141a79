"""The relay's own strings, sent through the psycopg connection below SQLAlchemy: several statements, one round trip.

Written once for both worlds: on an async connection the caller stands inside `run_sync`, whose greenlet may await.
"""

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only

# How long a connection that only asks and listens waits for an answer.
ANSWER_SECONDS = 15.0

DriverConnection: TypeAlias = "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]"


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """What one statement of a script gave: its command tag and its rows."""

    tag: str
    rows: Sequence[tuple[object, ...]]


def driver_connection(connection: Connection) -> DriverConnection:
    """The psycopg connection below an SQLAlchemy connection.

    Raises:
        TypeError: another driver.
    """
    # Not `driver_connection`, which a detached connection no longer has; an async adapter still names what it wraps.
    below = connection.connection.dbapi_connection
    driver = getattr(below, "driver_connection", below)
    if not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        raise TypeError(f"expected a psycopg connection, got {type(driver).__module__}")
    return driver


def run_script(connection: Connection, script: str) -> list[ScriptResult]:
    """Send `script`, one or more statements without parameters, as one simple query.

    PostgreSQL stops at the first statement that fails, and nothing after it is executed.

    Raises:
        psycopg.Error: the first failure.
    """
    driver = driver_connection(connection)
    if isinstance(driver, psycopg.AsyncConnection):
        return await_only(_run_async(driver, script))
    with driver.cursor() as cursor:
        cursor.execute(script.encode())
        results = [_result(cursor, cursor.fetchall() if cursor.description else [])]
        while cursor.nextset():
            results.append(_result(cursor, cursor.fetchall() if cursor.description else []))
        return results


async def _run_async(driver: "psycopg.AsyncConnection[Any]", script: str) -> list[ScriptResult]:
    async with driver.cursor() as cursor:
        await cursor.execute(script.encode())
        results = [_result(cursor, await cursor.fetchall() if cursor.description else [])]
        while cursor.nextset():
            results.append(_result(cursor, await cursor.fetchall() if cursor.description else []))
        return results


def _result(cursor: "psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]", rows: Sequence[Any]) -> ScriptResult:
    return ScriptResult(cursor.statusmessage or "", rows)


def run_on_libpq(connection: PGconn, script: str) -> list[tuple[str | None, ...]]:
    """Run statements on a connection of a thread of its own; as texts the rows of the one that returns rows.

    Never waits for ever, as libpq's own call would: a connection may have nobody behind it any more.

    Raises:
        psycopg.Error: one failed, and those behind it were not executed.
        psycopg.OperationalError: it was not answered in time.
    """
    connection.send_query(script.encode())
    deadline = time.monotonic() + ANSWER_SECONDS
    rows: list[tuple[str | None, ...]] = []
    failed: psycopg.Error | None = None
    # libpq wants to be asked until there is nothing more.
    while (result := _next_result(connection, deadline)) is not None:
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


def _next_result(connection: PGconn, deadline: float) -> PGresult | None:
    # Busy also between the last result and the end of the answer, which may come in pieces: libpq would wait for the
    # rest inside its own call, without an end, and psycopg keeps the interpreter's lock meanwhile.
    while connection.is_busy():
        if not wait_readable([connection.socket], max(0.0, deadline - time.monotonic())):
            raise psycopg.OperationalError(f"a connection was not answered within {ANSWER_SECONDS:g} s")
        connection.consume_input()
    return connection.get_result()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def wait_readable(files: "list[socket.socket | int]", seconds: float) -> bool:
    """Wait until one of these can be read; False where none could within `seconds`."""
    # Not select(): it refuses file descriptors from 1024 on.
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def transaction_status(connection: Connection) -> TransactionStatus:
    """What the driver last heard of the transaction; no I/O. UNKNOWN once the connection is lost."""
    if connection.invalidated:
        return TransactionStatus.UNKNOWN
    return driver_connection(connection).info.transaction_status


def is_lost(connection: Connection) -> bool:
    """Whether the connection to the server is gone."""
    return transaction_status(connection) == TransactionStatus.UNKNOWN


def sqlstate_of(error: BaseException) -> str | None:
    """The SQLSTATE of a database error, raised by the driver or through SQLAlchemy, else None."""
    original = error.orig if isinstance(error, DBAPIError) else error
    return original.sqlstate if isinstance(original, psycopg.Error) else None
