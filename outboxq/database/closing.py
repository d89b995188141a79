"""Closing of connections: by the thread or task that uses them.

Other code ends a connection's socket, or asks the server to end its session. If it were closed beneath a waiting
statement, that would go on in freed memory: psycopg's C code keeps a bare pointer. Both functions assert this.
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

# Checks of whether a statement has noticed that its socket has ended. Not by a time: a thread that waits for the
# processor, and an event loop that is held up, would notice nothing in it.
_LOOKS = 1_000
_LOOK_SECONDS = 0.01
# Checks that find no statement: one whose thread has just taken the driver's lock has not begun yet, and in an event
# loop those that wait for the lock take a turn each.
_IDLE_LOOKS, _IDLE_TURNS = 3, 20
# The functions in which a thread, or a task, is while a statement of the driver's is under way.
_WAITS = (psycopg.Connection.wait.__code__, psycopg.AsyncConnection.wait.__code__)


def give_up(connection: Connection) -> None:
    """Close for good a connection that a thread or task which a handler has left may be using.

    The socket ends first, and with it the statement: that would read from a socket that is the next connection's, by
    its number.
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
            # A statement that waits for the lock finds the connection closed.
            driver.lock.release()


def finish(connection: DriverConnection) -> None:
    """Close a connection that a thread uses by `run_on_libpq`; in that thread."""
    # psycopg's own close() may be a coroutine; below it there is nothing to wait for.
    assert libpq_users.get(connection.pgconn, get_ident()) == get_ident(), "a connection is closed by another thread"
    connection.pgconn.finish()


def _lock(driver: "psycopg.Connection[Any]") -> bool:
    """End the statement under way, and take the driver's lock; False if an unfinished COPY or stream has it."""
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
    """End the statement under way, and take the driver's lock, on an async connection, which only tasks use."""
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
    """Return True if a thread, or a task of the running event loop, is inside of a statement on this connection."""
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
