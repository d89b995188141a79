"""The sleep of a slot without work: its wake-ups, and its own polls.

A sleeping slot holds no connection. The listener holds its sleep flags: advisory locks, one for each of its queues.
While a flag is held ("up"), producers send a notification with each job of that queue. Jobs that were committed before
the flags were up sent no notification. So the slot relies on notifications only after a poll that began when all of its
flags were up.
"""

import concurrent.futures
import random
import time
from collections.abc import Callable

from sqlalchemy import Connection

from outboxq.database.driver import run_alone
from outboxq.relay.listener import IdleSlot
from outboxq.relay.poller import Order
from outboxq.relay.state import RelayState

FIRST_PAUSE_SECONDS = 0.01
# Without sleep flags notifications are not certain, so poll at least this often.
UNFLAGGED_PAUSE_SECONDS = 1.0


class SlotSleep:
    """Decides how long a slot or dispatcher without jobs sleeps, when it polls, and if notifications will wake it."""

    def __init__(self, state: RelayState, order: Order, wake: Callable[[], None]) -> None:
        self.idle_slot = IdleSlot(frozenset(order.queues), wake)
        # True from the time when the slot found nothing to do until it claims jobs.
        self.is_asleep = False
        self._state = state
        self._poller = state.poller
        self._first = order.queues[0]
        self._pause_seconds = FIRST_PAUSE_SECONDS
        # The next poll must begin after this one.
        self._poll_after = state.poller.latest
        self._is_poll_due = True
        self._claimed_at = 0.0

    def has_work(self) -> bool:
        """Return True if jobs are known to wait in the slot's queues, so that the slot should claim."""
        return self._has_jobs() or self._has_suspects()

    def _has_jobs(self) -> bool:
        return not self._poller.waiting().isdisjoint(self.idle_slot.queues)

    def _has_suspects(self) -> bool:
        quarantine, queues = self._state.quarantine, self.idle_slot.queues
        return quarantine.wait_in(queues) and not all(map(self._poller.is_held, quarantine.known_in(queues)))

    def needs_connection(self) -> bool:
        """Return True if the sleeping slot is to borrow a connection now, to claim or to poll."""
        return self._has_suspects() or self.is_behind()

    def is_behind(self) -> bool:
        """Return True if the slot must not sleep now: jobs are known to wait, or a poll is due that no slot is making.

        Suspects (jobs that ran when their relay died) do not count, because another slot may take long to run one.
        """
        return self._has_jobs() or (self._wants_poll() and not self._poller.is_under_way())

    def _wants_poll(self) -> bool:
        if self._is_poll_due and self._poller.has_polled(self._first, self._poll_after):
            self._is_poll_due = False
        return self._is_poll_due

    def poll(self, connection: Connection) -> None:
        """Poll all queues of the relay and record the result, if a poll is due and no other slot is making one."""
        begun = self._poller.begin_shared(self._first, self._poll_after) if self._wants_poll() else None
        if begun is None:
            return
        try:
            rows = run_alone(connection, self._poller.statement)
            self._poller.record(begun, rows)
        finally:
            self._poller.end_shared(begun)
        self._state.quarantine.record_poll(rows)
        self._is_poll_due = False

    def want_poll(self) -> None:
        """Record that a poll is due. Only a poll that begins from now on counts."""
        self._poll_after = self._poller.latest
        self._is_poll_due = True

    def is_flagged(self, since: float | None) -> bool:
        """Return True if this slot's sleep flags are up, so that notifications wake it; if needed, make a poll due.

        No poll is needed if one has begun since three events: all flags went up; the slot made its last claim, which
        may have led to jobs that are due later; and the last notification for its queues came, after which another slot
        may have claimed and left jobs.

        Args:
            since: The time (monotonic) since which all of the flags are up; None if they are not.
        """
        if since is not None and self._poller.uncalled_since(self.idle_slot.queues) <= max(since, self._claimed_at):
            # A poll sees the jobs that were committed before the flags were raised.
            self.want_poll()
        return since is not None

    def begin_claims(self) -> None:
        """Record that the slot claims now. No poll is due then, because the claims show if jobs wait."""
        self._is_poll_due = False
        self._claimed_at = time.monotonic()

    def end(self) -> None:
        """Record that the slot has claimed jobs and is awake.

        The listener then lowers the slot's sleep flags, the locks that make producers notify.
        """
        self._pause_seconds = FIRST_PAUSE_SECONDS
        if self.is_asleep and self._state.listener is not None:
            self._state.listener.wake_up(self.idle_slot)
        self.is_asleep = False

    def fall_asleep(self) -> "concurrent.futures.Future[float | None] | None":
        """Record that the slot sleeps, and have the listener raise its sleep flags, which make producers notify.

        Returns:
            A future for the time (monotonic) since which all of the flags are up, or for None if they are not. Without
            a listener there is no future: None.
        """
        self.is_asleep = True
        return None if self._state.listener is None else self._state.listener.fall_asleep(self.idle_slot)

    def pause_seconds(self, *, flagged: bool) -> float:
        """Return the seconds for which the slot is to sleep before its next poll, at most until a scheduled job is due.

        That is about the poll interval if notifications wake the slot (`flagged`). Otherwise the pause doubles with
        each call, up to a second.
        """
        poll_seconds = self._state.config.poll_seconds
        # In this order: a poll that returns in between is either still wanted, or its result is known.
        if self._wants_poll() or self._has_jobs():
            return FIRST_PAUSE_SECONDS
        growing = min(self._pause_seconds, UNFLAGGED_PAUSE_SECONDS, poll_seconds)
        self._pause_seconds = min(self._pause_seconds * 2, poll_seconds)
        self.want_poll()
        # A suspect's queue may be held, but only for a moment, and a poll may not see that a suspect waits.
        if self._state.quarantine.wait_in(self.idle_slot.queues):
            return growing
        pause = (poll_seconds if flagged else growing) * random.uniform(0.8, 1.0)
        due = self._poller.due_in_seconds(self.idle_slot.queues)
        # A due job that was not claimed is being run by another transaction, so it is no reason to claim in a loop.
        return min(max(self._poll_after.begun_at + pause - time.monotonic(), 0.0), due if due > 0 else growing)
