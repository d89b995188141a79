"""Closes connections: only the thread or task that uses a connection closes it.

Other code only ends the connection's socket, or requests the server to end its session. If a connection were closed
during a statement, psycopg's C code would go on in freed memory, since it keeps a bare pointer. `give_up` and `finish`
assert that no statement is under way.
"""

import asyncio
import inspect
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from threading import get_ident
from types import FrameType
from typing import Any

import psycopg
from sqlalchemy import Connection
from sqlalchemy.util import await_only

from outboxq.database.answers import inner_coroutine
from outboxq.database.driver import DriverConnection, driver_connection, libpq_users

# The number of checks if a statement has noticed the end of its socket. A time limit would not do: a thread that waits
# for the processor, or a blocked event loop, would notice nothing within it.
_LOOKS = 1_000
_LOOK_SECONDS = 0.01
# The number of checks that find no statement: a thread that has just taken the driver's lock has not begun its
# statement yet, and on an event loop each waiter for the lock takes a turn.
_IDLE_LOOKS, _IDLE_TURNS = 3, 20
# The functions in which a thread or task is while the driver executes a statement.
_WAITS = (psycopg.Connection.wait.__code__, psycopg.AsyncConnection.wait.__code__)


def give_up(connection: Connection) -> None:
    """Close a connection for good, even if a thread or task that a handler left running still uses it.

    The socket is shut down first, which ends a running statement: otherwise that statement might read from the socket
    of the next connection, if that gets the same file descriptor.
    """
    if connection.closed or connection.invalidated:
        return
    driver, is_ours = driver_connection(connection), False
    try:
        is_ours = await_only(_lock_async(driver)) if isinstance(driver, psycopg.AsyncConnection) else _lock(driver)
        assert is_ours or not _is_waited_on(driver), "a connection is closed beneath a statement"
    finally:
        connection.invalidate()
        if is_ours:
            # A statement that waits for the lock then finds the connection closed.
            driver.lock.release()


def finish(connection: DriverConnection) -> None:
    """Close a connection on which one thread runs statements through libpq, past psycopg (`run_on_libpq`).

    Only that thread may call this function: to close a connection during a statement would crash the process.
    """
    # psycopg's own close() may be a coroutine; libpq's needs no waiting.
    assert libpq_users.get(connection.pgconn, get_ident()) == get_ident(), "a connection is closed by another thread"
    connection.pgconn.finish()


def _lock(driver: "psycopg.Connection[Any]") -> bool:
    """Take the driver's lock, to close the connection; end a running statement that has it by shutting down its socket.

    Return False if the lock is never freed, because code holds it with an unfinished COPY or stream.
    """
    if driver.lock.acquire(blocking=False):
        return True
    _end_socket(driver)
    idle = 0
    for _ in range(_LOOKS):
        if driver.lock.acquire(timeout=_LOOK_SECONDS):
            return True
        idle = 0 if _is_waited_on(driver) else idle + 1
        if idle == _IDLE_LOOKS:
            break
    return False


async def _lock_async(driver: "psycopg.AsyncConnection[Any]") -> bool:
    """Take an async driver's lock, to close the connection; end a running statement that has it by its socket.

    Return False if the lock is never freed, because code holds it with an unfinished COPY or stream. Only tasks of this
    event loop use the connection.
    """
    if not driver.lock.locked():
        return await driver.lock.acquire()
    _end_socket(driver)
    taking, idle = asyncio.ensure_future(driver.lock.acquire()), 0
    try:
        for _ in range(_LOOKS):
            is_waited_on = _is_waited_on(driver)
            await asyncio.wait([taking], timeout=_LOOK_SECONDS if is_waited_on else 0)
            if taking.done():
                return True
            idle = 0 if is_waited_on else idle + 1
            if idle == _IDLE_TURNS:
                break
    finally:
        taking.cancel()
    return False


def _end_socket(driver: DriverConnection) -> None:
    with suppress(OSError, psycopg.OperationalError), socket.socket(fileno=os.dup(driver.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _is_waited_on(driver: DriverConnection) -> bool:
    """Return True if a thread, or a task of the running event loop, waits inside a statement on this connection."""
    is_async = isinstance(driver, psycopg.AsyncConnection)
    frames = _awaiting_frames() if is_async else _running_frames()
    return any(frame.f_code in _WAITS and frame.f_locals.get("self") is driver for frame in frames)


def _running_frames() -> Iterator[FrameType]:
    for frame in sys._current_frames().values():  # noqa: SLF001  # documented in the library reference
        found: FrameType | None = frame
        while found is not None:
            yield found
            found = found.f_back


def _awaiting_frames() -> Iterator[FrameType]:
    for task in asyncio.all_tasks():
        awaited = inner_coroutine(task.get_coro())
        while inspect.iscoroutine(awaited):
            if awaited.cr_frame is not None:
                yield awaited.cr_frame
            awaited = inner_coroutine(awaited.cr_await)
