"""Rest: how a slot without work sleeps, what wakes it, and when it looks for itself.

It holds no connection meanwhile. A look that began after its flags were up comes before it trusts them: what was
committed earlier rang for nobody.
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
# Without the sleep flag nobody promises to wake us: look again at least this often.
UNFLAGGED_PAUSE_SECONDS = 1.0


class SlotSleep:
    """The pauses of one slot."""

    def __init__(self, shared: RelayState, order: Order, wake: Callable[[], None]) -> None:
        self.idle_slot = IdleSlot(frozenset(order.queues), wake)
        # Since it found nothing to do.
        self.is_asleep = False
        self._shared = shared
        self._first = order.queues[0]
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._looked = shared.poller.latest
        self._is_look_due = True
        self._worked_at = 0.0

    def is_called(self) -> bool:
        """Whether something is known to wait here."""
        sees_work = not self._shared.poller.waiting().isdisjoint(self.idle_slot.queues)
        return sees_work or self._has_suspects()

    def _has_suspects(self) -> bool:
        return self._shared.quarantine.wait_in(self.idle_slot.queues)

    def wants_line(self) -> bool:
        """Whether a connection is needed: to claim, or to look."""
        return self.is_called() or (self._wants_look() and not self._shared.poller.is_awaited())

    def _wants_look(self) -> bool:
        if self._is_look_due and self._shared.poller.is_known(self._first, self._looked):
            self._is_look_due = False
        return self._is_look_due

    def look(self, connection: Connection) -> None:
        """Look at all queues of the relay, where that is due and nobody else does."""
        lookout = self._shared.poller
        taken = lookout.take(self._first, self._looked) if self._wants_look() else None
        if taken is None:
            return
        try:
            rows = run_alone(connection, lookout.statement)
            lookout.record(taken, rows)
        finally:
            lookout.ended(taken)
        self._shared.quarantine.queues.update(str(name) for name, _, _, suspected in rows if suspected)
        self._is_look_due = False

    def want_look(self) -> None:
        """Nothing but a look that begins from now on will do."""
        self._looked = self._shared.poller.latest
        self._is_look_due = True

    def is_flagged(self, since: float | None) -> bool:
        """Whether this slot is woken: it is, by all that is committed after a look that began under its flags.

        The look is younger than its last claim too, which may have led to jobs that are due later.
        """
        if since is not None and self._shared.poller.seen_at(self._first) <= max(since, self._worked_at):
            # What was committed before the flags were up is visible now.
            self.want_look()
        return since is not None

    def works(self) -> None:
        """The slot claims for itself."""
        self._is_look_due = False
        self._worked_at = time.monotonic()

    def found_jobs(self) -> None:
        """It took some: from now on it is awake."""
        self._pause_seconds = FIRST_PAUSE_SECONDS
        if self.is_asleep and self._shared.listener is not None:
            self._shared.listener.wake_up(self.idle_slot)
        self.is_asleep = False

    def fall_asleep(self) -> "concurrent.futures.Future[float | None] | None":
        """Ask for the sleep flags, and since when they are up; None where this relay does not listen."""
        self.is_asleep = True
        return None if self._shared.listener is None else self._shared.listener.fall_asleep(self.idle_slot)

    def pause_seconds(self, *, flagged: bool) -> float:
        """How long to sleep: up to the next scheduled job, and growing up to the poll interval since the last look."""
        shared = self._shared
        if self._wants_look() and shared.poller.is_awaited():
            # Somebody's look, which may have begun too early, is under way.
            return FIRST_PAUSE_SECONDS
        growing = min(self._pause_seconds, UNFLAGGED_PAUSE_SECONDS, shared.poll_seconds)
        self._pause_seconds = min(self._pause_seconds * 2, shared.poll_seconds)
        self.want_look()
        if self._has_suspects():
            return growing
        pause = (shared.poll_seconds if flagged else growing) * random.uniform(0.8, 1.0)
        due = shared.poller.due_in_seconds(self.idle_slot.queues)
        # Due, and yet not claimed: another transaction runs it. Not a reason to spin.
        return min(max(self._looked.begun_at + pause - time.monotonic(), 0.0), due if due > 0 else growing)
