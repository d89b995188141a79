"""`outboxq relay --metrics`: what is served is what happened, no secret is in it, and no client holds it up."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, external
from outboxq.postgres import Database
from tests.support import app
from tests.support.cli import REPOSITORY, environment, run
from tests.support.ledger import enqueue
from tests.support.metrics import Series, Serving, promtool, serving, value
from tests.support.waiting import PATIENCE, wait_until

# Whole programs.
pytestmark = pytest.mark.large

TARGET = "tests.support.app:jobs"
CANARY = "canary-7f3d"


@pytest.fixture
def relay(outboxq_database: Database, tmp_path: Path) -> Iterator[Serving]:
    """A relay that serves metrics."""
    with serving("relay", TARGET, "--metrics", "0", url=outboxq_database.url, log=tmp_path / "log") as found:
        yield found


@pytest.mark.wide
def test_what_happened_is_counted(
    relay: Serving, outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """By queue, kind and outcome, with waits, runs, errors and claims; every kind has its zeros from the start."""
    wait_until(lambda: "outboxq_slots" in relay.get(), "the relay's start")
    begun = relay.samples()
    assert value(begun, "outboxq_jobs_total", kind="fail") == 0
    assert any(dict(labels).get("kind") == "fail" for name, labels in begun if name == "outboxq_jobs_total")
    enqueue(engine, [f"{CANARY}-{number}" for number in range(20)])
    with sessions.begin() as session:
        session.add_job(app.fail.options(headers={"x-secret": CANARY}), name=CANARY)
        session.add_job(app.end, how="discard")
        session.add_job(app.end, how="snooze")
        session.add_job(external("unknown", queue="ledger"))
    wait_until(
        lambda: (
            (found := relay.samples())
            and value(found, "outboxq_jobs_total", outcome="done") == 20
            and value(found, "outboxq_jobs_total", outcome="dead") == 1
            and value(found, "outboxq_jobs_total", outcome="snoozed") == 1
            and value(found, "outboxq_parked_jobs_total") >= 1
        ),
        "all jobs",
    )
    text = relay.get()
    found = relay.samples()
    assert value(found, "outboxq_jobs_total", queue="ledger", kind="record", outcome="done") == 10
    assert value(found, "outboxq_jobs_total", kind="fail", outcome="retried") == 2
    assert value(found, "outboxq_jobs_total", kind="end", outcome="discarded") == 1
    assert value(found, "outboxq_job_errors_total", kind="fail", error_type="ValueError") == 3
    assert value(found, "outboxq_job_run_seconds_count", kind="record") == 10
    assert value(found, "outboxq_job_wait_seconds_count", kind="record_async") == 10
    assert value(found, "outboxq_claimed_jobs_total", queue="ledger") >= 15
    assert value(found, "outboxq_claims_total", result="jobs") == value(found, "outboxq_claim_seconds_count")
    assert value(found, "outboxq_slots") == 2 * len({dict(each[1])["queue"] for each in found if "running" in each[0]})
    assert value(found, "outboxq_relay_info") == 1
    database = outboxq_database.url.rpartition("/")[2].partition("?")[0]
    assert {dict(labels)["database"] for _, labels in found} == {database}
    assert CANARY not in text
    assert "no luck" not in text
    checked = promtool("check", "metrics", given=text)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.wide
def test_clients_that_are_slow_or_mad_hold_up_nobody(relay: Serving, engine: Engine) -> None:
    """Connections that say nothing are closed; meanwhile others are answered, if not at once, and jobs run."""
    host, _, port = relay.address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=PATIENCE) for _ in range(20)]
    try:
        mad = socket.create_connection((host, int(port)), timeout=PATIENCE)
        mad.sendall(b"\x00\xff" * 100 + b"\r\n\r\n")
        enqueue(engine, ["a"], both_flavours=False)
        assert all(_is_closed(each) for each in silent)
        mad.close()
    finally:
        for each in silent:
            each.close()
    wait_until(lambda: relay.value("outboxq_jobs_total", outcome="done") == 1, "the job and a scrape")
    assert relay.get("/healthz") == "ok\n"


@pytest.mark.wide
def test_a_client_that_never_ends_its_request_is_cut_off(relay: Serving) -> None:
    """One that sends a byte now and then, so that no read lasts long."""
    host, _, port = relay.address.rpartition(":")

    def is_refused() -> bool:
        try:
            dripping.sendall(b"G")
        except OSError:
            return True
        return False

    with socket.create_connection((host, int(port)), timeout=PATIENCE) as dripping:
        wait_until(is_refused, "the end of the connection")


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_an_address_that_is_taken_is_a_wrong_start(outboxq_database: Database) -> None:
    """One line, and exit code 2, before any job is claimed."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for processes in (1, 2):
            ended = run(
                "relay", TARGET, "--metrics", port, "--processes", processes, url=outboxq_database.url, cwd=REPOSITORY
            )
            assert ended.exit_code == 2
            assert f"metrics cannot be served on 127.0.0.1:{port}" in ended.stderr


WITHOUT_EXTRA = """\
import sys
sys.modules["prometheus_client"] = None
from outboxq.__main__ import main
main(sys.argv[1:])
"""


