"""What a slot claims next: from which of its queues, which sort of jobs, how many, and behind which place.

No I/O: the slot sends what is asked for here, and says what came of it.
"""

import random
import time

from outboxq.execution.batch_state import BatchState
from outboxq.execution.claim import ClaimRequest, PreparedClaims
from outboxq.execution.lease_mode import LeasedBatch
from outboxq.job import Job
from outboxq.relay.cursors import QueueCursor
from outboxq.relay.poller import Order, Sort
from outboxq.relay.state import RelayState
from outboxq.statements.claim import ClaimScript, ClaimStatements

# If a poll of all queues takes long, as over a slow network, it comes less often: it may take this part of the time.
_WALK_SHARE = 0.05
_LEAST_SHARE_SECONDS = 0.01
_NO_LIMIT = 1_000_000


class ClaimPlanner:
    """The claims of one slot, one after the other. `request` is the last one."""

    def __init__(self, state: RelayState, order: Order) -> None:
        queues = order.queues
        # Of the connection that the slot has.
        self.prepared: PreparedClaims | None = None
        # Jobs were found since the last poll of its queues.
        self.has_found = True
        # How long the last poll of its queues took.
        self.poll_took_seconds = 0.0
        # The last claim that was asked for, and the one that took the jobs that run: another may have been asked for
        # since, to go with their COMMIT, and was not sent.
        self.request: ClaimRequest | None = None
        # The lease's term when that was.
        self.lease_term = 0
        self._claimed: ClaimRequest | None = None
        # So many more jobs run one by one.
        self.alone_for = 0
        self._state = state
        self._order = order
        # Other slots, and other processes, begin elsewhere.
        self._last = random.choice(queues)
        self._statements = {name: ClaimStatements(state.config.schema, name, state.lease.owner) for name in queues}
        self._timeouts = {name: state.registry.timeout_seconds(name) for name in queues}
        # With a COMMIT comes the claim of the same mode only: a lease's would end the transaction that it begins.
        self._changes_queues = len(queues) > 1 and all(state.registry.claims[name] != "lease" for name in queues)
        # The same for one queue, which is claimed from without a poll, and for several.
        self._due_first, self._due_next = False, set[str]()
        self._batch_sizes = {name: state.registry.batch_size(name, state.config.batch_size) for name in queues}
        # Of jobs in a claim: deadlocks grow with the locks that a batch holds.
        self._most = _NO_LIMIT
        self._most_leased = dict.fromkeys(queues, 1)
        self._positions = {name: QueueCursor(name, state.sweep_schedule) for name in queues}
        self._follow_until = 0.0
        self._counts_due_at = 0.0
        self._walks_since: float | None = None

    @property
    def sharing_queues(self) -> frozenset[str]:
        """The queues whose claims may take several jobs."""
        return frozenset(name for name, size in self._batch_sizes.items() if size > 1)

    def begin_anew(self) -> None:
        """A handler left something on the last line, or lost it: what was claimed with its job had to go back."""
        self._most_leased = dict.fromkeys(self._order.queues, 1)

    def begin_walk(self) -> None:
        """The slot looks for jobs in its queues, outside of a transaction."""
        self._walks_since = _now()
        self._counts_due_at = self._walks_since + self._state.limits.counts_seconds

    def wants_poll(self) -> bool:
        """Whether what the last poll found is not to be trusted any more."""
        polled_at = self._state.poller.polled_at(self._order.queues[0])
        return _now() > polled_at + self._follow_seconds(self.poll_took_seconds)

    def take_turn(self) -> tuple[str, ClaimScript] | None:
        """Where the slot goes to claim, of what is known to wait; None if nothing is that no other slot goes for."""
        turn = self._state.poller.take_turn(self._order, self._last, self._due_next)
        if turn is None:
            return None
        self._last, sort = turn
        (self._due_next.add if sort == "ready" else self._due_next.discard)(self._last)
        return self._last, self._script(self._last, sort)

    def _script(self, name: str, sort: Sort) -> ClaimScript:
        statements = self._statements[name]
        if self._state.registry.claims[name] == "lease":
            return statements.lease_ready if sort == "ready" else statements.lease_due
        return statements.ready if sort == "ready" else statements.due

    def taking_alike(self, script: ClaimScript, name: str) -> tuple[ClaimScript, ...]:
        """The claims that take jobs of this queue in the same way as this one: none as that of suspects."""
        is_suspect = script is self._statements[name].lease_suspect
        return () if is_suspect else (self._script(name, "ready"), self._script(name, "due"))

    def sorts(self, name: str) -> tuple[ClaimScript, ...]:
        """Alternating, so that neither a backlog of ready jobs nor one of due jobs starves the other."""
        ready, due = self._script(name, "ready"), self._script(name, "due")
        self._due_first = not self._due_first
        return (due, ready) if self._due_first else (ready, due)

    def expect_ready(self) -> None:
        """The next walk asks for ready jobs first: it is these that wake a slot."""
        self._due_first = True
        self._due_next.clear()

    def suspects(self, name: str) -> ClaimScript:
        """For the suspects of a queue, which run one by one under the lease."""
        return self._statements[name].lease_suspect

    def ask(self, name: str, script: ClaimScript) -> ClaimRequest:
        """The next claim."""
        cursor = self._positions[name].start() if script.is_keyed else None
        limit = self._limit(name, script)
        self.lease_term = self._state.lease.term
        self.request = ClaimRequest(script, limit, cursor, name, self._timeouts[name], self.prepared)
        return self.request

    def _limit(self, name: str, script: ClaimScript) -> int:
        if self.alone_for or script is self._statements[name].lease_suspect:
            return 1
        return min(self._batch_sizes[name], self._most_leased[name] if script.leased else self._most)

    def took(self, name: str, jobs: tuple[Job, ...], moved: int) -> None:
        """The last claim took these, and moved so many to the suspects."""
        assert self.request is not None
        self._claimed = self.request
        if self._walks_since is not None:
            # In a round each of those that take turns has its share, and one claim at least.
            shares = 1 + self._order.count_peers(name, self._state.poller.waiting())
            share_seconds = self._follow_seconds(_now() - self._walks_since) / shares
            # So small that the next claim belongs to another queue: here it would mostly find nothing.
            self._follow_until = 0.0 if 0.0 < share_seconds < _LEAST_SHARE_SECONDS else _now() + share_seconds
            self._walks_since = None
        if self.request.script.is_keyed:
            self._positions[name].move(self.request, jobs, moved)

    def _follow_seconds(self, walk_seconds: float) -> float:
        """How long the slot stays with one sort of jobs, after a poll of all of its queues that took so long."""
        limits = self._state.limits
        return min(max(walk_seconds / _WALK_SHARE, limits.follow_least_seconds), limits.follow_most_seconds)

    def is_more(self, jobs: tuple[Job, ...], moved: int) -> bool:
        """Whether the last claim may have left some to others."""
        assert self.request is not None
        is_suspect = self.request.script is self._statements[self.request.queue].lease_suspect
        return len(jobs) + moved >= self.request.limit and not is_suspect

    def found_nothing(self, name: str, script: ClaimScript) -> None:
        """No such job waits behind where the claim started."""
        if script.is_keyed:
            self._positions[name].move_to_start()

    def cancelled(self) -> None:
        """The last claim was cancelled, as too long: the next one is for half as many jobs."""
        request = self.request
        assert request is not None
        half = _power_of_two(max(1, request.limit // 2))
        if request.script.leased:
            self._most_leased[request.queue] = half
        else:
            self._most = half

    def next_claim(self, batch: BatchState) -> ClaimRequest | None:
        """The claim that goes with the COMMIT of a batch, if any should.

        Now and then the queues before this one, other sorts of jobs and suspects have their turn.
        """
        request = self._claimed
        assert request is not None
        half = max(1, len(batch.jobs) // 2)
        self._most = _power_of_two(half) if batch.has_deadlocked else min(self._most * 2, _NO_LIMIT)
        if self.alone_for or batch.unknown or self._state.stopping.is_set() or _now() > self._counts_due_at:
            return None
        is_full = len(batch.jobs) >= request.limit
        following = self.ask(batch.queue, request.script) if is_full and _now() <= self._follow_until else None
        return following or self._ask_elsewhere()

    def _ask_elsewhere(self) -> ClaimRequest | None:
        """The claim from the next queue in which something is known to wait."""
        if not self._changes_queues or self._state.quarantine.wait_in(self._order.queues) or self.wants_poll():
            return None
        # Should it not be sent, or find nothing, the poll that ends the slot's turns finds what it has missed.
        turn = self.take_turn()
        if turn is None:
            return None
        self._walks_since = _now()
        return self.ask(*turn)

    def next_leased_claim(self, leased: LeasedBatch) -> ClaimRequest | None:
        """The claim that goes with the COMMIT of the last of these jobs: the faster they were, the more it takes."""
        request = self._claimed
        assert request is not None
        most = max(1, min(2 * request.limit, leased.fitting()))
        self._most_leased[leased.queue] = _power_of_two(most)
        is_suspect = request.script is self._statements[leased.queue].lease_suspect
        is_full = len(leased.jobs) >= request.limit and not (self.alone_for or is_suspect or leased.unknown)
        may_follow = (
            is_full and not self._state.stopping.is_set() and _now() <= min(self._counts_due_at, self._follow_until)
        )
        return self.ask(leased.queue, request.script) if may_follow else None


def _power_of_two(limit: int) -> int:
    """The next lower one: a backend keeps each claim that it has prepared, and there is one for each limit."""
    return 1 << (limit.bit_length() - 1)


def _now() -> float:
    return time.monotonic()
