"""Periodic tasks: what a relay does now and then beside its work, each in a thread and on a connection of its own.

The work depends on none of them: one that fails says so, and comes again.
"""

import logging
import random
import threading
from collections.abc import Callable

from psycopg.pq.abc import PGconn

from outboxq.database.driver import DriverConnection, sqlstate_of
from outboxq.events import Emitter, Event

logger = logging.getLogger("outboxq.chores")

_STOP_SECONDS = 5.0


class PeriodicTask:
    """One of them.

    Args:
        name: As in the name of its thread.
        connect: Opens a connection outside a transaction.
        emit: Given the event of what was done, with the connection closed again.
        stopping: Set when the relay stops.
        seconds: From one time to the next, at most; the pause is drawn, so that many relays take turns.
        first_seconds: The same for the first time.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], DriverConnection],
        emit: Emitter,
        stopping: threading.Event,
        seconds: float,
        first_seconds: float,
    ) -> None:
        self._name = name
        self._connect = connect
        self._emit = emit
        self._stopping = stopping
        self._seconds = seconds
        self._first_seconds = first_seconds
        self._thread = threading.Thread(target=self._run, name=f"outboxq-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and cancel its current run; from now on the relay counts as stopping."""
        self._stopping.set()
        self._thread.join(_STOP_SECONDS)

    def run_once(self) -> None:
        """Run once, on a new connection. Never raises, and ends early when the relay stops."""
        try:
            connection = self._connect()
        except Exception as error:  # noqa: BLE001  # users' engines raise what they like; the slots report outages
            logger.debug("no connection for the %s", self._name, extra={"error_type": type(error).__name__})
            return
        try:
            event = self._run_on(connection.pgconn)
        finally:
            connection.pgconn.finish()
        if event is not None:
            self._emit(event)

    def _run_on(self, connection: PGconn) -> Event | None:
        """Run once; return an event to emit, or None. Raises nothing."""
        raise NotImplementedError

    def _run(self) -> None:
        seconds = self._first_seconds
        while not self._stopping.wait(draw_pause(seconds)):
            self.run_once()
            seconds = self._seconds


def draw_pause(seconds: float, uniform: Callable[[], float] = random.random) -> float:
    """From half of `seconds` to the whole; `uniform` draws from [0, 1)."""
    return seconds * (1 - uniform() / 2)


def refusal_of(error: Exception) -> str | None:
    """The SQLSTATE of an error that is worth a word; None for a lost connection, which the slots report."""
    sqlstate = sqlstate_of(error)
    return None if sqlstate is None or sqlstate.startswith(("08", "57P")) else sqlstate
