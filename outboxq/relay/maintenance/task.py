"""Periodic tasks: a relay's chores besides its jobs, each in its own thread and on its own connection.

The relay's work depends on no task: a failure is logged, and the task runs again later.
"""

import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from psycopg.pq.abc import PGconn

from outboxq.database.closing import finish
from outboxq.database.driver import DriverConnection
from outboxq.database.errors import sqlstate_of
from outboxq.emitter import Emitter
from outboxq.events import Event

logger = logging.getLogger("outboxq.chores")

_STOP_SECONDS = 5.0


@dataclass(eq=False)
class PeriodicTask:
    """A periodic task.

    Args:
        connect: Opens a connection outside a transaction.
        schema: The schema of the tables.
        emit: Called with the events of a run, after its connection was closed.
        stopping: Set when the relay stops: no further step is begun.
        seconds: The longest pause between two runs; each pause is random, so that many relays take turns.
        first_seconds: The longest pause before the first run, if that is shorter.
    """

    name: ClassVar[str]

    connect: Callable[[], DriverConnection]
    schema: str
    emit: Emitter
    stopping: threading.Event
    seconds: float
    first_seconds: float = float("inf")

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=f"outboxq-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and cancel its current run; from now on the relay counts as stopping."""
        self.stopping.set()
        self._thread.join(_STOP_SECONDS)

    def run_once(self) -> None:
        """Run once, on a new connection. Never raises; ends early when the relay stops."""
        try:
            connection = self.connect()
        except Exception as error:  # noqa: BLE001  # users' engines raise what they like; the slots report outages
            logger.debug("no connection for the %s", self.name, extra={"error_type": type(error).__name__})
            return
        try:
            events = self._run_on(connection.pgconn)
        finally:
            finish(connection)
        for event in events:
            self.emit(event)

    def _run_on(self, connection: PGconn) -> Sequence[Event]:
        """Run once; return the events to emit. Raises nothing."""
        raise NotImplementedError

    def _run(self) -> None:
        seconds = min(self.first_seconds, self.seconds)
        while not self.stopping.wait(draw_pause(seconds)):
            self.run_once()
            seconds = self.seconds


def draw_pause(seconds: float, uniform: Callable[[], float] = random.random) -> float:
    """Draw a random pause, from half of `seconds` to the whole; `uniform` draws from [0, 1)."""
    return seconds * (1 - uniform() / 2)


def refusal_of(error: Exception) -> str | None:
    """The SQLSTATE of an error that is to be reported; None for a lost connection, which the slots report."""
    sqlstate = sqlstate_of(error)
    return None if sqlstate is None or sqlstate.startswith(("08", "57P")) else sqlstate
