"""The sleep of a slot without work: what wakes the slot, and when it polls its queues by itself.

A sleeping slot holds no connection. Before it trusts its sleep flags it needs a poll that began after they were raised:
jobs committed earlier sent no notification.
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
# Without sleep flags a notification is not certain: poll at least this often.
UNFLAGGED_PAUSE_SECONDS = 1.0


class SlotSleep:
    """The pauses of one slot."""

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
        """Return True if something is known to wait in the slot's queues."""
        return self._has_jobs() or self._has_suspects()

    def _has_jobs(self) -> bool:
        return not self._poller.waiting().isdisjoint(self.idle_slot.queues)

    def _has_suspects(self) -> bool:
        quarantine, queues = self._state.quarantine, self.idle_slot.queues
        return quarantine.wait_in(queues) and not all(map(self._poller.is_held, quarantine.known_in(queues)))

    def needs_connection(self) -> bool:
        """Return True if a connection is needed: to claim, or to poll."""
        return self._has_suspects() or self.is_behind()

    def is_behind(self) -> bool:
        """Return True if jobs are known to wait, or a poll is due that no other slot makes.

        Suspects alone do not count: another slot may run one for long.
        """
        return self._has_jobs() or (self._wants_poll() and not self._poller.is_under_way())

    def _wants_poll(self) -> bool:
        if self._is_poll_due and self._poller.has_polled(self._first, self._poll_after):
            self._is_poll_due = False
        return self._is_poll_due

    def poll(self, connection: Connection) -> None:
        """Poll all queues of the relay, if that is due and no other slot does."""
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
        """Request a poll that begins after this call."""
        self._poll_after = self._poller.latest
        self._is_poll_due = True

    def is_flagged(self, since: float | None) -> bool:
        """Return True if notifications wake this slot; requests a poll if none has begun since its flags were raised.

        The poll must also be newer than the slot's last claim, which may have led to jobs that are due later, and than
        the last call: another slot may have answered it, and left jobs before this slot slept.
        """
        if since is not None and self._poller.uncalled_since(self.idle_slot.queues) <= max(since, self._claimed_at):
            # A poll sees the jobs that were committed before the flags were raised.
            self.want_poll()
        return since is not None

    def begin_claims(self) -> None:
        """Record that the slot claims, which shows as much as a poll."""
        self._is_poll_due = False
        self._claimed_at = time.monotonic()

    def end(self) -> None:
        """Record that the slot has claimed jobs, and is awake."""
        self._pause_seconds = FIRST_PAUSE_SECONDS
        if self.is_asleep and self._state.listener is not None:
            self._state.listener.wake_up(self.idle_slot)
        self.is_asleep = False

    def fall_asleep(self) -> "concurrent.futures.Future[float | None] | None":
        """Request the sleep flags; the future says since when they are up. None if this relay does not listen."""
        self.is_asleep = True
        return None if self._state.listener is None else self._state.listener.fall_asleep(self.idle_slot)

    def pause_seconds(self, *, flagged: bool) -> float:
        """The time to sleep: up to the next scheduled job, growing up to the poll interval since the last poll."""
        poll_seconds = self._state.config.poll_seconds
        # In this order: a poll that comes back in between is either still wanted, or its result is known.
        if self._wants_poll() or self._has_jobs():
            return FIRST_PAUSE_SECONDS
        growing = min(self._pause_seconds, UNFLAGGED_PAUSE_SECONDS, poll_seconds)
        self._pause_seconds = min(self._pause_seconds * 2, poll_seconds)
        self.want_poll()
        # A suspect's queue may be held, for a moment only, and a poll may not see that a suspect waits.
        if self._state.quarantine.wait_in(self.idle_slot.queues):
            return growing
        pause = (poll_seconds if flagged else growing) * random.uniform(0.8, 1.0)
        due = self._poller.due_in_seconds(self.idle_slot.queues)
        # A due job that was not claimed is run by another transaction: no reason to spin.
        return min(max(self._poll_after.begun_at + pause - time.monotonic(), 0.0), due if due > 0 else growing)
