"""Row 12: scenarios 1 and 6 where the table is large, against themselves on a small one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import psycopg

from benchmarks.bench import Bench, MeasurementFailed, Workbench, conninfo
from benchmarks.figures import Comparison, Series, Unsupported
from benchmarks.peers_figures import Peers
from benchmarks.relays import drain
from benchmarks.scenarios.throughput import NOOP, UPDATE

_TARGET = 0.9
# Of the jobs that are drained behind a snapshot: the last part, whose claims have the most dead rows before them.
_END = 0.8

# Measures jobs that do nothing, then one UPDATE a transaction: each by its name, jobs a second.
_Case = Callable[[], Iterator[tuple[str, float]]]


def large(bench: Bench, peers: Peers) -> list[Comparison | Unsupported]:
    """Many waiting, many scheduled, and a snapshot that keeps vacuum from its work."""
    size = bench.size
    with bench.database() as workbench:
        cases: dict[str, _Case] = {
            "waiting": partial(_filled, bench, workbench, size.waiting, 0),
            "scheduled": partial(_filled, bench, workbench, 0, size.scheduled),
            "snapshot": partial(_behind_a_snapshot, bench, workbench),
        }
        found = _alternate(bench, cases, small=partial(_filled, bench, workbench, 0, 0))
    lines: list[Comparison | Unsupported] = []
    for case, title in (
        ("waiting", f"{size.waiting:,} waiting"),
        ("scheduled", f"{size.scheduled:,} scheduled of higher priority"),
        ("snapshot", f"behind a held snapshot, after {int(size.drained * _END):,} of {size.drained:,}"),
    ):
        for job, ours in (("noop", NOOP), ("update", UPDATE)):
            small, here = found[f"small beside {case} {job}"], found[f"{case} {job}"]
            what = f"{ours.what}: {title}"
            others = _peers_behind_a_snapshot(peers) if (case, job) == ("snapshot", "noop") else ()
            itself, plot = f"{ours.what}: small and fresh, right before {title}", f"large-{job}"
            lines.append(Comparison(12, "large", what, here, small, itself, _TARGET, others=others, plot=plot))
    return lines


def _peers_behind_a_snapshot(peers: Peers) -> tuple[tuple[str, Series], ...]:
    fresh = {each.name: each.series.median for each in peers.rates("noop", 1)}
    found: list[tuple[str, Series]] = []
    for each in peers.rates("snapshot", 1):
        if each.name in fresh:
            share = f"{each.series.median / fresh[each.name]:.2f} of its own, fresh"
            found.append((f"{each.name} behind a snapshot, at the end of {each.jobs:,} ({share})", each.series))
    return tuple(found)


def _alternate(bench: Bench, cases: dict[str, _Case], small: _Case) -> dict[str, Series]:
    """Each case right behind the small table: filling the large ones takes minutes, in which a machine changes."""
    values: dict[str, list[float]] = {}
    for repeat in range(1, bench.repeats + 1):
        for case, measure in cases.items():
            for title, measured in ((f"small beside {case}", small), (case, measure)):
                for job, rate in measured():
                    values.setdefault(f"{title} {job}", []).append(rate)
                    bench.say(f"  {repeat} of {bench.repeats}  {title} {job}: {rate:,.4g} jobs/s")
    return {name: Series(tuple(found), "jobs/s") for name, found in values.items()}


def _filled(bench: Bench, workbench: Workbench, waiting: int, scheduled: int) -> Iterator[tuple[str, float]]:
    size, small = bench.size, _small(bench)
    workbench.fill(max(waiting, small), scheduled=scheduled)
    for job, relay in (("noop", NOOP.relay), ("update", UPDATE.relay)):
        ready = max(waiting, small) if job == "noop" else _ready(workbench)
        drained = drain(
            workbench,
            relay,
            ready,
            seconds=size.seconds,
            warm_up_seconds=size.warm_up_seconds,
            updates=job == "update",
            enough=None if waiting else ready // 2,
        )
        yield job, drained.rate()


def _behind_a_snapshot(bench: Bench, workbench: Workbench) -> Iterator[tuple[str, float]]:
    size, rest = bench.size, _small(bench) // 10
    rows = size.drained + rest
    workbench.fill(rows)
    with _held_snapshot(workbench):
        drained = drain(workbench, NOOP.relay, rows, seconds=600.0, enough=size.drained)
        yield "noop", drained.rate(_END, 1.0)
        left = _ready(workbench)
        alone = drain(workbench, UPDATE.relay, left, seconds=size.seconds, updates=True)
        yield "update", alone.rate()


@contextmanager
def _held_snapshot(workbench: Workbench) -> Iterator[None]:
    with psycopg.connect(conninfo(workbench.url)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM account WHERE id = 1")
        yield
        connection.rollback()


def _small(bench: Bench) -> int:
    return 6_000 if bench.size.name == "quick" else 150_000


def _ready(workbench: Workbench) -> int:
    with workbench.connected() as connection:
        row = connection.execute("SELECT count(*) FROM outboxq.job WHERE state = 'ready'").fetchone()
    if row is None or row[0] == 0:
        raise MeasurementFailed("nothing is left for the jobs that run one by one")
    return int(row[0])
