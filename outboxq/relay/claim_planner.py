"""What a slot claims next: from which of its queues, which sort of jobs, how many, and behind which place.

No I/O: the slot sends the claims that the planner asks for, and tells it the results.
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

# The part of the time that polls of all queues may take: if one takes long (a slow network), they come less often.
_WALK_SHARE = 0.05
_LEAST_SHARE_SECONDS = 0.01
_NO_LIMIT = 1_000_000


class ClaimPlanner:
    """The claims of one slot, one after the other. `request` is the last one."""

    def __init__(self, state: RelayState, order: Order) -> None:
        queues = order.queues
        # The claims that are prepared on the connection that the slot has.
        self.prepared: PreparedClaims | None = None
        # Whether jobs were found since the last poll of the slot's queues.
        self.has_found = True
        # How long the last poll of the slot's queues took.
        self.poll_took_seconds = 0.0
        # The last claim that was asked for. `_claimed` took the jobs that run: a later request, to go with their
        # COMMIT, may not have been sent.
        self.request: ClaimRequest | None = None
        # The lease's term when `request` was made.
        self.lease_term = 0
        self._claimed: ClaimRequest | None = None
        # How many more jobs run one by one.
        self.alone_for = 0
        self._state = state
        self._order = order
        # At random, so that slots and processes begin with different queues.
        self._last = random.choice(queues)
        self._statements = {name: ClaimStatements(state.config.schema, name, state.lease.owner) for name in queues}
        self._timeouts = {name: state.registry.timeout_seconds(name) for name in queues}
        # A COMMIT brings only a claim of the same mode: a claim in lease mode would end the transaction that it begins.
        self._changes_queues = len(queues) > 1 and all(state.registry.claims[name] != "lease" for name in queues)
        # Whether due jobs are next: for a single queue, which is claimed from without a poll, and for several queues.
        self._due_first, self._due_next = False, set[str]()
        self._batch_sizes = {name: state.registry.batch_size(name, state.config.batch_size) for name in queues}
        # The most jobs in a claim: deadlocks grow with the locks that a batch holds.
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
        """Claim single leased jobs again: a handler spoiled or lost the last connection, and others had to go back."""
        self._most_leased = dict.fromkeys(self._order.queues, 1)

    def begin_walk(self) -> None:
        """Begin a round of the slot's queues, outside of a transaction."""
        self._walks_since = _now()
        self._counts_due_at = self._walks_since + self._state.limits.counts_seconds

    def wants_poll(self) -> bool:
        """Whether the last poll is too old to be trusted."""
        polled_at = self._state.poller.polled_at(self._order.queues[0])
        return _now() > polled_at + self._follow_seconds(self.poll_took_seconds)

    def take_turn(self) -> tuple[str, ClaimScript] | None:
        """The queue and the claim that are next, of those known to wait; None if other slots have taken all of them."""
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
        """The claims that take jobs of this queue in the same way as `script`; none if `script` takes suspects."""
        is_suspect = script is self._statements[name].lease_suspect
        return () if is_suspect else (self._script(name, "ready"), self._script(name, "due"))

    def sorts(self, name: str) -> tuple[ClaimScript, ...]:
        """The claims of ready and due jobs, alternating, so that neither backlog starves the other."""
        ready, due = self._script(name, "ready"), self._script(name, "due")
        self._due_first = not self._due_first
        return (due, ready) if self._due_first else (ready, due)

    def expect_ready(self) -> None:
        """Ask for ready jobs first in the next round: it is ready jobs that wake a slot."""
        self._due_first = True
        self._due_next.clear()

    def suspects(self, name: str) -> ClaimScript:
        """The claim of the suspects of a queue, which run one by one under the lease."""
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
        """Record that the last claim took these jobs, and moved so many others to the suspects."""
        assert self.request is not None
        self._claimed = self.request
        if self._walks_since is not None:
            # In a round each queue that takes turns has its share of the time, and one claim at least.
            shares = 1 + self._order.count_peers(name, self._state.poller.waiting())
            share_seconds = self._follow_seconds(_now() - self._walks_since) / shares
            # If the share is very small, the next claim goes to another queue: here it would mostly find nothing.
            self._follow_until = 0.0 if 0.0 < share_seconds < _LEAST_SHARE_SECONDS else _now() + share_seconds
            self._walks_since = None
        if self.request.script.is_keyed:
            self._positions[name].move(self.request, jobs, moved)

    def _follow_seconds(self, walk_seconds: float) -> float:
        """How long the slot stays with one sort of jobs, if a poll of all of its queues took `walk_seconds`."""
        limits = self._state.limits
        return min(max(walk_seconds / _WALK_SHARE, limits.follow_least_seconds), limits.follow_most_seconds)

    def is_more(self, jobs: tuple[Job, ...], moved: int) -> bool:
        """Whether the last claim may have left jobs to other slots."""
        assert self.request is not None
        is_suspect = self.request.script is self._statements[self.request.queue].lease_suspect
        return len(jobs) + moved >= self.request.limit and not is_suspect

    def found_nothing(self, name: str, script: ClaimScript) -> None:
        """Record that no such job waits behind the place from which the claim started."""
        if script.is_keyed:
            self._positions[name].move_to_start()

    def cancelled(self) -> None:
        """Halve the number of jobs of the next claim: the last one was cancelled because it took too long."""
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
        # If this claim is not sent, or finds nothing, the poll that ends the slot's turns finds the jobs again.
        turn = self.take_turn()
        if turn is None:
            return None
        self._walks_since = _now()
        return self.ask(*turn)

    def next_leased_claim(self, leased: LeasedBatch) -> ClaimRequest | None:
        """The claim that goes with the COMMIT of the last of these jobs: the faster they ran, the more it takes."""
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
    """The power of two at or below `limit`: a backend keeps every prepared claim, and there is one for each limit."""
    return 1 << (limit.bit_length() - 1)


def _now() -> float:
    return time.monotonic()
