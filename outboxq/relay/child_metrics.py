"""The metrics of a supervisor's children: the current totals of those that live, the last totals of those that ended.

A thread for each child reads what it sends. The thread that tends the children only hands over their sockets, so it
never waits here.
"""

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal, TypeAlias, get_args

import msgspec

from outboxq.observability.metrics.reading import Reading
from outboxq.relay.metrics import receive

# A scrape waits this long for answers; of children that send none, the last totals count.
_ANSWER_SECONDS = 1.0
EndReason: TypeAlias = Literal["died", "stuck", "silent", "lingers"]
REASONS: tuple[EndReason, ...] = get_args(EndReason)


class ChildSocket:
    """The supervisor's end of a child's socket, and the last totals received."""

    def __init__(self, database: str, connection: socket.socket) -> None:
        self.database = database
        self.connection = connection
        self.last: Reading | None = None
        # How often the child has sent its totals.
        self.told = 0


class ChildMetrics:
    """Adds up what the children of a supervisor count.

    Args:
        databases: The name of each of the supervisor's databases in the metrics.
    """

    def __init__(self, databases: Mapping[str, str]) -> None:
        self._names = databases
        self._changed = threading.Condition()
        self._children: set[ChildSocket] = set()
        # By database, the totals of children that have ended; the caps are those of all of its children.
        self._ended = {name: Reading() for name in databases}

    def open(self, database: str) -> tuple[ChildSocket, socket.socket]:
        """Make a child's socket, and the end that the child inherits, which the caller closes."""
        ours, theirs = socket.socketpair()
        child = ChildSocket(database, ours)
        with self._changed:
            self._children.add(child)
        threading.Thread(target=self._listen, args=(child,), name="outboxq-child-metrics", daemon=True).start()
        return child, theirs

    def close(self, child: ChildSocket) -> None:
        """Record that the child has ended: what it sent is read to the end, and counts for good."""
        # The reading thread ends once it has read everything, even if another process holds the other end.
        with suppress(OSError):
            child.connection.shutdown(socket.SHUT_RD)

    def count_end(self, database: str, reason: EndReason) -> None:
        """Count a child that did not end in order."""
        with self._changed:
            self._ended[database].add("outboxq_relay_child_ends_total", (reason,), 1)

    def read(self) -> dict[str, Reading]:
        """Read the totals of each database, by its name; queries the children, and waits for a second at most."""
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
            while (reading := receive(child.connection)) is not None:
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
