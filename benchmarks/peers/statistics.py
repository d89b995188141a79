"""From what the drivers reported to the figures."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.drivers import Progress

# Connecting, compiling and filling caches come before; a process that has run dry, and batches half full, after.
STEADY = (0.1, 0.9)
# The part of a long drain after most of its jobs are done.
LAST_PART = (0.8, 0.95)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the time from the commit of an enqueue to the start of its handler."""

    p50_ms: float
    p99_ms: float


def steady_rate(processes: Sequence[Sequence[Progress]], jobs: int, part: tuple[float, float] = STEADY) -> float:
    """Jobs per second over all processes, in a part of `jobs`: by default between the first tenth and the last.

    Raises:
        ValueError: the samples do not reach so far, or not in two points of time.
    """
    totals = _totals(processes)
    begin, end = (_reached(totals, jobs * share) for share in part)
    if end <= begin:
        raise ValueError("all jobs were executed between two samples: take more jobs")
    return jobs * (part[1] - part[0]) / (end - begin) * 1e9


def latencies_ms(committed: Sequence[tuple[int, int]], started: Sequence[tuple[int, int]]) -> list[float]:
    """Of each job, from the answer to its COMMIT to its handler's start; never negative, since either may be first.

    Raises:
        ValueError: a job was not started, or twice.
    """
    starts: Mapping[int, int] = dict(started)
    if len(starts) != len(started) or starts.keys() != dict(committed).keys():
        raise ValueError(f"{len(committed)} jobs were committed, {len(started)} starts of {len(starts)} jobs were seen")
    return [max(0, starts[index] - at) / 1e6 for index, at in committed]


def percentiles(values: Sequence[float]) -> Percentiles:
    """By the nearest rank."""
    ordered = sorted(values)
    return Percentiles(*(ordered[math.ceil(part * len(ordered)) - 1] for part in (0.5, 0.99)))


def _totals(processes: Sequence[Sequence[Progress]]) -> list[tuple[int, int]]:
    samples = sorted((sample.at, number, sample.executed) for number, one in enumerate(processes) for sample in one)
    latest = [0] * len(processes)
    totals = []
    for at, number, executed in samples:
        latest[number] = executed
        totals.append((at, sum(latest)))
    return totals


def _reached(totals: Sequence[tuple[int, int]], executed: float) -> float:
    for (before, fewer), (at, more) in itertools.pairwise(totals):
        if fewer < executed <= more:
            return before + (at - before) * (executed - fewer) / (more - fewer)
    raise ValueError(f"the drivers never reported {executed:.0f} jobs")
