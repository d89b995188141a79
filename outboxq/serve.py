"""Serve: the loop around a slot, once for a thread with sync handlers and once for a task with async ones."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.engines import NoConnection, opening
from outboxq.execute import Abandoned, ConnectionLost, Work
from outboxq.invoke import AsyncInvoker, SyncInvoker
from outboxq.slot import UNFLAGGED_PAUSE_SECONDS, Slot
from outboxq.tables import SCHEMA

_OUTAGES = (psycopg.Error, SQLAlchemyError, ConnectionLost, NoConnection, OSError)


def connection_options(engine: Engine | AsyncEngine, schema: str) -> dict[str, Any]:
    """READ COMMITTED, and this installation's tables for whatever a slot or a handler writes through SQLAlchemy."""
    options: dict[str, Any] = {"isolation_level": "READ COMMITTED"}
    mapped: dict[str | None, str | None] = engine.get_execution_options().get("schema_translate_map") or {}
    if mapped.get(SCHEMA, SCHEMA) != schema:
        options["schema_translate_map"] = {**mapped, SCHEMA: schema}
    return options


def serve_in_thread(slot: Slot, engine: Engine, bell: threading.Event) -> None:
    """The loop of a slot with sync handlers."""
    stopping = slot.shared.stopping
    while not (stopping.is_set() or slot.is_seized()):
        try:
            options = connection_options(engine, slot.shared.schema)
            with opening():
                opened = engine.connect()
            with opened.execution_options(**options) as connection, _not_returned(connection):
                work = slot.prepare(connection, SyncInvoker())
                while not (stopping.is_set() or slot.needs_connection(work)):
                    if not slot.work_once(connection, work) and _rest_in_thread(slot, connection, work, bell):
                        return
        except Abandoned:
            return
        except _OUTAGES as error:
            if slot.is_seized():
                return
            stopping.wait(slot.lost(error))


@contextmanager
def _not_returned(connection: Connection) -> Iterator[None]:
    """The slot's session settings must not leak into the pool of the user's engine: close the connection instead."""
    try:
        yield
    finally:
        connection.invalidate()


def _rest_in_thread(slot: Slot, connection: Connection, work: Work, bell: threading.Event) -> bool:
    """Sleep until woken; True where the slot is finished because it only drains."""
    if slot.shared.until_empty:
        return not slot.drain_suspects(connection, work)
    bell.clear()
    flagged = False
    while not slot.shared.stopping.is_set():
        fresh = False
        if not flagged:
            flagged = fresh = _is_flagged(slot)
        # What was committed before the flag was up is visible now; what comes after it rings the bell.
        if slot.work_seen(connection, work, fresh=fresh):
            return False
        if bell.wait(slot.pause_seconds(flagged=flagged)):
            return False
    return False


def _is_flagged(slot: Slot) -> bool:
    request = slot.fall_asleep()
    try:
        return request is not None and request.result(timeout=UNFLAGGED_PAUSE_SECONDS)
    except concurrent.futures.TimeoutError:
        return False


async def serve_in_loop(slot: Slot, engine: AsyncEngine, bell: asyncio.Event) -> None:
    """The loop of a slot with async handlers."""
    stopping = slot.shared.stopping
    while not (stopping.is_set() or slot.is_seized()):
        try:
            async with AsyncExitStack() as stack:
                with opening():
                    connection = await stack.enter_async_context(engine.connect())
                await connection.execution_options(**connection_options(engine, slot.shared.schema))
                try:
                    work = await connection.run_sync(slot.prepare, AsyncInvoker(connection))
                    while not (stopping.is_set() or slot.needs_connection(work)):
                        if not await connection.run_sync(slot.work_once, work) and await _rest_in_loop(
                            slot, connection.run_sync, work, bell
                        ):
                            return
                finally:
                    # As in `_not_returned`.
                    await connection.invalidate()
        except Abandoned:
            return
        except _OUTAGES as error:
            if slot.is_seized():
                return
            # The listener, which lost its connection too, has rung: without this the slot would spin.
            bell.clear()
            pause = slot.lost(error)
            if not stopping.is_set():
                await _wait(bell, pause)


async def _rest_in_loop(slot: Slot, run_sync: Callable[..., Awaitable[Any]], work: Work, bell: asyncio.Event) -> bool:
    """As `_rest_in_thread`."""
    if slot.shared.until_empty:
        return not await run_sync(slot.drain_suspects, work)
    bell.clear()
    flagged = False
    while not slot.shared.stopping.is_set():
        fresh = False
        if not flagged:
            flagged = fresh = await _is_flagged_in_loop(slot)
        if await run_sync(slot.work_seen, work, fresh=fresh):
            return False
        if await _wait(bell, slot.pause_seconds(flagged=flagged)):
            return False
    return False


async def _is_flagged_in_loop(slot: Slot) -> bool:
    request = slot.fall_asleep()
    if request is None:
        return False
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(request)), UNFLAGGED_PAUSE_SECONDS)
    except TimeoutError:
        return False


async def _wait(bell: asyncio.Event, seconds: float) -> bool:
    """Whether it rang within so many seconds."""
    try:
        return await asyncio.wait_for(bell.wait(), seconds)
    except TimeoutError:
        return False
