"""Cursors: where a slot's next claim starts in a queue, so that it need not walk over what was claimed before.

A deleted job's index entry stays until vacuum takes it, and with an old snapshot open vacuum takes nothing. So a claim
starts after the last job that its slot claimed. Jobs that were committed late, came back or have a higher priority lie
before that place: one slot of a relay sweeps for them, by claiming from the start.
"""

import random
import threading
import time

from outboxq.execution.claim import Claimed, ClaimRequest, GroupLook
from outboxq.statements.claim import Cursor
from outboxq.statements.group_claim import GROUPS_SEEN, bring_back

# While claims go on, each queue is claimed from its start at least this often.
SWEEP_SECONDS = 1.0
# Sweeps that take longer than other claims, because they walk over dead entries (0.1 s and more past a million), may
# take this part of the time. The pauses between them stay within these bounds.
_SHARE = 0.05
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 30.0
# The weight of the newest claim in the average length of claims.
_WEIGHT = 0.1


class SweepSchedule:
    """When a relay's slots sweep; shared by all slots."""

    def __init__(self) -> None:
        self._due_at: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._usual_seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def take_turn(self, queue: str) -> bool:
        """Whether the caller is to sweep this queue now."""
        now = time.monotonic()
        with self._lock:
            if now < self._due_at.get(queue, 0.0):
                return False
            # No other slot sweeps while this sweep lasts.
            self._due_at[queue] = now + max(SWEEP_SECONDS, self._pauses.get(queue, 0.0))
            return True

    def record(self, queue: str, seconds: float, *, swept: bool) -> None:
        """Record how long a claim took; the less a sweep cost, the sooner the next one is due."""
        usual = self._usual_seconds.get(queue, seconds)
        if swept:
            pause = min(max((seconds - usual) / _SHARE, _LEAST_SECONDS), _MOST_SECONDS)
            with self._lock:
                self._pauses[queue] = pause
                self._due_at[queue] = time.monotonic() + pause
        else:
            self._usual_seconds[queue] = usual + (seconds - usual) * _WEIGHT


class Start:
    """Where the claims of a sort without a cursor start: at the start of the queue, each time."""

    def place(self) -> Cursor | str | None:
        """The place after which the next claim starts; None for the start of the queue."""
        return None

    def record(self, claimed: Claimed) -> None:
        """Move by what a claim took, and looked at."""

    def is_at_end(self, request: ClaimRequest) -> bool:
        """Whether nothing waits at all, after this claim has found nothing from its place on."""
        return request.cursor is None

    def bringing_back(self) -> str | None:
        """A statement to send before the next claim, if the last one has seen that jobs are due to come back."""
        return None


class QueueCursor(Start):
    """Where the claims of one slot start among the ready jobs of one queue."""

    def __init__(self, queue: str, sweeps: SweepSchedule) -> None:
        self._queue = queue
        self._sweeps = sweeps
        self._cursor: Cursor | None = None

    def place(self) -> Cursor | None:
        """The place of the last job that the slot claimed, unless it is the slot's turn to sweep."""
        # Even without a cursor: a claim from the start is the sweep of all slots.
        if self._sweeps.take_turn(self._queue):
            self._cursor = None
        return self._cursor

    def record(self, claimed: Claimed) -> None:
        """Move to the last job of a claim, or to the start if the claim was not full."""
        jobs, request = claimed.jobs, claimed.request
        if claimed.is_full:
            return
        self._cursor = None
        if jobs:
            self._sweeps.record(self._queue, time.monotonic() - request.asked_at, swept=request.cursor is None)
            if len(jobs) + claimed.moved >= request.limit:
                self._cursor = Cursor(jobs[-1].priority, jobs[-1].seq)


class GroupCursor(Start):
    """The group after which a slot's next claim looks, and whether the slot has looked at all groups in vain.

    Each claim goes on where the last one ended, so that every group has its turn. Keys are compared as PostgreSQL's
    collation "C" does, by their bytes.
    """

    def __init__(self, schema: str, queue: str) -> None:
        self._schema = schema
        self._queue = queue
        # At random, so that slots and processes begin with different groups.
        self._after = chr(random.randint(33, 126))
        # Where a round without a job has begun, and whether it has ended.
        self._round_from: str | None = None
        self._has_round_ended = False
        self._is_back_due = False

    def place(self) -> str:
        """The key of the last group that a claim took, or looked at."""
        return self._after

    def record(self, claimed: Claimed) -> None:
        """Move to the last group that a claim took, or, if it did not find enough of them, that it looked at."""
        if claimed.look is not None:
            self._move(claimed.look)
        if claimed.jobs:
            self._round_from = None

    def _move(self, look: GroupLook) -> None:
        before, is_whole = self._after, look.seen is None or look.seen < GROUPS_SEEN
        self._is_back_due |= look.is_back_due
        last = look.taken[-1] if look.seen is None and look.taken else look.last
        if last is not None:
            self._after = last
        if self._round_from is None:
            self._round_from, self._has_round_ended = before, look.seen is not None and is_whole
        else:
            passes = _is_between(before, self._round_from, self._after)
            self._has_round_ended = passes or (look.seen is not None and is_whole)

    def is_at_end(self, _: ClaimRequest) -> bool:
        """Whether all groups were looked at since jobs were found; if so, the next round begins."""
        if self._has_round_ended and not self._is_back_due:
            self._round_from = None
            return True
        return False

    def bringing_back(self) -> str | None:
        """Let jobs that were passed over by their groups wait there again, if they are due."""
        is_due, self._is_back_due = self._is_back_due, False
        return bring_back(self._schema, self._queue) if is_due else None


def _is_between(first: str, key: str, last: str) -> bool:
    """Whether a walk in circles, from behind `first` up to `last`, comes to `key`."""
    start, place, end = first.encode(), key.encode(), last.encode()
    return start < place <= end if start < end else place > start or place <= end
