"""The soak's own proof: it knows what grows from what only wavers, and a short run of it ends as it should."""

import json
import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.soak.__main__ import main
from tests.soak.gauges import measure_process
from tests.soak.slopes import Series, Slope, Subject, Verdict, fit, in_lines

RELAY = Subject("relay", 1)
# A run of some seconds, in which every fault happens, and every series that lasts gets a line.
SHORT = (
    "--minutes=0.08 --jobs-a-second=40 --sample-seconds=0.25 --terminate-seconds=0.5 --kill-seconds=2.5 "
    "--warm-up-seconds=0.5 --least-seconds=2 --json"
)


def line(measure: str, values: list[float]) -> Slope:
    """Measured every five seconds."""
    return fit(RELAY, measure, [(5.0 * number, value) for number, value in enumerate(values)])


@pytest.mark.parametrize(
    ("measure", "value", "waver", "an_hour", "verdict"),
    [
        ("resident_kb", 80_000, 500, 0, "flat"),
        ("resident_kb", 80_000, 500, 7_000, "flat"),
        ("resident_kb", 80_000, 500, 12_000, "grows"),
        ("resident_kb", 80_000, 500, -50_000, "flat"),
        ("resident_kb", 80_000, 20_000, 9_000, "noisy"),
        ("descriptors", 27, 0, 0, "flat"),
        ("descriptors", 27, 1, 12, "grows"),
        ("threads", 17, 0, 2, "grows"),
        ("connections", 12, 0, 0.5, "flat"),
    ],
)
def test_growth_is_told_from_wavering(
    measure: str, value: float, waver: float, an_hour: float, verdict: Verdict
) -> None:
    """By the line through the points, its error, and what the measure may gain in an hour."""
    chance = random.Random(1)
    values = [value + an_hour * number / 720 + chance.uniform(-waver, waver) for number in range(300)]
    found = line(measure, values)
    assert found.verdict == verdict
    assert abs(found.an_hour - an_hour) <= 4 * found.error + 0.01


def test_a_step_is_seen_in_the_quarters() -> None:
    """The line through it rises; what stands still before and behind it is no leak."""
    found = line("descriptors", [22.0] * 75 + [25.0] * 25)
    assert found.verdict == "grows"
    assert found.quarters == [22.0, 22.0, 22.0, 25.0]


def test_a_process_that_leaks_descriptors_grows(tmp_path: Path) -> None:
    """One file for every measurement; its memory is measured too."""
    series = Series()
    with ExitStack() as stack:
        for number in range(20):
            stack.enter_context((tmp_path / str(number)).open("w"))
            series.add(5.0 * number, RELAY, measure_process(os.getpid()))
    slopes = {slope.measure: slope for slope in series.slopes(warm_up_seconds=10.0, least_seconds=60.0)}
    assert slopes["descriptors"].verdict == "grows"
    assert slopes["descriptors"].an_hour == pytest.approx(720, rel=0.05)
    assert slopes["threads"].an_hour == 0
    assert slopes["resident_kb"].mean > slopes["anonymous_kb"].mean > 1_000


def test_a_warm_up_and_short_lives_have_no_line() -> None:
    """Each life's own warm-up: what was started late is warm later."""
    series = Series()
    for number in range(100):
        series.add(5.0 * number, Subject("old", 1), {"threads": 50.0 if number < 20 else 9.0})
        if number > 60:
            series.add(5.0 * number, Subject("young", 2), {"threads": 1.0 * number})
    (found,) = series.slopes(warm_up_seconds=100.0, least_seconds=150.0)
    assert (found.subject, found.points, found.mean, found.an_hour) == ("old", 80, 9.0, 0)
    assert len(in_lines([found])) == 2


def test_a_process_that_has_ended_is_not_measured() -> None:
    """It may end between two looks at it, or wait to be reaped."""
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert measure_process(child) == {}
    os.waitpid(child, 0)
    assert measure_process(child) == {}


@pytest.mark.wide
def test_a_short_soak_loses_nothing_and_measures_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Under every fault each job comes to its end once; a verdict on growth takes longer than this."""
    code = main(SHORT.split())
    report = json.loads(capsys.readouterr().out)
    assert code == int(bool(report["problems"]))
    assert [problem for problem in report["problems"] if " grow by " not in problem] == []
    assert report["done"] + report["dead"] == report["jobs"] > 50
    assert min(report[fault] for fault in ("terminated", "killed", "deadlocks")) > 0
    measured = {(slope["subject"], slope["measure"]) for slope in report["slopes"]}
    of_a_process = {"resident_kb", "anonymous_kb", "threads", "descriptors"}
    for subject in ("producers and this tool", "supervisor", "supervised child", "embedded relay"):
        assert {measure for name, measure in measured if name == subject} >= of_a_process
    for name in ("supervised", "embedded"):
        assert {(f"connections of soak {name}", measure) for measure in ("connections", "backend_kb")} <= measured
