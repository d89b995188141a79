"""The runner of the peers' benchmarks: what drivers print, what is made of it, and what is said of a missing peer."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.__main__ import _peers as measured_peers
from benchmarks.exactly_once import Effects
from benchmarks.peers.__main__ import main
from benchmarks.peers.definitions import PEERS, Scenario
from benchmarks.peers.drivers import Done, Driver, DriverFailed, Progress, Ready, parse_line, running
from benchmarks.peers.environments import default_directory, is_installed
from benchmarks.peers.report import Finding, Spread, as_json, as_markdown, spread
from benchmarks.peers.statistics import Percentiles, latencies_ms, percentiles, steady_rate

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"event": "ready"}', Ready()),
        ('{"event": "progress", "at": 5, "executed": 2}', Progress(at=5, executed=2)),
        ('{"event": "done"}', Done()),
        ('{"event": "done", "executed": 1, "started": [[0, 7]]}', Done(executed=1, started=((0, 7),))),
        ('{"event": "done", "committed": [[0, 6]]}', Done(committed=((0, 6),))),
    ],
)
def test_a_drivers_line_is_read(line, message):
    """Each kind of message comes back as its value."""
    assert parse_line(line + "\n") == message


@pytest.mark.parametrize(
    "line", ["", "Traceback", "[]", "{}", '{"event": "hello"}', '{"event": "progress"}', '{"event": "ready", "x": 1}']
)
def test_anything_else_that_a_driver_prints_is_an_error(line):
    """A driver's stray output never passes as a figure."""
    with pytest.raises(DriverFailed):
        parse_line(line)


def test_a_driver_that_dies_is_an_error_with_its_last_words():
    """A run ends with the driver's own error text instead of waiting."""
    command = [sys.executable, "-c", "import sys; sys.exit('no such table')"]
    with pytest.raises(DriverFailed, match="no such table"), running([Driver(command, "work", {}, Path.cwd())]):
        pass


def test_a_driver_that_is_not_told_to_stop_is_killed(tmp_path):
    """A killed worker does nothing more, not even what it does at its end."""
    program = (
        "import atexit, pathlib; atexit.register(pathlib.Path('end').touch); "
        'print(\'{"event": "ready"}\'); input(); input()'
    )
    with running([driver := Driver([sys.executable, "-uc", program], "work", {}, tmp_path)]):
        assert driver.processor_seconds >= 0
    assert not (tmp_path / "end").exists()


def test_a_driver_is_told_to_go_and_to_stop():
    """The kit's protocol: ready, go, progress, stop, done."""
    program = (
        "import asyncio, contextlib, kit\n"
        "@contextlib.asynccontextmanager\n"
        "async def work(options, meter):\n"
        "    meter.note_start(0); meter.executed += options['jobs']\n"
        "    yield\n"
        "kit.main(None, work, None)\n"
    )
    driver = Driver([sys.executable, "-c", program], "work", {"jobs": 3}, Path.cwd())
    with running([driver]):
        driver.tell()
        done = driver.wait_done()
    assert (done.executed, [index for index, _ in done.started]) == (3, [0])


def test_the_rate_leaves_out_the_first_and_the_last_tenth():
    """A slow start and a slow end do not count."""
    slow_start = [Progress(0, 0), Progress(50 * SECOND, 10)]
    steady = [Progress(50 * SECOND + n * SECOND, 10 + 40 * n) for n in (1, 2)]
    assert steady_rate([slow_start + steady + [Progress(99 * SECOND, 100)]], 100) == pytest.approx(40)


def test_the_rates_of_processes_add_up():
    """Two processes that each do half in the same time are twice as fast as one."""
    one = [Progress(n * SECOND, 10 * n) for n in range(11)]
    assert steady_rate([one], 100) == pytest.approx(10)
    assert steady_rate([one, one], 200) == pytest.approx(20)


@pytest.mark.parametrize("samples", [[], [Progress(0, 0)], [Progress(0, 0), Progress(9, 50)]])
def test_a_rate_without_enough_samples_is_refused(samples):
    """There is no rate of a run that was not seen to its end."""
    with pytest.raises(ValueError, match="never reported"):
        steady_rate([samples], 100)


def test_latencies_are_of_the_same_job_and_never_negative():
    """The handler may start before its producer hears of the commit."""
    assert latencies_ms([(0, 5_000_000), (1, 9_000_000)], [(1, 8_000_000), (0, 6_500_000)]) == [1.5, 0]


