"""Cursors: where a slot's next claim starts in a queue, so that it need not walk over what was claimed before.

A deleted job's index entry stays until vacuum takes it, and behind an old snapshot vacuum takes nothing. So a claim
starts behind the last job that its slot claimed. Jobs that were committed late, came back or have a higher priority lie
before that place: one slot of a relay sweeps for them, by claiming from the start.
"""

import random
import threading
import time

from outboxq.execution.claim import ClaimRequest, GroupLook
from outboxq.job import Job
from outboxq.statements.claim import Cursor
from outboxq.statements.group_claim import GROUPS_SEEN

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


class QueueCursor:
    """Where the claims of one slot start in one queue."""

    def __init__(self, queue: str, sweeps: SweepSchedule) -> None:
        self._queue = queue
        self._sweeps = sweeps
        self._cursor: Cursor | None = None
        self._asked_at = 0.0

    def start(self) -> Cursor | None:
        """The place behind which the next claim starts; None for the start of the queue."""
        self._asked_at = time.monotonic()
        # Even without a cursor: a claim from the start is the sweep of all slots.
        if self._sweeps.take_turn(self._queue):
            self._cursor = None
        return self._cursor

    def move(self, request: ClaimRequest, jobs: tuple[Job, ...], moved: int) -> None:
        """Move behind the last job of a claim, or back to the start if the claim was not full."""
        self._sweeps.record(self._queue, time.monotonic() - self._asked_at, swept=request.cursor is None)
        is_full = jobs and len(jobs) + moved >= request.limit
        self._cursor = Cursor(jobs[-1].priority, jobs[-1].seq) if is_full else None

    def move_to_start(self) -> None:
        """Move to the start of the queue: nothing was found behind the cursor."""
        self._cursor = None


class GroupCursor:
    """The group behind which a slot's next claim looks, and whether the slot has looked at all groups in vain.

    Each claim goes on where the last one ended, so that every group has its turn. Keys are compared as PostgreSQL's
    collation "C" does, by their bytes.
    """

    def __init__(self) -> None:
        # At random, so that slots and processes begin with different groups.
        self.after = chr(random.randint(33, 126))
        # Where a round without a job has begun, and whether it is over.
        self._round_from: str | None = None
        self._is_round_over = False
        self._is_back_due = False

    def record(self, look: GroupLook) -> None:
        """Move behind the last group that a claim took, or, if it did not find enough of them, that it looked at."""
        before, is_whole = self.after, look.seen is None or look.seen < GROUPS_SEEN
        self._is_back_due |= look.is_back_due
        last = look.taken[-1] if look.seen is None and look.taken else look.last
        if last is not None:
            self.after = last
        if self._round_from is None:
            self._round_from, self._is_round_over = before, look.seen is not None and is_whole
        else:
            passes = _is_between(before, self._round_from, self.after)
            self._is_round_over = passes or (look.seen is not None and is_whole)

    def found(self) -> None:
        """Record that the last claim took jobs."""
        self._round_from = None

    def end_round(self) -> bool:
        """Whether all groups were looked at since jobs were found; if so, the next round begins."""
        if self._is_round_over and not self._is_back_due:
            self._round_from = None
            return True
        return False

    def take_back_due(self) -> bool:
        """Whether jobs that were passed over are due, and the caller is to bring them back."""
        is_due, self._is_back_due = self._is_back_due, False
        return is_due


def _is_between(first: str, key: str, last: str) -> bool:
    """Whether a walk in circles, from behind `first` up to `last`, comes to `key`."""
    start, place, end = first.encode(), key.encode(), last.encode()
    return start < place <= end if start < end else place > start or place <= end
