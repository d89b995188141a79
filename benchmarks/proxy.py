"""A TCP proxy before PostgreSQL, in a process of its own: it delays what passes, and counts what clients send.

Run as `python -m benchmarks.proxy HOST PORT DELAY_SECONDS`: it prints its port and serves until its standard input
ends; each line there is answered with the number of statements that clients have sent.
"""

import contextlib
import ctypes
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import make_url

_ROOT = Path(__file__).parent.parent
_RECEIVE_BYTES = 65_536
_PR_SET_TIMERSLACK = 29
_SPIN_SECONDS = 150e-6
# Linux: its option SO_TIMESTAMPING, SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE, and the first of three
# timespecs.
_SO_TIMESTAMPING = 37
_SOFTWARE_STAMPS = (1 << 3) | (1 << 4)
_STAMP = struct.Struct("@ll")
_STAMP_BYTES = socket.CMSG_SPACE(3 * _STAMP.size)
_LONGEST_WAKE_SECONDS = 0.5e-3


class Statements:
    """Counts the statements in one client's half of the protocol (version 3): in each Query, and each Execute."""

    def __init__(self) -> None:
        self.count = 0
        self._buffer = b""
        self._started = False

    def feed(self, data: bytes) -> None:
        """Read on."""
        self._buffer += data
        while len(self._buffer) >= 5:
            # The first message has no type.
            head = 1 if self._started else 0
            (length,) = struct.unpack_from("!i", self._buffer, head)
            if len(self._buffer) < head + length:
                return
            frame, self._buffer = self._buffer[: head + length], self._buffer[head + length :]
            self._note(frame)

    def _note(self, frame: bytes) -> None:
        if not self._started:
            # A question for TLS or GSS is followed by another first message.
            (code,) = struct.unpack_from("!i", frame, 4)
            self._started = code not in (80877103, 80877104)
        elif frame[:1] == b"Q":
            self.count += sum(bool(part.strip(b" \n\0")) for part in frame[5:].split(b";"))
        elif frame[:1] == b"E":
            self.count += 1


class RunningProxy:
    """A proxy process. `url` leads through it."""

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url = url
        self._process = process

    def count(self) -> int:
        """The statements that clients have sent until now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("count\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def running_proxy(database_url: str, delay_seconds: float) -> Iterator[RunningProxy]:
    """A proxy before the server of `database_url` that holds everything back for `delay_seconds` each way."""
    url = make_url(database_url)
    command = [sys.executable, "-m", "benchmarks.proxy", url.host or "127.0.0.1", str(url.port or 5432)]
    process = subprocess.Popen(
        [*command, str(delay_seconds)], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        own = url.set(host="127.0.0.1", port=port).update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
        yield RunningProxy(own.render_as_string(hide_password=False), process)
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def _pump(source: socket.socket, target: socket.socket, delay_seconds: float, seen: Statements | None) -> None:
    """One direction: a thread reads and stamps, another sends when it is due, so that a delay holds up no other."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def send() -> None:
        _sleep_exactly()
        with contextlib.suppress(OSError):
            while True:
                due, data = waiting.get()
                _wait_until(due)
                if not data:
                    break
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    _ask_for_stamps(source)
    data = b"first"
    while data:
        try:
            data, arrived = _receive(source)
        except OSError:
            data, arrived = b"", time.monotonic()
        waiting.put((arrived + delay_seconds, data))
        if seen is not None:
            seen.feed(data)


def _ask_for_stamps(source: socket.socket) -> None:
    # Without them the time until this thread runs would come on top.
    with contextlib.suppress(OSError):
        source.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _SOFTWARE_STAMPS)


def _receive(source: socket.socket) -> tuple[bytes, float]:
    """Return the received bytes and their time (monotonic), from the kernel if it reports it."""
    data, extra, _, _ = source.recvmsg(_RECEIVE_BYTES, _STAMP_BYTES)
    now, clock = time.monotonic(), time.time()
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPING and len(content) >= _STAMP.size:
            seconds, nanoseconds = _STAMP.unpack_from(content)
            # Never more than what waking up may take: the clock may have been set.
            return data, now - min(max(clock - seconds - nanoseconds * 1e-9, 0.0), _LONGEST_WAKE_SECONDS)
    return data, now


def _wait_until(due: float) -> None:
    """Sleep, and spin at the end: a sleeper is woken late."""
    time.sleep(max(0.0, due - time.monotonic() - _SPIN_SECONDS))
    while time.monotonic() < due:
        pass


def _sleep_exactly() -> None:
    # Linux lets each thread's sleep last up to 50 µs longer, unless this is set.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def _serve(listener: socket.socket, server: tuple[str, int], delay_seconds: float, all_seen: list[Statements]) -> None:
    while True:
        client, _ = listener.accept()
        behind = socket.create_connection(server)
        seen = Statements()
        all_seen.append(seen)
        for end in (client, behind):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pumped in ((client, behind, delay_seconds, seen), (behind, client, delay_seconds, None)):
            threading.Thread(target=_pump, args=pumped, daemon=True).start()


def main() -> None:
    """Serve until standard input ends; each line on it is answered with the count of statements."""
    host, port, delay_seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    sys.setswitchinterval(1e-4)
    listener = socket.create_server(("127.0.0.1", 0))
    all_seen: list[Statements] = []
    threading.Thread(target=_serve, args=(listener, (host, port), delay_seconds, all_seen), daemon=True).start()
    _answer(listener.getsockname()[1])
    for _ in sys.stdin:
        _answer(sum(seen.count for seen in all_seen))


def _answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