@pytest.mark.parametrize("started", [[], [(0, 1), (0, 2)], [(0, 1), (1, 2)]])
def test_a_job_that_was_not_started_once_is_an_error(started):
    """Percentiles never hide a lost job or a second run."""
    with pytest.raises(ValueError, match="starts"):
        latencies_ms([(0, 1)], started)


def test_percentiles_are_by_the_nearest_rank():
    """Of one to a hundred, the 50th and the 99th."""
    assert percentiles([float(n) for n in range(100, 0, -1)]) == Percentiles(50, 99)


def test_repeats_have_a_median_a_smallest_and_a_largest():
    """In any order."""
    assert spread([30, 10, 20]) == Spread(median=20, min=10, max=30)


def test_findings_come_as_json_and_as_a_table():
    """Both name the peer, its version and its settings."""
    peer = PEERS["pgqueuer"]
    findings = [
        Finding(peer, Scenario.noop, 2, 100, jobs_per_second=Spread(2, 1, 3)),
        Finding(peer, Scenario.latency, 1, 10, latency=Percentiles(1.5, 9)),
        Finding(peer, Scenario.orm, 1, 100, jobs_per_second=Spread(2, 1, 3), cpu_us=Spread(800, 700, 900)),
        Finding(peer, Scenario.kill, 1, 100, effects=Effects(100, 10, 0, 0)),
    ]
    noop, latency, orm, kill = json.loads(as_json(findings))
    assert (noop["peer"], noop["version"], noop["language"]) == ("pgqueuer", peer.version, "python")
    assert (noop["scenario"], noop["processes"]) == ("noop", 2)
    assert noop["jobs_per_second"] == {"median": 2, "min": 1, "max": 3}
    assert latency["latency"] == {"p50_ms": 1.5, "p99_ms": 9}
    assert noop["settings"] == dict(peer.settings)
    assert orm["cpu_us"] == {"median": 800, "min": 700, "max": 900}
    assert kill["effects"] == {"jobs": 100, "kills": 10, "doubled": 0, "missing": 0}
    table = as_markdown(findings)
    assert "| pgqueuer | noop | 2 | 100 | 2/s | 1/s | 3/s |" in table
    assert "| pgqueuer | orm | 1 | 100 | 2/s, 800 µs | 1/s, 700 µs | 3/s, 900 µs |" in table
    assert "| pgqueuer | kill | 1 | 100 | exactly once: yes (10 kills over 100 jobs) |  |  |" in table


@pytest.mark.parametrize("peer", PEERS.values(), ids=lambda peer: peer.name)
def test_each_peer_is_pinned_and_has_a_driver(peer):
    """A figure without an exact version cannot be repeated."""
    assert peer.version[0].isdigit()
    assert (peer.directory / ("driver.py" if peer.language == "python" else "driver.mjs")).is_file()


def test_a_peer_that_is_not_installed_is_named_with_the_command(tmp_path, capsys):
    """Running without environments is no error, and needs no server."""
    assert main(["run", "pgqueuer", "pg-boss", "--directory", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "pgqueuer: not installed: python -m benchmarks.peers install pgqueuer\n" in said
    assert "pg-boss: not installed: python -m benchmarks.peers install pg-boss\n" in said


def test_an_environment_of_another_version_is_not_installed(tmp_path):
    """A new pin asks for a new environment."""
    peer = PEERS["pgqueuer"]
    (tmp_path / peer.package).mkdir()
    mark = tmp_path / peer.package / "outboxq-installed"
    mark.write_text((peer.directory / "requirements.txt").read_text())
    assert is_installed(peer, tmp_path)
    mark.write_text("pgqueuer==0.1\n")
    assert not is_installed(peer, tmp_path)


def test_environments_are_in_the_users_cache(monkeypatch, tmp_path):
    """The repository stays free of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "outboxq-benchmarks" / "peers"


@pytest.mark.wide
def test_a_run_without_the_other_queues_says_what_to_install_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No figures of theirs, and no traceback: the rest is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = Namespace(peers=True, peers_file=None, repeats=1)
    assert not measured_peers(options, "postgresql://127.0.0.1:1/none", {"peers"})
    said = capfd.readouterr().err
    assert "pgqueuer: not installed: python -m benchmarks.peers install pgqueuer\n" in said
    assert "to install them: python -m benchmarks.peers install\n" in said
    assert "Traceback" not in said
