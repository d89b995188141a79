"""The historian: adds the outcomes of a relay's jobs to the history, and records that the relay lives.

It has its own thread, and opens a connection for each round. No job depends on it: while the tables are missing, or the
role may not write them, one log line says so, and the counts wait in memory.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from outboxq.clock import clock
from outboxq.database.closing import finish
from outboxq.database.driver import DriverConnection, run_on_libpq
from outboxq.database.errors import describe_error
from outboxq.observability.flush import Flusher
from outboxq.observability.gauges import write_gauges
from outboxq.observability.history import prune, roll_up_one_hour
from outboxq.relay.limits import HistoryLimits
from outboxq.relay.maintenance.side_connection import SideConnection
from outboxq.relay.maintenance.task import draw_pause, refusal_of
from outboxq.statements.transaction import BEGIN

logger = logging.getLogger("outboxq.history")

_UPKEEP_SECONDS = 600.0
# The most hours that one round rolls up: two weeks without a relay.
_HOURS_MOST = 336
_LAST_TRIES, _LAST_PAUSE_SECONDS = 5, 0.1
_NOT_ALLOWED = "the role may not: run what `outboxq roles --sql` prints"
_MISSING = "its tables are missing: run `outboxq migrate`"
_ADVICE = {"42501": _NOT_ALLOWED, "42P01": _MISSING, "3F000": _MISSING}


@dataclass(eq=False)
class Historian:
    """Writes (flushes) the relay's state and counts every few seconds (`limits.flush_seconds`), and once when it stops.

    Args:
        stats_seconds: The longest time between two flushes that add to the history; 0: never add to it.
        connect: Opens a connection outside a transaction; a transaction pooler will do.
        beside: Runs the transactions that write gauges and prune the history, on a connection of its own.
        stopping: Set when the relay stops: then no gauges are written, and nothing is pruned.

    Attributes:
        failures: The number of failed rounds.
    """

    flusher: Flusher
    connect: Callable[[], DriverConnection]
    beside: SideConnection
    schema: str
    stopping: threading.Event
    limits: HistoryLimits
    stats_seconds: float = 15.0

    def __post_init__(self) -> None:
        self.failures = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outboxq-history", daemon=True)
        self._connection: DriverConnection | None = None
        self._warned: set[str] = set()
        self._gauges_from = clock() + self.limits.gauges_after_seconds
        self._upkeep_at = clock() + draw_pause(_UPKEEP_SECONDS)
        self._counts_at = clock()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Flush the counts, remove the relay's row, and end the thread. Waits for `limits.finish_seconds` at most."""
        self._over.set()
        self._thread.join(self.limits.finish_seconds)

    def _run(self) -> None:
        seconds = self.limits.first_seconds
        while not self._over.wait(draw_pause(seconds)):
            self.run_once()
            seconds = min(self.limits.flush_seconds, self.stats_seconds or self.limits.flush_seconds)
        self._finish()

    def run_once(self) -> None:
        """Write the relay's state and counts; then the gauges, if due, and prune the history, if due. Never raises.

        If the relay stops, only the state and counts are written.
        """
        self._try(self._flush)

    def _flush(self) -> None:
        counts = self.stats_seconds > 0 and clock() >= self._counts_at
        has_gauges = self.flusher.flush(self._transact, counts=counts)
        self._let_go()
        if counts:
            # The first round after this time is not later than `stats_seconds` allows.
            self._counts_at = clock() + max(0.0, self.stats_seconds - self.limits.flush_seconds)
        if self.stopping.is_set():
            return
        if not has_gauges and clock() >= self._gauges_from:
            self.beside.transact(lambda connection: write_gauges(connection, self.schema))
        if clock() >= self._upkeep_at:
            self._keep_up()

    def _transact(self, script: str) -> list[tuple[str | None, ...]]:
        """Run a script in a transaction, in one round trip; return its rows.

        All scripts of a round use one connection, which the first one opens.
        """
        if self._connection is None:
            self._connection = self.connect()
        return run_on_libpq(self._connection.pgconn, f"{BEGIN}; {script}; COMMIT")

    def _let_go(self) -> None:
        if self._connection is not None:
            finish(self._connection)
            self._connection = None

    def _keep_up(self) -> None:
        self._upkeep_at = clock() + draw_pause(_UPKEEP_SECONDS)
        # First, because an hour that cannot be rolled up must not prevent it.
        self.beside.transact(lambda connection: prune(connection, self.schema))
        for _ in range(_HOURS_MOST):
            if self.stopping.is_set() or not self.beside.transact(self._roll_up):
                break

    def _roll_up(self, connection: Connection) -> bool:
        return roll_up_one_hour(connection, self.schema)

    def _finish(self) -> None:
        counts = self.stats_seconds > 0
        if not self.flusher.has_something_to_say(counts=counts):
            return
        # Each step may lose its connection, as the flush before may have done.
        for _ in range(_LAST_TRIES):
            if self._try(lambda: self.flusher.leave(self._transact, counts=counts)):
                return
            time.sleep(_LAST_PAUSE_SECONDS)

    def _try(self, step: Callable[[], object]) -> bool:
        """Call `step` and close the connections that it used; return True.

        If it raises, count and log the error; return False.
        """
        try:
            step()
        except Exception as error:  # noqa: BLE001  # counted and logged; numbers wait for the next flush
            self.failures += 1
            self._report(error)
            return False
        finally:
            self._let_go()
            if self.beside.was_used:
                with suppress(Exception):
                    self.beside.rest()
        return True

    def _report(self, error: Exception) -> None:
        """Log an error of a round: a refusal by the server as a warning, once per SQLSTATE; a lost connection at DEBUG.

        Slots report outages, so a lost connection needs no warning here.
        """
        original = error.orig if isinstance(error, DBAPIError) else error
        sqlstate = refusal_of(original) if isinstance(original, Exception) else None
        if sqlstate is None:
            logger.debug("the history's connection failed", extra={"error_type": type(error).__name__})
        elif sqlstate not in self._warned:
            self._warned.add(sqlstate)
            logger.warning(
                "the history is not written, and the relay works without it: %s",
                _ADVICE.get(sqlstate) or describe_error(error),
                extra={"outboxq_sqlstate": sqlstate},
            )
