"""A thread that listens for notifications on a connection of its own, and connects again after every loss.

Other threads wake it through a socket. It uses libpq below psycopg, which is the same for sync and async connections,
so any engine can provide the connection.
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
    """A thread that keeps one listening connection open; subclasses define its work.

    All methods but `start`, `stop` and `send` are called in the thread.

    Args:
        connect: Opens a connection outside a transaction; also called in the thread.
    """

    def __init__(self, name: str, connect: Callable[[], DriverConnection]) -> None:
        self._connect = connect
        self._requests: deque[Request] = deque()
        self._is_stopping = False
        self._is_connected = False
        # True if the last wait ended without a notification and without a request.
        self._is_silent = False
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def listen(self, connection: PGconn) -> None:
        """Prepare a new connection, by LISTEN for example."""

    @abstractmethod
    def work(self, connection: PGconn) -> float:
        """Do the work that is due; return the longest time in seconds to wait for a notification or a `send`."""

    @abstractmethod
    def hear(self, text: str) -> None:
        """Receive the text of a notification."""

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Receive the error that ended or prevented the connection; the next one is opened after a pause."""

    def is_needed(self) -> bool:
        """Return True if the thread is to open a connection now.

        It is called before each connection; after False it is called again at once.
        """
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
        """End the thread and its connection, and wait for that up to 5 seconds.

        If the thread hangs in a connection whose other end is gone, it ends later: it is a daemon, so it does not keep
        the process alive.
        """
        with self._lock:
            self._is_stopping = True
            # The socket is closed if the thread has ended.
            with contextlib.suppress(OSError):
                self._wake_writer.send(b"!")
        self._thread.join(_STOP_SECONDS)

    def send(self, request: Request) -> bool:
        """Pass a function to the thread, which calls it with its connection; return at once.

        Return False, without passing the function, if the thread is stopping.
        """
        # Not while the socket is closed: at that moment its file descriptor may belong to another connection.
        with self._lock:
            if self._is_stopping:
                return False
            self._requests.append(request)
            # If the socket is full, the thread is being woken already.
            with contextlib.suppress(BlockingIOError):
                self._wake_writer.send(b"!")
        return True

    def end_unless_requested(self) -> None:
        """Make the thread end, and `send` refuse further functions, unless an earlier function still waits."""
        with self._lock:
            self._is_stopping = self._is_stopping or not self._requests

    def take_requests(self, connection: PGconn | None) -> None:
        """Call the functions that other threads passed by `send`, with the connection, or None if there is none."""
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
            # Before the wait: a notification may have arrived with an answer.
            connection.consume_input()
            has_heard = False
            while notification := connection.notifies():
                self.hear(notification.extra.decode(errors="replace"))
                has_heard = True
            self._is_silent = not has_heard and not wait_readable([self._wake_reader, connection.socket], seconds)
            # Last: a stop whose byte was read here is noticed before the next wait.
            self.take_requests(connection)

    def _pause(self) -> None:
        """Wait until the next connection may be opened; functions that `send` passes in that time are called with None.

        The wait doubles after each failure, from 0.05 s up to 1 s.
        """
        ends_at = clock() + self._reconnect_seconds
        self._reconnect_seconds = min(self._reconnect_seconds * 2, _RECONNECT_CAP_SECONDS)
        while not self._is_stopping and (seconds := ends_at - clock()) > 0:
            wait_readable([self._wake_reader], seconds)
            self.take_requests(None)
