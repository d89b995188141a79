"""The benchmarks of lease mode run from end to end with a few slots, and see what a process holds."""

import os

import pytest

from benchmarks import raw
from benchmarks.bench import QUICK, Bench, MeasurementFailed
from benchmarks.figures import Comparison, Unsupported
from benchmarks.gauges import Watch, processor_seconds, resident_megabytes
from benchmarks.pgbench import PgbenchFailed, find_pgbench
from benchmarks.scenarios import leases
from outboxq.postgres import Server
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def bench(outboxq_server: Server) -> Bench:
    try:
        return Bench(outboxq_server, find_pgbench(), QUICK, 1, lambda _line: None, slots=5)
    except PgbenchFailed as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("run", [raw.call_one_by_one, raw.await_one_by_one], ids=["plain", "async"])
def test_psycopg_alone_calls_each_job_once_and_leaves_none(bench, run: raw.Run) -> None:
    """Leased, called with its arguments, deleted: as many as there were."""
    with bench.database() as workbench:
        workbench.fill(20)
        assert run(workbench, 60.0).jobs == 20
        assert workbench.count_jobs() == 0


@pytest.mark.parametrize(
    "measure", [leases.no_op, leases.waits, leases.waits_in_threads, leases.start, leases.behind_slow]
)
def test_slots_that_this_version_does_not_have_cost_a_line_and_no_run(bench, measure) -> None:
    """The line says how many there may be."""
    asked = Bench(bench.server, bench.pgbench, QUICK, 1, bench.say, slots=1_000_000)
    # Threads are bounded by the scenario itself.
    lines = measure(asked) if measure is not leases.waits_in_threads else []
    assert all(isinstance(line, Unsupported) and "got 1000000" in line.reason for line in lines)


@pytest.mark.wide
@pytest.mark.parametrize("measure", [leases.waits, leases.waits_in_threads])
def test_calls_that_wait_together_are_measured_with_what_they_hold(bench, measure) -> None:
    """About as long as one call takes, or longer; connections, memory and processor time beside it."""
    took, connections, megabytes, percent = measure(bench)
    # The clock starts when COMMIT has come back, and the first calls a little before.
    assert took.ratio > 0.9
    assert connections.ours.median >= 1
    assert megabytes.ours.median > 10
    # The kernel counts in hundredths of a second.
    assert percent.ours.median >= 0


@pytest.mark.wide
@pytest.mark.parametrize("measure", [leases.no_op, leases.one, leases.start, leases.behind_slow])
def test_each_row_of_lease_mode_is_measured_beside_its_limit(bench, measure) -> None:
    """Figures above zero on both sides."""
    lines = [line for line in measure(bench) if not line.what.endswith("more than in transaction mode")]
    assert lines
    for line in lines:
        assert isinstance(line, Comparison)
        assert line.limit is not None
        assert min(line.ours.median, line.limit.median) > 0


def test_a_process_that_computes_has_more_processor_time_than_before() -> None:
    """And memory, which is that of a Python process at least."""
    before = processor_seconds(os.getpid())
    wait_until(lambda: sum(range(100_000)) and processor_seconds(os.getpid()) > before, "a tick")
    assert 10 < resident_megabytes(os.getpid()) < 10_000


def test_the_most_connections_of_a_relay_are_seen_and_no_others(bench) -> None:
    """Connections that were closed since count, and those of other programs do not; without any there is no figure."""
    import psycopg

    from benchmarks.bench import conninfo

    with bench.database() as workbench:
        watch = Watch(workbench, os.getpid())
        names = ["outboxq", "outboxq", "psql"]
        open_now = [psycopg.connect(conninfo(workbench.url), application_name=name) for name in names]
        wait_until(lambda: watch.most_connections == 2, "the look of the thread")
        for connection in open_now:
            connection.close()
        assert watch.stop().connections == 2
        with pytest.raises(MeasurementFailed, match="no connection of the relay"):
            Watch(workbench, os.getpid()).stop()
