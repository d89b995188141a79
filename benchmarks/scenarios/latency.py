"""Row 11: the time from a job's COMMIT to its start, when there is little to do."""

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from sqlalchemy import Engine, create_engine

from benchmarks.apps.latency import STARTS_VARIABLE, note_start
from benchmarks.bench import Bench, MeasurementFailed, Workbench
from benchmarks.figures import Better, Comparison, Series, Unsupported
from benchmarks.peers_figures import Peers
from benchmarks.relays import RelayOptions, running_relay
from outboxq import NewJob, OutboxSession
from outboxq.outbox.kinds import JobKind

_JOBS_A_SECOND = 50
_WARM_UP_JOBS = 10


def latency(bench: Bench, peers: Peers) -> list[Comparison | Unsupported]:
    """Median and 99th percentile; the clock starts when COMMIT has come back, as it does for the peers."""
    runs: list[list[float]] = []
    with bench.database() as workbench:
        bench.alternate({"latency, p50": partial(_median_of_a_run, bench, workbench, runs)}, "ms")
    lines: list[Comparison | Unsupported] = []
    for percent in (50, 99):
        ours = Series(tuple(percentile(run, percent) for run in runs), "ms")
        what = f"COMMIT to the handler's start at {_JOBS_A_SECOND} jobs/s, p{percent}"
        best = peers.best_latency(percent)
        note = f"{sum(map(len, runs)):,} jobs; from the moment that COMMIT came back to the producer"
        others = tuple((each.name, each.series) for each in peers.latencies(percent))
        lines.append(
            Comparison(
                11,
                "latency",
                what,
                ours,
                best.series if best else None,
                best.name if best else "",
                1.0 if best else None,
                Better.lower,
                (note,),
                others,
                plot=f"latency-p{percent}",
            )
        )
    return lines


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that `percent` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _median_of_a_run(bench: Bench, workbench: Workbench, runs: list[list[float]]) -> float:
    runs.append(_run(workbench, max(10, int(bench.size.seconds * 3 * _JOBS_A_SECOND))))
    return percentile(runs[-1], 50)


def _run(workbench: Workbench, jobs: int) -> list[float]:
    workbench.fill(0)
    with tempfile.TemporaryDirectory(prefix="outboxq-benchmark-") as directory:
        starts = Path(directory) / "starts"
        with running_relay(workbench.url, RelayOptions("latency"), {STARTS_VARIABLE: str(starts)}) as relay:
            engine = create_engine(workbench.url)
            committed = enqueue_in_time(engine, note_start, range(_WARM_UP_JOBS), _JOBS_A_SECOND)
            relay.wait_until(lambda: sum(relay.counts()) == _WARM_UP_JOBS, "the first jobs to start")
            numbers = range(_WARM_UP_JOBS, _WARM_UP_JOBS + jobs)
            committed |= enqueue_in_time(engine, note_start, numbers, _JOBS_A_SECOND)
            relay.wait_until(lambda: sum(relay.counts()) == len(committed), "all jobs to start")
            engine.dispose()
        found = milliseconds_to_start(starts, committed)
    return [found[number] for number in committed if number >= _WARM_UP_JOBS]


def milliseconds_to_start(starts: Path, committed: Mapping[int, int]) -> dict[int, float]:
    """Milliseconds from the COMMIT of each job to its start, which the relay wrote down.

    Raises:
        MeasurementFailed: other jobs were started than committed.
    """
    pairs = (line.split() for line in starts.read_text().splitlines())
    started = {int(number): int(at) for number, at in pairs}
    if started.keys() != committed.keys():
        raise MeasurementFailed(f"{len(committed)} jobs were committed, and {len(started)} started")
    return {number: (started[number] - at) / 1e6 for number, at in committed.items()}


def enqueue_in_time(
    engine: Engine,
    kind: JobKind[...],
    numbers: range,
    jobs_a_second: float,
    before: Callable[[], Iterable[NewJob]] = tuple,
) -> dict[int, int]:
    """Commit one at a time, evenly; the time at which each had come back.

    Args:
        before: Makes the jobs that each transaction adds first.
    """
    committed: dict[int, int] = {}
    begun = time.monotonic()
    for place, number in enumerate(numbers):
        time.sleep(max(0.0, begun + place / jobs_a_second - time.monotonic()))
        with OutboxSession(engine) as session:
            session.add_jobs([*before(), kind.job(number=number)])
            session.commit()
        committed[number] = time.monotonic_ns()
    return committed
