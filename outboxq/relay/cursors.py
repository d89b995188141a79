"""Cursors: where a slot's next claim starts in a queue, so that it need not walk over what was claimed before.

A deleted job's index entry stays until vacuum takes it, and behind an old snapshot vacuum takes nothing. So a claim
starts behind the last job that its slot claimed. Jobs that were committed late, came back or have a higher priority lie
before that place: one slot of a relay sweeps for them, by claiming from the start.
"""

import threading
import time

from outboxq.execution.claim import ClaimRequest
from outboxq.job import Job
from outboxq.statements.claim import Cursor

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
