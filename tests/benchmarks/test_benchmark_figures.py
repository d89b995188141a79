"""The arithmetic of the benchmarks, and the shape of what they print."""

import json
from xml.etree import ElementTree

import pytest

from benchmarks.bench import MeasurementFailed
from benchmarks.exactly_once import Effects
from benchmarks.figures import Better, Comparison, Run, Series, Surroundings, Unsupported, drift_percent
from benchmarks.peers import report as peers_report
from benchmarks.peers.definitions import PEERS, Scenario
from benchmarks.peers.report import Finding, Spread
from benchmarks.peers.statistics import Percentiles
from benchmarks.peers_figures import Peers
from benchmarks.proxy import Statements
from benchmarks.relays import Counted
from benchmarks.report import as_json, as_markdown
from benchmarks.scenarios.latency import percentile
from benchmarks.svg import write_plots

AROUND = Surroundings("0.1", "3.11", "2.1", "PostgreSQL 18", {"fsync": "on"}, 2, "pgbench 18", "default")
FASTER = Comparison(
    1, "noop", "no-op", Series((40.0, 60.0, 50.0), "jobs/s"), Series((90.0, 100.0, 300.0), "jobs/s"), "pgbench", 0.45
)


def run_of(*lines: Comparison | Unsupported) -> Run:
    return Run(AROUND, 3, list(lines), (Series((100.0,), "jobs/s"), Series((90.0,), "jobs/s")), 12.0)


def test_a_ratio_is_of_medians_and_not_of_extremes() -> None:
    """One slow or fast repeat does not move a ratio."""
    assert FASTER.ratio == 0.5
    assert (FASTER.ours.lowest, FASTER.ours.median, FASTER.ours.highest) == (40.0, 50.0, 60.0)


def test_the_ratio_of_pairs_is_the_median_of_their_ratios() -> None:
    """A slow minute of the machine slows both of a pair, and moves no ratio."""
    ours, limit = Series((45.0, 90.0, 10.0), "jobs/s"), Series((50.0, 100.0, 20.0), "jobs/s")
    paired = Comparison(12, "large", "no-op", ours, limit, "small", 0.9, is_paired=True)
    assert paired.ratios == (0.9, 0.9, 0.5)
    assert (paired.ratio, paired.is_met) == (0.9, True)
    assert Comparison(12, "large", "no-op", ours, Series((5.0, 100.0, 50.0), "jobs/s")).ratio == 0.9
    assert "| 0.90 (0.50 to 0.90) | at least 0.9, met |" in as_markdown(run_of(paired))


def test_turns_add_up_and_without_a_job_there_is_no_rate() -> None:
    """A relay that did nothing in its turns is an error, and no zero in the table."""
    assert (Counted(10, 0.5) + Counted(20, 1.0)).rate == 20.0
    with pytest.raises(MeasurementFailed, match=r"no job was seen done in 1\.50 s"):
        _ = (Counted(0, 0.5) + Counted(0, 1.0)).rate


@pytest.mark.parametrize(
    ("better", "target", "met"),
    [(Better.higher, 0.5, True), (Better.higher, 0.51, False), (Better.lower, 0.5, True), (Better.lower, 0.49, False)],
)
def test_a_target_is_met_from_the_side_that_is_better(better: Better, target: float, met: bool) -> None:
    """What is to be small is not called met for being large."""
    line = Comparison(1, "x", "x", Series((50.0,), "ms"), Series((100.0,), "ms"), "limit", target, better)
    assert line.is_met is met


def test_so_many_times_less_is_the_limit_by_ours() -> None:
    """A target of ten is met by a tenth of the limit."""
    ours, limit = Series((50.0, 40.0, 60.0), "µs"), Series((500.0,), "µs")
    line = Comparison(10, "peers", "CPU", ours, limit, "other", 10, Better.times_less)
    assert (line.ratio, line.is_met) == (10.0, True)
    assert "| 500 µs: other | 10.00 | at least 10, met |" in as_markdown(run_of(line))
    assert Comparison(10, "peers", "CPU", ours, Series((499.0,), "µs"), "", 10, Better.times_less).is_met is False


def test_without_a_limit_the_figure_itself_is_held_against_the_target() -> None:
    """Memory and time are compared with plain numbers."""
    assert Comparison(14, "cost", "memory", Series((80.0,), "MB"), None, "", 90, Better.lower).is_met is True
    assert Comparison(14, "cost", "memory", Series((80.0,), "MB")).is_met is None


def test_a_series_without_measurements_is_refused() -> None:
    """No figure is made up where nothing was measured."""
    with pytest.raises(ValueError, match="at least one"):
        Series((), "jobs/s")


def test_drift_is_the_last_limit_by_the_first() -> None:
    """A machine that became slower has a negative drift."""
    assert drift_percent((Series((100.0,), "jobs/s"), Series((90.0,), "jobs/s"))) == pytest.approx(-10.0)


def test_a_percentile_is_the_nearest_rank() -> None:
    """The 99th of a hundred is the second largest."""
    assert percentile([float(value) for value in range(100, 0, -1)], 99) == 99.0
    assert percentile([3.0], 50) == 3.0


