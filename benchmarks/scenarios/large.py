"""Row 12: scenarios 1 and 6 where the table is large, against themselves on a small one.

The two are databases of one server, worked off by turns: filling a large one takes minutes, in which a machine changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.bench import Bench, MeasurementFailed, Workbench, conninfo
from benchmarks.figures import Comparison, Series, Unsupported
from benchmarks.peers_figures import Peers
from benchmarks.relays import drain
from benchmarks.scenarios.throughput import NOOP, UPDATE

_TARGET = 0.9
# Of the jobs that are drained behind a snapshot: the last part, whose claims have the most dead rows before them.
_END = 0.8
_RELAYS = {"noop": NOOP, "update": UPDATE}

# What was measured, and its jobs a second in the small table and in the large one.
_Pair = tuple[str, float, float]


def large(bench: Bench, peers: Peers) -> list[Comparison | Unsupported]:
    """Many waiting, many scheduled, and a snapshot that keeps vacuum from its work."""
    size = bench.size
    behind = f"behind a held snapshot, after {int(size.drained * _END):,} of {size.drained:,}"
    lines: list[Comparison | Unsupported] = []
    with bench.database() as small, bench.database() as big:
        for measure, title in (
            (_waiting, f"{size.waiting:,} waiting"),
            (_scheduled, f"{size.scheduled:,} scheduled of higher priority"),
            (_behind_a_snapshot, behind),
        ):
            others = _peers_behind_a_snapshot(peers) if measure is _behind_a_snapshot else ()
            lines += _measured(bench, title, measure(bench, small, big), others)
    return lines


def _measured(
    bench: Bench, title: str, pairs: Iterator[_Pair], others: tuple[tuple[str, Series], ...]
) -> Iterator[Comparison]:
    found: dict[str, list[tuple[float, float]]] = {}
    for job, there, here in pairs:
        found.setdefault(job, []).append((there, here))
        done = f"{len(found[job])} of {bench.repeats}"
        bench.say(f"  {done}  {title}, {job}: {there:,.4g} small, {here:,.4g} jobs/s here")
    for job, rates in found.items():
        small, here = (Series(tuple(values), "jobs/s") for values in zip(*rates, strict=True))
        what = _RELAYS[job].what
        yield Comparison(
            12,
            "large",
            f"{what}: {title}",
            here,
            small,
            f"{what}: small and fresh, beside: {title}",
            _TARGET,
            others=others if job == "noop" else (),
            plot=f"large-{job}",
        )


def _peers_behind_a_snapshot(peers: Peers) -> tuple[tuple[str, Series], ...]:
    fresh = {each.name: each.series.median for each in peers.rates("noop", 1)}
    found: list[tuple[str, Series]] = []
    for each in peers.rates("snapshot", 1):
        if each.name in fresh:
            share = f"{each.series.median / fresh[each.name]:.2f} of its own, fresh"
            found.append((f"{each.name} behind a snapshot, at the end of {each.jobs:,} ({share})", each.series))
    return tuple(found)


def _waiting(bench: Bench, small: Workbench, big: Workbench) -> Iterator[_Pair]:
    big.fill(max(bench.size.waiting, _few(bench)))
    for _ in range(bench.repeats):
        small.fill(_few(bench))
        yield _pair(bench, small, big, "noop")
        yield _pair(bench, small, big, "update")


def _scheduled(bench: Bench, small: Workbench, big: Workbench) -> Iterator[_Pair]:
    for _ in range(bench.repeats):
        small.fill(_few(bench))
        big.fill(_few(bench), scheduled=bench.size.scheduled)
        yield _pair(bench, small, big, "noop")
        yield _pair(bench, small, big, "update")


def _behind_a_snapshot(bench: Bench, small: Workbench, big: Workbench) -> Iterator[_Pair]:
    rows = bench.size.drained + _few(bench)
    for _ in range(bench.repeats):
        small.fill(_few(bench))
        big.fill(rows)
        with _held_snapshot(big):
            fresh = _rate(bench, small, "noop")
            drained = drain(big, NOOP.relay, rows, seconds=600.0, enough=bench.size.drained)
            yield "noop", fresh, drained.rate(_END, 1.0)
            yield _pair(bench, small, big, "update")


def _pair(bench: Bench, small: Workbench, big: Workbench, job: str) -> _Pair:
    return job, _rate(bench, small, job), _rate(bench, big, job)


def _rate(bench: Bench, workbench: Workbench, job: str) -> float:
    """Of what is ready, half at the most: there is another measurement behind this one."""
    size, ready = bench.size, _ready(workbench)
    return drain(
        workbench,
        _RELAYS[job].relay,
        ready,
        seconds=size.seconds,
        warm_up_seconds=size.warm_up_seconds,
        updates=job == "update",
        enough=ready // 2,
    ).rate()


@contextmanager
def _held_snapshot(workbench: Workbench) -> Iterator[None]:
    with psycopg.connect(conninfo(workbench.url)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM account WHERE id = 1")
        yield
        connection.rollback()


def _few(bench: Bench) -> int:
    return 6_000 if bench.size.name == "quick" else 150_000


def _ready(workbench: Workbench) -> int:
    with workbench.connected() as connection:
        row = connection.execute("SELECT count(*) FROM outboxq.job WHERE state = 'ready'").fetchone()
    if row is None or row[0] == 0:
        raise MeasurementFailed("nothing is left to be worked off")
    return int(row[0])
