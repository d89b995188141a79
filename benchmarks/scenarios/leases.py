"""Rows 22 to 27: lease mode: many calls at a time, what they hold, and the time until one starts."""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import Engine, create_engine

from benchmarks import limits, raw
from benchmarks.apps import waiting, waiting_threads
from benchmarks.bench import Bench, Workbench
from benchmarks.figures import Better, Comparison, Series, Unsupported
from benchmarks.gauges import Held, watched
from benchmarks.relays import Counted, RelayOptions, RunningRelay, running_relay, working_relay
from benchmarks.scenarios.latency import enqueue_in_time, milliseconds_to_start, percentile
from benchmarks.scenarios.throughput import Limit, Ours, compare
from benchmarks.support import too_many_slots
from outboxq import NewJob, OutboxSession
from outboxq.outbox.kinds import JobKind

Lines = list[Comparison | Unsupported]

_MOST_THREADS = 200
_QUICK_SLOTS = 20
_WARM_UP_JOBS = 10
_WAIT_SECONDS = 300.0
_JOBS_A_SECOND = 50
# More than there are commits a second, so that no queue runs empty.
_MOST_CALLS_A_SECOND = 10_000
_TURN_SECONDS = 0.35
# Two slow calls before each fast one take 40 slots.
_FAST_A_SECOND = 20
_SLOW_BEFORE_EACH = 2
_SLOW_SECONDS = 1.0


def no_op(bench: Bench) -> Lines:
    """Row 22."""
    slots = bench.slots or 100
    what = f"no-op under a lease, {slots} slots, one process"
    if problem := too_many_slots(slots):
        return [Unsupported(22, "lease-slots", what, problem)]
    limit = Limit("pgbench, lease and delete 100 at a time, 1 client", limits.lease_and_delete(100), 100)
    in_tasks = Ours(f"{what}: async", RelayOptions("leased_async", slots=slots), limit, 0.4)
    in_threads = Ours(f"{what}: plain, in threads", RelayOptions("leased", slots=slots), limit, None)
    return compare(bench, 22, "lease-slots", [in_tasks, in_threads])


def one(bench: Bench) -> Lines:
    """Row 23."""
    what = "one call at a time under a lease, one slot"
    return [
        _beside_raw(bench, f"{what}: plain", RelayOptions("leased"), raw.call_one_by_one),
        _beside_raw(bench, f"{what}: async", RelayOptions("leased_async"), raw.await_one_by_one),
    ]


def _beside_raw(bench: Bench, what: str, options: RelayOptions, run: raw.Run) -> Comparison:
    found: list[tuple[float, float]] = []
    with bench.database() as one, bench.database() as other:
        for repeat in range(1, bench.repeats + 1):
            ours, limit = _by_turns(bench, options, run, one, other)
            found.append((ours.rate, limit.rate))
            told = f"{ours.rate:,.4g} and psycopg alone {limit.rate:,.4g} calls/s: {ours.rate / limit.rate:.2f}"
            bench.say(f"  {repeat} of {bench.repeats}  {what}: {told}")
    ours_rates, limit_rates = (Series(tuple(rates), "calls/s") for rates in zip(*found, strict=True))
    return Comparison(23, "lease-one", what, ours_rates, limit_rates, "psycopg alone", 0.7, is_paired=True)


def _by_turns(
    bench: Bench, options: RelayOptions, run: raw.Run, one: Workbench, other: Workbench
) -> tuple[Counted, Counted]:
    """Calls by turns: both sides wait for the disk at each one, and a slow minute of it is one for both."""
    size, ours, limit = bench.size, Counted(), Counted()
    rows = int(_MOST_CALLS_A_SECOND * (size.seconds + size.warm_up_seconds + 1.0))
    for workbench in (one, other):
        workbench.fill(rows)
        workbench.write_out()
    turn = min(_TURN_SECONDS, size.seconds)
    with working_relay(one, options, rows) as relay:
        relay.stand_still()
        relay.take_turn(size.warm_up_seconds)
        for _ in range(max(1, round(size.seconds / turn))):
            ours += relay.take_turn(turn)
            limit += run(other, turn)
    return ours, limit


@dataclass(frozen=True, slots=True)
class _Waits:
    """Calls that all wait at the same time, and the targets for them.

    Attributes:
        times: The most time until all are done, as a multiple of one call's; None for no target.
        connections: The most of the server; `megabytes` and `cpu_percent` likewise of the relay's process.
    """

    number: int
    scenario: str
    what: str
    relay: RelayOptions
    kind: JobKind[...]
    seconds: float
    connections: float
    times: float | None = None
    megabytes: float | None = None
    cpu_percent: float | None = None


