"""How relay processes end: asked, told twice, orphaned or stuck; and what their health file says until then."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, config, external
from outboxq.errors import ConfigError
from outboxq.events import DatabaseBack, DatabaseLost, RelayStarted, RelayStopping
from outboxq.postgres import Database, Server
from outboxq.relay.health import Health, StateHook, health_file, judge
from outboxq.relay.signals import stop_signals
from tests.support import app
from tests.support.cli import REPOSITORY, call, command, environment, run
from tests.support.fork_server import SERVER_NAME
from tests.support.ledger import effects, waiting
from tests.support.waiting import PATIENCE, wait_until

TARGET = "tests.support.app:jobs"
ONE_SLOT = ("--queue", "ledger=1", "--no-listen", "--poll-seconds", "0.05")
# Longer than anything is waited for.
PATIENT_DRAIN = ("--drain-seconds", 10 * PATIENCE)


@contextmanager
def started(
    *arguments: object, url: str, target: str = TARGET, cwd: Path = REPOSITORY
) -> Iterator["subprocess.Popen[str]"]:
    """A relay's process; neither it nor its children outlive the block."""
    with subprocess.Popen(
        command("relay", target, *arguments), cwd=cwd, env=environment(url), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            children = psutil.Process(process.pid).children() if process.poll() is None else []
            process.kill()
            for child in children:
                child.kill()


@pytest.fixture
def gate(sessions: sessionmaker[OutboxSession], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job waits whose handler goes on as soon as this file is there; see `wait_for_run`."""
    path = tmp_path_factory.mktemp("gate") / "open"
    add_job_at(path, sessions)
    return path


def add_job_at(gate: Path, sessions: sessionmaker[OutboxSession]) -> None:
    with sessions.begin() as session:
        session.add_job(app.record_at_gate, name="slow", gate=str(gate))


def wait_for_run(engine: Engine) -> None:
    """Until the slow job's handler has written its row and stands at the gate."""
    query = text(
        "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'effect_ledger'::regclass AND mode = 'RowExclusiveLock')"
    )

    def writes() -> bool:
        with engine.connect() as connection:
            return connection.execute(query).scalar_one()

    wait_until(writes, "the handler to run")


def relay_children(process: "subprocess.Popen[str]", count: int) -> list[psutil.Process]:
    def found() -> list[psutil.Process]:
        return [child for child in psutil.Process(process.pid).children() if child.name() != SERVER_NAME]

    return wait_until(lambda: len(children := found()) == count and children, "the relay processes")


def wait_for_end(children: list[psutil.Process]) -> None:
    def ended(child: psutil.Process) -> bool:
        # Orphans may stay zombies where nobody waits for them.
        try:
            return child.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(lambda: all(map(ended, children)), "the end of every child")


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT), (15, signal.SIGINT)]
)
def test_a_second_signal_ends_a_relay_at_once(
    outboxq_database: Database, engine: Engine, gate: Path, first: signal.Signals, second: signal.Signals
) -> None:
    """The process dies by the second signal without waiting for its handler, whose rows are rolled back."""
    with started(*ONE_SLOT, *PATIENT_DRAIN, url=outboxq_database.url) as process:
        wait_for_run(engine)
        process.send_signal(first)
        assert process.stderr is not None
        assert any("relay is stopping" in line for line in process.stderr)
        process.send_signal(second)
        assert process.wait(PATIENCE) == -second
    assert not gate.exists()
    assert effects(engine) == []
    assert waiting(engine) == 1


def test_a_second_signal_ends_a_supervisor_and_its_relays_at_once(
    outboxq_database: Database, engine: Engine, gate: Path
) -> None:
    """Children are killed, and the server rolls back what they had open."""
    with started(*ONE_SLOT, *PATIENT_DRAIN, "--processes", 2, url=outboxq_database.url) as process:
        wait_for_run(engine)
        children = relay_children(process, 2)
        process.terminate()
        assert process.stderr is not None
        assert any("relay is stopping" in line for line in process.stderr)
        process.terminate()
        assert process.wait(PATIENCE) == -signal.SIGTERM
        wait_for_end(children)
    assert not gate.exists()
    assert effects(engine) == []
    assert waiting(engine) == 1


def test_a_service_manager_may_signal_every_process_of_the_group(
    outboxq_database: Database, engine: Engine, gate: Path
) -> None:
    """SIGTERM to supervisor and children alike, as systemd sends it, is one request: the handler finishes."""
    with started(*ONE_SLOT, *PATIENT_DRAIN, "--processes", 2, url=outboxq_database.url) as process:
        assert process.stderr is not None
        # One that is still starting dies of the signal.
        for _ in range(2):
            assert any("relay started" in line for line in process.stderr)
        wait_for_run(engine)
        for child in relay_children(process, 2):
            child.terminate()
        process.terminate()
        # Each has been told; told twice, it would not live to see the gate open.
        for _ in range(2):
            assert any("relay is stopping" in line for line in process.stderr)
        gate.touch()
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert effects(engine) == ["slow"]


