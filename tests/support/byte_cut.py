"""A proxy in front of PostgreSQL that cuts its connections after a given number of bytes, in either direction."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from sqlalchemy import make_url

Direction = Literal["request", "answer"]


class ByteCut:
    """What a proxy lets through; everything until `arm`.

    Attributes:
        url: The database's URL, through the proxy.
        passed: The bytes of the direction that have passed since `arm`.
        is_reached: The connection was cut.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.passed = 0
        self.is_reached = False
        self._direction: Direction | None = None
        self._left: int | None = None
        self._containing: tuple[bytes, ...] = ()
        self._client: socket.socket | None = None
        self._lock = threading.Lock()

    def arm(self, direction: Direction, count: int | None, *containing: bytes) -> None:
        """Cut a connection once `count` more bytes have passed in this direction; None only counts them.

        Args:
            containing: Only the first request with all of these, or its answer, is counted.
        """
        with self._lock:
            self._direction, self._left, self.passed, self.is_reached = direction, count, 0, False
            self._containing, self._client = containing, None

    def disarm(self) -> None:
        """Let everything through again."""
        with self._lock:
            self._direction = self._left = None

    def share(self, direction: Direction, data: bytes, client: socket.socket) -> tuple[bytes, bool]:
        """The part of `data` that passes, and whether the connection goes on."""
        with self._lock:
            if self._containing and direction == "request":
                if client is self._client:
                    # The request after the one that is counted.
                    self._direction = None
                elif self._client is None and all(each in data for each in self._containing):
                    self._client = client
            if direction != self._direction or (self._containing and client is not self._client):
                return data, True
            part = data if self._left is None else data[: self._left]
            self.passed += len(part)
            if self._left is not None:
                self._left -= len(part)
            self.is_reached = self._left == 0
            if self.is_reached:
                # Other connections go on.
                self._direction = None
            return part, not self.is_reached


@contextmanager
def byte_cut(url: str) -> Iterator[ByteCut]:
    """A proxy on loopback for a `with` block."""
    target = make_url(url)
    threads: list[threading.Thread] = []
    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        through = target.set(host="127.0.0.1", port=port, query={}).update_query_dict(
            {"sslmode": "disable", "gssencmode": "disable"}
        )
        cut = ByteCut(through.render_as_string(hide_password=False))

        def start(work: threading.Thread) -> None:
            threads.append(work)
            work.start()

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection((str(target.host), target.port or 5432))
                    ends.extend((client, server))
                    start(threading.Thread(target=_pump, args=(cut, "request", client, server, client)))
                    start(threading.Thread(target=_pump, args=(cut, "answer", server, client, client)))

        start(threading.Thread(target=accept))
        try:
            yield cut
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for end in ends:
                _close(end)
            for thread in threads:
                thread.join(10)


def _pump(
    cut: ByteCut, direction: Direction, source: socket.socket, target: socket.socket, client: socket.socket
) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            part, goes_on = cut.share(direction, data, client)
            target.sendall(part)
            if not goes_on:
                break
    _close(source)
    _close(target)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
