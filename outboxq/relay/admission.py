"""Admission: decides by a queue's limit and rate if a relay's slots may claim from it now.

The claim itself keeps the limit. This module saves claims that would find nothing: a queue that is at its limit, or has
no tokens, is held for a moment, for all slots of the relay. Then one slot tries again. Only a suspect, whose claim has
committed, takes its slot of the limit here.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

from sqlalchemy import Connection

from outboxq.database.driver import Rows, run_script
from outboxq.execution.claim import Claimed
from outboxq.handlers.options import ClaimMode
from outboxq.queue_limits import Rate
from outboxq.relay.flow_settings import FlowSettings
from outboxq.relay.limits import RelayLimits
from outboxq.relay.poller import SharedPoller
from outboxq.statements.limit import return_suspect, room, take_slot
from outboxq.statements.rate import TokenRequest, begin_rate, reserve_tokens
from outboxq.statements.transaction import local_timeouts

logger = logging.getLogger("outboxq.relay")

# The number of waiting jobs, if the limit has room, the tokens reserved, and the seconds until tokens are due.
Row: TypeAlias = tuple[int, bool, int, float | None]

# Tokens are due by the server's clock, and other relays wait for them too.
_LEAST_HOLD_SECONDS = 0.002
# A single token serves the next claims of its slot: a claim of another sort may have found nothing. It is kept for a
# tenth of a token's time, so that no more than a tenth of a job begins too early.
_LEAST_KEEP_SECONDS, _MOST_KEEP_SECONDS, _KEPT_SHARE = 0.02, 60.0, 0.1


# A chunk is the tokens of this time, if the burst allows it, so that a queue at its rate is not queried more often.
_CHUNK_SECONDS = 0.02


def chunk_of(rate: Rate) -> int:
    """The number of tokens reserved at once, if so many jobs wait: at most half of the burst, and one at least."""
    return max(1, min(int(_CHUNK_SECONDS / rate.seconds_each), rate.burst // 2))


@dataclass(slots=True)
class _Hand:
    """The tokens of one queue that the relay has, and how many it requests next."""

    tokens: int = 0
    until: float = 0.0
    # No claim has taken any of them yet.
    is_fresh: bool = False
    wanted: int = 1
    used: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """Tokens that a claim has taken, and the time until which another one may use them if this one does not."""

    tokens: int
    until: float


class TokenHands:
    """The tokens of its queues' rates that a relay has in hand; shared by its slots, and used one for each job.

    Several tokens are reserved at once, for the next claims, so that a high rate does not cost a commit for each job.
    They are used within moments: tokens kept for long would let more jobs begin at once than the rate allows. Tokens
    that are not used in time are lost, and the next reservation is for fewer.
    """

    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        self._hands: dict[str, _Hand] = {}
        self._lock = threading.Lock()

    def request(self, queue: str, rate: Rate, batch_size: int) -> TokenRequest:
        """The next request: enough for a claim, and as many more as were used in time the last time."""
        chunk = chunk_of(rate)
        with self._lock:
            wanted = self._hands.setdefault(queue, _Hand()).wanted
        # For half of the burst's time at most, so that a whole chunk can be had.
        keep_seconds = min(self._keep_seconds, rate.burst * rate.seconds_each / 2)
        return TokenRequest(
            most=min(max(min(wanted, chunk), batch_size), rate.burst),
            chunk=min(wanted, chunk),
            each_seconds=rate.seconds_each,
            burst=rate.burst,
            keep_seconds=keep_seconds,
        )

    def add(self, queue: str, tokens: int, until: float) -> None:
        """Take over tokens that were reserved, to be used before `until` (monotonic)."""
        with self._lock:
            hand = self._hands.setdefault(queue, _Hand())
            self._drop_old(hand)
            hand.until = min(until, hand.until) if hand.tokens else until
            hand.wanted = 2 * tokens
            hand.tokens, hand.used, hand.is_fresh = hand.tokens + tokens, 0, True

    def take(self, queue: str, most: int) -> Taken:
        """Take up to `most` tokens for a claim.

        The first claim after a reservation has them however late it comes: if a busy machine lost them each time, no
        job would ever begin.
        """
        with self._lock:
            hand = self._hands.get(queue)
            if hand is None:
                return Taken(0, 0.0)
            self._drop_old(hand)
            taken = min(most, hand.tokens)
            hand.tokens -= taken
            hand.used += taken
            hand.is_fresh = False
            return Taken(taken, hand.until)

    def give_back(self, queue: str, taken: Taken) -> None:
        """Give back tokens that no claim used; they are lost if their time has ended."""
        with self._lock:
            hand = self._hands[queue]
            hand.used -= taken.tokens
            if time.monotonic() < taken.until:
                hand.until = min(taken.until, hand.until) if hand.tokens else taken.until
                hand.tokens += taken.tokens

    def has(self, queue: str) -> bool:
        """Return True if there are tokens in hand."""
        with self._lock:
            hand = self._hands.get(queue)
            return hand is not None and hand.tokens > 0 and (hand.is_fresh or time.monotonic() < hand.until)

    def _drop_old(self, hand: _Hand) -> None:
        if hand.tokens and not hand.is_fresh and time.monotonic() >= hand.until:
            hand.wanted, hand.tokens = max(1, hand.used), 0


@dataclass
class Query:
    """A statement that a slot sends, outside of a transaction, before its next claim.

    Attributes:
        is_alone: The statement needs no transaction.
        rows: The answer, when the slot has sent it.
    """

    statement: str
    is_alone: bool = False
    rows: Rows = ()


@dataclass(eq=False)
class Admission:
    """Decides which queues a relay's slots may claim from.

    Args:
        wake_another: Wakes a slot that sleeps on a queue.

    Attributes:
        given_back_at: The last time (monotonic) at which a token that came back has released a queue.
    """

    schema: str
    claims: Mapping[str, ClaimMode]
    flow: FlowSettings
    poller: SharedPoller
    limits: RelayLimits
    wake_another: Callable[[str], None]
    given_back_at: dict[str, float] = field(default_factory=dict)
    _pauses: dict[str, float] = field(default_factory=dict)
    # By queue, the end of its hold for want of tokens.
    _tokens_due_at: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.hands = TokenHands(self.limits.token_seconds)

    def found_full(self, queue: str) -> None:
        """Record that a claim found a queue at its limit: no slot claims from it for a moment."""
        limits = self.limits
        with self._lock:
            pause = self._pauses.get(queue, limits.full_least_seconds)
            self._pauses[queue] = min(pause * 2, limits.full_most_seconds)
        self.poller.hold(queue, pause)

    def found_room(self, queue: str) -> None:
        """Record that no limit stopped a claim of this queue."""
        # Without the lock: a pause that another slot sets at this moment counts as set after this call.
        if queue in self._pauses:
            with self._lock:
                self._pauses.pop(queue, None)
        self.poller.release(queue)

    def give_back(self, queue: str, taken: Taken) -> None:
        """Give back tokens that no claim used, for the next claims: also if a slot found none meanwhile."""
        self.hands.give_back(queue, taken)
        self.release_tokens(queue)

    def release_tokens(self, queue: str) -> None:
        """Release a queue that is held for want of tokens, if there are some."""
        until = self._tokens_due_at.get(queue)
        is_held = until is not None and until == self.poller.held_until.get(queue)
        if is_held and self.hands.has(queue) and self.poller.release(queue):
            self.given_back_at[queue] = time.monotonic()
            self.wake_another(queue)

    def ended(self, queue: str) -> None:
        """Record that jobs of this queue have ended: its limit has room again, and another slot may claim.

        The slot that ran them may be about to turn to another queue.
        """
        if self.flow.limits_of(queue).running is not None and self.poller.release(queue):
            self.wake_another(queue)

    def changed(self, queues: frozenset[str]) -> None:
        """Record that the limits of these queues have changed, and release what the old limits held."""
        for queue in sorted(queues):
            logger.info("queue %r is limited: %s", queue, self.flow.limits_of(queue))
            with self._lock:
                self._pauses.pop(queue, None)
            if self.poller.release(queue):
                self.wake_another(queue)

    def reserve(self, queue: str, batch_size: int) -> Iterator[Query]:
        """Reserve tokens before a claim, if the queue has a rate and none are in hand.

        If no token can be had, the queue is held until one is due.
        """
        rate = self.flow.limits_of(queue).rate
        if rate is None or self.hands.has(queue):
            return
        asked = self.hands.request(queue, rate, batch_size)
        # Reserve no tokens that cannot be used.
        most, counts_leases = self.flow.limits_of(queue).running, self.claims.get(queue) == "lease"
        limited = None if most is None else room(self.schema, queue, most, counts_leases=counts_leases)
        statement = reserve_tokens(self.schema, queue, asked, limited)
        yield (query := Query(statement))
        waiting, has_room, tokens, due_seconds = _row(query.rows)
        if waiting and has_room and due_seconds is None:
            yield Query(begin_rate(self.schema, queue))
            yield (query := Query(statement))
            waiting, has_room, tokens, due_seconds = _row(query.rows)
        if tokens:
            one_seconds = min(max(_LEAST_KEEP_SECONDS, rate.seconds_each * _KEPT_SHARE), _MOST_KEEP_SECONDS)
            # Counted from the answer: however long the COMMIT took, the next claim comes in time.
            self.hands.add(queue, tokens, time.monotonic() + (asked.keep_seconds if tokens > 1 else one_seconds))
        elif not has_room:
            self.found_full(queue)
        elif waiting:
            self._tokens_due_at[queue] = self.poller.hold(queue, max(due_seconds or 0.0, _LEAST_HOLD_SECONDS))
            # Another slot may have given one back since: before the hold, or after it, as `give_back` does.
            self.release_tokens(queue)
        else:
            self.found_room(queue)


class SlotAdmission:
    """Decides what one slot may claim now. Holds the tokens that its last claim took until jobs are known to use them.

    A claim from a queue without a limit or rate costs nothing here.
    """

    def __init__(self, shared: Admission) -> None:
        self._shared = shared
        self._held: tuple[str, Taken] | None = None
        # Their claim found nothing: the queue's next claim has them.
        self._are_left = False

    def reserve(self, queue: str, batch_size: int) -> Iterator[Query]:
        """Yield what to send before a claim, if the queue has a rate and no tokens are in hand."""
        return iter(()) if self._are_left_to(queue) else self._shared.reserve(queue, batch_size)

    def take(self, queue: str, limit: int) -> int:
        """Take tokens for up to `limit` jobs, if the queue has a rate; returns how many jobs may be claimed."""
        held = self._held
        if held is not None and self._are_left_to(queue) and held[1].tokens <= limit:
            self._are_left = False
            return held[1].tokens
        self.return_unused()
        if self._shared.flow.limits_of(queue).rate_jobs is None:
            return limit
        taken = self._shared.hands.take(queue, limit)
        self._held = (queue, taken) if taken.tokens else None
        return taken.tokens

    def record(self, claimed: Claimed) -> None:
        """Record what a claim took, or that it found its queue at its limit."""
        queue = claimed.request.queue
        if claimed.is_full:
            self._shared.found_full(queue)
        elif claimed.jobs:
            self._shared.found_room(queue)
            self.return_unused(len(claimed.jobs))
        else:
            self._shared.found_room(queue)
            self._are_left = True

    def ended(self, queue: str, following: Claimed | None) -> None:
        """Record that jobs of a queue have ended: there is room for others, unless the slot's next claim has taken it.

        Args:
            following: The claim that went along with their COMMIT.
        """
        if following is None or following.request.queue != queue or not (following.jobs or following.is_full):
            self._shared.ended(queue)

    def return_unused(self, used: int = 0) -> None:
        """Give back the tokens of the last claim that no job used."""
        if self._held is not None:
            queue, taken = self._held
            self._held, self._are_left = None, False
            if used < taken.tokens:
                self._shared.give_back(queue, replace(taken, tokens=taken.tokens - used))

    def _are_left_to(self, queue: str) -> bool:
        return self._are_left and self._held is not None and self._held[0] == queue


def _row(rows: Rows) -> Row:
    return cast("Row", rows[0]) if rows else (0, True, 0, None)


def take_slot_again(connection: Connection, claimed: Claimed, schema: str) -> bool:
    """Take a slot of the limit again for a job that was claimed to run by itself, or give the job back.

    The claim's COMMIT gave up the claim's own slot. The transaction of the job itself begins here, and holds the slot
    to its end.
    """
    request, job = claimed.request, claimed.jobs[0]
    most = request.script.most
    if most is None:
        return True
    # The server's deadlines are those of a job that is about to run.
    timeouts = local_timeouts(request.timeout_seconds)
    if run_script(connection, *timeouts, take_slot(schema, request.queue, most))[0][0]:
        return True
    assert job.lease_token is not None
    in_group = job.group_key is not None
    run_script(connection, return_suspect(schema, job.id, job.lease_token, job.crashes, in_group=in_group))
    return False
