"""A job, as the pieces of its way see it: named when it is enqueued, read when it is claimed."""

import os
import time
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

_LOW_62_BITS = (1 << 62) - 1


def uuid7() -> UUID:
    """A UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then 74 random bits."""
    milliseconds = time.time_ns() // 1_000_000
    random_bits = int.from_bytes(os.urandom(10))
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | random_bits
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return UUID(int=value)


def uuid7s(count: int) -> list[UUID]:
    """`count` UUIDv7 in ascending order, from one reading of the clock (RFC 9562, section 6.2, method 2)."""
    milliseconds = time.time_ns() // 1_000_000
    fixed = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | 0x7 << 76 | 0x2 << 62
    # One bit less than there is room for: the steps cannot run over.
    random_bits = int.from_bytes(os.urandom(10)) >> 7
    ids = []
    for step in memoryview(os.urandom(4 * count)).cast("I"):
        random_bits += step + 1
        ids.append(UUID(int=fixed | random_bits >> 62 << 64 | random_bits & _LOW_62_BITS))
    return ids


@dataclass(frozen=True, slots=True)
class JobHandle:
    """What `add_job` returns: enough to find the job again, known before anything is written."""

    id: UUID
    kind: str
    queue: str


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
