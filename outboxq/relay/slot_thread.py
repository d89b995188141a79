"""A slot with sync handlers, in a thread of its own: its loop, and how it is given up."""

import concurrent.futures
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable

import psycopg
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.config import SlotGroup
from outboxq.database.driver import dbapi_connection
from outboxq.database.errors import NoConnection
from outboxq.execution.attempt import Abandoned, ConnectionLost
from outboxq.relay.connections import SlotConnections
from outboxq.relay.idle import UNFLAGGED_PAUSE_SECONDS
from outboxq.relay.slot import Slot
from outboxq.relay.state import RelayState
from outboxq.relay.threads import BoundedStart

# What a slot survives: its connection is lost, or refuses a statement.
CONNECTION_ERRORS = (psycopg.Error, SQLAlchemyError, ConnectionLost, NoConnection, OSError)


class SlotThread:
    """A slot with sync handlers, in a thread of its own."""

    def __init__(
        self, state: RelayState, group: SlotGroup, connections: SlotConnections, fail: Callable[[BaseException], None]
    ) -> None:
        self._wake_event = threading.Event()
        self.slot = Slot(state, "sync", group.queues, self._wake_event.set, group.in_turns)
        self.has_failed = False
        self._state = state
        self._connections = connections
        self._fail = fail
        self._detached: DBAPIConnection | None = None
        # A daemon: a handler that outlives the time to drain must not keep the process alive.
        self._thread = BoundedStart(self._run, "outboxq-slot")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  # raised again by the relay
            self.has_failed = True
            self._fail(error)
        finally:
            if self._detached is not None:
                self._detached.close()

    def _serve(self) -> None:
        slot, stopping, until_empty = self.slot, self._state.stopping, self._state.until_empty
        work = slot.drain if until_empty else slot.work_all
        while not (stopping.is_set() or slot.is_seized()):
            try:
                is_over = not (until_empty or slot.wants_work())
                if not is_over:
                    with self._connections.borrow() as slot_connection:
                        is_over = work(slot_connection)
                if is_over and until_empty:
                    return
                if is_over:
                    self._sleep()
            except Abandoned:
                return
            except CONNECTION_ERRORS as error:
                if slot.is_seized():
                    return
                stopping.wait(slot.lost(error))

    def _sleep(self) -> None:
        """Sleep until woken, or until a poll found something; without a connection except to poll."""
        slot, sleep = self.slot, self.slot.sleep
        self._wake_event.clear()
        flagged = False
        while not self._state.stopping.is_set():
            if sleep.needs_connection():
                with self._connections.borrow() as slot_connection:
                    if slot.work_seen(slot_connection):
                        return
            if not flagged:
                flagged = sleep.is_flagged(self._flagged_since())
                if sleep.needs_connection():
                    continue
            if self._wake_event.wait(slot.pause_seconds(flagged=flagged)):
                sleep.want_poll()
                return

    def _flagged_since(self) -> float | None:
        request = self.slot.sleep.fall_asleep()
        try:
            return None if request is None else request.result(timeout=UNFLAGGED_PAUSE_SECONDS)
        except concurrent.futures.TimeoutError:
            return None

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def abandon(self) -> None:
        """Free its place in the pool for the slot that follows. The thread cannot be stopped, and cannot commit."""
        slot_connection = self.slot.line
        if slot_connection is None or self._detached is not None:
            return
        connection = slot_connection.connection
        if connection.closed or connection.invalidated:
            return
        # Its thread may be closing it at this moment.
        with contextlib.suppress(SQLAlchemyError):
            self._detached = dbapi_connection(connection)
            connection.detach()

    def ask(self) -> None:
        """Nothing to ask: a thread is shared with no other handler."""

    def is_held_up(self) -> bool:
        return False

    def is_running(self) -> bool:
        """False: it runs in no event loop."""
        return False

    def stack(self) -> list[traceback.FrameSummary]:
        return stack_of_thread(self._thread.ident)


def stack_of_thread(thread: int | None) -> list[traceback.FrameSummary]:
    """Where a thread stands; empty if it has ended."""
    frame = None if thread is None else sys._current_frames().get(thread)  # noqa: SLF001  # documented in the library reference
    return [] if frame is None else list(traceback.extract_stack(frame))
