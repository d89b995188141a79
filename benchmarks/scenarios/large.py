"""Row 12: scenarios 1 and 6 where the table is large, against themselves on a small one.

The two are databases of one server, worked off by turns: filling a large one takes minutes, in which a machine changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.bench import Bench, MeasurementFailed, Workbench, conninfo
from benchmarks.figures import Comparison, Series, Unsupported
from benchmarks.peers_figures import Peers
from benchmarks.pgbench import run_pgbench
from benchmarks.relays import drain
from benchmarks.scenarios.throughput import NOOP, NOOP_LIMIT, UPDATE

_TARGET = 0.9
_DRAIN_SECONDS = 600.0
# Twice what a slot does on the machines that we know.
_JOBS_A_SECOND = 80_000
_RELAYS = {"noop": NOOP, "update": UPDATE}

# What was measured, and its jobs a second in the small table and in the large one.
_Pair = tuple[str, float, float]


def large(bench: Bench, peers: Peers) -> list[Comparison | Unsupported]:
    """Many waiting, many scheduled, and a snapshot that keeps vacuum from its work."""
    size = bench.size
    lines: list[Comparison | Unsupported] = []
    with bench.database() as small, bench.database() as big:
        for measure, title in (
            (_waiting, f"{size.waiting:,} waiting"),
            (_scheduled, f"{size.scheduled:,} scheduled of higher priority"),
            (_behind_a_snapshot, f"after {size.drained:,} behind a held snapshot"),
        ):
            others = _peers_behind_a_snapshot(peers) if measure is _behind_a_snapshot else ()
            lines += _measured(bench, title, measure(bench, small, big), others)
    return lines


def _measured(
    bench: Bench, title: str, pairs: Iterator[_Pair], others: tuple[tuple[str, Series], ...]
) -> Iterator[Comparison]:
    found: dict[str, list[tuple[float, float]]] = {}
    for what, there, here in pairs:
        found.setdefault(what, []).append((there, here))
        done = f"{len(found[what])} of {bench.repeats}"
        bench.say(f"  {done}  {title}, {what}: {there:,.4g} small, {here:,.4g} jobs/s here")
    for what, rates in found.items():
        small, here = (Series(tuple(values), "jobs/s") for values in zip(*rates, strict=True))
        name = NOOP_LIMIT.name if what == "limit" else _RELAYS[what].what
        yield Comparison(
            12,
            "large",
            f"{name}: {title}",
            here,
            small,
            f"{name}: small and fresh, beside: {title}",
            None if what == "limit" else _TARGET,
            others=others if what == "noop" else (),
            plot="large-update" if what == "update" else "large-noop",
            is_reference=what == "limit",
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
        yield from _pairs(bench, small, big, "noop", "limit", "update")


def _scheduled(bench: Bench, small: Workbench, big: Workbench) -> Iterator[_Pair]:
    for _ in range(bench.repeats):
        small.fill(_few(bench))
        big.fill(_few(bench), scheduled=bench.size.scheduled)
        yield from _pairs(bench, small, big, "noop", "update")


def _behind_a_snapshot(bench: Bench, small: Workbench, big: Workbench) -> Iterator[_Pair]:
    rows = bench.size.drained + _few(bench) * (bench.repeats + 1)
    big.fill(rows)
    with _held_snapshot(big):
        drain(big, NOOP.relay, rows, seconds=_DRAIN_SECONDS, enough=bench.size.drained)
        for _ in range(bench.repeats):
            small.fill(_few(bench))
            yield from _pairs(bench, small, big, "noop", "update")


def _pairs(bench: Bench, small: Workbench, big: Workbench, *what: str) -> Iterator[_Pair]:
    big.write_out()
    for each in what:
        yield each, _rate(bench, small, each), _rate(bench, big, each)


def _rate(bench: Bench, workbench: Workbench, what: str) -> float:
    """Of what is ready, half at the most: there are other measurements behind this one."""
    size, ready = bench.size, _ready(workbench)
    jobs = min(ready, _few(bench)) // 2
    if what == "limit":
        transactions = jobs // NOOP_LIMIT.batch
        return NOOP_LIMIT.batch * run_pgbench(
            bench.pgbench, workbench.url, NOOP_LIMIT.script, clients=1, transactions=transactions
        )
    return drain(
        workbench,
        _RELAYS[what].relay,
        ready,
        seconds=size.seconds,
        warm_up_seconds=size.warm_up_seconds,
        updates=what == "update",
        enough=jobs,
    ).rate()


@contextmanager
def _held_snapshot(workbench: Workbench) -> Iterator[None]:
    with psycopg.connect(conninfo(workbench.url)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM account WHERE id = 1")
        yield
        connection.rollback()


def _few(bench: Bench) -> int:
    """Enough for each measurement to have half of what the one before it left."""
    return max(6_000, int(_JOBS_A_SECOND * bench.size.seconds))


def _ready(workbench: Workbench) -> int:
    with workbench.connected() as connection:
        row = connection.execute("SELECT count(*) FROM outboxq.job WHERE state = 'ready'").fetchone()
    if row is None or row[0] == 0:
        raise MeasurementFailed("nothing is left to be worked off")
    return int(row[0])
