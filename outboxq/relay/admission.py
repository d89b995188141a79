"""Admission: decides if a relay's slots may claim from a queue now, by the queue's limit (of running jobs) and rate.

The SQL of a claim enforces the limit. This module avoids claims that would find nothing. Each job of a queue with a
rate uses one token, and the rate says how fast new tokens come. A queue that is at its limit, or has no tokens, is
held: no slot of the relay claims from it for a moment, and then one slot tries again.

A suspect (a job that ran when its relay died) is claimed in one transaction and runs in another. In the transaction
that runs the suspect, `take_slot_again` counts it in the limit again.
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

# The number of waiting jobs if the limit has room, the reserved tokens, and the seconds until tokens are due.
Row: TypeAlias = tuple[int, bool, int, float | None]

# Tokens are due by the server's clock, and other relays wait for them too.
_LEAST_HOLD_SECONDS = 0.002
# A single token serves its slot's next claims, because a claim of another sort may have found nothing. It is kept for a
# tenth of a token's interval, so that at most a tenth of a job begins too early.
_LEAST_KEEP_SECONDS, _MOST_KEEP_SECONDS, _KEPT_SHARE = 0.02, 60.0, 0.1


# A chunk is the tokens of this time, if the burst allows that, so that a queue at its rate is not queried more often.
_CHUNK_SECONDS = 0.02


def chunk_of(rate: Rate) -> int:
    """Return the number of tokens of a queue's rate to reserve at once, in advance of the claims that will use them.

    That is the number of tokens that the rate gives in 0.02 s, but at most half of the burst, and at least one. A
    single claim that needs more tokens reserves more.
    """
    return max(1, min(int(_CHUNK_SECONDS / rate.seconds_each), rate.burst // 2))


@dataclass(slots=True)
class _Hand:
    """The tokens of one queue's rate that the relay has reserved and not used yet.

    Attributes:
        tokens: The number of these tokens.
        until: The time (monotonic) before which claims must use them.
        is_fresh: True until the first claim after a reservation takes some of them.
        wanted: The number of tokens to reserve the next time.
        used: The number of tokens that claims have used since the last reservation.
    """

    tokens: int = 0
    until: float = 0.0
    # True until a claim takes one of them.
    is_fresh: bool = False
    wanted: int = 1
    used: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """The tokens of a queue's rate that one claim took from those that the relay had reserved.

    Attributes:
        tokens: The number of tokens.
        until: The time (monotonic) until which other claims may use tokens that this claim gives back.
    """

    tokens: int
    until: float


class TokenHands:
    """The tokens that a relay has reserved in the database, by queue. Each job of a queue with a rate uses one.

    All slots of the relay share the tokens. One reservation takes several tokens, for the next claims, so that a high
    rate does not cost a commit for each job. Claims must use the tokens soon (`TokenRequest.keep_seconds`): if the
    relay kept tokens for longer, more jobs could begin at once than the rate allows. Tokens that are not used in time
    are lost, and the next reservation is smaller.
    """

    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        self._hands: dict[str, _Hand] = {}
        self._lock = threading.Lock()

    def request(self, queue: str, rate: Rate, batch_size: int) -> TokenRequest:
        """Return a request to reserve the next tokens of a queue in the database.

        The request is for `batch_size` tokens, one for each job of a claim. It is for more if claims used the tokens of
        the last reservation in time.
        """
        chunk = chunk_of(rate)
        with self._lock:
            wanted = self._hands.setdefault(queue, _Hand()).wanted
        # For half the burst's time at most, so that a whole chunk is possible.
        keep_seconds = min(self._keep_seconds, rate.burst * rate.seconds_each / 2)
        return TokenRequest(
            most=min(max(min(wanted, chunk), batch_size), rate.burst),
            chunk=min(wanted, chunk),
            each_seconds=rate.seconds_each,
            burst=rate.burst,
            keep_seconds=keep_seconds,
        )

    def add(self, queue: str, tokens: int, until: float) -> None:
        """Add tokens that were reserved in the database; claims must use them before `until` (monotonic)."""
        with self._lock:
            hand = self._hands.setdefault(queue, _Hand())
            self._drop_old(hand)
            hand.until = min(until, hand.until) if hand.tokens else until
            hand.wanted = 2 * tokens
            hand.tokens, hand.used, hand.is_fresh = hand.tokens + tokens, 0, True

    def take(self, queue: str, most: int) -> Taken:
        """Take up to `most` of a queue's reserved tokens for a claim; return the tokens taken, which may be none.

        The first claim after a reservation gets tokens even if it comes after their `until`: otherwise no job would
        ever begin on a machine that is so busy that each claim is late.
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
        """Give back tokens that a claim took and did not use, for other claims.

        After `taken.until` the tokens are lost instead.
        """
        with self._lock:
            hand = self._hands[queue]
            hand.used -= taken.tokens
            if time.monotonic() < taken.until:
                hand.until = min(taken.until, hand.until) if hand.tokens else taken.until
                hand.tokens += taken.tokens

    def has(self, queue: str) -> bool:
        """Return True if there are reserved tokens of this queue that a claim may still use."""
        with self._lock:
            hand = self._hands.get(queue)
            return hand is not None and hand.tokens > 0 and (hand.is_fresh or time.monotonic() < hand.until)

    def _drop_old(self, hand: _Hand) -> None:
        if hand.tokens and not hand.is_fresh and time.monotonic() >= hand.until:
            hand.wanted, hand.tokens = max(1, hand.used), 0


