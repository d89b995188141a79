"""Serve: the loop around a slot, once for a thread with sync handlers and once for a task with async ones."""

import asyncio
import concurrent.futures
import threading

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from outboxq.database.errors import NoConnection
from outboxq.execution.errors import Abandoned, ConnectionLost
from outboxq.relay.connections import AsyncSlotConnections, SlotConnections
from outboxq.relay.idle import UNFLAGGED_PAUSE_SECONDS
from outboxq.relay.slot import Slot

_OUTAGES = (psycopg.Error, SQLAlchemyError, ConnectionLost, NoConnection, OSError)


def serve_in_thread(slot: Slot, lines: SlotConnections, bell: threading.Event) -> None:
    """The loop of a slot with sync handlers."""
    stopping = slot.state.stopping
    while not (stopping.is_set() or slot.is_seized()):
        try:
            if slot.state.until_empty:
                with lines.line() as line:
                    is_drained = slot.drain(line)
                if is_drained:
                    return
                continue
            is_over = True
            if slot.wants_work():
                with lines.line() as line:
                    is_over = slot.work_all(line)
            if is_over:
                _rest_in_thread(slot, lines, bell)
        except Abandoned:
            return
        except _OUTAGES as error:
            if slot.is_seized():
                return
            stopping.wait(slot.lost(error))


def _rest_in_thread(slot: Slot, lines: SlotConnections, bell: threading.Event) -> None:
    """Sleep until woken, or until a look found something; without a connection but for looks."""
    bell.clear()
    flagged = False
    while not slot.state.stopping.is_set():
        if slot.sleep.wants_line():
            with lines.line() as line:
                if slot.work_seen(line):
                    return
        if not flagged:
            flagged = slot.sleep.is_flagged(_flagged_since(slot))
            if slot.sleep.wants_line():
                continue
        if bell.wait(slot.pause_seconds(flagged=flagged)):
            slot.sleep.want_look()
            return


def _flagged_since(slot: Slot) -> float | None:
    request = slot.sleep.fall_asleep()
    try:
        return None if request is None else request.result(timeout=UNFLAGGED_PAUSE_SECONDS)
    except concurrent.futures.TimeoutError:
        return None


async def serve_in_loop(slot: Slot, lines: AsyncSlotConnections, bell: asyncio.Event) -> None:
    """The loop of a slot with async handlers."""
    stopping = slot.state.stopping
    while not (stopping.is_set() or slot.is_seized()):
        try:
            if slot.state.until_empty:
                async with lines.line() as line:
                    is_drained = await line.run(slot.drain)
                if is_drained:
                    return
                continue
            is_over = True
            if slot.wants_work():
                async with lines.line() as line:
                    is_over = await line.run(slot.work_all)
            if is_over:
                await _rest_in_loop(slot, lines, bell)
        except Abandoned:
            return
        except asyncio.CancelledError as error:
            # The relay's own come when it is done with the slot. Any other is of a handler that had its task cancelled
            # later, and had ended by then.
            if slot.is_abandoned or slot.is_seized() or stopping.is_set():
                raise
            task = asyncio.current_task()
            assert task is not None
            while task.cancelling():
                task.uncancel()
            slot.lost(error)
        except _OUTAGES as error:
            if slot.is_seized():
                return
            # The listener, which lost its connection too, has rung: without this the slot would spin.
            bell.clear()
            pause = slot.lost(error)
            if not stopping.is_set():
                await _wait(bell, pause)


async def _rest_in_loop(slot: Slot, lines: AsyncSlotConnections, bell: asyncio.Event) -> None:
    """As `_rest_in_thread`."""
    bell.clear()
    flagged = False
    while not slot.state.stopping.is_set():
        if slot.sleep.wants_line():
            async with lines.line() as line:
                if await line.run(slot.work_seen):
                    return
        if not flagged:
            flagged = slot.sleep.is_flagged(await _flagged_since_in_loop(slot))
            if slot.sleep.wants_line():
                continue
        if await _wait(bell, slot.pause_seconds(flagged=flagged)):
            slot.sleep.want_look()
            return


async def _flagged_since_in_loop(slot: Slot) -> float | None:
    request = slot.sleep.fall_asleep()
    if request is None:
        return None
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(request)), UNFLAGGED_PAUSE_SECONDS)
    except TimeoutError:
        return None


async def _wait(bell: asyncio.Event, seconds: float) -> bool:
    """Whether it rang within so many seconds."""
    try:
        return await asyncio.wait_for(bell.wait(), seconds)
    except TimeoutError:
        return False
