"""Many queues, each with a handler that notes when it started, on the clock that the producer uses too."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.apps.counting import COUNTER
from outboxq import Context, Jobs

QUEUES_VARIABLE = "OUTBOXQ_BENCHMARK_QUEUES"
STARTS_VARIABLE = "OUTBOXQ_BENCHMARK_STARTS"

_starts: list[tuple[int, int]] = []


def _written_at_the_end() -> Iterator[None]:
    yield
    Path(os.environ[STARTS_VARIABLE]).write_text("".join(f"{number} {at}\n" for number, at in _starts))


jobs = Jobs(lifespan=_written_at_the_end)


def queue_name(place: int) -> str:
    """The name of the queue at this place; alphabetical order is the same."""
    return f"queue {place:03}"


def _note_start(ctx: Context, number: int) -> None:
    _starts.append((number, time.monotonic_ns()))
    COUNTER[0] += 1


kinds = [
    jobs.handler(queue=queue_name(place), kind=f"job {place:03}")(_note_start)
    for place in range(int(os.environ.get(QUEUES_VARIABLE, "500")))
]
