"""Clocks: one for durations, one for the ids of jobs, and the database's."""

import os
import time
from dataclasses import dataclass
from itertools import accumulate
from operator import add

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    """Return the reading, in seconds, of a clock for durations: subtract two readings to measure the time between them.

    If the system has such a clock, it also advances while the machine is suspended. It advances in tests whose library
    stops `time.monotonic`.
    """
    return time.clock_gettime(_CLOCK)


def uuid7s(count: int) -> list[str]:
    """Return `count` UUIDs of version 7 as hex, in ascending order, from one reading of the clock.

    RFC 9562, sections 5.7 and 6.2, methods 3 and 2: 48 bits of Unix milliseconds, 12 bits of the fraction of a
    millisecond, then random bits. So ids of one process are in the order in which they were made, as long as its clock
    goes forward.
    """
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    high = (milliseconds & 0xFFFF_FFFF_FFFF) << 16 | 0x7 << 12 | (nanoseconds << 12) // 1_000_000
    # One bit less than fits, so that the steps cannot overflow.
    low = 0x2 << 62 | int.from_bytes(os.urandom(8)) >> 3
    steps = memoryview(os.urandom(4 * count)).cast("I")
    # A random step may be 0: with its number added, each id is above the one before.
    lows = map(add, accumulate(steps, initial=low), range(count))
    prefix = f"{high:016x}"
    return [f"{prefix}{low:x}" for low in lows]


@dataclass(slots=True)
class DatabaseClock:
    """An estimate of the time on the database's server, computed without a query: `time.time() + ahead_seconds`.

    The estimate is wrong by at most half of the round trip of the last `compare`, and the drift of the two clocks since
    then.
    """

    ahead_seconds: float = 0.0

    def compare(self, database_seconds: float, asked_at: float, answered_at: float) -> None:
        """Set the estimate from the answer to a query: the database's clock showed `database_seconds`.

        `asked_at` and `answered_at` are the readings of `time.time()` before and after the query.
        """
        self.ahead_seconds = database_seconds - (asked_at + answered_at) / 2