@pytest.mark.parametrize(("drain_seconds", "done"), [(10 * PATIENCE, ["slow"]), (0.2, [])])
def test_relays_drain_when_their_supervisor_is_killed(
    outboxq_database: Database, engine: Engine, gate: Path, drain_seconds: float, done: list[str]
) -> None:
    """SIGKILL of the parent: handlers get `--drain-seconds`, then what is open is rolled back; no child stays."""
    options = (*ONE_SLOT, "--processes", 2, "--drain-seconds", drain_seconds)
    with started(*options, url=outboxq_database.url) as process:
        wait_for_run(engine)
        children = relay_children(process, 2)
        process.kill()
        try:
            assert process.stderr is not None
            assert any("relay is stopping" in line for line in process.stderr)
            if done:
                gate.touch()
            wait_for_end(children)
        finally:
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
    wait_until(lambda: effects(engine) == done, "the outcome")
    assert waiting(engine) == 1 - len(done)


@pytest.mark.large
def test_jobs_of_stopped_relays_are_done_by_those_that_replace_them(
    outboxq_database: Database, engine: Engine, gate: Path
) -> None:
    """SIGSTOP in a handler, in transaction mode: `--stall-seconds` later the process is killed, and its job is free."""
    with started(*ONE_SLOT, "--processes", 2, "--stall-seconds", 5, url=outboxq_database.url) as process:
        assert process.stderr is not None
        # Until both have told of their life: a process that never did is left alone.
        for _ in range(2):
            assert any("relay started" in line for line in process.stderr)
        wait_for_run(engine)
        stopped = relay_children(process, 2)
        for child in stopped:
            child.suspend()
        gate.touch()
        wait_for_end(stopped)
        wait_until(lambda: effects(engine) == ["slow"], "the job")
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert errors.count("relay process shows no life, killing it") == 2


def test_a_request_to_stop_may_take_locks_that_the_main_thread_holds() -> None:
    """A signal comes in the middle of anything: what it calls must not wait for the very thread that it interrupted."""
    lock, stopped = threading.Lock(), threading.Event()

    def stop() -> None:
        with lock:
            stopped.set()

    with stop_signals(stop):
        with lock:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not stopped.is_set()
        assert stopped.wait(PATIENCE)


def test_the_programs_own_signal_handlers_come_back() -> None:
    """After the block everything is as it was, whether a signal came or not; no thread and no pipe stays."""
    pipes = len(os.listdir("/proc/self/fd"))
    for send in (False, True):
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        stopped = threading.Event()
        with stop_signals(stopped.set):
            if send:
                os.kill(os.getpid(), signal.SIGTERM)
                assert stopped.wait(PATIENCE)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        assert stopped.is_set() == send
        wait_until(lambda: len(os.listdir("/proc/self/fd")) == pipes, "the pipe to be closed")


def test_processes_that_handlers_start_know_nothing_of_the_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that a handler starts must not take the supervisor's pipe, or whatever has its number, for its own."""
    read_end, write_end = os.pipe()
    try:
        for variable, pipe, ask in (
            ("OUTBOXQ_PARENT_PIPE", read_end, config.parent_pipe),
            ("OUTBOXQ_HEARTBEAT_PIPE", write_end, config.heartbeat_pipe),
        ):
            os.set_inheritable(pipe, True)
            monkeypatch.setenv(variable, str(pipe))
            assert ask() == pipe
            assert variable not in os.environ
            assert not os.get_inheritable(pipe)
            monkeypatch.setenv(variable, "99999")
            assert ask() is None
    finally:
        os.close(read_end)
        os.close(write_end)


# An application that cannot free a handler, once; the process that follows works.
STUCK = """
import logging, pathlib, threading, time
from contextlib import contextmanager, suppress
from outboxq import Context, Jobs
from outboxq.errors import RelayStuck

def stuck(hold_lock):
    if hold_lock:
        logging.getLogger().handlers[0].acquire()
    held.set()
    time.sleep(600)

held = threading.Event()

@contextmanager
def lifespan():
    try:
        pathlib.Path("first").touch(exist_ok=False)
    except FileExistsError:
        yield None
        return
    # Not a daemon: Python would wait for it.
    threading.Thread(target=stuck, args=(pathlib.Path("hold-lock").exists(),)).start()
    held.wait()
    raise RelayStuck("a handler could not be freed")

jobs = Jobs(lifespan=lifespan)

@jobs.handler(queue="ledger")
def record(ctx: Context, name: str) -> None: ...
"""


