"""The listener: one connection and one thread per relay, which hold idle slots' sleep flags and wake the slots.

A sleep flag is an advisory lock for a queue: while a relay holds it (the flag is up), producers send notifications of
the queue's jobs. Slots also poll their queues, which finds every job, so an error here costs latency, but never a job.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import psycopg
from psycopg.pq.abc import PGconn

from outboxq.database.closing import finish
from outboxq.database.driver import DriverConnection, run_on_libpq, wait_readable
from outboxq.database.errors import describe_error
from outboxq.database.notifications import ListeningThread
from outboxq.statements import wake as listen

logger = logging.getLogger("outboxq.listener")

# A refused flag is tried again with the next request after this pause, which doubles.
_RETRY_FIRST_SECONDS, _RETRY_CAP_SECONDS = 0.005, 2.0
_HEARING_SECONDS = 0.1
# A slot that works for less than this leaves its flags up, because with hundreds of queues there are hundreds of flags.
# Jobs committed in this time notify without need, or for the slot's next poll.
_LOWER_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class IdleSlot:
    """A slot that sleeps: its queues, and the function that wakes it, from any thread and any number of times."""

    queues: frozenset[str]
    wake: Callable[[], None]


@dataclass(eq=False)
class HearingCheck:
    """Checks once that notifications arrive on the listening connection: a pooler may give them to other clients.

    The relay sends itself a notification through the database URL, as producers do, on a channel only for this check.
    If it does not arrive, the pooler's connection keeps listening to that channel, which does no harm: it is never
    notified again.

    Args:
        connect: Opens a connection as producers do, by the database URL.
        patience_seconds: A notification that takes longer is reported as missing; if it arrives later, it still counts.
        poll_seconds: The longest time between two polls while no notifications arrive; for the log message.
        passed: True after the notification has arrived.
    """

    connect: Callable[[], DriverConnection]
    patience_seconds: float
    poll_seconds: float
    passed: bool = False
    _is_told: bool = False
    _channel: str = ""
    _late_at: float = 0.0

    def begin(self, connection: PGconn) -> bool:
        """Listen on this connection, and notify through another one. Returns False if no notification could be sent."""
        self._channel = f"outboxq_hearing_{secrets.token_hex(8)}"
        run_on_libpq(connection, listen.listen_on(self._channel))
        try:
            other = self.connect()
            try:
                run_on_libpq(other.pgconn, listen.notify_on(self._channel))
            finally:
                finish(other)
        except Exception as error:  # noqa: BLE001  # users' engines raise what they like; slots report outages
            logger.debug("notifications could not be checked: %s", describe_error(error))
            run_on_libpq(connection, listen.unlisten(self._channel))
            return False
        self._late_at = time.monotonic() + self.patience_seconds
        return True

    def is_over(self, connection: PGconn) -> bool:
        """Return True if the notification has arrived.

        Logs a warning once if it is late although the connection works.
        """
        is_late = time.monotonic() >= self._late_at
        if is_late:
            # An answer shows that the server still exists, and arrives after its notifications.
            run_on_libpq(connection, "SELECT")
            self._late_at = time.monotonic() + self.patience_seconds
        connection.consume_input()
        while notification := connection.notifies():
            if notification.relname.decode() == self._channel:
                self.passed = True
                run_on_libpq(connection, listen.unlisten(self._channel))
                if self._is_told:
                    logger.info("notifications arrive after all: the relay listens for them")
                return True
        if is_late and not self._is_told:
            self._is_told = True
            logger.warning(
                "notifications do not arrive on the connection that listens for them, so the relay polls, up to %g s "
                "apart: behind a transaction pooler (pgbouncer) give --listen-url a direct URL of the server, or pass "
                "--no-listen",
                self.poll_seconds,
            )
        return False

    def wait_seconds(self) -> float:
        """Return the longest time to wait for the notification before `is_over` is to be called again, in seconds."""
        return max(0.0, self._late_at - time.monotonic())


class Listener(ListeningThread):
    """Holds sleep flags (locks that make producers notify) for idle slots, and wakes slots when notifications come.

    A notification wakes one slot. A slot that finds jobs wakes the next one, so that only slots with work take
    connections.

    Args:
        connect: Opens a connection outside a transaction, to the server itself and not to a transaction pooler.
        record_call: Called with each queue that a notification names, before a slot is woken.
        probe_seconds: A connection is checked after receiving nothing for this long.
        hearing: The check that notifications arrive; until it passes, no flag is raised, and slots poll.
        is_held: Returns True if no slot may claim from a queue now, so that its notification wakes none.
        record_settings: Called when a notification says that operators have changed settings.
    """

    def __init__(
        self,
        connect: Callable[[], DriverConnection],
        schema: str,
        record_call: Callable[[str], None],
        probe_seconds: float,
        hearing: HearingCheck | None = None,
        *,
        is_held: Callable[[str], bool] = lambda _: False,
        record_settings: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("outboxq-listener", connect)
        self._schema = schema
        self._record_call = record_call
        self._probe_seconds = probe_seconds
        self._hearing = hearing
        self._is_held = is_held
        self._record_settings = record_settings
        # The slots that were woken since they fell asleep.
        self._idle_slots: dict[IdleSlot, bool] = {}
        # The time since which each queue's flag is up.
        self._flags: dict[str, float] = {}
        self._lower_at = math.inf
        self._refused: set[str] = set()
        self._retry_seconds = _RETRY_FIRST_SECONDS
        self._retry_at = 0.0

    def fall_asleep(self, idle_slot: IdleSlot) -> "Future[float | None]":
        """Make the listener's thread raise the sleep flags of a slot's queues; return a future for the result.

        The result is the time (monotonic) since which all of the flags are up; None if they are not, and the slot is to
        poll again soon. A poll that begins after that time misses no job: for each job committed later there is a
        notification, or a slot of its queue is woken.
        """
        flagged = Future[float | None]()
        self.send(partial(self._add_idle, idle_slot, flagged))
        return flagged

    def wake_up(self, idle_slot: IdleSlot) -> None:
        """Record that a slot no longer sleeps.

        The sleep flags of queues on which no other slot sleeps are lowered soon.
        """
        self.send(partial(self._remove_idle, idle_slot))

    def wake_one(self, queue: str) -> None:
        """Wake one slot that sleeps on this queue, if there is one, to claim jobs that may wait there.

        Returns at once.
        """
        if self._idle_slots:
            self.send(partial(self._notify_others, queue))

    def failed(self, error: Exception) -> None:
        is_defect = self._is_connected and not isinstance(error, psycopg.Error | OSError)
        logger.log(
            logging.WARNING if is_defect else logging.DEBUG,
            "the listener failed, and begins again" if is_defect else "there is no connection to listen on",
            extra={"error_type": type(error).__name__},
        )
        self._flags.clear()
        self._lower_at = math.inf
        self._refused.clear()
        if self._is_connected:
            # Without a connection notifications are lost: every slot polls by itself.
            self._wake(self._idle_slots)

    def listen(self, connection: PGconn) -> None:
        hearing = self._hearing
        if hearing is not None and not hearing.passed and hearing.begin(connection):
            # The notification nearly always arrives at once, and requests can wait for it.
            wait_readable([connection.socket], _HEARING_SECONDS)
            while not hearing.is_over(connection) and not self._is_stopping:
                self.take_requests(None)
                seconds = min(hearing.wait_seconds(), self._probe_seconds)
                if not wait_readable([self._wake_reader, connection.socket], seconds):
                    run_on_libpq(connection, "SELECT")
        run_on_libpq(connection, listen.listen(self._schema))
        self._wake(self._idle_slots)

    def work(self, connection: PGconn) -> float:
        if time.monotonic() >= self._lower_at:
            self._lower_at = math.inf
            dropped = self._flags.keys() - self._slept_on()
            if dropped:
                # First, so that no slot relies on a flag that is being lowered.
                self._flags = {name: since for name, since in self._flags.items() if name not in dropped}
                run_on_libpq(connection, listen.drop_sleep_flags(self._schema, dropped))
        elif self._is_silent:
            # The connection may be half-open.
            run_on_libpq(connection, "SELECT")
        return min(max(0.0, self._lower_at - time.monotonic()), self._probe_seconds)

    def _add_idle(self, idle_slot: IdleSlot, flagged: "Future[float | None]", connection: PGconn | None) -> None:
        self._idle_slots[idle_slot] = False
        since = None
        try:
            if connection is not None:
                self._raise_flags(connection, idle_slot.queues)
            if self._flags.keys() >= idle_slot.queues:
                since = max(self._flags[name] for name in idle_slot.queues)
        finally:
            # The future is cancelled if the slot has stopped waiting.
            if flagged.set_running_or_notify_cancel():
                flagged.set_result(since)

    def _remove_idle(self, idle_slot: IdleSlot, connection: PGconn | None) -> None:
        self._idle_slots.pop(idle_slot, None)
        if connection is not None:
            self._lower_at = min(self._lower_at, time.monotonic() + _LOWER_SECONDS)

    def _notify_others(self, name: str, _connection: PGconn | None) -> None:
        # If no slot sleeps on the queue, the call would only cause an empty claim.
        if name in self._slept_on():
            self._notify(name)

    def _raise_flags(self, connection: PGconn, queues: Iterable[str]) -> None:
        # Session locks are counted, so the process takes each lock once for all of its idle slots.
        missing = set(queues) - self._flags.keys()
        if not missing or (missing <= self._refused and time.monotonic() < self._retry_at):
            return
        wanted = missing | (self._refused & self._slept_on())
        rows = run_on_libpq(connection, listen.try_sleep_flags(self._schema, wanted))
        now = time.monotonic()
        self._flags |= {str(name): now for name, held in rows if held == "t"}
        self._refused = wanted - self._flags.keys()
        pause = min(self._retry_seconds * 2, _RETRY_CAP_SECONDS)
        self._retry_seconds = pause if self._refused else _RETRY_FIRST_SECONDS
        self._retry_at = time.monotonic() + self._retry_seconds

    def _slept_on(self) -> set[str]:
        return {name for idle_slot in self._idle_slots for name in idle_slot.queues}

    def hear(self, text: str) -> None:
        if text == listen.ALL_QUEUES:
            self._record_call(text)
            self._wake(self._idle_slots)
        elif text == listen.SETTINGS:
            self._record_settings()
        else:
            self._notify(text)

    def _notify(self, name: str) -> None:
        self._record_call(name)
        if self._is_held(name):
            return
        idle_slots = [idle_slot for idle_slot in self._idle_slots if name in idle_slot.queues]
        # Slots that were woken before may have polled too early: without another slot, all of them poll again.
        fresh = [idle_slot for idle_slot in idle_slots if not self._idle_slots[idle_slot]][-1:]
        self._wake(fresh or idle_slots)

    def _wake(self, idle_slots: Iterable[IdleSlot]) -> None:
        for idle_slot in list(idle_slots):
            self._idle_slots[idle_slot] = True
            idle_slot.wake()
