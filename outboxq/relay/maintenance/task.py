"""Periodic tasks: a relay's chores apart from its jobs, each in its own thread and on its own connection.

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
    """A chore of a relay that runs again and again, in its own thread, each time on a new connection.

    Args:
        connect: Opens a connection outside a transaction.
        schema: The schema of the tables.
        emit: Called with each event of a run, after the run's connection was closed.
        stopping: Set when the relay stops: a run ends early, and no further run begins.
        seconds: The longest pause between two runs; each pause is random, so that many relays do not run at the same
            time.
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
        """Set `stopping`, which also ends or cancels the present run, and wait for the thread, for 5 s at most."""
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
        """Do the work of one run on this connection; return the events to emit. Never raises."""
        raise NotImplementedError

    def _run(self) -> None:
        seconds = min(self.first_seconds, self.seconds)
        while not self.stopping.wait(draw_pause(seconds)):
            self.run_once()
            seconds = self.seconds


def draw_pause(seconds: float, uniform: Callable[[], float] = random.random) -> float:
    """Return a random pause: from half of `seconds` to all of it. `uniform` returns a random number from [0, 1)."""
    return seconds * (1 - uniform() / 2)


def refusal_of(error: Exception) -> str | None:
    """Return the SQLSTATE of an error by which the server refused a statement; None for a lost connection.

    The caller reports only refusals, because slots report lost connections.
    """
    sqlstate = sqlstate_of(error)
    return None if sqlstate is None or sqlstate.startswith(("08", "57P")) else sqlstate