@pytest.fixture
def stuck_application(tmp_path: Path) -> Path:
    (tmp_path / "stuck.py").write_text(STUCK)
    return tmp_path


HANGING = """\
import asyncio, threading
from outboxq import AsyncContext, Backoff, Jobs

jobs = Jobs()

@jobs.handler(queue="ledger", retry=Backoff(max_attempts=1), timeout_seconds=1)
async def hang(ctx: AsyncContext) -> None:
    await asyncio.to_thread(threading.Event().wait)
"""


@pytest.mark.large
def test_a_thread_that_a_handler_left_behind_keeps_no_process(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], tmp_path: Path
) -> None:
    """Python would wait for it without an end."""
    (tmp_path / "hanging.py").write_text(HANGING)
    with sessions.begin() as session:
        session.add_job(external("hang", queue="ledger"))
    said = run("relay", "hanging:jobs", "--drain", url=outboxq_database.url, cwd=tmp_path).ok()
    assert "dead 1" in said.stdout
    assert "threads that handlers left behind are not waited for" in said.stderr


@pytest.mark.large
@pytest.mark.parametrize("hold_lock", [False, True])
def test_a_relay_with_a_stuck_handler_ends_with_3(
    outboxq_database: Database, stuck_application: Path, hold_lock: bool
) -> None:
    """The process ends though a thread that Python waits for goes on, and though it holds the log's own lock."""
    if hold_lock:
        (stuck_application / "hold-lock").touch()
    said = run("relay", "stuck:jobs", url=outboxq_database.url, cwd=stuck_application)
    assert said.exit_code == 3
    assert ("CRITICAL" in said.stderr) == (not hold_lock)
    assert "Traceback" not in said.stderr


@pytest.mark.large
def test_a_supervisor_replaces_a_relay_with_a_stuck_handler(
    outboxq_database: Database, stuck_application: Path
) -> None:
    """It says why, and the next process does the work."""
    said = run("relay", "stuck:jobs", "--processes", 2, "--drain", url=outboxq_database.url, cwd=stuck_application).ok()
    (line,) = [line for line in said.stderr.splitlines() if "starting another" in line]
    assert "could not be freed" in line


def test_a_relay_that_fails_ends_with_1(outboxq_database: Database, tmp_path: Path) -> None:
    """An error of the application's lifespan is no reason to pretend that all went well."""
    (tmp_path / "failing.py").write_text(
        STUCK.replace('raise RelayStuck("a handler could not be freed")', "raise ValueError").replace(
            "time.sleep(600)", ""
        )
    )
    said = run("relay", "failing:jobs", "--health-file", "health.json", url=outboxq_database.url, cwd=tmp_path)
    assert said.exit_code == 1
    assert not (tmp_path / "health.json").exists()


@pytest.mark.parametrize("options", [("--stall-seconds", 1), ("--health-file", "no/such/directory/health.json")])
def test_options_that_cannot_be_are_wrong_usage(outboxq_database: Database, options: tuple[object, ...]) -> None:
    """Nothing is started, and the message says what the option takes."""
    said = run("relay", TARGET, "--processes", 2, *options, url=outboxq_database.url, cwd=REPOSITORY)
    assert said.exit_code == 2
    (line,) = said.stderr.splitlines()
    assert line.startswith("Error: ")


def state(path: Path) -> object:
    return json.loads(path.read_text())["state"] if path.exists() else None


