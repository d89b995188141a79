"""The relay's own strings, sent through the psycopg connection below SQLAlchemy: several statements, one round trip.

Written once for both worlds: on an async connection the caller stands inside `run_sync`, whose greenlet may await.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only

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
