"""Row 12: scenarios 1 and 6 where the table is large, against themselves on a small one.

The two tables are in databases of one server, and so are two relays, one of which is stopped while the other goes on.
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
# Twice what a slot does on the machines that we know, no-op and one UPDATE a transaction.
_MOST_NOOPS_A_SECOND, _MOST_UPDATES_A_SECOND = 100_000, 4_000
# However short a repeat is: a write to the disk that takes long must not be all of a turn.
_LEAST_TURN_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class _Turns:
    """The turns of two relays.

    Attributes:
        small_seconds: The length of a turn of the small table's relay.
        large_seconds: That of the large table's.
        is_refilled: True if the small table is filled again for each repeat, and has a new relay. Else there are no
            pauses between the repeats.
    """

    small_seconds: float
    large_seconds: float
    is_refilled: bool


_ALIKE = _Turns(0.5, 0.5, is_refilled=True)
# A relay sweeps by the clock, which goes on while it is stopped. While a snapshot is held, sweeps cost something:
# hardly more of them are to fall into a turn than into as much time of a relay that always goes on, and none into a
# pause.
_MOSTLY_LARGE = _Turns(0.25, 1.0, is_refilled=False)


@dataclass(frozen=True, slots=True)
class _Tables:
    """A small and a large table, each in a database of its own, and how they are measured against each other."""

    bench: Bench
    small: Workbench
    large: Workbench

    @property
    def spare_rows(self) -> int:
        """More jobs than are done in the large table: no-op in all repeats, and UPDATEs in all repeats."""
        return self._rows(NOOP, self.bench.repeats) + self._rows(UPDATE, self.bench.repeats)

    def compare(
        self,
        title: str,
        ours: Ours,
        turns: _Turns = _ALIKE,
        *,
        drained: int = 0,
        others: Sequence[tuple[str, Series]] = (),
    ) -> Comparison:
        """The same relay on both; the large table's is one relay in all repeats, and does `drained` jobs before."""
        what = f"{ours.what}: {title}"
        found: list[tuple[float, float]] = []
        for on_small, on_large in self._pairs(ours, turns, drained):
            found.append((on_small, on_large))
            done, ratio = f"{len(found)} of {self.bench.repeats}", on_large / on_small
            self.bench.say(f"  {done}  {what}: {on_small:,.4g} small, {on_large:,.4g} large, jobs/s: {ratio:.2f}")
        small_rates, large_rates = (Series(tuple(rates), "jobs/s") for rates in zip(*found, strict=True))
        return Comparison(
            12,
            "large",
            what,
            large_rates,
            small_rates,
            f"{ours.what}: {self._small_rows(ours, turns):,} jobs, fresh, beside: {title}",
            _TARGET,
            others=tuple(others),
            plot="large-update" if ours is UPDATE else "large-noop",
            is_paired=True,
        )

    def _pairs(self, ours: Ours, turns: _Turns, drained: int) -> Iterator[tuple[float, float]]:
        """A rate on the small table and on the large one for each repeat."""
        rows, small_rows, repeats = _count_ready(self.large), self._small_rows(ours, turns), self.bench.repeats
        with working_relay(self.large, ours.relay, rows, updates=ours.updates) as on_large:
            on_large.wait_until(lambda: sum(on_large.counts()) >= drained, f"{drained:,} jobs", _DRAIN_SECONDS)
            on_large.stand_still()
            for _ in range(repeats if turns.is_refilled else 1):
                self.small.fill(small_rows)
                # Both: rows that were just inserted would be written back while something is measured, and the first
                # change of a page after a checkpoint costs more than others.
                self.small.write_out()
                with working_relay(self.small, ours.relay, small_rows, updates=ours.updates) as on_small:
                    time.sleep(self.bench.size.warm_up_seconds)
                    on_small.stand_still()
                    # It has stood still for seconds, and makes up now for what it does by the clock.
                    on_large.take_turn(self.bench.size.warm_up_seconds)
                    for _ in range(1 if turns.is_refilled else repeats):
                        yield self._by_turns(on_small, on_large, turns)
                    _check_that_some_are_left(on_small, small_rows)
            _check_that_some_are_left(on_large, rows)

    def _by_turns(self, on_small: RunningRelay, on_large: RunningRelay, turns: _Turns) -> tuple[float, float]:
        seconds = self.bench.size.seconds
        scale = min(1.0, seconds / turns.large_seconds)
        small = large = Counted()
        for _ in range(max(1, round(seconds / turns.large_seconds))):
            small += on_small.take_turn(max(turns.small_seconds * scale, _LEAST_TURN_SECONDS))
            large += on_large.take_turn(max(turns.large_seconds * scale, _LEAST_TURN_SECONDS))
        return small.rate, large.rate

    def _small_rows(self, ours: Ours, turns: _Turns) -> int:
        if turns.is_refilled:
            return self._rows(ours, 1)
        return self._rows(ours, self.bench.repeats * turns.small_seconds / turns.large_seconds)

    def _rows(self, ours: Ours, repeats: float) -> int:
        """More jobs than are done in so many repeats."""
        size = self.bench.size
        a_second = _MOST_UPDATES_A_SECOND if ours is UPDATE else _MOST_NOOPS_A_SECOND
        return int(a_second * (size.seconds * repeats + size.warm_up_seconds + 0.5))


def large(bench: Bench, peers: Peers) -> list[Comparison | Unsupported]:
    """Many waiting, many scheduled, and a snapshot that keeps vacuum from its work."""
    with bench.database() as small_database, bench.database() as large_database:
        tables = _Tables(bench, small_database, large_database)
        return [*_waiting(tables), *_scheduled(tables), *_behind_a_snapshot(tables, _peers_behind_a_snapshot(peers))]


def _waiting(tables: _Tables) -> Iterator[Comparison]:
    waiting = tables.bench.size.waiting
    tables.large.fill(waiting + tables.spare_rows)
    for ours in (NOOP, UPDATE):
        yield tables.compare(f"{waiting:,} waiting", ours)


def _scheduled(tables: _Tables) -> Iterator[Comparison]:
    scheduled = tables.bench.size.scheduled
    tables.large.fill(tables.spare_rows, scheduled=scheduled)
    for ours in (NOOP, UPDATE):
        yield tables.compare(f"{scheduled:,} scheduled of higher priority", ours)


def _behind_a_snapshot(tables: _Tables, others: Sequence[tuple[str, Series]]) -> Iterator[Comparison]:
    drained = tables.bench.size.drained
    title = f"after {drained:,} behind a held snapshot"
    tables.large.fill(drained + tables.spare_rows)
    with _held_snapshot(tables.large):
        yield tables.compare(title, NOOP, _MOSTLY_LARGE, drained=drained, others=others)
        yield tables.compare(title, UPDATE, _MOSTLY_LARGE)


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
        raise MeasurementFailed(f"{rows:,} jobs did not last: this machine does more of them than was expected")


def _count_ready(workbench: Workbench) -> int:
    with workbench.connected() as connection:
        row = connection.execute("SELECT count(*) FROM outboxq.job WHERE state = 'ready'").fetchone()
    assert row is not None
    return int(row[0])
