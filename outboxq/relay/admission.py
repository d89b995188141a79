"""Admission: whether a relay's slots may claim from a queue now, by the queue's limit and its rate.

The claim itself keeps the limit. Here is what keeps slots from claiming in vain: a queue that is at its limit, or that
has no tokens, is held for a moment, for all slots of the relay. Then one slot looks again.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from sqlalchemy import Connection

from outboxq.database.driver import run_script
from outboxq.handlers.options import ClaimMode
from outboxq.queue_limits import Rate
from outboxq.relay.flow_settings import FlowSettings
from outboxq.relay.limits import RelayLimits
from outboxq.relay.poller import SharedPoller
from outboxq.relay.rates import TokenHands
from outboxq.statements.limit import room
from outboxq.statements.rate import begin_rate, reserve_tokens

logger = logging.getLogger("outboxq.relay")

# How many jobs wait, whether the limit has room, the tokens that were reserved, and when tokens will be due.
Row: TypeAlias = tuple[int, bool, int, float | None]

# Tokens are due by the server's clock, and other relays wait for them too.
_LEAST_HOLD_SECONDS = 0.002
# A single token is for the next claims of its slot: a claim of another sort may have found nothing. A tenth of the time
# of a token, so that no more than a tenth of a job begins too early.
_LEAST_KEEP_SECONDS, _MOST_KEEP_SECONDS, _KEPT_SHARE = 0.02, 60.0, 0.1


@dataclass(eq=False)
class Admission:
    """Which queues a relay's slots may claim from.

    Args:
        wake_another: Wakes a slot that sleeps on a queue.
    """

    schema: str
    claims: Mapping[str, ClaimMode]
    flow: FlowSettings
    poller: SharedPoller
    limits: RelayLimits
    wake_another: Callable[[str], None]
    _pauses: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.hands = TokenHands(self.limits.token_seconds)

    def has_rate(self, queue: str) -> bool:
        """Whether each job of this queue takes a token."""
        return self.flow.limits_of(queue).rate_jobs is not None

    def found_full(self, queue: str) -> None:
        """Record that a claim found a queue at its limit: no slot claims from it for a moment."""
        limits = self.limits
        with self._lock:
            pause = self._pauses.get(queue, limits.full_least_seconds)
            self._pauses[queue] = min(pause * 2, limits.full_most_seconds)
        self.poller.hold(queue, pause)

    def found_room(self, queue: str) -> None:
        """Record that a claim of this queue was not kept back by a limit."""
        # Mostly there is none. One that another slot sets at this moment comes behind this call.
        if queue in self._pauses:
            with self._lock:
                self._pauses.pop(queue, None)
        self.poller.release(queue)

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

    def admits(self, connection: Connection, queue: str, batch_size: int) -> bool:
        """Whether a claim of this queue may be sent: if it has a rate, tokens are in hand, or can be reserved now.

        Outside of a transaction. If no token can be had, the queue is held until one is due.
        """
        rate = self.flow.limits_of(queue).rate
        return rate is None or self.hands.has(queue) or self._reserve(connection, queue, rate, batch_size)

    def _reserve(self, connection: Connection, queue: str, rate: Rate, batch_size: int) -> bool:
        asked = self.hands.request(queue, rate, batch_size)
        # Tokens that cannot be used must not be reserved.
        most, counts_leases = self.flow.limits_of(queue).running, self.claims.get(queue) == "lease"
        limited = None if most is None else room(self.schema, queue, most, counts_leases=counts_leases)
        statement = reserve_tokens(self.schema, queue, asked, limited)
        waiting, has_room, tokens, due_seconds = self._send(connection, statement)
        if waiting and has_room and due_seconds is None:
            self._send(connection, f"{begin_rate(self.schema, queue)}; COMMIT")
            waiting, has_room, tokens, due_seconds = self._send(connection, statement)
        if tokens:
            # From the answer on: however long a COMMIT takes, the claim behind it comes in time.
            keep_seconds = asked.keep_seconds if tokens > 1 else _keep_one_seconds(rate)
            self.hands.add(queue, tokens, time.monotonic() + keep_seconds)
            return True
        if not has_room:
            self.found_full(queue)
        elif waiting:
            self.poller.hold(queue, max(due_seconds or 0.0, _LEAST_HOLD_SECONDS))
        else:
            self.found_room(queue)
        return False

    def _send(self, connection: Connection, statement: str) -> Row:
        # The statement ends with COMMIT; leaving the block has nothing more to end.
        with connection.begin():
            rows = run_script(connection, statement)
        return cast("Row", rows[0]) if rows else (0, True, 0, None)


def _keep_one_seconds(rate: Rate) -> float:
    """For how long a relay may keep a token that it reserved alone."""
    return min(max(_LEAST_KEEP_SECONDS, rate.seconds_each * _KEPT_SHARE), _MOST_KEEP_SECONDS)
