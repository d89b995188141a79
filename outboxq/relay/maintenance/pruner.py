"""The pruner: the periodic task that deletes expired messages, effects, unique keys, finished rows and dead letters.

It also sweeps callback batches (`jobs.batch`: sets of jobs after whose end another job, the callback, is enqueued): it
enqueues the callbacks that are missing. The end of a batch goes unnoticed if the relay of its last job died between
that job's COMMIT and the check, or if an operator, another relay's lease or an older relay removed the job.

A round opens a connection, deletes in small transactions, and closes it. It waits for no row locks, any number of
relays may prune at once, and jobs run as well without it: only the tables would grow.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias
from uuid import UUID

import psycopg
from psycopg.pq.abc import PGconn

from outboxq.database.driver import run_on_libpq
from outboxq.events import DeadLettersPruned, Pruned
from outboxq.execution.aside import describe, is_of_a_row
from outboxq.relay.maintenance.task import PeriodicTask, refusal_of
from outboxq.statements import prune as statements
from outboxq.statements.callback_batches import SETTINGS, batch_page, sweep_batches
from outboxq.statements.transaction import BEGIN
from outboxq.statements.unique import delete_idle_keys, lock_idle_keys

logger = logging.getLogger("outboxq.pruner")

# The most rows that cannot be deleted and are skipped in a round: if there are more, single rows are not the cause.
_MOST_REFUSED = 20
# The pause between two transactions, so that pruning takes only a part of the server's capacity.
_BREATH_SECONDS = 0.05

_Deletion: TypeAlias = Callable[[str, int, int], str]

_NOT_ALLOWED = "the role may not: run what `outboxq roles --sql` prints"
_MISSING = "a table is missing: run `outboxq migrate`"
_ADVICE = {"42501": _NOT_ALLOWED, "42P01": _MISSING, "3F000": _MISSING}
_FINISHED, _NOTES = "finished jobs", "notes of progress"
_OTHERWISE = "it is tried again in the next round; the server's log says more"


@dataclass(eq=False)
class Pruner(PeriodicTask):
    """Deletes expired rows periodically. It may connect through a transaction pooler.

    Args:
        first_seconds: The longest time until the first round, however long the pauses between later rounds are.
        deletes: True to delete expired rows. In any case old requests to cancel jobs and old notes of progress are
            deleted, and callbacks whose batch is done (`jobs.batch`) are started.
        batch_rows: The most rows that one transaction deletes.
        max_batches: The most transactions for each table in one round; for dead letters, for each queue.
        keep_dead: By queue, the seconds for which the application keeps dead letters, if operators have set no time.
    """

    name = "pruner"

    first_seconds: float = 60.0
    batch_rows: int = 1_000
    max_batches: int = 100
    deletes: bool = True
    keep_dead: Mapping[str, float] = field(default_factory=dict)
    _warned: set[tuple[str, str]] = field(default_factory=set, init=False)
    # The next round begins after this unique key.
    _last_key: str = field(default="", init=False)

    def _run_on(self, connection: PGconn) -> Sequence[Pruned | DeadLettersPruned]:
        messages = effects = keys = finished = 0
        if self.deletes:
            messages = self._delete_all(connection, "messages", statements.delete_messages)
            effects = self._delete_all(connection, "effects", statements.delete_effects)
            keys = self._delete_idle_keys(connection)
            finished = self._delete_all(connection, _FINISHED, statements.delete_finished)
        dead = self._delete_dead(connection) if self.deletes else []
        self._delete_all(connection, "cancellations", statements.delete_requests)
        self._delete_all(connection, _NOTES, statements.delete_progress)
        pruned = Pruned(messages, effects, keys, self._sweep(connection), finished)
        return dead if pruned == Pruned(0, 0) else [pruned, *dead]

    def _delete_dead(self, connection: PGconn) -> list[DeadLettersPruned]:
        """Delete expired dead letters in the queues that keep theirs for a limited time; return an event per queue.

        Queues in which none had expired have no event.
        """
        try:
            found = run_on_libpq(connection, statements.select_kept(self.schema))
        except Exception as error:  # noqa: BLE001  # reported; the next round looks again
            self._report("dead letters", error)
            return []
        kept = {**self.keep_dead, **{str(name): float(str(seconds)) for name, seconds in found}}
        pruned: list[DeadLettersPruned] = []
        for queue in sorted(name for name, seconds in kept.items() if seconds):
            deletion = partial(_dead_of, queue, self.keep_dead.get(queue))
            jobs = self._delete_all(connection, "dead letters", deletion)
            if jobs:
                pruned.append(DeadLettersPruned(queue, jobs))
        return pruned

    def _sweep(self, connection: PGconn) -> int:
        """Enqueue the callbacks of callback batches (`jobs.batch`) whose end went unnoticed; return their number."""
        over, after = 0, UUID(int=0)
        for _ in range(self.max_batches):
            try:
                looked, last, finished = self._sweep_page(connection, after, self.batch_rows)
            except Exception as error:  # noqa: BLE001  # reported; the next sweep begins again
                self._report("batches", error)
                break
            over += finished
            if last is None or looked < self.batch_rows or self.stopping.wait(_BREATH_SECONDS):
                break
            after = last
        return over

    def _sweep_page(self, connection: PGconn, after: UUID, limit: int) -> tuple[int, UUID | None, int]:
        """Check up to `limit` open callback batches after the id `after`, and enqueue the callbacks of ended ones.

        Returns:
            The number of batches checked, the id of the last of them (None if there are none), and the number that had
            ended.
        """
        statement = sweep_batches(self.schema, after, limit)
        try:
            ((looked, last, finished),) = run_on_libpq(connection, "; ".join((BEGIN, *SETTINGS, statement, "COMMIT")))
        except psycopg.Error as error:
            _roll_back(connection)
            if limit == 1 or not is_of_a_row(error):
                raise
            return self._sweep_one_by_one(connection, after)
        return int(looked or 0), UUID(last) if last else None, int(finished or 0)

    def _sweep_one_by_one(self, connection: PGconn, after: UUID) -> tuple[int, UUID | None, int]:
        """Check the next `batch_rows` callback batches one by one, because the callback of one of them is refused.

        That callback cannot become a job, so it is logged and left out; the other callbacks are enqueued.

        Returns:
            The number of batches checked, the id of the last of them (None if there are none), and the number that had
            ended.
        """
        page = [
            UUID(found)
            for (found,) in run_on_libpq(connection, batch_page(self.schema, after, self.batch_rows))
            if found
        ]
        over = 0
        for batch_id in page:
            try:
                over += self._sweep_page(connection, after, 1)[2]
            except psycopg.Error as error:
                if not is_of_a_row(error):
                    raise
                self._refuse(batch_id, error)
            after = batch_id
            if self.stopping.is_set():
                break
        return len(page), after if page else None, over

    def _refuse(self, batch_id: UUID, error: psycopg.Error) -> None:
        if (str(batch_id), "") not in self._warned:
            self._warned.add((str(batch_id), ""))
            logger.warning(
                "the callback of batch %s cannot become a job, and is tried again in each round: %s",
                batch_id,
                describe(error),
            )

    def _delete_idle_keys(self, connection: PGconn) -> int:
        """Delete unique keys that no job uses any more; return their number.

        A round checks up to `batch_rows` times `max_batches` keys, including keys in use, and starts after the last key
        that the previous round checked.
        """
        deleted = 0
        for _ in range(self.max_batches):
            try:
                rows, found, self._last_key = _delete_keys(connection, self.schema, self._last_key, self.batch_rows)
            except Exception as error:  # noqa: BLE001  # reported; keys stay until the next round
                self._report("unique keys", error)
                break
            deleted += rows
            if found < self.batch_rows:
                self._last_key = ""
                break
            if self.stopping.wait(_BREATH_SECONDS):
                break
        return deleted

    def _delete_all(self, connection: PGconn, what: str, deletion: _Deletion) -> int:
        """Delete expired rows, `batch_rows` per transaction, until none are left or after `max_batches` transactions.

        Args:
            what: The name of the rows in log messages.
            deletion: Returns the SQL statement, given the schema, the most rows to delete, and the number of rows to
                skip.

        Returns:
            The number of deleted rows.
        """
        deleted = refused = 0
        for _ in range(self.max_batches):
            more = 0
            try:
                rows = self._delete(connection, deletion(self.schema, self.batch_rows, refused))
            except Exception as error:  # noqa: BLE001  # reported; rows stay until the next round
                self._report(what, error)
                if not is_of_a_row(error):
                    break
                rows, more = self._delete_one_by_one(connection, deletion, refused)
                refused += more
            deleted += rows
            if rows + more < self.batch_rows or self.stopping.wait(_BREATH_SECONDS):
                break
        return deleted

    def _delete_one_by_one(self, connection: PGconn, deletion: _Deletion, refused: int) -> tuple[int, int]:
        """Delete rows one by one, after a statement for many of them failed, so that one bad row keeps no other.

        Args:
            deletion: Returns the SQL statement, given the schema, the most rows to delete, and the number of rows to
                skip.
            refused: The number of rows that are known not to be deletable; they are skipped.

        Returns:
            The number of deleted rows, and the number of further rows that cannot be deleted.
        """
        deleted = more = 0
        while deleted + more < self.batch_rows and refused + more < _MOST_REFUSED and not self.stopping.is_set():
            try:
                rows = self._delete(connection, deletion(self.schema, 1, refused + more))
            except psycopg.Error as error:
                if not is_of_a_row(error):
                    break
                more += 1
            else:
                deleted += rows
                if rows == 0:
                    break
        return deleted, more

    def _delete(self, connection: PGconn, deletion: str) -> int:
        """Run one DELETE statement in its own transaction, in one round trip; return the number of deleted rows."""
        try:
            script = f"{statements.BEGIN}; {deletion}; COMMIT"
            return int(str(run_on_libpq(connection, script)[0][0]))
        except Exception:
            _roll_back(connection)
            raise

    def _report(self, what: str, error: Exception) -> None:
        """Log an error of a deletion or check: a refusal by the server as a warning, a lost connection at level DEBUG.

        There is one warning for each pair of `what` (the name of the rows) and SQLSTATE, so that periodic rounds do not
        repeat it. Slots report outages of the database, so a lost connection needs no warning here.
        """
        sqlstate = refusal_of(error)
        if sqlstate is None:
            logger.debug("the pruner's connection failed", extra={"error_type": type(error).__name__})
        elif what in (_FINISHED, _NOTES) and sqlstate in _ADVICE:
            # A relay that writes these tables warns itself; no other relay needs them.
            logger.debug("%s could not be deleted", what, extra={"outboxq_sqlstate": sqlstate})
        elif (what, sqlstate) not in self._warned:
            self._warned.add((what, sqlstate))
            logger.warning(
                "%s: %s (%s): %s",
                "batches could not be swept" if what == "batches" else f"expired {what} could not be deleted",
                type(error).__name__,
                sqlstate,
                _ADVICE.get(sqlstate, _OTHERWISE),
                extra={"outboxq_sqlstate": sqlstate},
            )


def _dead_of(queue: str, declared: float | None, schema: str, limit: int, skip: int) -> str:
    return statements.delete_dead(schema, queue, declared, limit, skip)


def _delete_keys(connection: PGconn, schema: str, after: str, limit: int) -> tuple[int, int, str]:
    """Check the next `limit` unique keys after `after`, in order, and delete the unused ones, in one transaction.

    Returns:
        The number of keys deleted, the number checked, and the last key checked ("" if none).
    """
    try:
        page = run_on_libpq(connection, f"{statements.BEGIN}; {lock_idle_keys(schema, after, limit)}")
        locked = [str(key) for key, is_locked in page if is_locked == "t"]
        # A separate statement, so that its snapshot is taken with the locks held.
        deletion = f"{delete_idle_keys(schema, locked)}; " if locked else ""
        deleted = run_on_libpq(connection, f"{deletion}COMMIT")
    except Exception:
        _roll_back(connection)
        raise
    return int(str(deleted[0][0])) if locked else 0, len(page), str(page[-1][0]) if page else ""


def _roll_back(connection: PGconn) -> None:
    # The connection is used for further rows.
    with contextlib.suppress(psycopg.Error, OSError):
        run_on_libpq(connection, "ROLLBACK")