@dataclass
class Query:
    """A statement that a slot or dispatcher sends between claims: a poll, or a reservation of tokens.

    `Planner` and `Admission` yield queries, because they do no I/O. The slot sends the statement with no transaction
    open, and stores the answer in `rows`.

    Attributes:
        statement: The SQL.
        is_alone: True to send it without BEGIN and COMMIT; otherwise it runs in a transaction of its own.
        rows: The answer, after the slot has sent the statement.
    """

    statement: str
    is_alone: bool = False
    rows: Rows = ()


@dataclass(eq=False)
class Admission:
    """Decides from which queues a relay's slots may claim, by the queues' limits and rates. All slots share it.

    A queue that is at its limit, or has no tokens of its rate, is held: no slot claims from it for a moment.

    Args:
        claims: The claim mode of each queue.
        wake_another: Wakes a slot that sleeps on the given queue.

    Attributes:
        given_back_at: By queue, the last time (monotonic) at which the queue's hold ended because a token was given
            back. `LastJobs` reads it, to claim from such queues once more.
    """

    schema: str
    claims: Mapping[str, ClaimMode]
    flow: FlowSettings
    poller: SharedPoller
    limits: RelayLimits
    wake_another: Callable[[str], None]
    given_back_at: dict[str, float] = field(default_factory=dict)
    _pauses: dict[str, float] = field(default_factory=dict)
    # By queue, the end of its hold because of missing tokens.
    _tokens_due_at: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.hands = TokenHands(self.limits.token_seconds)

    def found_full(self, queue: str) -> None:
        """Record that a claim found a queue at its limit, and hold the queue: no slot claims from it for some time.

        The first hold takes `RelayLimits.full_least_seconds`, and each further one twice as long, up to
        `full_most_seconds`.
        """
        limits = self.limits
        with self._lock:
            pause = self._pauses.get(queue, limits.full_least_seconds)
            self._pauses[queue] = min(pause * 2, limits.full_most_seconds)
        self.poller.hold(queue, pause)

    def found_room(self, queue: str) -> None:
        """Record that a queue's limit did not stop a claim: end the queue's hold, if it has one.

        The next hold of the queue is short again.
        """
        # Without the lock: a pause that another slot sets at this moment counts as set after this call.
        if queue in self._pauses:
            with self._lock:
                self._pauses.pop(queue, None)
        self.poller.release(queue)

    def give_back(self, queue: str, taken: Taken) -> None:
        """Give back tokens that a claim did not use.

        If slots avoid the queue because it had no tokens, let them claim again.
        """
        self.hands.give_back(queue, taken)
        self.release_tokens(queue)

    def release_tokens(self, queue: str) -> None:
        """If a queue is held because it had no tokens, and the relay has some by now, end the hold and wake a slot."""
        until = self._tokens_due_at.get(queue)
        is_held = until is not None and until == self.poller.held_until.get(queue)
        if is_held and self.hands.has(queue) and self.poller.release(queue):
            self.given_back_at[queue] = time.monotonic()
            self.wake_another(queue)

    def ended(self, queue: str) -> None:
        """Record that jobs of this queue have ended: if it has a limit and is held, end the hold and wake a slot.

        A sleeping slot is woken, because the slot that ran the jobs may be about to claim from another queue.
        """
        if self.flow.limits_of(queue).running is not None and self.poller.release(queue):
            self.wake_another(queue)

    def changed(self, queues: frozenset[str]) -> None:
        """Log the new limits of these queues, and end holds that their old limits caused."""
        for queue in sorted(queues):
            logger.info("queue %r is limited: %s", queue, self.flow.limits_of(queue))
            with self._lock:
                self._pauses.pop(queue, None)
            if self.poller.release(queue):
                self.wake_another(queue)

    def reserve(self, queue: str, batch_size: int) -> Iterator[Query]:
        """Yield statements for a slot to send, which reserve tokens of a queue's rate for the slot's next claim.

        Yields nothing if the queue has no rate, or the relay still has tokens of it. If an answer shows that there is
        no token, no slot claims from the queue until the next token is due.
        """
        rate = self.flow.limits_of(queue).rate
        if rate is None or self.hands.has(queue):
            return
        asked = self.hands.request(queue, rate, batch_size)
        # Do not reserve tokens that cannot be used.
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
            # Counted from the answer, so that the next claim is in time however long the COMMIT took.
            self.hands.add(queue, tokens, time.monotonic() + (asked.keep_seconds if tokens > 1 else one_seconds))
        elif not has_room:
            self.found_full(queue)
        elif waiting:
            self._tokens_due_at[queue] = self.poller.hold(queue, max(due_seconds or 0.0, _LEAST_HOLD_SECONDS))
            # Another slot may have returned a token since: before the hold, or after it, as `give_back` does.
            self.release_tokens(queue)
        else:
            self.found_room(queue)


