"""The benchmarks run from end to end, in sizes too small to mean anything."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import limits
from benchmarks.__main__ import main
from benchmarks.bench import ACCOUNTS, CENTS, QUICK, Bench, MeasurementFailed, conninfo
from benchmarks.exactly_once import Effects, effects_after_kills
from benchmarks.figures import Comparison
from benchmarks.peers_figures import Peers
from benchmarks.pgbench import PgbenchFailed, find_pgbench, run_pgbench
from benchmarks.proxy import running_proxy
from benchmarks.relays import RelayOptions, RunningRelay, drain, working_relay
from benchmarks.scenarios import limits as limits_scenario
from benchmarks.scenarios.beside_peers import entities
from benchmarks.scenarios.large import large
from outboxq.postgres import Server
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def bench(outboxq_server: Server) -> Bench:
    try:
        return Bench(outboxq_server, find_pgbench(), QUICK, 1, lambda _line: None)
    except PgbenchFailed as error:
        pytest.skip(str(error))


@pytest.mark.wide
def test_a_scenario_is_measured_beside_its_limit_and_written_in_every_form(bench, tmp_path, capsys) -> None:
    """One command: a relay process and pgbench, figures above zero, and a table, JSON and a plot."""
    table, found, plots = tmp_path / "table.md", tmp_path / "found.json", tmp_path / "plots"
    options = ["--quick", "--repeats", "1", "--server", bench.server.url]
    outputs = ["--markdown", str(table), "--json", str(found), "--svg", str(plots)]
    assert main(["noop", *options, *outputs]) == 0
    (line,) = json.loads(found.read_text())["lines"]
    assert line["ours"]["median"] > 0
    assert line["limit"]["median"] > 0
    assert line["ratio"] == pytest.approx(line["ours"]["median"] / line["limit"]["median"])
    assert "| 1 | no-op, batches of 50, one process |" in table.read_text()
    assert (plots / "noop.svg").exists()
    assert "1 of 1" in capsys.readouterr().err


def test_a_scenario_that_does_not_exist_is_named(capsys) -> None:
    """A typing mistake measures nothing."""
    assert main(["nop"]) == 2
    assert "no scenario nop" in capsys.readouterr().err


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("script", "updates"),
    [
        (limits.claim_and_delete(5), False),
        (limits.claim_and_update_one(), True),
        (limits.claim_and_update_each(5, ACCOUNTS, pipelined=False), True),
        (limits.claim_and_update_each(5, ACCOUNTS, pipelined=True), True),
        (limits.claim_and_update_set(5), True),
        (limits.lease_and_delete(5), False),
    ],
)
def test_a_limit_does_the_whole_work(bench, script: str, updates: bool) -> None:
    """pgbench leaves no job behind, and where it updates, the accounts have changed."""
    with bench.database() as workbench:
        workbench.fill(20)
        batch = 1 if script == limits.claim_and_update_one() else 5
        assert run_pgbench(bench.pgbench, workbench.url, script, clients=1, transactions=20 // batch) > 0
        assert workbench.count_jobs() == 0
        assert (workbench.balance() > 0) is updates


def test_a_failing_script_is_no_figure(bench) -> None:
    """What pgbench could not run is an error with its own words."""
    with bench.database() as workbench, pytest.raises(PgbenchFailed, match="no_such_table"):
        run_pgbench(bench.pgbench, workbench.url, "SELECT FROM no_such_table;", clients=1, transactions=1)


@pytest.mark.wide
def test_a_drain_is_believed_only_if_the_accounts_agree(bench) -> None:
    """Handlers that run and write nothing where they should are not taken for fast ones."""
    with bench.database() as workbench:
        workbench.fill(2_000)
        with pytest.raises(MeasurementFailed, match="the accounts have 0 more"):
            drain(workbench, RelayOptions("noop", 5), 2_000, seconds=30, updates=True)
        workbench.fill(2_000)
        drained = drain(workbench, RelayOptions("update", 5), 2_000, seconds=30, updates=True)
        assert drained.rate > 0
        assert workbench.balance() % CENTS == 0


@pytest.mark.large
def test_a_relay_works_in_its_turns_and_in_no_others(bench) -> None:
    """What stands still does nothing, and is stopped well from there: every job that is gone was counted."""
    with bench.database() as workbench:
        workbench.fill(50_000)
        with working_relay(workbench, RelayOptions("noop", 5), 50_000) as relay:
            relay.stand_still()
            for _ in range(2):
                wait_until(lambda: _stands_still(relay), "it stands still")
                before = sum(relay.counts())
                # Meanwhile the server reads the table, in which time a relay at work does dozens of jobs.
                workbench.count_jobs()
                assert sum(relay.counts()) == before
                assert relay.take_turn(0.5).jobs > 0


def _stands_still(relay: RunningRelay) -> bool:
    return Path(f"/proc/{relay.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.wide
def test_large_tables_are_measured_beside_small_ones(bench) -> None:
    """Waiting, scheduled, behind a snapshot; no-op and UPDATE: rates of both, and their ratio."""
    lines = large(bench, Peers([]))
    assert len(lines) == 6
    for line in lines:
        assert isinstance(line, Comparison)
        assert line.limit is not None
        assert len(line.ours.values) == len(line.limit.values) == len(line.ratios) == 1
        assert line.ratios[0] == line.ours.values[0] / line.limit.values[0]
    assert {line.plot for line in lines} == {"large-noop", "large-update"}


@pytest.mark.parametrize(("jobs", "doubled", "missing"), [(4, 4, 0), (5, 4, 1)])
def test_effects_that_were_committed_twice_or_never_are_counted(bench, jobs: int, doubled: int, missing: int) -> None:
    """Of a worker that does four jobs again after each kill, however many there are."""
    with bench.database() as workbench, workbench.connected() as connection:

        @contextmanager
        def worker() -> Iterator[None]:
            connection.execute("UPDATE account SET balance = balance + %s WHERE id <= 4", [CENTS])
            yield

        found = effects_after_kills(conninfo(workbench.url), worker, "SELECT 0", jobs, kills=1)
    assert found == Effects(jobs, 1, doubled, missing)


@pytest.mark.wide
def test_the_same_orm_handler_is_measured_beside_peers_and_its_relay_is_killed(bench) -> None:
    """As a coroutine and as a function: processor time, which is to be ten times less, jobs a second, and effects."""
    spread = {"median": 800.0, "min": 700.0, "max": 900.0}
    named = {"peer": "other", "version": "1", "language": "python", "processes": 1, "jobs": 100}
    kill = {**named, "scenario": "kill", "effects": {"jobs": 100, "kills": 10, "doubled": 3, "missing": 0}}
    lines = entities(bench, Peers([{**named, "scenario": "orm", "jobs_per_second": spread, "cpu_us": spread}, kill]))
    for cpu, rate in zip(lines[::2], lines[1::2], strict=True):
        assert isinstance(cpu, Comparison)
        assert isinstance(rate, Comparison)
        assert (cpu.limit_name, rate.limit_name, cpu.target, rate.target) == ("other 1", "other 1", 10, None)
        assert cpu.ratio == pytest.approx(800 / cpu.ours.median)
        assert rate.ours.median > 0
        assert cpu.notes == (
            "outboxq: exactly once: yes (2 kills over 600 jobs)",
            "other 1: exactly once: no, 3 effects too many and 0 missing (10 kills over 100 jobs)",
        )


def test_the_proxy_passes_a_session_on_and_counts_it(bench) -> None:
    """Everything that a client sends arrives, and each statement is counted once."""
    with bench.database() as workbench, running_proxy(workbench.url, 0.0) as proxy:
        import psycopg

        from benchmarks.bench import conninfo

        before = proxy.count()
        with psycopg.connect(conninfo(proxy.url), autocommit=True) as connection:
            assert connection.execute("SELECT count(*) FROM account").fetchone() == (ACCOUNTS,)
            connection.execute("SELECT 1; SELECT 2")
        assert proxy.count() - before == 3


def test_the_proxy_holds_everything_back_for_its_delay(bench) -> None:
    """Each way, counted from the arrival: nothing comes through sooner."""
    with bench.database() as workbench, running_proxy(workbench.url, 0.004) as proxy:
        import psycopg

        from benchmarks.bench import conninfo

        with psycopg.connect(conninfo(proxy.url), autocommit=True) as connection:
            seconds = []
            for _ in range(20):
                begun = time.perf_counter()
                connection.execute("SELECT 1")
                seconds.append(time.perf_counter() - begun)
    assert min(seconds) >= 0.0079


@pytest.mark.large
def test_claims_of_limited_queues_are_measured_beside_plain_ones(bench) -> None:
    """In both modes, as a relay prepares and executes them."""
    lines = limits_scenario.limits(bench)
    assert [line.limit_name for line in lines] == ["a claim", "a claim under a lease"]
    assert all(line.ours.median > 0 and line.limit.median > 0 for line in lines)