def waits(bench: Bench) -> Lines:
    """Row 24."""
    slots = bench.slots or (_QUICK_SLOTS if bench.size.name == "quick" else 1_000)
    seconds = 0.3 if bench.size.name == "quick" else 5.0
    what = f"{slots:,} async calls that wait {seconds:g} s, one process"
    relay = RelayOptions("waiting", slots=slots, queue=waiting.LEASE_QUEUE)
    wanted = _Waits(24, "waits", what, relay, waiting.wait, seconds, 8, times=1.3, megabytes=160, cpu_percent=20)
    return _all_at_once(bench, wanted)


def waits_in_threads(bench: Bench) -> Lines:
    """Row 25."""
    slots = min(bench.slots or (_QUICK_SLOTS if bench.size.name == "quick" else _MOST_THREADS), _MOST_THREADS)
    seconds = 0.3 if bench.size.name == "quick" else 3.0
    what = f"{slots} plain calls that wait {seconds:g} s and leave their session alone, one process"
    relay = RelayOptions("waiting_threads", slots=slots)
    return _all_at_once(bench, _Waits(25, "waits-threads", what, relay, waiting_threads.wait, seconds, 8))


def _all_at_once(bench: Bench, wanted: _Waits) -> Lines:
    if problem := too_many_slots(wanted.relay.slots):
        return [Unsupported(wanted.number, wanted.scenario, wanted.what, problem)]
    held: list[Held] = []
    with bench.database() as workbench:
        until_done = f"{wanted.what}: until all are done"
        took = bench.alternate({until_done: partial(_seconds_at_once, workbench, wanted, held)}, "s")[until_done]
    bench.say(f"  {wanted.what}: " + "; ".join(map(str, held)))
    ideal = Series((wanted.seconds,) * bench.repeats, "s")
    found = [
        Comparison(wanted.number, wanted.scenario, until_done, took, ideal, "one call", wanted.times, Better.lower)
    ]
    for name, unit, values, most in (
        ("connections of the server", "connections", [float(each.connections) for each in held], wanted.connections),
        ("memory of the process", "MB", [each.megabytes for each in held], wanted.megabytes),
        ("processor time of the process", "%", [each.cpu_percent for each in held], wanted.cpu_percent),
    ):
        what, series = f"{wanted.what}: {name}", Series(tuple(values), unit)
        found.append(Comparison(wanted.number, wanted.scenario, what, series, None, "", most, Better.lower))
    return [*found]


def _seconds_at_once(workbench: Workbench, wanted: _Waits, held: list[Held]) -> float:
    """Seconds from the COMMIT of as many calls as there are slots until the last one's row is gone."""
    workbench.fill(0)
    calls = wanted.relay.slots
    with _relay(workbench, wanted.relay) as (relay, engine):
        _add(engine, (wanted.kind.job(seconds=0.0) for _ in range(_WARM_UP_JOBS)))
        relay.wait_until(lambda: sum(relay.counts()) == _WARM_UP_JOBS, "the first calls to end")
        with watched(workbench, relay.process.pid, held):
            _add(engine, (wanted.kind.job(seconds=wanted.seconds) for _ in range(calls)))
            begun = time.monotonic()
            relay.wait_until(lambda: sum(relay.counts()) == _WARM_UP_JOBS + calls, "all calls to end", _WAIT_SECONDS)
            relay.wait_until(lambda: workbench.count_jobs() == 0, "their rows to go")
            return time.monotonic() - begun


def start(bench: Bench) -> Lines:
    """Row 26."""
    slots = bench.slots or (_QUICK_SLOTS if bench.size.name == "quick" else 1_000)
    held = slots * 9 // 10
    transaction = "transaction mode, one slot"
    leased = {
        f"COMMIT to the start of a leased call, {slots:,} slots, idle, p50": 0,
        f"the same with {held:,} calls at work": held,
    }
    if problem := too_many_slots(slots):
        return [Unsupported(26, "lease-latency", what, problem) for what in leased]
    relay = RelayOptions("waiting", slots=slots, queue=waiting.LEASE_QUEUE)
    beside = RelayOptions("waiting", queue=waiting.TRANSACTION_QUEUE)
    with bench.database() as workbench:
        measures: dict[str, Callable[[], float]] = {
            transaction: partial(_median_to_start, bench, workbench, beside, waiting.note, 0)
        }
        for what, number in leased.items():
            measures[what] = partial(_median_to_start, bench, workbench, relay, waiting.note_leased, number)
        found = bench.alternate(measures, "ms")
    lines: Lines = []
    for what in leased:
        ours, limit = found[what], found[transaction]
        more = Series(tuple(a - b for a, b in zip(ours.values, limit.values, strict=True)), "ms")
        beyond = f"{what}: more than in transaction mode"
        lines += [
            Comparison(26, "lease-latency", what, ours, limit, transaction, None, Better.lower, is_paired=True),
            Comparison(26, "lease-latency", beyond, more, None, "", 0.5, Better.lower),
        ]
    return lines


