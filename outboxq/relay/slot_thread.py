"""A slot with sync handlers, in a thread of its own."""

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.config import SlotGroup
from outboxq.database.driver import dbapi_connection
from outboxq.execution.frames import Frame, frames_of_stack
from outboxq.handlers.call import HandlerCall
from outboxq.relay.connections import SlotConnections
from outboxq.relay.idle import UNFLAGGED_PAUSE_SECONDS
from outboxq.relay.slot_loop import SlotLoop
from outboxq.relay.state import RelayState
from outboxq.relay.threads import BoundedStart


class SlotThread(SlotLoop):
    """A slot with sync handlers, in a thread of its own."""

    def __init__(
        self, state: RelayState, group: SlotGroup, connections: SlotConnections, fail: Callable[[BaseException], None]
    ) -> None:
        super().__init__(state, group, "sync", connections, threading.Event(), fail)
        self._detached: DBAPIConnection | None = None
        # A daemon: a handler that exceeds the time to drain must not keep the process alive.
        self._thread = BoundedStart(self._run, "outboxq-slot")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  # raised again by the relay
            self.has_failed = True
            self._fail(error)
        finally:
            if self._detached is not None:
                self._detached.close()

    def _flagged_since(self, request: Future[float | None]) -> float | None:
        try:
            return request.result(UNFLAGGED_PAUSE_SECONDS)
        except TimeoutError:
            return None

    def _wait_after(self, error: BaseException) -> None:
        self._state.stopping.wait(self.slot.lost(error))

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def abandon(self) -> None:
        """Free the slot's place in the pool for its successor. The thread cannot be stopped, and cannot commit."""
        slot_connection = self.slot.connected
        if slot_connection is None or self._detached is not None:
            return
        connection = slot_connection.connection
        if connection.closed or connection.invalidated:
            return
        # The slot's thread may be closing the connection at this moment.
        with contextlib.suppress(SQLAlchemyError):
            self._detached = dbapi_connection(connection)
            connection.detach()

    def ask(self) -> None:
        """Do nothing: no other handler shares the thread."""

    def cancel(self, call: HandlerCall) -> None:
        """Do nothing: the handler checks `ctx.cancelled`, or the server cancels its statement."""

    def is_held_up(self) -> bool:
        return False

    def is_running(self) -> bool:
        """Return False: the handler runs in no event loop."""
        return False

    def stack(self) -> list[Frame]:
        return stack_of_thread(self._thread.ident)


def stack_of_thread(thread: int | None) -> list[Frame]:
    """The call stack of a thread; empty if it has ended."""
    frame = None if thread is None else sys._current_frames().get(thread)  # noqa: SLF001  # documented in the library reference
    return [] if frame is None else frames_of_stack(frame)
