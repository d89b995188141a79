"""The relays of the files in `deploy/`, started by the very commands that stand there, and probed by their probes."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.postgres import Database, Server
from tests.deploy.files import PLACES, Deployed, documents
from tests.support import app, gated_calls
from tests.support.ledger import effects, enqueue, rows, waiting
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).parents[2]
HELD = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outboxq%' AND datname = current_database()"


class Installed:
    """The application as it stands in a container: its folder, and the environment of its processes."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.health_file = directory / "relay.json"
        self._environment = {
            **os.environ,
            "OUTBOXQ_DATABASE_URL": url,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": f"{directory}:{REPOSITORY}",
        }
        package = directory / "shop"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "jobs.py").write_text("from tests.support.app import jobs\n\n__all__ = ['jobs']\n")

    def _here(self, command: list[str]) -> list[str]:
        """A command of the files, with the health file in the test's directory.

        The program is the interpreter's module, which can be forked: the script in front of it is tested where it is
        the first process of a container.
        """
        program, *arguments = (str(self.health_file) if part.endswith("/relay.json") else part for part in command)
        return [sys.executable, "-m", "outboxq", *arguments] if program == "outboxq" else [program, *arguments]

    def run(self, command: list[str]) -> int:
        """The exit code of a command."""
        here = self._here(command)
        return subprocess.run(here, env=self._environment, cwd=self.directory, check=False).returncode

    @contextmanager
    def running(self, command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
        """A command that runs for the length of the block, at most."""
        process = subprocess.Popen(self._here(command), env=self._environment, cwd=self.directory)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def add_gated_jobs(engine: Engine, gate: Path, names: Iterable[str]) -> None:
    """Commit jobs whose handlers stay until the file `gate` is there."""
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        session.add_jobs(app.record_at_gate.job(name=name, gate=str(gate)) for name in names)


@pytest.fixture
def installed(tmp_path: Path, outboxq_database: Database) -> Installed:
    return Installed(tmp_path, libpq_url(outboxq_database.url))


@pytest.mark.wide
@pytest.mark.parametrize("place", PLACES)
def test_the_relay_of_each_file_works_is_found_alive_and_stops(
    place: str, installed: Installed, engine: Engine
) -> None:
    """It does jobs of both flavours; its probe passes as long as it works; SIGTERM ends it with 0."""
    deployed: Deployed = PLACES[place]()
    probe = deployed.probe or ["outboxq", "health", "/run/shop/relay.json"]
    assert installed.run(probe) == 1
    names = enqueue(engine, ["one", "two", "three", "four"])
    with installed.running(deployed.command) as relay:
        wait_until(lambda: waiting(engine) == 0, "the jobs")
        assert installed.run(probe) == 0
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(PATIENCE) == 0
    assert installed.run(probe) == 1
    assert effects(engine) == sorted(names)


@pytest.mark.wide
def test_the_migration_of_each_file_installs_the_tables(outboxq_server: Server, tmp_path: Path) -> None:
    """Into an empty database, and again without a change."""
    (compose,), (job,) = documents("compose.yaml"), documents("kubernetes/migrate.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    database = outboxq_server.create_database()
    installed = Installed(tmp_path, libpq_url(database.url))
    for command in (compose["services"]["migrate"]["command"], container["command"]):
        assert installed.run(command) == 0
    engine = create_engine(database.url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one() == 0
    engine.dispose()


@pytest.mark.large
@pytest.mark.parametrize(
    ("options", "connections"),
    [
        (["--queue", "ledger=1"], 1 + 2),
        (["--queue", "ledger=3"], 3 + 2),
        (["--queue", "ledger=3", "--no-listen"], 3 + 1),
        (["--queue", "ledger=2", "--processes", "3"], 3 * (2 + 2)),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else str(given),
)
def test_a_relay_holds_as_many_connections_as_the_page_says(
    options: list[str], connections: int, installed: Installed, engine: Engine, tmp_path: Path
) -> None:
    """docs/deploying.md: processes x (slots + 2), one less without LISTEN, while all of its slots work."""
    gate = tmp_path / "gate"
    add_gated_jobs(engine, gate, map(str, range(9)))
    command = ["outboxq", "relay", "shop.jobs:jobs", *options, "--prune-seconds", "0", "--no-reindex"]
    with installed.running(command) as relay:
        wait_until(lambda: rows(engine, HELD) == [(connections,)], f"{connections} connections")
        gate.touch()
        wait_until(lambda: waiting(engine) == 0, "the jobs")
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(PATIENCE) == 0
    assert effects(engine) == [str(number) for number in range(9)]


@pytest.mark.large
@pytest.mark.parametrize(("uses_session", "most"), [(False, 3), (True, 1 + 20 + 2)])
def test_calls_hold_as_many_connections_as_the_page_says(
    uses_session: bool, most: int, installed: Installed, engine: Engine, tmp_path: Path
) -> None:
    """docs/deploying.md: a group in lease mode counts as 1 + 20 slots, as 1 if its calls leave their session alone."""
    # A call may have the connection that the dispatcher gave back: it claims nothing while all slots are busy.
    held = [[(most,)], [(most - 1,)]] if uses_session else [[(most,)]]
    folder = tmp_path / "calls"
    folder.mkdir()
    job = gated_calls.wait_at_gate.job(folder=str(folder), uses_session=uses_session)
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        session.add_jobs(job for _ in range(60))
    options = ["--queue", "mail=60", "--prune-seconds", "0", "--stats-seconds", "0", "--no-reindex"]
    with installed.running(["outboxq", "relay", "tests.support.gated_calls:jobs", *options]) as relay:
        wait_until(lambda: len(list(folder.iterdir())) == 60, "all calls to begin")
        wait_until(lambda: rows(engine, HELD) in held, f"{most} connections")
        (folder / "gate").touch()
        wait_until(lambda: waiting(engine) == 0, "the jobs")
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(PATIENCE) == 0


@pytest.mark.wide
def test_the_first_process_of_a_container_stops_in_order(installed: Installed, engine: Engine, tmp_path: Path) -> None:
    """SIGTERM lets its handler finish. A second one changes nothing there: the kernel keeps it from that process."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("a container's first process needs root and a namespace of process ids")
    gate = tmp_path / "gate"
    add_gated_jobs(engine, gate, ["x"])
    with installed.running([*unshare, *PLACES["docker"]().command]) as namespace:
        wait_until(lambda: is_at_gate(engine), "the handler at its gate")
        (first,) = map(int, Path(f"/proc/{namespace.pid}/task/{namespace.pid}/children").read_text().split())
        os.kill(first, signal.SIGTERM)
        wait_until(lambda: "stopping" in installed.health_file.read_text(), "the relay to stop")
        os.kill(first, signal.SIGTERM)
        gate.touch()
        assert namespace.wait(PATIENCE) == 0
    assert effects(engine) == ["x"]


def is_at_gate(engine: Engine) -> bool:
    table = app.Effect.__tablename__
    return bool(
        rows(
            engine,
            "SELECT 1 FROM pg_locks JOIN pg_class ON pg_class.oid = relation "
            f"WHERE relname = '{table}' AND mode = 'RowExclusiveLock'",
        )
    )
