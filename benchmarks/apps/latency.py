"""Notes when each job started, on the clock that the producer uses too (CLOCK_MONOTONIC, one for all processes)."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.apps.counting import COUNTER
from outboxq import Context, Jobs

STARTS_VARIABLE = "OUTBOXQ_BENCHMARK_STARTS"

_starts: list[tuple[int, int]] = []


def _written_at_the_end() -> Iterator[None]:
    yield
    Path(os.environ[STARTS_VARIABLE]).write_text("".join(f"{number} {at}\n" for number, at in _starts))


jobs = Jobs(lifespan=_written_at_the_end)


@jobs.handler(queue="bench", kind="job")
def note_start(ctx: Context, number: int) -> None:
    """Note it."""
    _starts.append((number, time.monotonic_ns()))
    COUNTER[0] += 1
