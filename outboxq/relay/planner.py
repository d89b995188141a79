"""Planner: decides on a slot's next claim: its queue, the sort and number of jobs, and the place where it starts.

The sorts are ready jobs, scheduled jobs that are due, jobs of groups, and suspects (jobs that ran when their relay
died). The planner does no I/O: the slot sends the claims and queries that it yields, and records the results.
"""

import random
import time
from collections.abc import Generator, Iterator
from typing import TypeAlias

from outboxq.database.driver import ANY_SERVER, ServerSession
from outboxq.execution.batch_state import BatchState, Ended
from outboxq.execution.claim import Claimed, ClaimRequest
from outboxq.relay.admission import Query, SlotAdmission
from outboxq.relay.poller import SORTS, Order
from outboxq.relay.queue_claims import QueueClaims, cursors_of
from outboxq.relay.state import RelayState
from outboxq.statements.claim import Sort

# The things that a slot sends: a claim, or a query before the next one.
Asked: TypeAlias = ClaimRequest | Query

# The share of time that polls of all queues may take: if they are slow (a slow network), they are less frequent.
_WALK_SHARE = 0.05
_LEAST_SHARE_SECONDS = 0.01
_NO_LIMIT = 1_000_000
# The most jobs of a claim under the lease, if each of them runs in a slot of its own.
_MOST_LEASED = 200


