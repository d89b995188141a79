"""What a slot claims next: from which of its queues, which sort of jobs, how many, and behind which place.

No I/O: the slot sends the claims that the planner asks for, and tells it the results.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import replace

from outboxq.execution.batch_state import BatchState
from outboxq.execution.claim import AnyScript, ClaimRequest
from outboxq.execution.lease_mode import LeasedBatch
from outboxq.execution.prepared import PreparedStatements
from outboxq.job import Job
from outboxq.queue_limits import QueueLimits
from outboxq.relay.cursors import GroupCursor, QueueCursor
from outboxq.relay.poller import Order, Sort
from outboxq.relay.slot_tokens import SlotTokens
from outboxq.relay.state import RelayState
from outboxq.statements.claim import ClaimStatements
from outboxq.statements.group_claim import GroupScript

# The part of the time that polls of all queues may take: if one takes long (a slow network), they come less often.
_WALK_SHARE = 0.05
_LEAST_SHARE_SECONDS = 0.01
_NO_LIMIT = 1_000_000


class ClaimPlanner:
    """The claims of one slot, one after the other. `request` is the last one."""

    def __init__(self, state: RelayState, order: Order) -> None:
        queues = order.queues
        # The claims that are prepared on the connection that the slot has.
        self.prepared: PreparedStatements | None = None
        # Whether jobs were found since the last poll of the slot's queues.
        self.has_found = True
        # How long the last poll of the slot's queues took.
        self.poll_took_seconds = 0.0
        # The last claim that was asked for. `_claimed` took the jobs that run: a later request, to go with their
        # COMMIT, may not have been sent.
        self.request: ClaimRequest | None = None
        # Whether the slot took a queue in which something was known to wait, and has claimed no jobs since. No other
        # slot goes there on account of the same poll or call.
        self.is_called = False
        # The lease's term when `request` was made.
        self.lease_term = 0
        self._claimed: ClaimRequest | None = None
        # How many more jobs run one by one.
        self.alone_for = 0
        self._state = state
        self._order = order
        # At random, so that slots and processes begin with different queues.
        self._last = random.choice(queues)
        self._statements = {name: self._statements_of(name) for name in queues}
        self.tokens = SlotTokens(state.admission)
        self._timeouts = {name: state.registry.timeout_seconds(name) for name in queues}
        # A COMMIT brings only a claim of the same mode: a claim in lease mode would end the transaction that it begins.
        self._changes_queues = len(queues) > 1 and all(state.registry.claims[name] != "lease" for name in queues)
        # Whether due jobs are next: for a single queue, which is claimed from without a poll, and for several queues.
        self._due_first, self._due_next, self._grouped_next = False, set[str](), set[str]()
        self._group_scripts = {name: _group_scripts(state, name) for name in queues}
        # The limits of all queues, which each look replaces whole, as they were when the claims had those of a queue.
        self._same_limits: dict[str, Mapping[str, QueueLimits]] = {}
        self._groups = {name: GroupCursor() for name in queues}
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
        self.tokens.return_unused()
        self._walks_since = _now()
        self._counts_due_at = self._walks_since + self._state.limits.counts_seconds
        self._see_limits()

    def _see_limits(self) -> None:
        """Make the claims of queues whose limits have changed anew."""
        for name in self._statements:
            if self._has_other_limit(name):
                self._statements[name] = self._statements_of(name)
                self._group_scripts[name] = _group_scripts(self._state, name)

    def _has_other_limit(self, name: str) -> bool:
        flow = self._state.flow
        if self._same_limits.get(name) is flow.limits:
            return False
        every, limits = flow.limits, flow.limits_of(name)
        if self._group_scripts[name][0].limits != (limits.running, limits.per_group or 1):
            return True
        self._same_limits[name] = every
        return False

    def _statements_of(self, name: str) -> ClaimStatements:
        state = self._state
        most, is_leasing = state.flow.limits_of(name).running, state.registry.claims[name] == "lease"
        return ClaimStatements(state.config.schema, name, state.lease.owner, most=most, counts_leases=is_leasing)

    def batch_size(self, name: str) -> int:
        """How many jobs a claim of this queue may take."""
        return 1 if self.alone_for else self._batch_sizes[name]

    def wants_poll(self) -> bool:
        """Whether the last poll is too old to be trusted."""
        polled_at = self._state.poller.polled_at(self._order.queues[0])
        return _now() > polled_at + self._follow_seconds(self.poll_took_seconds)

    def take_turn(self) -> tuple[str, AnyScript] | None:
        """The queue and the claim that are next, of those known to wait; None if other slots have taken all of them."""
        turn = self._state.poller.take_turn(self._order, self._last, self._due_next, self._grouped_next)
        if turn is None:
            return None
        self._last, sort = turn
        self.is_called = True
        # The sorts take turns: ready, due, grouped.
        (self._due_next.add if sort == "ready" else self._due_next.discard)(self._last)
        (self._grouped_next.add if sort == "due" else self._grouped_next.discard)(self._last)
        return self._last, self._script(self._last, sort)

    def take_queue(self, name: str) -> bool:
        """Record that the slot claims from its only queue, which tells as much as a poll; False if it must not now."""
        is_known = self._state.poller.take_queue(name)
        if is_known is not None:
            self.is_called = is_known
        return is_known is not None

    def _script(self, name: str, sort: Sort) -> AnyScript:
        if sort == "grouped":
            return self._group_scripts[name][0]
        statements = self._statements[name]
        if self._state.registry.claims[name] == "lease":
            return statements.lease_ready if sort == "ready" else statements.lease_due
        return statements.ready if sort == "ready" else statements.due

    def taking_alike(self, script: AnyScript, name: str) -> tuple[AnyScript, ...]:
        """The claims that take jobs of this queue in the same way as `script`; none if `script` takes suspects."""
        if isinstance(script, GroupScript):
            return () if script.suspects else (script,)
        is_suspect = script is self._statements[name].lease_suspect
        return () if is_suspect else (self._script(name, "ready"), self._script(name, "due"))

    def sorts(self, name: str) -> tuple[AnyScript, ...]:
        """The claims of ready and due jobs, alternating, so that neither backlog starves the other.

        Those of jobs of groups are between them, or before them, if the queue is known to have any.
        """
        ready, due = self._script(name, "ready"), self._script(name, "due")
        self._due_first = not self._due_first
        scripts = (due, ready) if self._due_first else (ready, due)
        if not self._state.has_groups(name):
            return scripts
        grouped = self._script(name, "grouped")
        return (grouped, *scripts) if self._due_first else (scripts[0], grouped, scripts[1])

    def expect_ready(self) -> None:
        """Ask for ready jobs first in the next round: it is ready jobs that wake a slot."""
        self._due_first = True
        self._due_next.clear()

    def suspects(self, name: str) -> AnyScript:
        """The claim of the suspects of a queue, which run one by one under the lease."""
        return self._statements[name].lease_suspect

    def in_groups(self, name: str) -> AnyScript:
        """The claim of the suspects of a queue's groups: of the first jobs of their groups only."""
        return self._group_scripts[name][1]

    def ask(self, name: str, script: AnyScript) -> ClaimRequest | None:
        """The next claim; None if the queue has a rate and no tokens are in hand, or if it has another limit by now."""
        if self._has_other_limit(name):
            return None
        limit = self.tokens.take(name, self._limit(name, script))
        if not limit:
            return None
        if isinstance(script, GroupScript):
            return self._ask_groups(name, script, limit)
        cursor = self._positions[name].start() if script.is_keyed else None
        self.lease_term = self._state.lease.term
        self.request = ClaimRequest(
            script, limit, cursor, name, self._timeouts[name], self.prepared, clock=self._state.clock
        )
        return self.request

    def _ask_groups(self, name: str, script: GroupScript, limit: int) -> ClaimRequest:
        groups = None if script.suspects else self._groups[name]
        after = "" if groups is None else groups.after
        self.lease_term = self._state.lease.term
        self.request = ClaimRequest(
            script, limit, None, name, self._timeouts[name], None, after, groups, self._state.clock
        )
        return self.request

    def _limit(self, name: str, script: AnyScript) -> int:
        # Under a lease each claimed job counts for the limit of its queue, and the jobs of a claim run one by one.
        counts_each = script.leased and self._state.flow.limits_of(name).running is not None
        if self.alone_for or counts_each or self._takes_suspects(name, script):
            return 1
        return min(self._batch_sizes[name], self._most_leased[name] if script.leased else self._most)

    def _takes_suspects(self, name: str, script: AnyScript) -> bool:
        return script is self._statements[name].lease_suspect or script is self._group_scripts[name][1]

    def took(self, name: str, jobs: tuple[Job, ...], moved: int) -> None:
        """Record that the last claim took these jobs, and moved so many others to the suspects."""
        assert self.request is not None
        self._claimed = self.request
        self.is_called = False
        self.tokens.return_unused(len(jobs))
        if self._walks_since is not None:
            # In a round each queue that takes turns has its share of the time, and one claim at least.
            shares = 1 + self._order.count_peers(name, self._state.poller.waiting())
            share_seconds = self._follow_seconds(_now() - self._walks_since) / shares
            # If the share is very small, the next claim goes to another queue: here it would mostly find nothing.
            self._follow_until = 0.0 if 0.0 < share_seconds < _LEAST_SHARE_SECONDS else _now() + share_seconds
            self._walks_since = None
        if isinstance(self.request.script, GroupScript):
            self._state.poller.record_groups(name)
            self._groups[name].found()
        elif self.request.script.is_keyed:
            self._positions[name].move(self.request, jobs, moved)

    def _follow_seconds(self, walk_seconds: float) -> float:
        """How long the slot stays with one sort of jobs, if a poll of all of its queues took `walk_seconds`."""
        limits = self._state.limits
        return min(max(walk_seconds / _WALK_SHARE, limits.follow_least_seconds), limits.follow_most_seconds)

    def is_more(self, jobs: tuple[Job, ...], moved: int) -> bool:
        """Whether the last claim may have left jobs to other slots."""
        assert self.request is not None
        is_suspect = self._takes_suspects(self.request.queue, self.request.script)
        return _may_be_more(self.request, len(jobs) + moved) and not is_suspect

    def found_nothing(self, name: str, script: AnyScript) -> bool:
        """Record that no such job waits behind the place from which the claim started; whether none waits at all."""
        assert self.request is not None
        self.tokens.leave()
        if isinstance(script, GroupScript):
            return script.suspects or self._groups[name].end_round()
        if script.is_keyed:
            self._positions[name].move_to_start()
        return self.request.cursor is None

    def take_back_due(self, name: str) -> bool:
        """Whether jobs that were passed over by their groups are due, and the caller is to bring them back."""
        return self._groups[name].take_back_due()

    def cancelled(self) -> None:
        """Halve the number of jobs of the next claim: the last one was cancelled because it took too long."""
        request = self.request
        assert request is not None
        half = max(1, request.limit // 2)
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
        self._most = max(1, len(batch.jobs) // 2) if batch.has_deadlocked else min(self._most * 2, _NO_LIMIT)
        parks = batch.decided and batch.parked
        if self.alone_for or parks or self._state.stopping.is_set() or _now() > self._counts_due_at:
            return None
        is_full = _may_be_more(request, len(batch.jobs))
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
        self._most_leased[leased.queue] = max(1, min(2 * request.limit, leased.fitting()))
        is_suspect = self._takes_suspects(leased.queue, request.script)
        is_full = _may_be_more(request, len(leased.jobs) + leased.dropped) and not (
            self.alone_for or is_suspect or leased.unknown
        )
        may_follow = (
            is_full and not self._state.stopping.is_set() and _now() <= min(self._counts_due_at, self._follow_until)
        )
        return self.ask(leased.queue, request.script) if may_follow else None


def _group_scripts(state: RelayState, name: str) -> tuple[GroupScript, GroupScript]:
    """The claim of jobs of a queue's groups, and that of suspects among them."""
    schema, owner, limits = state.config.schema, state.lease.owner, state.flow.limits_of(name)
    is_leased = state.registry.claims[name] == "lease"
    ordinary = GroupScript(
        schema, name, owner if is_leased else None, limits.running, is_leased, per_group=limits.per_group or 1
    )
    return ordinary, replace(ordinary, owner=owner, suspects=True)


def _may_be_more(request: ClaimRequest, claimed: int) -> bool:
    """Whether more jobs may wait behind those of a claim: behind the first jobs of groups always."""
    return claimed > 0 if isinstance(request.script, GroupScript) else claimed >= request.limit


def _now() -> float:
    return time.monotonic()
