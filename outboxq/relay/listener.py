"""The listener: one connection and one thread per relay, through which idle slots sleep and are woken.

The listener works on libpq below psycopg, which is the same for sync and async connections, so that any engine can
provide its connection. Polls find every job: whatever goes wrong here costs latency, never a job.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import psycopg
from psycopg.pq.abc import PGconn

from outboxq.database.closing import finish
from outboxq.database.driver import DriverConnection, run_on_libpq, wait_readable
from outboxq.relay.hearing import HearingCheck
from outboxq.statements import wake as listen

logger = logging.getLogger("outboxq.listener")

_RECONNECT_SECONDS = 1.0
# A flag that was refused is tried again with the next request after this pause, which doubles.
_RETRY_FIRST_SECONDS, _RETRY_CAP_SECONDS = 0.005, 2.0
_STOP_SECONDS = 5.0
_HEARING_SECONDS = 0.1
# A slot that works for a shorter time than this leaves its flags up: hundreds of queues have as many. Jobs that are
# committed meanwhile notify for nothing, or for the slot's next poll.
_LOWER_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class IdleSlot:
    """A slot that sleeps: `wake` may be called from any thread, any number of times."""

    queues: frozenset[str]
    wake: Callable[[], None]


# A slot's request, run in the listener's thread; given None while there is no connection.
_Request: TypeAlias = Callable[[PGconn | None], None]


class Listener:
    """Holds the sleep flags of the queues on which this process has idle slots, and hears their notifications.

    A notification wakes one slot. A slot that finds jobs calls the next one, so that no more slots take a connection
    than there is work for.

    Args:
        connect: Opens a connection outside a transaction, to the server itself and not to a transaction pooler.
        record_call: Called with each queue that a notification names, before a slot is woken.
        probe_seconds: A connection through which nothing came for so long is asked for a sign of life.
        hearing: The proof that notifications arrive; until then no flag is raised, and slots poll.
        is_held: Whether no slot may claim from a queue at this moment: then a notification of it wakes none.
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
        self._connect = connect
        self._schema = schema
        self._record_call = record_call
        self._probe_seconds = probe_seconds
        self._hearing = hearing
        self._is_held = is_held
        self._record_settings = record_settings
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        # Whether each slot was woken since it fell asleep.
        self._idle_slots: dict[IdleSlot, bool] = {}
        # Since when each queue's flag is up.
        self._flags: dict[str, float] = {}
        self._lower_at: float | None = None
        self._refused: set[str] = set()
        self._retry_seconds = _RETRY_FIRST_SECONDS
        self._retry_at = 0.0
        self._stopping = threading.Event()
        self._sockets = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="outboxq-listener", daemon=True)

    def start(self) -> None:
        """Start the thread; it connects by itself, and again after every loss."""
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        try:
            self._thread.start()
        except BaseException:
            self._close_sockets()
            raise

    def stop(self) -> None:
        """End the thread and its connection, and with it the flags.

        One that hangs in a half-open connection ends later: it is a daemon, and nothing waits for it.
        """
        self._stopping.set()
        self._wake_thread()
        self._thread.join(_STOP_SECONDS)

    def fall_asleep(self, idle_slot: IdleSlot) -> "Future[float | None]":
        """Raise the sleep flags of the slot's queues.

        The future says since when (monotonic) this process holds all of the flags. Every job that is committed after a
        poll that began later notifies, or wakes the slot. None if the flags are not held: poll again soon.
        """
        flagged = Future[float | None]()
        self._send(partial(self._add_idle, idle_slot, flagged))
        return flagged

    def wake_up(self, idle_slot: IdleSlot) -> None:
        """Record that the slot has work: flags under which no slot sleeps any more go down soon. Returns at once."""
        self._send(partial(self._remove_idle, idle_slot))

    def wake_one(self, queue: str) -> None:
        """Wake a slot that sleeps on this queue, if there is one: it may find jobs. Returns at once."""
        if self._idle_slots:
            self._send(partial(self._notify_others, queue))

    def _send(self, request: _Request) -> None:
        self._requests.put(request)
        self._wake_thread()

    def _wake_thread(self) -> None:
        # Never blocks a slot, let alone the event loop: if the socket is full, the thread is being woken already. Once
        # the thread has ended, it is closed.
        with self._sockets, contextlib.suppress(OSError):
            self._wake_writer.send(b"!")

    def _run(self) -> None:
        try:
            self._serve_until_stopped()
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        # Not while a slot writes to it: at that moment its number may become that of another connection.
        with self._sockets:
            self._wake_reader.close()
            self._wake_writer.close()

    def _serve_until_stopped(self) -> None:
        while not self._stopping.is_set():
            try:
                connection = self._connect()
            except Exception as error:  # noqa: BLE001  # users' engines raise what they like; slots poll meanwhile
                logger.debug("no connection to listen on", extra={"error_type": type(error).__name__})
                self._answer_offline()
                continue
            try:
                self._serve(connection.pgconn)
            except Exception as error:  # noqa: BLE001  # a thread that ends would leave its relay polling for good
                is_loss = isinstance(error, psycopg.Error | OSError)
                logger.log(
                    logging.DEBUG if is_loss else logging.WARNING,
                    "the listening connection was lost" if is_loss else "the listener failed, and begins again",
                    extra={"error_type": type(error).__name__},
                )
            finally:
                finish(connection)
                self._flags.clear()
                self._lower_at = None
                self._refused.clear()
                # Notifications that come while there is no connection are lost: every slot polls by itself.
                self._wake(self._idle_slots)
            if not self._stopping.is_set():
                self._answer_offline()

    def _answer_offline(self) -> None:
        """Without a connection no flag is held; slots poll. Waits a moment before the next try."""
        wait_readable([self._wake_reader], _RECONNECT_SECONDS)
        for request in self._drain_requests():
            request(None)
        self._stopping.wait(_RECONNECT_SECONDS / 4)

    def _serve(self, connection: PGconn) -> None:
        self._wait_until_heard(connection)
        run_on_libpq(connection, listen.listen(self._schema))
        self._wake(self._idle_slots)
        while not self._stopping.is_set():
            for request in self._drain_requests():
                request(connection)
            if self._lower_at is not None and time.monotonic() >= self._lower_at:
                self._lower_flags(connection)
            # Before the wait: a notification may have come in with the answer to a request.
            connection.consume_input()
            self._hear(connection)
            is_readable = wait_readable([self._wake_reader, connection.socket], self._patience())
            if not is_readable and self._lower_at is None:
                run_on_libpq(connection, "SELECT")

    def _wait_until_heard(self, connection: PGconn) -> None:
        hearing = self._hearing
        if hearing is None or hearing.passed or not hearing.begin(connection):
            return
        # Nearly always it has come by now, and requests can wait for it.
        wait_readable([connection.socket], _HEARING_SECONDS)
        while not hearing.is_over(connection) and not self._stopping.is_set():
            for request in self._drain_requests():
                request(None)
            seconds = min(hearing.wait_seconds(), self._probe_seconds)
            if not wait_readable([self._wake_reader, connection.socket], seconds):
                # The connection may be half-open, and nothing arrives on it any more.
                run_on_libpq(connection, "SELECT")

    def _patience(self) -> float:
        if self._lower_at is None:
            return self._probe_seconds
        return min(max(0.0, self._lower_at - time.monotonic()), self._probe_seconds)

    def _drain_requests(self) -> Iterable[_Request]:
        try:
            while self._wake_reader.recv(4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                yield self._requests.get_nowait()
            except queue.Empty:
                return

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
            self._lower_at = self._lower_at or time.monotonic() + _LOWER_SECONDS

    def _notify_others(self, name: str, _connection: PGconn | None) -> None:
        # If no slot sleeps on the queue, the call would make the caller itself claim in vain.
        if name in self._slept_on():
            self._notify(name)

    def _raise_flags(self, connection: PGconn, queues: Iterable[str]) -> None:
        # Session locks are counted, so each is taken only once per process, whatever the number of its idle slots.
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

    def _lower_flags(self, connection: PGconn) -> None:
        self._lower_at = None
        dropped = self._flags.keys() - self._slept_on()
        if dropped:
            # First, so that no slot trusts a flag that goes down.
            self._flags = {name: since for name, since in self._flags.items() if name not in dropped}
            run_on_libpq(connection, listen.drop_sleep_flags(self._schema, dropped))

    def _hear(self, connection: PGconn) -> None:
        while notification := connection.notifies():
            name = notification.extra.decode()
            if name == listen.ALL_QUEUES:
                self._record_call(name)
                self._wake(self._idle_slots)
            elif name == listen.SETTINGS:
                self._record_settings()
            else:
                self._notify(name)

    def _notify(self, name: str) -> None:
        self._record_call(name)
        if self._is_held(name):
            return
        idle_slots = [idle_slot for idle_slot in self._idle_slots if name in idle_slot.queues]
        # A slot that was woken already may have polled too early: if there is no other slot, all of them poll again.
        fresh = [idle_slot for idle_slot in idle_slots if not self._idle_slots[idle_slot]][-1:]
        self._wake(fresh or idle_slots)

    def _wake(self, idle_slots: Iterable[IdleSlot]) -> None:
        for idle_slot in list(idle_slots):
            self._idle_slots[idle_slot] = True
            idle_slot.wake()
