"""A job, as the pieces of its way see it: named when it is enqueued, read when it is claimed."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, make_dataclass
from datetime import datetime
from itertools import accumulate
from operator import add
from typing import Any, cast
from uuid import UUID


def uuid7() -> UUID:
    """A UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then 74 random bits."""
    milliseconds = time.time_ns() // 1_000_000
    random_bits = int.from_bytes(os.urandom(10))
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | random_bits
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return UUID(int=value)


def uuid7s(count: int) -> list[str]:
    """`count` UUIDv7 as hex, in ascending order, from one reading of the clock (RFC 9562, section 6.2, method 2)."""
    milliseconds = time.time_ns() // 1_000_000
    high = (milliseconds & 0xFFFF_FFFF_FFFF) << 16 | 0x7 << 12 | int.from_bytes(os.urandom(2)) >> 4
    # One bit less than there is room for: the steps cannot run over.
    low = 0x2 << 62 | int.from_bytes(os.urandom(8)) >> 3
    steps = memoryview(os.urandom(4 * count)).cast("I")
    # A step may be 0: with its number added, each is above the one before.
    lows = map(add, accumulate(steps, initial=low), range(count))
    prefix = f"{high:016x}"
    return [f"{prefix}{low:x}" for low in lows]


@dataclass(frozen=True, slots=True)
class Job:
    """A claimed job, as its handler sees it in `ctx.job`.

    `attempt` counts from 1 and includes this run. `args` is the stored JSON text; handlers receive it decoded.
    `max_attempts` is None where the handler's own retry policy decides. `crashes` is how often its relay died while it
    ran alone, before this run. `lease_token` is None in transaction mode. Times are the database's, in UTC.
    """

    id: UUID
    queue: str
    kind: str
    args: str = field(repr=False)
    headers: str = field(repr=False)
    priority: int
    attempt: int
    max_attempts: int | None
    crashes: int
    parked: int
    unique_key: str | None
    group_key: str | None
    errors: str = field(repr=False)
    run_at: datetime
    created_at: datetime
    seq: int
    lease_token: int | None = None


# Frozen, a class sets each value by a call of its own: five times as long. One of the same layout does not.
_Thawed: Any = make_dataclass("_Thawed", [each.name for each in fields(Job)], slots=True)


def read_job(row: Iterable[object]) -> Job:
    """A job from its values, in the order of its fields."""
    job = _Thawed(*row)
    job.__class__ = Job
    return cast("Job", job)
