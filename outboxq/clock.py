"""Clocks: the one that durations are measured by, the one that the ids of jobs are made of, and the database's."""

import os
import time
from dataclasses import dataclass
from itertools import accumulate
from operator import add

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    """Seconds that also pass while the machine is suspended, if the system has such a clock.

    They also pass in tests whose library stops `time.monotonic`.
    """
    return time.clock_gettime(_CLOCK)


def uuid7s(count: int) -> list[str]:
    """`count` UUIDv7 as hex, in ascending order, from one reading of the clock.

    RFC 9562, sections 5.7 and 6.2, methods 3 and 2: 48 bits of Unix milliseconds, 12 of the fraction of one,
    then random bits. So ids of one process are in the order in which they were made, as long as its clock goes forward.
    """
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    high = (milliseconds & 0xFFFF_FFFF_FFFF) << 16 | 0x7 << 12 | (nanoseconds << 12) // 1_000_000
    # One bit less than there is room for: the steps cannot run over.
    low = 0x2 << 62 | int.from_bytes(os.urandom(8)) >> 3
    steps = memoryview(os.urandom(4 * count)).cast("I")
    # A step may be 0: with its number added, each is above the one before.
    lows = map(add, accumulate(steps, initial=low), range(count))
    prefix = f"{high:016x}"
    return [f"{prefix}{low:x}" for low in lows]


@dataclass(slots=True)
class DatabaseClock:
    """An estimate of the database's clock, by its distance from this process's own: `time.time() + ahead_seconds`.

    As exact as half of the round trip in which they were compared, and the drift of the two since then.
    """

    ahead_seconds: float = 0.0

    def compare(self, database_seconds: float, asked_at: float, answered_at: float) -> None:
        """Record that the database's clock showed `database_seconds` between these two times of `time.time()`."""
        self.ahead_seconds = database_seconds - (asked_at + answered_at) / 2
