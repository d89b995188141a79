"""Tokens of the rates of a relay's queues: reserved on the server, and used by its slots' claims, one for each job.

Several tokens are reserved at once, for the next claims, so that a high rate does not cost a commit for each job. They
are used within moments: tokens kept for long would let more jobs begin at once than the rate allows. Tokens that are
not used in time are lost, and the next reservation is for fewer.
"""

import threading
import time
from dataclasses import dataclass

from outboxq.queue_limits import Rate
from outboxq.statements.rate import TokenRequest

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
    """The tokens that a relay has in hand; shared by its slots."""

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
        """Give back tokens that a claim did not use; they are lost if their time has ended."""
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
