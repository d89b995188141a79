"""Async calls under a lease that wait, and a kind in each claim mode that notes when it started.

The notes are on the clock that the producer uses too (CLOCK_MONOTONIC, one for all processes).
"""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.apps.counting import COUNTER
from outboxq import AsyncContext, Jobs

STARTS_VARIABLE = "OUTBOXQ_BENCHMARK_STARTS"
LEASE_QUEUE, TRANSACTION_QUEUE = "bench", "bench-transaction"

_starts: list[tuple[int, int]] = []
_gate = asyncio.Event()


def _written_at_the_end() -> Iterator[None]:
    yield
    if path := os.environ.get(STARTS_VARIABLE):
        Path(path).write_text("".join(f"{number} {at}\n" for number, at in _starts))


jobs = Jobs(lifespan=_written_at_the_end)


@jobs.handler(queue=LEASE_QUEUE, kind="wait", claim="lease")
async def wait(ctx: AsyncContext, seconds: float) -> None:
    """Wait, as for an answer from elsewhere."""
    await asyncio.sleep(seconds)
    COUNTER[0] += 1


@jobs.handler(queue=LEASE_QUEUE, kind="hold", claim="lease")
async def hold(ctx: AsyncContext) -> None:
    """Count, and wait until `release` runs."""
    COUNTER[0] += 1
    await _gate.wait()


@jobs.handler(queue=LEASE_QUEUE, kind="release", claim="lease")
async def release(ctx: AsyncContext) -> None:
    """End all that `hold`, now and later."""
    _gate.set()
    COUNTER[0] += 1


async def _note_start(ctx: AsyncContext, number: int) -> None:
    _starts.append((number, time.monotonic_ns()))
    COUNTER[0] += 1


note_leased = jobs.handler(queue=LEASE_QUEUE, kind="note leased", claim="lease")(_note_start)
note = jobs.handler(queue=TRANSACTION_QUEUE, kind="note")(_note_start)
