"""The metrics of a relay: its counts, read when they are requested.

A supervisor's child sends them through a socket: on request, every few seconds and at its end. So its counts stay in
the supervisor's totals after the child has ended or died.
"""

import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from outboxq.observability.metrics.counter import EventCounter
from outboxq.observability.metrics.families import JOBS
from outboxq.observability.metrics.reading import OUTCOMES, Reading, add_kinds
from outboxq.relay.run import RelayLook

TELL_SECONDS = 5.0
# A supervisor that takes nothing for so long, because its process is stopped, gets the rest the next time.
_SEND_SECONDS = 1.0
_LENGTH = struct.Struct("!I")
# A reading has some hundred kilobytes at the most.
MOST_BYTES = 64 * 1024**2


def read_relay(look: RelayLook | None, counter: EventCounter) -> Reading:
    """Read a relay's counts and activity."""
    reading = counter.read()
    if look is None:
        return reading
    for kind in look.kinds:
        for outcome in (*OUTCOMES.values(), "interrupted"):
            # With zeros, so that the first failure of a kind is an increase.
            reading.add(JOBS, (*kind, outcome), 0)
    add_kinds(reading, look.totals)
    for state, slots in look.slots.items():
        reading.add("outboxq_slots", (state,), slots)
    for queue, jobs in look.claimed.items():
        reading.add("outboxq_running_jobs", (queue,), jobs)
        for name in ("outboxq_parked_jobs_total", "outboxq_suspected_jobs_total", "outboxq_rolled_back_batches_total"):
            reading.add(name, (queue,), 0)
    reading.add("outboxq_hook_failures_total", (), look.hook_failures)
    reading.add("outboxq_stat_flush_failures_total", (), look.flush_failures)
    identity = look.identity
    reading.add("outboxq_relay_info", (identity.version, identity.host, str(identity.id)), 1)
    return reading


class MetricsTeller:
    """Sends this process's counts to its supervisor: on request, every few seconds, and at the end.

    Args:
        number: The file descriptor of the socket.
    """

    def __init__(self, number: int, read: Callable[[], Reading]) -> None:
        self._socket = socket.socket(fileno=number)
        self._socket.settimeout(_SEND_SECONDS)
        self._read = read
        self._rest = memoryview(b"")
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="outboxq-metrics", daemon=True).start()

    def tell(self) -> None:
        """Send the totals, after the rest of those before, if the supervisor took only a part.

        Raises:
            TimeoutError: the supervisor takes nothing now.
            OSError: the supervisor is gone.
        """
        with self._lock:
            self._send_rest()
            data = self._read().encoded()
            self._rest = memoryview(_LENGTH.pack(len(data)) + data)
            self._send_rest()

    def finish(self) -> None:
        """Send the totals for the last time."""
        with suppress(OSError):
            self.tell()

    def _send_rest(self) -> None:
        while self._rest:
            self._rest = self._rest[self._socket.send(self._rest) :]

    def _run(self) -> None:
        try:
            while True:
                is_asked, _, _ = select.select([self._socket], [], [], TELL_SECONDS)
                if is_asked and not self._socket.recv(4096):
                    return
                with suppress(TimeoutError):
                    self.tell()
        except OSError:
            # The supervisor is gone.
            return
        finally:
            with self._lock:
                self._socket.close()


def receive(connection: socket.socket) -> Reading | None:
    """Receive the next totals that a `MetricsTeller` sends; None at the end.

    Raises:
        OSError: the connection failed.
        msgspec.DecodeError: the data is not ours.
    """
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    data = _receive_exactly(connection, length) if length <= MOST_BYTES else None
    return None if data is None else Reading.decoded(data)


def _receive_exactly(connection: socket.socket, length: int) -> bytes | None:
    parts: list[bytes] = []
    while length:
        part = connection.recv(min(length, 1_048_576))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
