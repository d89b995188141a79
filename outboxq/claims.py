"""What a slot claims next: from which of its queues, which sort of jobs, how many, and behind which place.

No I/O: the slot sends what is asked for here, and says what came of it.
"""

import time
from dataclasses import replace

from sqlalchemy import Connection

from outboxq.batch import ClaimedQueue
from outboxq.claim import Aside, ClaimRequest, PreparedClaims
from outboxq.cursors import Position
from outboxq.driver import driver_connection
from outboxq.held import Held
from outboxq.job import Job
from outboxq.progress import Progress
from outboxq.relay_state import Shared
from outboxq.statements.claim import ClaimScript, ClaimStatements
from outboxq.statements.listen import calls_away
from outboxq.statements.session import local_timeouts

# So long, at least and at most, a slot claims with each COMMIT the next jobs of the same sort; then it looks at all of
# its queues again. Where that takes long, as over a slow network, less often: it may take this part of the time.
_FOLLOW_LEAST_SECONDS, _FOLLOW_MOST_SECONDS, _WALK_SHARE = 0.1, 1.0, 0.05
# Nor longer than this, whatever the other queues hold: then a COMMIT brings no claim, and the session is idle outside
# of a transaction. Only then does the server take its counts of changed and deleted rows, by which autovacuum goes.
COUNTS_SECONDS = 10.0
_NO_LIMIT = 1_000_000


