"""Row 21: the cost of knowing what happened: the history, metrics, and finished jobs that are kept."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.bench import Bench, MeasurementFailed, Workbench
from benchmarks.figures import Comparison, Series, Unsupported
from benchmarks.relays import Counted, RelayOptions, RunningRelay, working_relay
from benchmarks.scenarios.throughput import NOOP, UPDATE, Ours

_TURN_SECONDS = 0.35
_LEAST_TURN_SECONDS = 0.05
# More than a relay does in a second, so that no queue runs empty.
_MOST_A_SECOND = {"noop": 100_000, "kept": 100_000, "update": 10_000}
_NO_HISTORY = ("--stats-seconds", "0")
_HUNDREDS = Ours("no-op, batches of 100, one process", RelayOptions("noop", 100), NOOP.limit, 0.0)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A relay, the same one without the measured feature, and the ratio that we want."""

    what: str
    ours: RelayOptions
    limit: RelayOptions
    limit_name: str
    target: float


def _pairs() -> Iterator[_Pair]:
    for of, target in ((NOOP, 0.98), (UPDATE, 0.99)):
        without = replace(of.relay, more=_NO_HISTORY)
        yield _Pair(f"{of.what}: with the history", of.relay, without, f"{of.what}: --stats-seconds 0", target)
    told = replace(NOOP.relay, more=("--metrics", "127.0.0.1:0"))
    yield _Pair(f"{NOOP.what}: with --metrics", told, NOOP.relay, f"{NOOP.what}: without", 0.95)
    kept = replace(_HUNDREDS.relay, app="kept")
    yield _Pair(f"{_HUNDREDS.what}: with keep=", kept, _HUNDREDS.relay, f"{_HUNDREDS.what}: without", 0.8)


def observing(bench: Bench) -> list[Comparison | Unsupported]:
    """Two relays, each on a database of its own, by turns of a third of a second."""
    return [_compared(bench, pair) for pair in _pairs()]


def _compared(bench: Bench, pair: _Pair) -> Comparison:
    found: list[tuple[float, float]] = []
    with bench.database() as one, bench.database() as other:
        for repeat in range(1, bench.repeats + 1):
            found.append(_by_turns(bench, pair, one, other))
            ours, limit = found[-1]
            told = f"{ours:,.4g} with, {limit:,.4g} without, jobs/s: {ours / limit:.2f}"
            bench.say(f"  {repeat} of {bench.repeats}  {pair.what}: {told}")
    ours_rates, limit_rates = (Series(tuple(rates), "jobs/s") for rates in zip(*found, strict=True))
    return Comparison(21, "observing", pair.what, ours_rates, limit_rates, pair.limit_name, pair.target, is_paired=True)


def _by_turns(bench: Bench, pair: _Pair, one: Workbench, other: Workbench) -> tuple[float, float]:
    size = bench.size
    rows = int(_MOST_A_SECOND[pair.ours.app] * (size.seconds + size.warm_up_seconds + 1.0))
    for workbench in (one, other):
        workbench.fill(rows)
        workbench.write_out()
    with working_relay(one, pair.ours, rows) as ours:
        ours.stand_still()
        with working_relay(other, pair.limit, rows) as limit:
            limit.stand_still()
            for relay in (ours, limit):
                # It has stood still, and makes up now for what it does by the clock.
                relay.take_turn(size.warm_up_seconds)
            found = _take_turns(ours, limit, size.seconds)
            if max(sum(ours.counts()), sum(limit.counts())) >= rows - pair.ours.claimable:
                raise MeasurementFailed(f"{rows} jobs were too few for {size.seconds} s")
            return found


def _take_turns(ours: RunningRelay, limit: RunningRelay, seconds: float) -> tuple[float, float]:
    counted, other = Counted(), Counted()
    turn = max(_LEAST_TURN_SECONDS, min(_TURN_SECONDS, seconds))
    for _ in range(max(1, round(seconds / turn))):
        counted += ours.take_turn(turn)
        other += limit.take_turn(turn)
    return counted.rate, other.rate
