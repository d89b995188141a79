"""The pruner: the chore that forgets the messages and the effects whose retention is over.

A round opens a connection, deletes in small transactions, and closes it. It waits for nobody's rows, any number of
relays may prune at once, and nothing depends on when it happens: only the tables' size does.
"""

import contextlib
import logging
import threading
from collections.abc import Callable

import psycopg
from psycopg.pq.abc import PGconn

from outboxq.chores import Chore
from outboxq.driver import DriverConnection, run_on_libpq, sqlstate_of
from outboxq.events import Emitter, Pruned
from outboxq.statements import prune as statements

logger = logging.getLogger("outboxq.pruner")

BATCH_ROWS = 1_000
# Of each table in one round.
MAX_BATCHES = 100
# Between two batches, so that pruning never takes more than a part of what the server can do.
_BREATH_SECONDS = 0.05
# A relay that lives for a minute has pruned, however long its rounds are apart.
_FIRST_SECONDS = 60.0

_NOT_ALLOWED = "the role may not: run what `outboxq roles --sql` prints"
_MISSING = "a table is missing: run `outboxq migrate`"
_ADVICE = {"42501": _NOT_ALLOWED, "42P01": _MISSING, "3F000": _MISSING}
_OTHERWISE = "it is tried again in the next round; the server's log says more"


class Pruner(Chore):
    """Deletes what has expired, now and then.

    Args:
        connect: Opens a connection outside a transaction; a transaction pooler will do.
        stopping: Set when the relay stops: no further batch is begun.
        prune_seconds: From one round to the next, at most; the pause is drawn, so that many relays take turns.
    """

    def __init__(
        self,
        connect: Callable[[], DriverConnection],
        schema: str,
        emit: Emitter,
        stopping: threading.Event,
        *,
        prune_seconds: float,
    ) -> None:
        super().__init__("pruner", connect, emit, stopping, prune_seconds, min(prune_seconds, _FIRST_SECONDS))
        self._messages = _batch(statements.delete_messages(schema, BATCH_ROWS))
        self._effects = _batch(statements.delete_effects(schema, BATCH_ROWS))
        self._warned: set[tuple[str, str]] = set()

    def _do(self, connection: PGconn) -> Pruned | None:
        messages = self._delete_all(connection, "messages", self._messages)
        effects = self._delete_all(connection, "effects", self._effects)
        return Pruned(messages, effects) if messages or effects else None

    def _delete_all(self, connection: PGconn, what: str, deletion: str) -> int:
        """Batch after batch, while they are full; how many rows went."""
        deleted = 0
        for _ in range(MAX_BATCHES):
            rows = self._delete_batch(connection, what, deletion)
            deleted += rows
            if rows < BATCH_ROWS or self._stopping.wait(_BREATH_SECONDS):
                break
        return deleted

    def _delete_batch(self, connection: PGconn, what: str, deletion: str) -> int:
        try:
            return int(run_on_libpq(connection, deletion)[0][0] or 0)
        except Exception as error:  # noqa: BLE001  # whatever it is, the relay's work does not depend on it
            self._report(what, error)
            # The other table may fare better.
            with contextlib.suppress(psycopg.Error, OSError):
                run_on_libpq(connection, statements.rollback())
            return 0

    def _report(self, what: str, error: Exception) -> None:
        """Warn once of each kind of error; of an outage the slots do."""
        sqlstate = sqlstate_of(error)
        if sqlstate is None or sqlstate.startswith(("08", "57P")):
            logger.debug("the pruner's connection failed", extra={"error_type": type(error).__name__})
        elif (what, sqlstate) not in self._warned:
            self._warned.add((what, sqlstate))
            logger.warning(
                "expired %s could not be deleted: %s (%s): %s",
                what,
                type(error).__name__,
                sqlstate,
                _ADVICE.get(sqlstate, _OTHERWISE),
                extra={"outboxq_sqlstate": sqlstate},
            )


def _batch(deletion: str) -> str:
    """A deletion in a transaction of its own: one string, one round trip."""
    return "; ".join((statements.begin(), deletion, statements.commit()))
