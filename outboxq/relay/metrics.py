"""The metrics of a relay: its counts, read when they are requested.

A supervisor's child sends them through a socket: on request, every few seconds and at its end. So its counts stay in
the supervisor's totals after the child has ended or died. In the supervisor, a thread for each child reads its totals:
the thread that manages the children only passes on their sockets, so it never waits here.
"""

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import BinaryIO, Literal, TypeAlias, get_args

import msgspec

from outboxq.observability.metrics.counter import EventCounter
from outboxq.observability.metrics.families import JOBS
from outboxq.observability.metrics.reading import OUTCOMES, Reading, add_kinds
from outboxq.relay.run import RelayLook

TELL_SECONDS = 5.0
# If a supervisor accepts nothing for this long, because its process is stopped, the rest is sent the next time.
_SEND_SECONDS = 1.0
_LENGTH = struct.Struct("!I")
# A reading has some hundred kilobytes at the most.
MOST_BYTES = 64 * 1024**2
# A scrape waits this long for answers; for children that send none, the last totals count.
_ANSWER_SECONDS = 1.0
EndReason: TypeAlias = Literal["died", "stuck", "silent", "lingers"]
REASONS: tuple[EndReason, ...] = get_args(EndReason)


def read_relay(look: RelayLook | None, counter: EventCounter) -> Reading:
    reading = counter.read()
    if look is None:
        return reading
    for kind in look.kinds:
        for outcome in (*OUTCOMES.values(), "interrupted"):
            # With zeros, so that the first failure of a kind is seen as an increase.
            reading.add(JOBS, (*kind, outcome), 0)
    add_kinds(reading, look.totals)
    for state, slots in look.slots.items():
        reading.add("outboxq_slots", (state,), slots)
    for (queue, state), calls in look.calls.items():
        reading.add("outboxq_calls", (queue, state), calls)
    for queue, slots in look.free.items():
        reading.add("outboxq_free_call_slots", (queue,), slots)
    for state, connections in look.connections.items():
        reading.add("outboxq_call_connections", (state,), connections)
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
    """Sends this process's counts to its supervisor: on request, every few seconds (`TELL_SECONDS`), and at the end.

    Args:
        number: The file descriptor of the socket to the supervisor.
        read: Returns the present counts.
    """

    def __init__(self, number: int, read: Callable[[], Reading]) -> None:
        self._socket = socket.socket(fileno=number)
        self._socket.settimeout(_SEND_SECONDS)
        self._read = read
        self._rest = memoryview(b"")
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="outboxq-metrics", daemon=True).start()

    def tell(self) -> None:
        """Send the present totals to the supervisor, after any part of the previous ones that could not be sent yet.

        Raises:
            TimeoutError: the supervisor accepts no data now.
            OSError: the supervisor is gone.
        """
        with self._lock:
            self._send_rest()
            data = self._read().encoded()
            self._rest = memoryview(_LENGTH.pack(len(data)) + data)
            self._send_rest()

    def finish(self) -> None:
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


def receive(stream: BinaryIO) -> Reading | None:
    """Wait for the next totals that a `MetricsTeller` sends, and return them; None at the stream's end.

    Raises:
        OSError: the connection failed.
        msgspec.DecodeError: the data is invalid.
    """
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length) if length <= MOST_BYTES else b""
    return Reading.decoded(data) if len(data) == length else None


class ChildSocket:
    """The supervisor's end of the socket to one child, and the last totals that the child has sent."""

    def __init__(self, database: str, connection: socket.socket) -> None:
        self.database = database
        self.connection = connection
        self.last: Reading | None = None
        # The number of times that the child has sent its totals.
        self.told = 0

    def close(self) -> None:
        """End the reading of the socket, after its child has ended.

        Data that the child has sent is still read and counted.
        """
        # The reading thread ends after it has read everything, even if another process holds the other end.
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)


class ChildMetrics:
    """Adds up the counts of a supervisor's children: present ones of running children, last ones of ended ones.

    Args:
        databases: Maps each database's name in the supervisor to its name in the metrics.
    """

    def __init__(self, databases: Mapping[str, str]) -> None:
        self._names = databases
        self._changed = threading.Condition()
        self._children: set[ChildSocket] = set()
        # By database, the totals of children that have ended; the caps apply to all of its children.
        self._ended = {name: Reading() for name in databases}

    def open(self, database: str) -> tuple[ChildSocket, socket.socket]:
        """Make the two ends of the socket for a new child, and start a thread that reads the supervisor's end.

        Returns:
            The supervisor's end, and the end that the child inherits, which the caller closes after the child has
            started.
        """
        ours, theirs = socket.socketpair()
        child = ChildSocket(database, ours)
        with self._changed:
            self._children.add(child)
        threading.Thread(target=self._listen, args=(child,), name="outboxq-child-metrics", daemon=True).start()
        return child, theirs

    def count_end(self, database: str, reason: EndReason) -> None:
        """Count a child that died or was killed, by the reason of its end."""
        with self._changed:
            self._ended[database].add("outboxq_relay_child_ends_total", (reason,), 1)

    def read(self) -> dict[str, Reading]:
        """Return the totals of each database, by its name in the metrics.

        Requests them from the children first, and waits for a second at most.
        """
        with self._changed:
            asked = {child: child.told for child in self._children if _ask(child)}
        deadline = time.monotonic() + _ANSWER_SECONDS
        with self._changed:
            self._changed.wait_for(
                lambda: all(child.told > told for child, told in asked.items() if child in self._children),
                max(0.0, deadline - time.monotonic()),
            )
            return {self._names[database]: self._sum(database) for database in self._ended}

    def _sum(self, database: str) -> Reading:
        ended = self._ended[database]
        total = Reading(caps=ended.caps)
        for reason in REASONS:
            total.add("outboxq_relay_child_ends_total", (reason,), 0)
        total.merge(ended)
        children = [child for child in self._children if child.database == database]
        total.add("outboxq_relay_children", (), len(children))
        for child in children:
            if child.last is not None:
                total.merge(child.last)
        return total

    def _listen(self, child: ChildSocket) -> None:
        try:
            with child.connection.makefile("rb") as stream:
                while (reading := receive(stream)) is not None:
                    with self._changed:
                        child.last = reading
                        child.told += 1
                        self._changed.notify_all()
        except (OSError, msgspec.DecodeError):
            pass
        finally:
            with self._changed:
                self._children.discard(child)
                if child.last is not None:
                    self._ended[child.database].merge(child.last, without_gauges=True)
                self._changed.notify_all()
            child.connection.close()


def _ask(child: ChildSocket) -> bool:
    try:
        child.connection.send(b"?", socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True
