"""The flush: a relay's counts are added to the tables, each of them at most once.

Each flush has a number, and adds the counts only if the number is higher than the one in the relay's own row, which it
then replaces. So a flush whose answer was lost can be sent again unchanged: if it was committed, it has no further
effect. While the database is unavailable, the counts wait in memory. Counts that a killed process had not flushed are
lost.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

from outboxq.clock import DatabaseClock, clock
from outboxq.observability.aggregate import OUTCOMES, Aggregate, Counts, KindCounts
from outboxq.statements import history as statements

# Runs statements in a transaction at READ COMMITTED, on a connection apart from the slots; returns the rows of the last
# query, as texts.
Transact: TypeAlias = Callable[[str], Sequence[Sequence[str | None]]]

# The row of a relay that was not seen for a day is removed, and the number of its last flush with it.
_DOUBT_SECONDS = 43_200.0
# Tries at the end: if the row was removed, the same counts with a new row, and then the counts since.
_LAST_FLUSHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayIdentity:
    """Facts about a relay that do not change while it runs; `Flusher` stores them in the relay's row.

    `limits`: the limits of queues that its application declares, as JSON.
    """

    id: UUID
    host: str
    pid: int
    version: str
    queues: tuple[str, ...]
    kinds: tuple[str, ...]
    slots: int
    listens: bool
    limits: str = "[]"


@dataclass(frozen=True, slots=True)
class RelayActivity:
    """The activity of a relay at one moment; `Flusher` stores it in the relay's row.

    `busy`: how many of its slots work. `free`: the queues that at least one free slot serves. `running`: the jobs that
    have run for long, as JSON.
    """

    state: str
    busy: int
    free: tuple[str, ...]
    running: str


class Flusher:
    """Adds the counts of an aggregate to the tables, and updates the relay's row, which shows that the relay lives.

    Args:
        activity: Returns the relay's activity; called at each flush.
        database_clock: The estimate of the database's clock, which each flush corrects.
    """

    def __init__(
        self,
        schema: str,
        identity: RelayIdentity,
        aggregate: Aggregate,
        activity: Callable[[], RelayActivity],
        database_clock: DatabaseClock,
    ) -> None:
        self._schema = schema
        self._identity = identity
        self._aggregate = aggregate
        self._activity = activity
        self._clock = database_clock
        self._number = 0
        self._is_registered = False
        # The counts that the flush of this number adds, until its commit is known, and the time since which that is in
        # doubt.
        self._pending: Counts | None = None
        self._in_doubt_since: float | None = None

    def has_something_to_say(self, *, counts: bool) -> bool:
        """Return True if a flush is useful.

        A flush is useful if the relay may have a row, which has to show that the relay lives. It is useful also if
        there are counts to add, and `counts` is True.
        """
        has_counts = counts and not self._aggregate.is_empty
        return self._is_registered or self._in_doubt_since is not None or has_counts

    def flush(self, transact: Transact, *, counts: bool = True) -> bool:
        """Report that the relay lives, and add the counts since the last flush.

        Counts that a lost connection left in doubt are sent again by the next flush. Returns True if some relay has
        already written the gauges (jobs by state) of the present minute.

        Args:
            counts: False leaves the counts to a later flush.

        Raises:
            psycopg.Error: no count was added, or it is not known if any was.
        """
        if self._in_doubt_since is not None and clock() - self._in_doubt_since > _DOUBT_SECONDS:
            self._forget()
        if self._pending is None:
            self._pending = self._aggregate.take() if counts else {}
            self._number += 1
        script = self._script(self._pending)
        is_first_try = self._in_doubt_since is None
        self._in_doubt_since = clock() if is_first_try else self._in_doubt_since
        asked_at = time.time()
        ((*answers, seconds),) = transact(script)
        self._clock.compare(float(seconds or 0), asked_at, time.time())
        is_added, is_known, has_gauges = (answer == "t" for answer in answers)
        if is_added or is_known or not is_first_try:
            self._forget()
            self._is_registered = is_known or is_added
        else:
            # The row was removed since the last flush. These counts were not added, and are sent with a new row.
            self._in_doubt_since, self._is_registered = None, False
        return has_gauges

    def leave(self, transact: Transact, *, counts: bool = True) -> None:
        """Flush for the last time, and remove the relay's row.

        Args:
            counts: False leaves out the counts.

        Raises:
            psycopg.Error: no count was added, or it is not known if any was.
        """
        for _ in range(_LAST_FLUSHES):
            self.flush(transact, counts=counts)
            if self._is_registered and (self._aggregate.is_empty or not counts):
                break
        transact(statements.unregister(self._schema, self._identity.id))
        self._is_registered = False

    def _forget(self) -> None:
        """Drop the pending counts, because they were added, or because it is too late to find out if they were."""
        self._pending = self._in_doubt_since = None

    def _script(self, counts: Counts) -> str:
        identity, activity = self._identity, self._activity()
        script = statements.SETTINGS
        if not self._is_registered:
            registration = statements.register(
                self._schema,
                identity.id,
                identity.host,
                identity.pid,
                identity.version,
                identity.queues,
                identity.kinds,
                identity.slots,
                self._number - 1,
                listens=identity.listens,
                limits=identity.limits,
            )
            script += f"{registration}; "
        return script + statements.flush_counts(
            self._schema,
            identity.id,
            self._number,
            activity.state,
            activity.busy,
            activity.free,
            activity.running,
            [_row(queue, kind, each) for (queue, kind), each in counts.items()],
        )


def _row(queue: str, kind: str, counts: KindCounts) -> tuple[object, ...]:
    outcomes = (counts.outcomes[outcome] for outcome in OUTCOMES)
    return (queue, kind, *outcomes, counts.wait_seconds, counts.run_seconds, counts.wait, counts.run)
