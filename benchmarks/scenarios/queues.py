"""Row 15: the same jobs in one queue and in many, which one slot serves in turns."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import Engine, create_engine

from benchmarks.apps.many import QUEUES_VARIABLE, STARTS_VARIABLE, kinds
from benchmarks.bench import Bench, MeasurementFailed, Workbench
from benchmarks.figures import Better, Comparison, Unsupported
from benchmarks.relays import RelayOptions, RunningRelay, running_relay
from benchmarks.scenarios.latency import percentile
from outboxq import OutboxSession

_JOBS = 200
_MANY = 200
_FEW, _MOST = 2, 500
_JOBS_A_SECOND = 20
_WARM_UP_JOBS = 10


def queues(bench: Bench) -> list[Comparison | Unsupported]:
    """Measure how long jobs take that are committed at once, and how soon one starts when there is little to do."""
    one, many = f"{_JOBS} jobs in one queue of {_MANY}", f"{_JOBS} jobs over {_MANY} queues"
    few, most = (f"COMMIT to the handler's start with {number} queues, p50" for number in (_FEW, _MOST))
    with bench.database() as workbench:
        with _relay(workbench, _MANY) as (relay, _):
            took = bench.alternate(
                {one: partial(_seconds, workbench, relay, 1), many: partial(_seconds, workbench, relay, _MANY)}, "s"
            )
        jobs = max(10, int(bench.size.seconds * _JOBS_A_SECOND))
        waits = bench.alternate(
            {few: partial(_latency, workbench, _FEW, jobs), most: partial(_latency, workbench, _MOST, jobs)}, "ms"
        )
    return [
        Comparison(15, "queues", many, took[many], took[one], one, 2.0, Better.lower, is_paired=True),
        Comparison(15, "queues", most, waits[most], waits[few], few, 1.5, Better.lower, is_paired=True),
    ]


@contextmanager
def _relay(workbench: Workbench, number: int) -> Iterator[tuple[RunningRelay, Path]]:
    """One slot that serves so many queues, asleep, and where it writes its starts down at its end."""
    workbench.fill(0)
    with tempfile.TemporaryDirectory(prefix="outboxq-benchmark-") as directory:
        starts = Path(directory) / "starts"
        environment = {QUEUES_VARIABLE: str(number), STARTS_VARIABLE: str(starts)}
        with running_relay(workbench.url, RelayOptions("many", queue="*"), environment) as relay:
            engine = create_engine(workbench.url)
            _enqueue(engine, range(_WARM_UP_JOBS), number)
            relay.wait_until(lambda: sum(relay.counts()) == _WARM_UP_JOBS, "the first jobs to start")
            engine.dispose()
            yield relay, starts


def _seconds(workbench: Workbench, relay: RunningRelay, number: int) -> float:
    engine, before = create_engine(workbench.url), sum(relay.counts())
    with OutboxSession(engine) as session:
        session.add_jobs(kinds[place % number].job(number=-1) for place in range(_JOBS))
        session.commit()
    begun = time.perf_counter()
    relay.wait_until(lambda: sum(relay.counts()) == before + _JOBS, "all jobs to start")
    took = time.perf_counter() - begun
    engine.dispose()
    return took


def _latency(workbench: Workbench, number: int, jobs: int) -> float:
    with _relay(workbench, number) as (relay, starts):
        engine = create_engine(workbench.url)
        committed = _enqueue(engine, range(_WARM_UP_JOBS, _WARM_UP_JOBS + jobs), number)
        relay.wait_until(lambda: sum(relay.counts()) == _WARM_UP_JOBS + jobs, "all jobs to start")
        engine.dispose()
        relay.stop()
        started = {int(number): int(at) for number, at in (line.split() for line in starts.read_text().splitlines())}
    if not committed.keys() <= started.keys():
        raise MeasurementFailed(f"{len(committed)} jobs were committed, and {len(started)} started")
    return percentile([(started[number] - at) / 1e6 for number, at in committed.items()], 50)


def _enqueue(engine: Engine, numbers: range, number: int) -> Mapping[int, int]:
    """Commit one every 50 ms, each into another queue; when each had come back."""
    committed: dict[int, int] = {}
    begun = time.monotonic()
    for place, job in enumerate(numbers):
        time.sleep(max(0.0, begun + place / _JOBS_A_SECOND - time.monotonic()))
        with OutboxSession(engine) as session:
            session.add_job(kinds[job * 7 % number], number=job)
            session.commit()
        committed[job] = time.monotonic_ns()
    return committed