def test_json_holds_every_repeat_and_what_was_not_measured() -> None:
    """Nothing that a reader needs to judge a ratio is left out."""
    found = json.loads(as_json(run_of(Unsupported(3, "orm", "batchable", "not supported"), FASTER)))
    first, second = found["lines"]
    assert (first["number"], first["ratio"], first["met"]) == (1, 0.5, True)
    assert first["ours"] == {"unit": "jobs/s", "median": 50.0, "min": 40.0, "max": 60.0, "values": [40.0, 60.0, 50.0]}
    assert second["unsupported"] == "not supported"
    assert found["drift"]["percent"] == pytest.approx(-10.0)
    assert found["surroundings"]["settings"] == {"fsync": "on"}


def test_markdown_is_a_table_of_equal_rows_with_the_drift_below() -> None:
    """The table can be pasted as it is."""
    text = as_markdown(run_of(FASTER, Unsupported(3, "orm", "batchable", "not supported")))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {7}
    assert "| 1 | no-op | 50 jobs/s (40 to 60) | 100 jobs/s (90 to 300): pgbench | 0.50 | at least 0.45, met |" in rows
    assert "-10 %" in text


def test_plots_are_well_formed_and_one_for_each_scenario_with_figures(tmp_path) -> None:
    """A name with markup in it breaks no file."""
    odd = Comparison(2, "odd", "a < b & c", Series((1.0,), "ms"), Series((0.0,), "ms"), "nothing")
    written = write_plots(run_of(FASTER, odd, Unsupported(3, "orm", "x", "y")), tmp_path)
    assert sorted(path.name for path in written) == ["noop.svg", "odd.svg"]
    for path in written:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_a_figure_below_zero_has_no_bar(tmp_path) -> None:
    """A difference may be one; nothing is drawn to the left of the picture."""
    less = Comparison(26, "less", "less than", Series((-0.5, -0.4), "ms"))
    (path,) = write_plots(run_of(less), tmp_path)
    _, bar = ElementTree.parse(path).getroot().findall("{*}rect")
    assert float(bar.get("width", "")) == 1
    assert "M10.0 " in path.read_text()


def test_the_best_peer_is_chosen_by_scenario_processes_and_language() -> None:
    """A figure of another scenario, or of more processes, is no peer of this one."""
    slow, fast, quick = PEERS["pgqueuer"], PEERS["graphile-worker"], PEERS["oban"]
    written = peers_report.as_json(
        [
            Finding(slow, Scenario.noop, 1, 100, Spread(10.0, 9.0, 11.0)),
            Finding(fast, Scenario.noop, 1, 100, Spread(40.0, 30.0, 50.0)),
            Finding(slow, Scenario.noop, 2, 100, Spread(90.0, 80.0, 91.0)),
            Finding(quick, Scenario.latency, 1, 100, latency=Percentiles(3.0, 9.0)),
        ]
    )
    peers = Peers(json.loads(written))
    best, in_python, latency = peers.best_rate("noop", 1), peers.best_rate("noop", 1, "python"), peers.best_latency(99)
    assert best is not None
    assert in_python is not None
    assert latency is not None
    assert best.name == f"graphile-worker {fast.version}"
    assert (best.series.median, best.series.lowest, best.series.highest) == (40.0, 30.0, 50.0)
    assert in_python.name == f"pgqueuer {slow.version}"
    assert latency.series.median == 9.0
    assert peers.best_rate("update", 1) is None


def test_processor_time_and_effects_of_peers_are_read_with_their_names() -> None:
    """A peer without them is left out."""
    peer, other = PEERS["pgqueuer"], PEERS["oban"]
    written = peers_report.as_json(
        [
            Finding(peer, Scenario.orm, 1, 100, Spread(10.0, 9.0, 11.0), cpu_us=Spread(800.0, 700.0, 900.0)),
            Finding(other, Scenario.noop, 1, 100, Spread(10.0, 9.0, 11.0)),
            Finding(peer, Scenario.kill, 1, 100, effects=Effects(100, 10, 3, 0)),
        ]
    )
    peers = Peers(json.loads(written))
    (cost,) = peers.costs("orm")
    assert (cost.name, cost.series) == (f"pgqueuer {peer.version}", Series((800.0, 700.0, 900.0), "µs"))
    no = "exactly once: no, 3 effects too many and 0 missing (10 kills over 100 jobs)"
    assert peers.effects() == [f"pgqueuer {peer.version}: {no}"]


def test_the_proxy_counts_statements_and_not_packets() -> None:
    """Two statements in one string are two, a prepared one is one each time, and split packets change nothing."""
    startup = b"\x00\x00\x00\x08\x00\x03\x00\x00"
    query = b"SELECT 1; SELECT 2\0"
    sent = startup + b"Q" + (len(query) + 4).to_bytes(4) + query + b"E\x00\x00\x00\x09\0\0\0\0\0"
    whole, bytewise = Statements(), Statements()
    whole.feed(sent)
    for place in range(len(sent)):
        bytewise.feed(sent[place : place + 1])
    assert whole.count == bytewise.count == 3
