"""The listener: one connection and one thread per relay, which hold idle slots' sleep flags and wake the slots.

Polls find every job: an error here costs latency, never a job.
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
# A slot that works for less than this leaves its flags up: with hundreds of queues there are as many. Jobs committed in
# this time notify for nothing, or for the slot's next poll.
_LOWER_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class IdleSlot:
    """A slot that sleeps: `wake` may be called from any thread, any number of times."""

    queues: frozenset[str]
    wake: Callable[[], None]


@dataclass(eq=False)
class HearingCheck:
    """Checks once that notifications arrive, which a transaction pooler would hand to another client.

    The relay notifies itself, through the database URL, as producers do, on a channel of its own: if nothing arrives,
    the pooler's connection is left listening to a channel that is never notified again.

    Args:
        connect: Opens a connection as producers have it, by the database URL.
        patience_seconds: A notification that takes longer is reported as missing; if it comes later, it still counts.
        poll_seconds: The longest time between two polls until then; for the message.
    """

    connect: Callable[[], DriverConnection]
    patience_seconds: float
    poll_seconds: float
    passed: bool = False
    _is_told: bool = False
    _channel: str = ""
    _late_at: float = 0.0

    def begin(self, connection: PGconn) -> bool:
        """Listen on this connection, and notify through another one; False if no notification could be sent."""
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
        """Return True if the notification has come; warns once if it is late although the connection works."""
        is_late = time.monotonic() >= self._late_at
        if is_late:
            # An answer shows that the server is still there, and comes after its notifications.
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
        """The time to wait for the notification until the next call of `is_over`."""
        return max(0.0, self._late_at - time.monotonic())


class Listener(ListeningThread):
    """Holds the sleep flags of the queues on which this process has idle slots, and receives their notifications.

    A notification wakes one slot. A slot that finds jobs calls the next one, so that only as many slots take a
    connection as have work.

    Args:
        connect: Opens a connection outside a transaction, to the server itself and not to a transaction pooler.
        record_call: Called with each queue that a notification names, before a slot is woken.
        probe_seconds: A connection that received nothing for so long is checked.
        hearing: The check that notifications arrive; until it passes no flag is raised, and slots poll.
        is_held: Returns True if no slot may claim from a queue now: then its notification wakes none.
        record_settings: Called when operators have changed settings.
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
        # True for the slots that were woken since they fell asleep.
        self._idle_slots: dict[IdleSlot, bool] = {}
        # The time since which each queue's flag is up.
        self._flags: dict[str, float] = {}
        self._lower_at = math.inf
        self._refused: set[str] = set()
        self._retry_seconds = _RETRY_FIRST_SECONDS
        self._retry_at = 0.0

    def fall_asleep(self, idle_slot: IdleSlot) -> "Future[float | None]":
        """Raise the sleep flags of the slot's queues.

        The future holds the time (monotonic) since which this process has all of the flags. Every job committed after a
        poll that began later notifies, or wakes the slot. None if the flags are not held: poll again soon.
        """
        flagged = Future[float | None]()
        self.send(partial(self._add_idle, idle_slot, flagged))
        return flagged

    def wake_up(self, idle_slot: IdleSlot) -> None:
        """Record that the slot has work: flags that no sleeping slot needs go down soon. Returns at once."""
        self.send(partial(self._remove_idle, idle_slot))

    def wake_one(self, queue: str) -> None:
        """Wake a slot that sleeps on this queue, if any: it may find jobs. Returns at once."""
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
            # Notifications are lost while there is no connection: every slot polls by itself.
            self._wake(self._idle_slots)

    def listen(self, connection: PGconn) -> None:
        hearing = self._hearing
        if hearing is not None and not hearing.passed and hearing.begin(connection):
            # Nearly always the notification comes at once, and requests can wait for it.
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
                # First, so that no slot trusts a flag that goes down.
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
        # If no slot sleeps on the queue, the call would only cost the caller an empty claim.
        if name in self._slept_on():
            self._notify(name)

    def _raise_flags(self, connection: PGconn, queues: Iterable[str]) -> None:
        # Session locks are counted, so each is taken once per process, for all of its idle slots.
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
        # Slots woken before may have polled too early: if there is no other slot, all of them poll again.
        fresh = [idle_slot for idle_slot in idle_slots if not self._idle_slots[idle_slot]][-1:]
        self._wake(fresh or idle_slots)

    def _wake(self, idle_slots: Iterable[IdleSlot]) -> None:
        for idle_slot in list(idle_slots):
            self._idle_slots[idle_slot] = True
            idle_slot.wake()