@pytest.mark.large
def test_the_health_file_follows_the_relay(
    outboxq_database: Database,
    outboxq_server: Server,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Serving, waiting for the database, serving, stopping, gone: and `outboxq health` says which of it is life."""
    path = tmp_path / "health.json"
    with started(*ONE_SLOT, "--health-file", path, url=outboxq_database.url) as process:
        wait_until(lambda: state(path) == "serving", "the relay to serve")
        assert json.loads(path.read_text()).keys() == {"state", "processes", "running", "pid", "at"}
        assert json.loads(path.read_text())["pid"] == process.pid
        said = call("health", path).ok()
        assert said.stdout == "alive: serving\n"
        engine.dispose()
        with closed_database(outboxq_server, outboxq_database):
            wait_until(lambda: state(path) == "waiting_for_database", "the relay to notice")
            call("health", path).ok()
        gate = tmp_path_factory.mktemp("gate") / "open"
        add_job_at(gate, sessions)
        wait_for_run(engine)
        wait_until(lambda: state(path) == "serving", "the file to tell so")
        process.terminate()
        wait_until(lambda: state(path) == "stopping", "the file to tell that it stops")
        assert call("health", path).exit_code == 1
        gate.touch()
        assert process.wait(PATIENCE) == 0
    assert list(tmp_path.iterdir()) == []
    said = call("health", path)
    assert said.exit_code == 1
    assert "there is no file" in said.stdout


@contextmanager
def closed_database(server: Server, database: Database) -> Iterator[None]:
    """Within the block nobody can connect to the database, and nobody is connected."""
    admin = create_engine(server.url, isolation_level="AUTOCOMMIT")
    name = make_url(database.url).database
    with admin.connect() as connection:
        connection.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'))
        end = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")
        connection.execute(end, {"name": name})
        try:
            yield
        finally:
            connection.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'))
    admin.dispose()


def test_a_supervisor_writes_one_health_file_for_all(outboxq_database: Database, tmp_path: Path) -> None:
    """It tells what the children do, and how many there are; a child that was killed is missing until it is back."""
    path = tmp_path / "health.json"
    with started(*ONE_SLOT, "--processes", 2, "--health-file", path, url=outboxq_database.url) as process:
        wait_until(lambda: state(path) == "serving", "a child to serve")
        found = call("health", path, "--json").ok().json
        assert found["alive"]
        assert (found["health"]["processes"], found["health"]["pid"]) == (2, process.pid)
        wait_until(lambda: json.loads(path.read_text())["running"] == 2, "both children")
        process.terminate()
        assert process.wait(PATIENCE) == 0
    assert not path.exists()


def test_the_state_follows_the_events() -> None:
    """A relay that stops is not said to serve again, whatever its last slots tell."""
    hook = StateHook()
    states = []
    for event in (
        DatabaseLost("OperationalError", 0.5),
        RelayStarted(("ledger",), 1, 3),
        DatabaseLost("OperationalError", 0.5),
        DatabaseBack(1.0),
        RelayStopping(1, 30.0),
        DatabaseBack(1.0),
    ):
        hook(event)
        states.append(hook.state)
    assert states == ["waiting_for_database", "serving", "waiting_for_database", "serving", "stopping", "stopping"]


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "there is no file"),
        ("", "no health file"),
        ("[]", "no health file"),
        ('{"state": "serving", "at": "yesterday"}', "no health file"),
        ('{"state": "serving", "at": "2026-01-01T00:00:00"}', "no health file"),
        ({"state": "stopping", "age": 0}, "stopping"),
        ({"state": "odd", "age": 0}, "odd"),
        ({"state": "serving", "age": 40}, " s ago, over the limit of 30 s"),
        ({"state": "serving", "age": -86_400}, "last written -86"),
    ],
)
def test_a_health_file_that_shows_no_life(tmp_path: Path, content: object, expected: str) -> None:
    """Missing, foreign, old, or from the future: not alive, and the reason is told."""
    path = tmp_path / "health.json"
    if isinstance(content, dict):
        written_at = datetime.now(UTC) - timedelta(seconds=content["age"])
        path.write_text(json.dumps({"state": content["state"], "at": written_at.isoformat()}))
    elif content is not None:
        path.write_text(str(content))
    said = call("health", path)
    assert said.exit_code == 1
    assert said.stdout.startswith("not alive: ")
    assert expected in said.stdout


def test_a_health_file_is_never_half_written(tmp_path: Path) -> None:
    """Whenever it is read, it is whole, while it is being replaced all the time."""
    path = tmp_path / "health.json"
    with health_file(path, lambda: Health("serving"), write_seconds=0.0):
        seen: set[str] = set()
        while len(seen) < 50:
            seen.add(path.read_text())
        assert all(json.loads(text)["state"] == "serving" for text in seen)
    assert list(tmp_path.iterdir()) == []


def test_a_health_file_that_cannot_be_written_for_a_while_is_no_reason_to_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory that goes and comes back: one warning, and the file is there again."""
    directory = tmp_path / "run"
    path = directory / "health.json"
    with pytest.raises(ConfigError, match="a directory that exists"), health_file(path, lambda: Health("serving")):
        pass
    directory.mkdir()
    with health_file(path, lambda: Health("serving"), write_seconds=0.01):
        directory.rename(tmp_path / "away")
        wait_until(lambda: caplog.records, "the warning")
        time.sleep(0.05)  # several more attempts, which say nothing
        (tmp_path / "away").rename(directory)
        before = path.read_text()
        wait_until(lambda: path.read_text() != before, "the file to be written again")
    assert len(caplog.records) == 1
    assert judge(path, 30).why.startswith("there is no file")


@pytest.mark.large
def test_the_probe_is_quick() -> None:
    """A container runs it every few seconds: it imports neither SQLAlchemy nor a driver."""
    code = (
        "import sys\n"
        "from outboxq.__main__ import main\n"
        "try:\n    main(['health', '/no/such/file'])\n"
        "except SystemExit as end:\n    assert end.code == 1\n"
        "heavy = {'sqlalchemy', 'psycopg', 'alembic', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, capture_output=True)