def _median_to_start(bench: Bench, workbench: Workbench, relay: RelayOptions, kind: JobKind[...], held: int) -> float:
    jobs = max(10, int(bench.size.seconds * 3 * _JOBS_A_SECOND))
    return percentile(_milliseconds(workbench, relay, _Producing(kind, jobs, _JOBS_A_SECOND), held), 50)


def behind_slow(bench: Bench) -> Lines:
    """Row 27."""
    slots = bench.slots or 100
    what = f"COMMIT to the start of a fast call among slow ones, {slots} slots, p99"
    if problem := too_many_slots(slots):
        return [Unsupported(27, "behind-slow", what, problem)]
    alone = "without slow ones"
    with bench.database() as workbench:
        found = bench.alternate(
            {
                alone: partial(_behind, bench, workbench, slots, 0),
                what: partial(_behind, bench, workbench, slots, _SLOW_BEFORE_EACH),
            },
            "ms",
        )
    return [Comparison(27, "behind-slow", what, found[what], found[alone], alone, 1.5, Better.lower, is_paired=True)]


def _behind(bench: Bench, workbench: Workbench, slots: int, slow: int) -> float:
    relay = RelayOptions("waiting", slots=slots, queue=waiting.LEASE_QUEUE)
    jobs = max(10, int(bench.size.seconds * 3 * _FAST_A_SECOND))
    return percentile(_milliseconds(workbench, relay, _Producing(waiting.note_leased, jobs, _FAST_A_SECOND, slow)), 99)


@dataclass(frozen=True, slots=True)
class _Producing:
    """A number of jobs of a kind that notes its start, one a transaction.

    Attributes:
        slow: How many slow calls each transaction adds before it.
    """

    kind: JobKind[...]
    jobs: int
    jobs_a_second: float
    slow: int = 0

    def enqueue(self, engine: Engine, numbers: range, slow: int) -> dict[int, int]:
        """Commit these; the time at which each had come back."""
        return enqueue_in_time(engine, self.kind, numbers, self.jobs_a_second, partial(_slow_calls, slow))


def _slow_calls(number: int) -> list[NewJob]:
    return [waiting.wait.job(seconds=_SLOW_SECONDS) for _ in range(number)]


def _milliseconds(workbench: Workbench, options: RelayOptions, producing: _Producing, held: int = 0) -> list[float]:
    """Milliseconds from each COMMIT to the start, with `held` calls at work all the time."""
    workbench.fill(0)
    with tempfile.TemporaryDirectory(prefix="outboxq-benchmark-") as directory:
        starts = Path(directory) / "starts"
        with _relay(workbench, options, {waiting.STARTS_VARIABLE: str(starts)}) as (relay, engine):
            _add(engine, (waiting.hold.job() for _ in range(held)))
            relay.wait_until(lambda: sum(relay.counts()) == held, "the calls to be at work")
            committed = producing.enqueue(engine, range(_WARM_UP_JOBS), 0)
            relay.wait_until(lambda: sum(relay.counts()) == held + _WARM_UP_JOBS, "the first jobs to start")
            numbers = range(_WARM_UP_JOBS, _WARM_UP_JOBS + producing.jobs)
            committed |= producing.enqueue(engine, numbers, producing.slow)
            counted = held + len(committed) + producing.slow * producing.jobs
            relay.wait_until(lambda: sum(relay.counts()) == counted, "all jobs to start")
            if held:
                _add(engine, [waiting.release.job()])
        found = milliseconds_to_start(starts, committed)
    return [found[number] for number in numbers]


@contextmanager
def _relay(
    workbench: Workbench, options: RelayOptions, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[RunningRelay, Engine]]:
    """A running relay, and an engine to add jobs with."""
    engine = create_engine(workbench.url)
    with running_relay(workbench.url, options, environment) as relay:
        yield relay, engine
    engine.dispose()


def _add(engine: Engine, jobs: Iterable[NewJob]) -> None:
    with OutboxSession(engine) as session:
        session.add_jobs(jobs)
        session.commit()
