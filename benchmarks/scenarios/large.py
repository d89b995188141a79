"""Row 12: scenarios 1 and 6 where the table is large, against themselves on a small one.

The two tables are in databases of one server, and so are two relays, of which one stands still while the other goes on.
They change places twice a second, so that a machine that is slow for a while, or busy with its disk, is slow for both.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from benchmarks.bench import Bench, MeasurementFailed, Workbench, conninfo
from benchmarks.figures import Comparison, Series, Unsupported
from benchmarks.peers_figures import Peers
from benchmarks.relays import Counted, RunningRelay, working_relay
from benchmarks.scenarios.throughput import NOOP, UPDATE, Ours

_TARGET = 0.9
_DRAIN_SECONDS = 600.0
# Twice what a slot does on the machines that we know.
_MOST_A_SECOND = 100_000
_TURN_SECONDS = 0.5
# A relay sweeps by the clock, which goes on while it stands still. Where sweeps cost something, the other one's turns
# are so much shorter, and hardly more sweeps fall into a turn than into as much time of a relay that always goes on.
_SHORT = 0.25


@dataclass(frozen=True, slots=True)
class _Tables:
    """A small and a large table, each in a database of its own, and how they are measured against each other."""

    bench: Bench
    small: Workbench
    large: Workbench

    @property
    def few(self) -> int:
        """More jobs than are done in a repeat."""
        size = self.bench.size
        return max(6_000, int(_MOST_A_SECOND * (size.seconds + size.warm_up_seconds)))

    @property
    def enough(self) -> int:
        """More jobs than are done in the large table in all repeats: no-op, and UPDATEs, which are far fewer."""
        return self.few * (self.bench.repeats + 1)

    def compare(
        self, title: str, ours: Ours, *, short: float = 1.0, drained: int = 0, others: Sequence[tuple[str, Series]] = ()
    ) -> Comparison:
        """The same relay on both; the large table's is one relay in all repeats, and does `drained` jobs before."""
        what, found = f"{ours.what}: {title}", list[tuple[float, float]]()
        for small, large in self._pairs(ours, short, drained):
            found.append((small, large))
            done = f"{len(found)} of {self.bench.repeats}"
            self.bench.say(f"  {done}  {what}: {small:,.4g} small, {large:,.4g} jobs/s here: {large / small:.2f}")
        small_rates, large_rates = (Series(tuple(rates), "jobs/s") for rates in zip(*found, strict=True))
        return Comparison(
            12,
            "large",
            what,
            large_rates,
            small_rates,
            f"{ours.what}: small and fresh, beside: {title}",
            _TARGET,
            others=tuple(others),
            plot="large-update" if ours is UPDATE else "large-noop",
            is_paired=True,
        )

    def _pairs(self, ours: Ours, short: float, drained: int) -> Iterator[tuple[float, float]]:
        rows = _ready(self.large)
        with working_relay(self.large, ours.relay, rows, updates=ours.updates) as there:
            there.wait_until(lambda: sum(there.counts()) >= drained, f"{drained:,} jobs", _DRAIN_SECONDS)
            there.stand_still()
            for _ in range(self.bench.repeats):
                self.small.fill(self.few)
                # Both: rows that were just inserted would be written back while something is measured, and the first
                # change of a page after a checkpoint costs more than others.
                self.small.write_out()
                with working_relay(self.small, ours.relay, self.few, updates=ours.updates) as here:
                    yield self._by_turns(here, there, short)
                    _check_that_some_are_left(here, self.few)
            _check_that_some_are_left(there, rows)

    def _by_turns(self, here: RunningRelay, there: RunningRelay, short: float) -> tuple[float, float]:
        size = self.bench.size
        time.sleep(size.warm_up_seconds)
        here.stand_still()
        # It has stood still for seconds, and makes up now for what it does by the clock.
        there.take_turn(size.warm_up_seconds)
        seconds = min(_TURN_SECONDS, size.seconds)
        small = large = Counted()
        for turn in range(max(1, round(size.seconds / seconds))):
            # Neither is always the one that comes first.
            if turn % 2:
                large += there.take_turn(seconds)
            small += here.take_turn(seconds * short)
            if not turn % 2:
                large += there.take_turn(seconds)
        return small.rate, large.rate


def large(bench: Bench, peers: Peers) -> list[Comparison | Unsupported]:
    """Many waiting, many scheduled, and a snapshot that keeps vacuum from its work."""
    with bench.database() as small, bench.database() as big:
        tables = _Tables(bench, small, big)
        return [*_waiting(tables), *_scheduled(tables), *_behind_a_snapshot(tables, _peers_behind_a_snapshot(peers))]


def _waiting(tables: _Tables) -> Iterator[Comparison]:
    waiting = tables.bench.size.waiting
    tables.large.fill(waiting + tables.enough)
    for ours in (NOOP, UPDATE):
        yield tables.compare(f"{waiting:,} waiting", ours)


def _scheduled(tables: _Tables) -> Iterator[Comparison]:
    scheduled = tables.bench.size.scheduled
    tables.large.fill(tables.enough, scheduled=scheduled)
    for ours in (NOOP, UPDATE):
        yield tables.compare(f"{scheduled:,} scheduled of higher priority", ours)


def _behind_a_snapshot(tables: _Tables, others: Sequence[tuple[str, Series]]) -> Iterator[Comparison]:
    drained = tables.bench.size.drained
    title = f"after {drained:,} behind a held snapshot"
    tables.large.fill(drained + tables.enough)
    with _held_snapshot(tables.large):
        yield tables.compare(title, NOOP, short=_SHORT, drained=drained, others=others)
        yield tables.compare(title, UPDATE, short=_SHORT)


def _peers_behind_a_snapshot(peers: Peers) -> tuple[tuple[str, Series], ...]:
    fresh = {each.name: each.series.median for each in peers.rates("noop", 1)}
    found: list[tuple[str, Series]] = []
    for each in peers.rates("snapshot", 1):
        if each.name in fresh:
            share = f"{each.series.median / fresh[each.name]:.2f} of its own, fresh"
            found.append((f"{each.name} behind a snapshot, at the end of {each.jobs:,} ({share})", each.series))
    return tuple(found)


@contextmanager
def _held_snapshot(workbench: Workbench) -> Iterator[None]:
    with psycopg.connect(conninfo(workbench.url)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM account WHERE id = 1")
        yield
        connection.rollback()


def _check_that_some_are_left(relay: RunningRelay, rows: int) -> None:
    if sum(relay.counts()) > rows * 0.99:
        raise MeasurementFailed(f"{rows:,} jobs did not last: at most {_MOST_A_SECOND:,} a second were expected")


def _ready(workbench: Workbench) -> int:
    with workbench.connected() as connection:
        row = connection.execute("SELECT count(*) FROM outboxq.job WHERE state = 'ready'").fetchone()
    assert row is not None
    return int(row[0])
