"""The reindexer: the periodic task that rebuilds bloated indexes of the table `job`.

After a backlog was worked off, vacuum unlinks the empty pages of an index, so claims no longer read them and are fast
again; but the file keeps its size, and each vacuum of the table reads all of it. A relay whose role owns the tables
rebuilds such indexes, only for speed. A relay under any other role logs once that an index should be rebuilt.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn

from outboxq.database.driver import run_on_libpq, wait_readable
from outboxq.events import IndexRebuilt
from outboxq.relay.maintenance.task import PeriodicTask, refusal_of
from outboxq.statements import reindex as statements

logger = logging.getLogger("outboxq.upkeep")

# A smaller file is read within milliseconds.
MIN_BYTES = 64 * 1024**2
# Ten times the size of an entry with the longest queue name.
BYTES_PER_ENTRY = 1_000
# The pause after a rebuild that failed: each try reads the whole table.
RETRY_SECONDS = 6 * 3_600.0
# Longer than the statement_timeout of the reindexer's session.
_ANSWER_SECONDS = 75.0
_SLICE_SECONDS = 0.2


@dataclass(eq=False)
class Reindexer(PeriodicTask):
    """Rebuilds bloated indexes of the table `job` periodically; cancels a rebuild when the relay stops.

    Does nothing behind a pooler, where the settings and locks of its session could reach another client.

    Args:
        min_bytes: Smaller indexes are not rebuilt.
        old_seconds: Nothing is rebuilt while a transaction has run for longer than this: the rebuild would wait for
            that transaction, up to its own time limit.
    """

    name = "reindexer"

    seconds: float = 600.0
    min_bytes: int = MIN_BYTES
    old_seconds: float = 5.0
    _paused_until: float = field(default=0.0, init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    def _run_on(self, connection: PGconn) -> Sequence[IndexRebuilt]:
        """Rebuild one bloated index, if there is one; return its event, or no event."""
        try:
            rebuilt = self._check(connection)
        except Exception as error:  # noqa: BLE001  # reported; the index stays as it is
            self._report(error)
            return ()
        return () if rebuilt is None else (rebuilt,)

    def _check(self, connection: PGconn) -> IndexRebuilt | None:
        if _value(connection, statements.backend_pid()) != str(connection.backend_pid):
            self._say_once("the URL leads to a pooler, through which no index can be built again")
            return None
        run_on_libpq(connection, statements.settings())
        if _value(connection, statements.owns_jobs(self.schema)) != "true":
            self._advise(connection)
        elif _value(connection, statements.try_lock_reindexing(self.schema)) == "true":
            return self._maintain(connection)
        return None

    def _advise(self, connection: PGconn) -> None:
        """Log once if an index is bloated and this role may not rebuild it: usually the role does not own the table."""
        if wasted := self._wasted(connection):
            self._say_once(
                f"index {wasted[0][0]} is far larger than what is in it, and this role may not build it again: "
                "see `outboxq doctor`"
            )

    def _maintain(self, connection: PGconn) -> IndexRebuilt | None:
        is_paused = time.monotonic() < self._paused_until
        if is_paused or _value(connection, statements.obstacle(self.schema, self.old_seconds)):
            return None
        left_over = [name for (name,) in run_on_libpq(connection, statements.left_over_indexes(self.schema)) if name]
        wasted = self._wasted(connection)
        # Set before, so that a rebuild that fails is not tried again at each check.
        self._paused_until = time.monotonic() + RETRY_SECONDS
        for name in left_over:
            self._run_long(connection, statements.drop_index(self.schema, name))
        rebuilt = self._rebuild(connection, *wasted[0]) if wasted else None
        self._paused_until = 0.0
        return rebuilt

    def _wasted(self, connection: PGconn) -> list[tuple[str, int]]:
        """Return the bloated indexes, the largest first: the name of each, and its size in bytes."""
        found = run_on_libpq(connection, statements.wasted_indexes(self.schema, self.min_bytes, BYTES_PER_ENTRY))
        return [(str(name), int(size or 0)) for name, size in found]

    def _rebuild(self, connection: PGconn, name: str, size: int) -> IndexRebuilt | None:
        needed = size // BYTES_PER_ENTRY
        if int(_value(connection, statements.count_jobs(self.schema, needed)) or 0) >= needed:
            return None
        self._run_long(connection, statements.reindex(self.schema, name))
        after = int(_value(connection, statements.index_bytes(self.schema, name)) or 0)
        return IndexRebuilt(name, size, after)

    def _run_long(self, connection: PGconn, statement: str) -> None:
        """Run a statement that may take a minute, and cancel it when the relay stops."""
        connection.send_query(statement.encode())
        deadline = time.monotonic() + _ANSWER_SECONDS
        cancelled = False
        while connection.is_busy():
            if self.stopping.is_set() and not cancelled:
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
        sqlstate = refusal_of(error)
        if sqlstate is None or self.stopping.is_set():
            logger.debug("the reindexer's connection failed", extra={"error_type": type(error).__name__})
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