@pytest.mark.wide
@pytest.mark.parametrize("words", [("relay", TARGET, "--metrics", "0"), ("metrics", "--once")])
def test_without_the_extra_it_is_named(outboxq_database: Database, words: tuple[str, ...]) -> None:
    """Exit code 2."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRA, *words],
        env=environment(outboxq_database.url), cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended
    assert "pip install 'outboxq[metrics]'" in ended.stderr
    assert "Traceback" not in ended.stderr


NOTHING_IMPORTED = """\
import sys
from outboxq.__main__ import main
try:
    main(sys.argv[1:])
finally:
    assert "prometheus_client" not in sys.modules, "imported"
"""


@pytest.mark.wide
@pytest.mark.usefixtures("fresh_processes")
def test_nothing_is_imported_without_the_option(outboxq_database: Database) -> None:
    """A relay without `--metrics` does not know of prometheus_client."""
    subprocess.run(
        [sys.executable, "-c", NOTHING_IMPORTED, "relay", TARGET, "--drain"],
        env=environment(outboxq_database.url), cwd=REPOSITORY, check=True,
    )  # fmt: skip


def test_reload_and_metrics_are_not_for_one_another(outboxq_database: Database) -> None:
    """Said before anything is started."""
    ended = run("relay", TARGET, "--reload", "--metrics", "0", url=outboxq_database.url)
    assert (ended.exit_code, "--metrics" in ended.stderr) == (2, True)


def test_a_drain_serves_metrics_too(outboxq_database: Database, engine: Engine, tmp_path: Path) -> None:
    """Until it has drained."""
    gate = tmp_path / "gate"
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        session.add_job(app.record_at_gate, name="a", gate=str(gate))
    with serving("relay", TARGET, "--metrics", "0", "--drain", url=outboxq_database.url, log=tmp_path / "log") as found:
        wait_until(lambda: found.value("outboxq_running_jobs", queue="ledger") == 1, "the running job")
        assert found.value("outboxq_slots", state="busy") == 1
        gate.touch()
        assert found.process.wait(PATIENCE) == 0


class Watch:
    """Scrapes all the time, and notes each counter that has fallen."""

    def __init__(self, served: Serving) -> None:
        self._served = served
        self._over = threading.Event()
        self.fallen: list[object] = []
        self.scrapes = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        before: dict[Series, float] = {}
        while not self._over.is_set():
            after = self._served.samples()
            self.scrapes += 1
            for series, found in before.items():
                is_counter = series[0].endswith(("_total", "_bucket", "_sum", "_count"))
                if is_counter and after.get(series, -1.0) < found:
                    self.fallen.append((series, found, after.get(series)))
            before = after

    def end(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE)


@pytest.mark.wide
def test_counters_never_fall_when_processes_are_killed(
    outboxq_database: Database, engine: Engine, tmp_path: Path
) -> None:
    """Three processes, killed one after the other while they work and are scraped; each end is counted."""
    with serving(
        "relay", TARGET, "--metrics", "0", "--processes", 3, url=outboxq_database.url, log=tmp_path / "log"
    ) as served:
        supervisor = psutil.Process(served.process.pid)
        wait_until(lambda: served.value("outboxq_relay_info") == 3, "three relays")
        watch = Watch(served)
        try:
            for turn in range(4):
                names = enqueue(engine, [f"{turn}-{number}" for number in range(40)])
                done = (turn + 1) * len(names)
                wait_until(lambda: served.value("outboxq_jobs_total", outcome="done") > 0, "some work")
                children = wait_until(lambda: _relays(supervisor), "a child")
                os.kill(children[turn % len(children)].pid, signal.SIGKILL)
                wait_until(
                    lambda turn=turn: served.value("outboxq_relay_child_ends_total") > turn, "its end is counted"
                )
                wait_until(lambda: served.value("outboxq_relay_info") == 3, "another")
        finally:
            watch.end()
        assert watch.fallen == []
        assert watch.scrapes > 10
        found = served.samples()
        assert value(found, "outboxq_relay_child_ends_total", reason="died") == 4
        assert 0 < value(found, "outboxq_jobs_total", outcome="done") <= done
        checked = promtool("check", "metrics", given=served.get())
        assert (checked.returncode, checked.stderr) == (0, "")


def _relays(supervisor: psutil.Process) -> list[psutil.Process]:
    return [child for child in supervisor.children() if "fork server" not in child.name()]


def test_a_process_that_stands_still_holds_up_no_scrape(
    outboxq_database: Database, engine: Engine, tmp_path: Path
) -> None:
    """Of it the last numbers count, and the others are read."""
    with serving(
        "relay", TARGET, "--metrics", "0", "--processes", 2, url=outboxq_database.url, log=tmp_path / "log"
    ) as served:
        wait_until(lambda: served.value("outboxq_relay_info") == 2, "two relays")
        enqueue(engine, map(str, range(20)))
        wait_until(lambda: served.value("outboxq_jobs_total", outcome="done") == 20, "the jobs")
        stopped = _relays(psutil.Process(served.process.pid))[0]
        stopped.suspend()
        try:
            assert served.value("outboxq_jobs_total", outcome="done") == 20
            assert served.value("outboxq_relay_info") == 2
        finally:
            stopped.resume()


def test_the_supervisor_serves_what_a_drain_has_counted(outboxq_database: Database, engine: Engine) -> None:
    """`--processes 2 --drain` with metrics ends as it does without."""
    enqueue(engine, map(str, range(10)))
    run("relay", TARGET, "--processes", 2, "--drain", "--metrics", "0", url=outboxq_database.url, cwd=REPOSITORY).ok()