class Claims:
    """The claims of one slot, one after the other.

    `request` is the last one, and `queue` the one that it was for.
    """

    def __init__(self, shared: Shared, queues: tuple[str, ...]) -> None:
        self.request: ClaimRequest | None = None
        # So many more jobs run one by one.
        self.alone_for = 0
        self._shared = shared
        self._queue_names = queues
        self._statements = {name: ClaimStatements(shared.schema, name, shared.lease.owner) for name in queues}
        self._queues = {name: ClaimedQueue(name, shared.registry.timeout_seconds(name)) for name in queues}
        self.queue = self._queues[queues[0]]
        self._due_first = dict.fromkeys(queues, False)
        self._batch_sizes = {name: shared.registry.batch_size(name, shared.batch_size) for name in queues}
        # Of jobs in a claim: deadlocks grow with the locks that a batch holds.
        self._most = _NO_LIMIT
        self._most_leased = dict.fromkeys(queues, 1)
        self._asides = {name: Aside(calls_away(shared.schema, queues, name), self._is_called) for name in queues}
        self._positions = {name: Position(name, shared.sweeps) for name in queues}
        self._prepared: PreparedClaims | None = None
        self._follow_until = 0.0
        self._counts_due_at = 0.0
        self._is_called_away = False
        self._walks_since: float | None = None

    @property
    def sharing_queues(self) -> frozenset[str]:
        """The queues whose claims may take several jobs."""
        return frozenset(name for name, size in self._batch_sizes.items() if size > 1)

    @property
    def is_behind_cursor(self) -> bool:
        """Whether the last claim did not start at the start of its queue."""
        return self.request is not None and self.request.cursor is not None

    def connected(self, connection: Connection) -> None:
        """Nothing is prepared on a new connection; nor ever, where there is a pooler, or for reasons of the user's."""
        prepares = driver_connection(connection).prepare_threshold is not None
        self._prepared = PreparedClaims() if prepares else None
        # A handler may have left something on the last one: what was claimed with its job had to go back.
        self._most_leased = dict.fromkeys(self._queue_names, 1)

    def begin_walk(self) -> None:
        """The slot looks at all of its queues."""
        self._walks_since = _now()

    def sorts(self, name: str) -> tuple[ClaimScript, ...]:
        """Alternating, so that neither a backlog of ready jobs nor one of due jobs starves the other."""
        statements = self._statements[name]
        if self._shared.registry.claims[name] == "lease":
            ready, due = statements.lease_ready, statements.lease_due
        else:
            ready, due = statements.ready, statements.due
        self._due_first[name] = not self._due_first[name]
        return (due, ready) if self._due_first[name] else (ready, due)

    def expect_ready(self) -> None:
        """The next walk asks for ready jobs first: it is these that wake a slot."""
        self._due_first = dict.fromkeys(self._due_first, True)

    def suspects(self, name: str) -> ClaimScript:
        """For the suspects of a queue, which run one by one under the lease."""
        return self._statements[name].lease_suspect

    def ask(self, name: str, script: ClaimScript) -> ClaimRequest:
        """The next claim."""
        self.queue = self._queues[name]
        cursor = self._positions[name].start() if script.is_keyed else None
        limit, settings = self._limit(name, script), local_timeouts(self.queue.timeout_seconds)
        self.request = ClaimRequest(script, limit, cursor, settings, self._prepared)
        return self.request

    def _limit(self, name: str, script: ClaimScript) -> int:
        if self.alone_for or script is self._statements[name].lease_suspect:
            return 1
        return min(self._batch_sizes[name], self._most_leased[name] if script.leased else self._most)

    def took(self, name: str, jobs: tuple[Job, ...], moved: int) -> None:
        """The last claim took these, and moved so many to the suspects."""
        assert self.request is not None
        if self._walks_since is not None:
            self._is_called_away = False
            self._follow_until = _now() + follow_seconds(_now() - self._walks_since)
            self._counts_due_at = _now() + COUNTS_SECONDS
            self._walks_since = None
        if self.request.script.is_keyed:
            self._positions[name].move(self.request, jobs, moved)

    def found_nothing(self, name: str, script: ClaimScript) -> None:
        """No such job waits behind where the claim started."""
        if script.is_keyed:
            self._positions[name].move_to_start()

    def cancelled(self) -> None:
        """The last claim took too long for somebody: the next one is for half as many jobs."""
        request = self.request
        assert request is not None
        half = _power_of_two(max(1, request.limit // 2))
        if request.script.leased:
            self._most_leased[self.queue.name] = half
        else:
            self._most = half

    def following(self, progress: Progress) -> ClaimRequest | None:
        """The claim that goes with the COMMIT of a batch, if any should.

        Now and then the queues before this one, other sorts of jobs and suspects have their turn.
        """
        request = self.request
        assert request is not None
        half = max(1, len(progress.jobs) // 2)
        self._most = _power_of_two(half) if progress.deadlocked else min(self._most * 2, _NO_LIMIT)
        is_full = len(progress.jobs) >= request.limit and not (self.alone_for or progress.unknown)
        return self._ask_on(progress.queue, request.script) if is_full else None

    def following_held(self, held: Held) -> ClaimRequest | None:
        """As `following`, under a lease. The faster its handlers were, the more jobs the next claim takes."""
        request = self.request
        assert request is not None
        most = max(1, min(2 * request.limit, held.fitting()))
        self._most_leased[held.queue] = _power_of_two(most)
        is_suspect = request.script is self._statements[held.queue].lease_suspect
        is_full = len(held.jobs) >= request.limit and not (self.alone_for or is_suspect or held.unknown)
        return self._ask_on(held.queue, request.script) if is_full else None

    def _ask_on(self, name: str, script: ClaimScript) -> ClaimRequest | None:
        if self._shared.stopping.is_set() or _now() > self._counts_due_at:
            return None
        if _now() <= self._follow_until:
            return self.ask(name, script)
        has_suspects = self._shared.suspects.wait_in(self._queue_names)
        if self._is_called_away or has_suspects or not script.is_keyed or script.leased:
            return None
        return replace(self.ask(name, script), aside=self._asides[name])

    def _is_called(self, row: tuple[object, ...]) -> None:
        """Whether the slot goes to look at its other queues after the jobs that it has just claimed."""
        self._is_called_away = row[0] is True
        if not self._is_called_away:
            self._follow_until = _now() + follow_seconds(0.0)


def follow_seconds(walk_seconds: float) -> float:
    """How long a slot stays with one sort of jobs, after a look at all of its queues that took so long."""
    return min(max(walk_seconds / _WALK_SHARE, _FOLLOW_LEAST_SECONDS), _FOLLOW_MOST_SECONDS)


def _power_of_two(limit: int) -> int:
    """The next lower one: a backend keeps each claim that it has prepared, and there is one for each limit."""
    return 1 << (limit.bit_length() - 1)


def _now() -> float:
    return time.monotonic()
