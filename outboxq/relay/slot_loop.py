"""The loop of a slot: it works while something waits, and sleeps until it is woken.

Written once, for threads and for tasks. A task runs it in a greenlet, as SQLAlchemy does its own code, so that each
wait in the loop is an `await` of the task.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from outboxq.clock import clock
from outboxq.config import SlotGroup
from outboxq.database.defects import is_defect
from outboxq.errors import ConfigError, RelayStuck, SchemaError
from outboxq.execution.errors import Abandoned
from outboxq.forks import call_here
from outboxq.handlers.handler import Flavour
from outboxq.relay.connections import SlotConnections
from outboxq.relay.slot import CONNECTION_ERRORS, Slot
from outboxq.relay.state import RelayState

# The next try would fail the same way.
_FINAL = (ConfigError, RelayStuck, SchemaError)
# For a server that drops a connection and accepts the next: if it is down, its jobs are left to the next relay.
_LAST_TRIES, _LAST_PAUSE_SECONDS, _LAST_SECONDS = 5, 0.1, 2.0


class WakeEvent(Protocol):
    """The event that wakes a sleeping slot: a `threading.Event`, or its like for a task. Any thread may set it."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float) -> bool: ...


class SlotLoop:
    """The loop of one slot; `has_failed`: the loop ended by an error, which the relay raises again."""

    def __init__(
        self,
        state: RelayState,
        group: SlotGroup,
        flavour: Flavour,
        connections: SlotConnections,
        wake_event: WakeEvent,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.slot = Slot(state, flavour, group.queues, wake_event.set, group.in_turns)
        self.has_failed = False
        self._state = state
        self._connections = connections
        self._wake_event = wake_event
        self._fail = fail

    def _serve(self) -> None:
        slot, stopping, until_empty = self.slot, self._state.stopping, self._state.until_empty
        work = slot.drain if until_empty else slot.work_all
        while not (stopping.is_set() or slot.is_seized()):
            try:
                is_over = not (until_empty or slot.wants_work())
                if not is_over:
                    with self._connections.borrow() as slot_connection:
                        is_over = call_here(work, slot_connection)
                if is_over and until_empty:
                    break
                if is_over:
                    self._sleep()
            except Abandoned:
                break
            except asyncio.CancelledError as error:
                self._outlive(error)
            except _FINAL:
                raise
            except Exception as error:
                # Users' listeners on a connection raise anything. A defect of ours ends the relay.
                if not isinstance(error, CONNECTION_ERRORS) and is_defect(error):
                    raise
                if slot.is_seized():
                    break
                self._wait_after(error)
        self._find_out()

    def _find_out(self) -> None:
        """Settle jobs whose connection was lost when the relay stopped: only this slot can find out their outcome."""
        slot, ends_at = self.slot, clock() + _LAST_SECONDS
        for _ in range(_LAST_TRIES):
            if not slot.is_in_doubt or slot.is_seized() or clock() > ends_at:
                return
            try:
                with self._connections.borrow() as slot_connection:
                    call_here(slot.settle, slot_connection)
            except Abandoned:
                return
            except _FINAL:
                raise
            except Exception as error:
                if not isinstance(error, CONNECTION_ERRORS) and is_defect(error):
                    raise
                slot.lost(error)
                self._wake_event.clear()
                self._wake_event.wait(_LAST_PAUSE_SECONDS)

    def _sleep(self) -> None:
        """Sleep until woken, or until a poll finds something; has a connection only to poll."""
        slot, sleep = self.slot, self.slot.sleep
        self._wake_event.clear()
        flagged = False
        while not self._state.stopping.is_set():
            if sleep.needs_connection():
                with self._connections.borrow() as slot_connection:
                    if call_here(slot.work_seen, slot_connection):
                        return
            if not flagged:
                request = sleep.fall_asleep()
                flagged = sleep.is_flagged(None if request is None else self._flagged_since(request))
                # Suspects alone do not count: another slot may run one for long.
                if sleep.is_behind():
                    continue
            if self._wake_event.wait(sleep.pause_seconds(flagged=flagged)):
                sleep.want_poll()
                return

    def _flagged_since(self, request: Future[float | None]) -> float | None:
        """Wait for the listener's answer; None if it takes too long."""
        raise NotImplementedError

    def _outlive(self, error: asyncio.CancelledError) -> None:
        """Go on after a cancellation that is not the relay's own; raise any other."""
        raise error

    def _wait_after(self, error: BaseException) -> None:
        """Report a lost or refused connection, and wait before the next try."""
        raise NotImplementedError
