"""What a child tells its supervisor of its counts comes through, also if the supervisor stands still for a while."""

import itertools
import socket
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from outboxq.observability.metrics.reading import Reading
from outboxq.relay.metrics import MetricsTeller, receive
from tests.support.waiting import PATIENCE

NAME = "outboxq_parked_jobs_total"
# With names of this length a reading is larger than what the socket holds.
QUEUES = [f"{number} {'x' * 200}" for number in range(100)]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The ends of the supervisor and of the child, with the smallest buffer that there is."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with ours, theirs:
        # A child ends when its supervisor's end is closed.
        yield ours, theirs


def reading_of(count: int) -> Reading:
    """One in which each number is `count`."""
    reading = Reading()
    for queue in QUEUES:
        reading.add(NAME, (queue,), count)
    return reading


def told(stream: BinaryIO) -> set[float]:
    """The numbers of the next reading that comes."""
    reading = receive(stream)
    assert reading is not None
    assert len(reading.values[NAME]) == len(QUEUES)
    return set(reading.values[NAME].values())


def test_a_supervisor_that_stands_still_reads_on_where_it_was(ends: tuple[socket.socket, socket.socket]) -> None:
    """Half of a message was sent when the child's patience ended: its rest comes first, and then newer totals."""
    ours, theirs = ends
    counts = itertools.count(1)
    teller = MetricsTeller(theirs.detach(), lambda: reading_of(next(counts)))
    with pytest.raises(TimeoutError):
        teller.tell()
    # Its thread answers when it is asked.
    ours.send(b"?")
    with ours.makefile("rb") as stream:
        assert [told(stream), told(stream)] == [{1}, {2}]
        ours.send(b"?")
        assert told(stream) == {3}
