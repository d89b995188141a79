"""The upkeep: the chore that builds the indexes of `job` again that are files of almost nothing.

After a backlog was worked off, vacuum takes the empty pages of an index out of every walk, and so claims are quick
again; but the file keeps its size, and each vacuum of the queue reads it from end to end. A relay whose role owns the
tables mends that now and then, beside the work; nothing depends on it. Any other role only says so, once.
"""

import logging
import threading
import time
from collections.abc import Callable

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn

from outboxq.database.driver import DriverConnection, run_on_libpq, wait_readable
from outboxq.database.errors import sqlstate_of
from outboxq.events import Emitter, IndexRebuilt
from outboxq.relay.maintenance.task import PeriodicTask
from outboxq.statements import reindex as statements

logger = logging.getLogger("outboxq.upkeep")

# A smaller file is read within milliseconds.
MIN_BYTES = 64 * 1024**2
# Ten times what an entry takes, the name of its queue being as long as may be.
BYTES_PER_ENTRY = 1_000
LOOK_SECONDS = 600.0
# After one that failed: each try reads the whole table.
RETRY_SECONDS = 6 * 3_600.0
# Who is in the way for longer would make it run into its time limit.
OLD_SECONDS = 5.0
# Longer than the server lets a statement take.
_ANSWER_SECONDS = 75.0
_SLICE_SECONDS = 0.2


class Reindexer(PeriodicTask):
    """Looks after the indexes of the queue, now and then.

    Args:
        connect: Opens a connection outside a transaction. Behind a pooler nothing is done: settings and locks of a
            session would be another client's.
        stopping: Set when the relay stops: what is being built is given up.
        look_seconds: From one look to the next, at most; the pause is drawn, so that many relays take turns.
        min_bytes: Smaller indexes are left alone.
    """

    def __init__(
        self,
        connect: Callable[[], DriverConnection],
        schema: str,
        emit: Emitter,
        stopping: threading.Event,
        *,
        look_seconds: float = LOOK_SECONDS,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        super().__init__("upkeep", connect, emit, stopping, look_seconds, look_seconds)
        self._schema = schema
        self._min_bytes = min_bytes
        self._rests_until = 0.0
        self._warned: set[str] = set()

    def _do(self, connection: PGconn) -> IndexRebuilt | None:
        """One look, and what it leads to: at most one index."""
        try:
            return self._look(connection)
        except Exception as error:  # noqa: BLE001  # whatever it is, the relay's work does not depend on it
            self._report(error)
            return None

    def _look(self, connection: PGconn) -> IndexRebuilt | None:
        if _value(connection, statements.backend_pid()) != str(connection.backend_pid):
            self._say_once("the URL leads to a pooler, through which no index can be built again")
            return None
        run_on_libpq(connection, statements.settings())
        if _value(connection, statements.owns_jobs(self._schema)) != "true":
            self._advise(connection)
        elif _value(connection, statements.lock_upkeep(self._schema)) == "true":
            return self._keep_up(connection)
        return None

    def _advise(self, connection: PGconn) -> None:
        """For the normal case: a role that may work on the jobs, and not on the table."""
        if wasted := self._wasted(connection):
            self._say_once(
                f"index {wasted[0][0]} is far larger than what is in it, and this role may not build it again: "
                "see `outboxq doctor`"
            )

    def _keep_up(self, connection: PGconn) -> IndexRebuilt | None:
        if time.monotonic() < self._rests_until or _value(connection, statements.obstacle(self._schema, OLD_SECONDS)):
            return None
        left_over = [name for (name,) in run_on_libpq(connection, statements.left_over_indexes(self._schema)) if name]
        wasted = self._wasted(connection)
        # Should this fail, it is not tried again with each look.
        self._rests_until = time.monotonic() + RETRY_SECONDS
        for name in left_over:
            self._run_long(connection, statements.drop_index(self._schema, name))
        rebuilt = self._rebuild(connection, *wasted[0]) if wasted else None
        self._rests_until = 0.0
        return rebuilt

    def _wasted(self, connection: PGconn) -> list[tuple[str, int]]:
        """Names and sizes, the largest first."""
        found = run_on_libpq(connection, statements.wasted_indexes(self._schema, self._min_bytes, BYTES_PER_ENTRY))
        return [(str(name), int(size or 0)) for name, size in found]

    def _rebuild(self, connection: PGconn, name: str, size: int) -> IndexRebuilt | None:
        needed = size // BYTES_PER_ENTRY
        if int(_value(connection, statements.count_jobs(self._schema, needed)) or 0) >= needed:
            return None
        self._run_long(connection, statements.reindex(self._schema, name))
        after = int(_value(connection, statements.index_bytes(self._schema, name)) or 0)
        return IndexRebuilt(name, size, after)

    def _run_long(self, connection: PGconn, statement: str) -> None:
        """Run what may take a minute, and cancel it when the relay stops."""
        connection.send_query(statement.encode())
        deadline = time.monotonic() + _ANSWER_SECONDS
        cancelled = False
        while connection.is_busy():
            if self._stopping.is_set() and not cancelled:
                connection.get_cancel().cancel()
                cancelled = True
            if time.monotonic() > deadline:
                raise psycopg.OperationalError(f"a connection was not answered within {_ANSWER_SECONDS:g} s")
            if wait_readable([connection.socket], _SLICE_SECONDS):
                connection.consume_input()
        while (result := connection.get_result()) is not None:
            if result.status != ExecStatus.COMMAND_OK:
                raise error_from_result(result)

    def _report(self, error: Exception) -> None:
        sqlstate = sqlstate_of(error)
        if sqlstate is None or sqlstate.startswith(("08", "57P")) or self._stopping.is_set():
            logger.debug("the upkeep's connection failed", extra={"error_type": type(error).__name__})
        else:
            self._say_once(
                f"an index of the queue could not be built again ({sqlstate}): it is tried again in some hours, and "
                "nothing else depends on it"
            )

    def _say_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.info(message)


def _value(connection: PGconn, statement: str) -> str | None:
    rows = run_on_libpq(connection, statement)
    return rows[0][0] if rows else None