class SlotAdmission:
    """Decides how many jobs one slot may claim now, and keeps the tokens that its last claim took, until jobs use them.

    For a queue without a limit or rate this costs nothing.
    """

    def __init__(self, shared: Admission) -> None:
        self._shared = shared
        self._held: tuple[str, Taken] | None = None
        # The claim with these tokens found nothing: the queue's next claim uses them.
        self._are_left = False

    def reserve(self, queue: str, batch_size: int) -> Iterator[Query]:
        """Yield the statements that the slot sends to reserve tokens of the queue's rate for its next claim.

        Yields nothing if the queue has no rate, or if there are still tokens: the relay's, or those that the slot's
        last claim took and did not use because it found no job.
        """
        return iter(()) if self._are_left_to(queue) else self._shared.reserve(queue, batch_size)

    def take(self, queue: str, limit: int) -> int:
        """Take tokens for up to `limit` jobs, if the queue has a rate; return how many jobs may be claimed."""
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
        """Record the answer to a claim, which took jobs, found none, or found its queue at its limit.

        Tokens beyond the number of claimed jobs are given back. If there was no job at all, the slot keeps its tokens
        for the queue's next claim.
        """
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
        """Record that jobs have ended, so that other slots may use the room that they leave in their queue's limit.

        Does nothing if the slot's own next claim was for this queue, and took jobs or found the queue at its limit.

        Args:
            following: The answer to the claim that was sent with the COMMIT of these jobs; None if there was no such
                claim.
        """
        if following is None or following.request.queue != queue or not (following.jobs or following.is_full):
            self._shared.ended(queue)

    def return_unused(self, used: int = 0) -> None:
        """Give back the tokens of the slot's last claim, except for `used` of them: one for each claimed job."""
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
    """Count a claimed suspect (a job that ran when its relay died) in its queue's limit while it runs.

    The claim was a separate transaction, and the job stopped counting at its COMMIT. So the job is counted again in the
    transaction that runs it, which `connection` must have begun. If the limit has no room, make the job claimable again
    and return False.
    """
    request, job = claimed.request, claimed.jobs[0]
    most = request.script.most
    if most is None:
        return True
    # The server's time-outs are set for a job that is about to run.
    timeouts = local_timeouts(request.timeout_seconds)
    if run_script(connection, *timeouts, take_slot(schema, request.queue, most))[0][0]:
        return True
    assert job.lease_token is not None
    in_group = job.group_key is not None
    run_script(connection, return_suspect(schema, job.id, job.lease_token, job.crashes, in_group=in_group))
    return False
