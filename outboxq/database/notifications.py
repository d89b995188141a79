"""A thread with a connection that listens: it is opened again after every loss, and other threads reach it by a socket.

It works on libpq below psycopg, which is the same for sync and async connections, so that any engine can provide the
connection.
"""

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from psycopg.pq.abc import PGconn

from outboxq.clock import clock
from outboxq.database.closing import finish
from outboxq.database.driver import DriverConnection, wait_readable

_RECONNECT_FIRST_SECONDS, _RECONNECT_CAP_SECONDS = 0.05, 1.0
_STOP_SECONDS = 5.0

# Called in the thread, with None while there is no connection.
Request: TypeAlias = Callable[[PGconn | None], None]


class ListeningThread(ABC):
    """A thread that serves one listening connection; subclasses define its work there.

    Args:
        connect: Opens a connection outside a transaction; called in the thread, as all methods but `start`, `stop` and
            `send`.
    """

    def __init__(self, name: str, connect: Callable[[], DriverConnection]) -> None:
        self._connect = connect
        self._requests: deque[Request] = deque()
        self._is_stopping = False
        self._is_connected = False
        # Whether the last wait ended without a notification and without a request.
        self._is_silent = False
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def listen(self, connection: PGconn) -> None:
        """Prepare a new connection."""

    @abstractmethod
    def work(self, connection: PGconn) -> float:
        """Do the work that is due; returns the seconds to wait for a notification or a request."""

    @abstractmethod
    def hear(self, text: str) -> None:
        """Receive the text of a notification."""

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Receive the error that ended the connection or refused it; after a pause the next one is opened."""

    def is_needed(self) -> bool:
        """Return True if a connection is to be opened; called before each one."""
        return True

    def start(self) -> None:
        """Start the thread."""
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        try:
            self._thread.start()
        except BaseException:
            self._close()
            raise

    def stop(self) -> None:
        """End the thread and its connection.

        One that hangs in a half-open connection ends later: it is a daemon, and nothing waits for it.
        """
        with self._lock:
            self._is_stopping = True
            # Closed if the thread has ended.
            with contextlib.suppress(OSError):
                self._wake_writer.send(b"!")
        self._thread.join(_STOP_SECONDS)

    def send(self, request: Request) -> bool:
        """Pass a request to the thread, which runs it; False if the thread stops. Returns at once."""
        # Not while the socket is closed: at that moment its number may become that of another connection.
        with self._lock:
            if self._is_stopping:
                return False
            self._requests.append(request)
            # If the socket is full, the thread is being woken already.
            with contextlib.suppress(BlockingIOError):
                self._wake_writer.send(b"!")
        return True

    def end_unless_requested(self) -> None:
        """End the thread, unless a request was sent; later ones are refused."""
        with self._lock:
            self._is_stopping = self._is_stopping or not self._requests

    def take_requests(self, connection: PGconn | None) -> None:
        """Run the requests that other threads sent."""
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        while self._requests:
            self._requests.popleft()(connection)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                if self.is_needed():
                    self._connect_and_serve()
        finally:
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._is_stopping = True
            self._wake_reader.close()
            self._wake_writer.close()

    def _connect_and_serve(self) -> None:
        try:
            connection = self._connect()
            self._is_connected = True
            try:
                self._serve(connection.pgconn)
            finally:
                finish(connection)
        except Exception as error:  # noqa: BLE001  # users' engines raise any error, and others wait for the thread
            self.failed(error)
        self._is_connected = self._is_silent = False
        self._pause()

    def _serve(self, connection: PGconn) -> None:
        self.listen(connection)
        while not self._is_stopping:
            seconds = self.work(connection)
            self._reconnect_seconds = _RECONNECT_FIRST_SECONDS
            # Before the wait: a notification may have come in with an answer.
            connection.consume_input()
            has_heard = False
            while notification := connection.notifies():
                self.hear(notification.extra.decode(errors="replace"))
                has_heard = True
            self._is_silent = not has_heard and not wait_readable([self._wake_reader, connection.socket], seconds)
            # Last: a stop whose byte was read here is seen before the next wait.
            self.take_requests(connection)

    def _pause(self) -> None:
        """Run requests without a connection until it is time for the next one."""
        ends_at = clock() + self._reconnect_seconds
        self._reconnect_seconds = min(self._reconnect_seconds * 2, _RECONNECT_CAP_SECONDS)
        while not self._is_stopping and (seconds := ends_at - clock()) > 0:
            wait_readable([self._wake_reader], seconds)
            self.take_requests(None)