class Planner:
    """Decides on the claims of one slot (or dispatcher), one after the other."""

    def __init__(self, state: RelayState, order: Order) -> None:
        queues = order.queues
        self._state = state
        self._order = order
        self._claims = QueueClaims(state.config, state.registry, state.lease, state.flow)
        self._admission = SlotAdmission(state.admission)
        self._cursors = {name: cursors_of(name, state.config.schema, state.sweeps, state.poller) for name in queues}
        self._server = ANY_SERVER
        # Random, so that slots and processes begin with different queues.
        self._last = random.choice(queues)
        self._last_claimed: Claimed | None = None
        # The next sort: for a single queue, which is claimed from without a poll, and for several queues.
        self._taken: Sort | None = Sort.READY
        self._next: dict[str, Sort] = {}
        # A COMMIT is sent only with a claim of the same mode: a claim in lease mode would end the transaction that it
        # begins.
        self._changes_queues = len(queues) > 1 and all(state.registry.claims[name] != "lease" for name in queues)
        # The number of jobs that are still to run one by one.
        self._alone_for = 0
        # The most jobs in a claim: deadlocks become more likely with the locks that a batch holds.
        self._most = _NO_LIMIT
        # The number of free slots, for claims under the lease.
        self._free = 1
        # True if nothing waited at the slot's last claim: it has slept since, and trusts the poll or call that woke it.
        self._is_rested = True
        # True if jobs were found since the last poll of the slot's queues; the time that this poll took.
        self._has_found, self._poll_took_seconds = True, 0.0
        # True if the slot took a queue in which jobs were known to wait, and has claimed none since. The same poll or
        # call sends no other slot there.
        self._is_called = False
        # The time since which the slot searches for jobs; the time until which its COMMITs claim more of the sort
        # found.
        self._walks_since: float | None = None
        self._follow_until = 0.0
        self._counts_due_at = 0.0

    def first(
        self, server: ServerSession, most: int | None = None, *, aside: bool = False
    ) -> Generator[Asked, None, None]:
        """Yield claims and queries for the slot to send, for each of its queues in turn, until a claim takes jobs.

        The caller has no transaction open. After each claim it calls `record_claim` with the result, and then requests
        the next one.

        Args:
            most: The number of free slots, for a dispatcher, whose claims are made under the lease; None for a single
                slot.
            aside: True to claim only suspects (jobs that ran when their relay died), which run apart from other jobs.
                The caller has the process's turn to run them.
        """
        self._server = server
        state, queues = self._state, self._order.queues
        if most is not None:
            self._free = min(most, _MOST_LEASED)
        if aside:
            yield from state.quarantine.claims(queues, state.poller.is_held, self._claims_of)
            self._admission.return_unused()
            return
        if most is not None:
            yield from self._follow()
        self._admission.return_unused()
        self._walks_since = time.monotonic()
        self._counts_due_at = self._walks_since + self._state.limits.counts_seconds
        if most is None:
            yield from state.quarantine.round(self, queues, state.poller.is_held, state.lease.want, self._claims_of)
        yield from self._only_queue(queues[0]) if len(queues) == 1 else self._queues_in_turns()
        # Before the slot sleeps: another slot may have held the queue because of tokens that this slot does not use.
        self._admission.return_unused()
        self._is_rested = True

    def _only_queue(self, name: str) -> Iterator[Asked]:
        """Yield the claims of a slot that has a single queue. It needs no polls: its claims show if jobs wait.

        The claims begin with the sort of jobs (ready, due, grouped) whose turn it is, so that no backlog starves the
        other sorts.
        """
        is_known = self._state.poller.take_queue(name)
        if is_known is None:
            return
        self._is_called = is_known
        sorts = self._state.sorts_of(name)
        first = sorts.index(self._taken) + 1 if self._taken in sorts else 0
        for sort in sorts[first:] + sorts[:first]:
            yield from self._claims_of(name, sort)
            if self._state.poller.is_held(name):
                # The other sorts have their turn when the hold ends.
                return
        # No job waits: ready jobs will wake the slot.
        self._taken = None

    def _queues_in_turns(self) -> Iterator[Asked]:
        """Yield claims for a slot with several queues, and polls that find the queues with waiting jobs.

        The slot claims only from queues in which jobs are known to wait.
        """
        while True:
            if not self._is_rested and self._wants_poll():
                yield from self._poll()
            self._is_rested = False
            turn = self._take_turn()
            if turn is None and self._has_found:
                # All queues that the last poll named have been claimed from.
                yield from self._poll()
                turn = self._take_turn()
            if turn is None:
                break
            yield from self._claims_of(*turn)
        if not any(map(self._state.poller.is_held, self._order.queues)):
            # As for a single queue.
            self._next.clear()

    def _wants_poll(self) -> bool:
        """Return True if the last poll is too old to say in which queues jobs wait."""
        polled_at = self._state.poller.polled_at(self._order.queues[0])
        return time.monotonic() > polled_at + self._follow_seconds(self._poll_took_seconds)

    def _poll(self) -> Iterator[Query]:
        """Yield the query that finds the queues with waiting jobs, and record its answer."""
        poller, queues, started_at = self._state.poller, self._order.queues, time.monotonic()
        taken, query = poller.begin(), Query(poller.statement_for(queues), is_alone=True)
        yield query
        poller.record(taken, query.rows, queues)
        self._state.quarantine.record_poll(query.rows)
        self._poll_took_seconds = time.monotonic() - started_at
        self._has_found = False

    def _take_turn(self) -> tuple[str, Sort] | None:
        """Choose the next queue in which jobs are known to wait, and a sort of them; other slots then leave these jobs.

        Returns None if there is no such queue, or if other slots have chosen all such queues.
        """
        turn = self._state.poller.take_turn(self._order, self._last, self._next)
        if turn is None:
            return None
        self._last, sort = turn
        self._is_called = True
        self._next[self._last] = SORTS[(SORTS.index(sort) + 1) % len(SORTS)]
        return turn

    def _claims_of(self, name: str, sort: Sort) -> Generator[Asked, None, bool]:
        """Yield claims of one sort of a queue's jobs until none is left.

        The claims start after the last job or group that this slot claimed, so that the server need not skip index
        entries of deleted jobs. When no job is left there, they start once more at the start of the queue.

        Returns False if the queue is at its limit, else True.
        """
        cursor = self._cursors[name][sort]
        while True:
            if self._state.flow.restricts:
                claims = self._claims.of(name)
                most = claims.most(sort, self._free)
                yield from self._admission.reserve(name, 1 if self._alone_for else most)
            request = self._ask(name, sort)
            if request is None:
                return True
            yield request
            if self._last_claimed is None or self._last_claimed.is_full:
                return False
            if cursor.is_at_end():
                return True
            if statement := cursor.bringing_back():
                yield Query(statement)
            # No job waits after the cursor: claim again from the start, or from the next groups.

    def _ask(self, name: str, sort: Sort) -> ClaimRequest | None:
        """Make the next claim of one sort of a queue's jobs.

        If the queue has a rate, the claim takes tokens, one for each job; returns None if there is no token.
        """
        claims, state = self._claims.of(name), self._state
        script = claims.scripts[sort]
        limit = 1 if self._alone_for or sort in claims.by_one else min(self._most, claims.most(sort, self._free))
        if state.flow.restricts and not (limit := self._admission.take(name, limit)):
            return None
        return ClaimRequest(
            script,
            limit,
            self._cursors[name][sort].place(),
            name,
            sort,
            claims.alike[sort],
            claims.timeout_seconds,
            self._server,
            state.clock,
        )

    def record_claim(self, claimed: Claimed, *, is_called: bool) -> bool:
        """Record a claim's result. Returns True if another slot should be woken, because the claim may have left jobs.

        Args:
            is_called: True if the slot slept until now: then the notification that woke it may be for several jobs.
        """
        request, jobs, poller = claimed.request, claimed.jobs, self._state.poller
        name, sort = request.queue, request.sort
        self._last_claimed = claimed
        if claimed.is_full or poller.held_until or self._state.flow.restricts:
            self._admission.record(claimed)
        self._cursors[name][sort].record(claimed)
        if not jobs:
            return False
        # Without a listener no slot sleeps for long, and waking one would cause empty claims.
        is_called |= self._is_called and self._state.listener is not None
        self._is_called = False
        self._taken = sort
        if self._walks_since is not None:
            # In a round each queue that takes turns has a share of the time, and at least one claim.
            shares = 1 + self._order.count_peers(name, poller.waiting())
            share_seconds = self._follow_seconds(time.monotonic() - self._walks_since) / shares
            # If the share is very small, the next claim goes to another queue: in this one it would usually find
            # nothing.
            self._follow_until = 0.0 if 0.0 < share_seconds < _LEAST_SHARE_SECONDS else time.monotonic() + share_seconds
            self._walks_since = None
        return is_called and not sort.is_suspect and claimed.may_leave_more(len(jobs) + claimed.moved)

    def after(self, batch: BatchState) -> ClaimRequest | None:
        """Return the claim to send together with the COMMIT of a batch; None to send the COMMIT alone.

        It is usually for the same sort of jobs as the batch. After `_follow_until`, other queues and sorts have their
        turn.
        """
        request = batch.claimed.request
        self._most = max(1, len(batch.jobs) // 2) if batch.tries.has_deadlocked else min(self._most * 2, _NO_LIMIT)
        now = time.monotonic()
        if self._alone_for or (batch.of_claim and batch.has_parked) or now > self._counts_due_at:
            return None
        if self._state.stopping.is_set():
            return None
        if now <= self._follow_until and batch.claimed.may_leave_more(len(batch.jobs)):
            following = self._ask(request.queue, request.sort)
            if following is not None:
                return following
        return self._ask_elsewhere() if self._changes_queues else None

    def _ask_elsewhere(self) -> ClaimRequest | None:
        """Make a claim from the next queue in which jobs are known to wait, to be sent with a COMMIT.

        Returns None if there is no such queue, if a poll is due, or if suspects (jobs that ran when their relay died)
        are to be claimed first.
        """
        if self._state.quarantine.wait_in(self._order.queues) or self._wants_poll():
            return None
        # If this claim is not sent, the poll that ends the slot's turns finds the jobs again.
        turn = self._take_turn()
        if turn is None:
            return None
        self._walks_since = time.monotonic()
        return self._ask(*turn)

    def _follow(self) -> Iterator[Asked]:
        """Yield more claims of the queue and sort of jobs of the last claim, until their share of the time ends.

        The share ends at `_follow_until`; then other queues and sorts have their turn.
        """
        claimed = self._last_claimed
        if claimed is None or time.monotonic() > min(self._counts_due_at, self._follow_until):
            return
        if not claimed.request.sort.is_suspect and claimed.may_leave_more(len(claimed.jobs)):
            yield from self._claims_of(claimed.request.queue, claimed.request.sort)

    def record(self, request: ClaimRequest, ended: Ended) -> None:
        """Record how a batch or its claim ended, which determines the number of jobs in the next claims."""
        self._has_found = True
        if self._state.flow.restricts and ended.report is not None:
            self._admission.ended(request.queue, ended.claimed)
        claimed = 0 if ended.report is None else ended.report.claimed
        self._alone_for = max(0, (ended.run_alone or self._alone_for) - claimed)
        if ended.was_too_large:
            self._most = max(1, request.limit // 2)
        elif request.script.leased:
            self._most = min(self._most * 2, _NO_LIMIT)

    def _follow_seconds(self, walk_seconds: float) -> float:
        """Return for how many seconds the slot stays with one queue and sort of jobs before it polls all its queues.

        The time is in proportion to `walk_seconds`, the time that such a poll took, within bounds.
        """
        limits = self._state.limits
        return min(max(walk_seconds / _WALK_SHARE, limits.follow_least_seconds), limits.follow_most_seconds)
