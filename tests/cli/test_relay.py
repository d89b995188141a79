"""`outboxq relay` and `outboxq migrate`, as processes."""

import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from sqlalchemy import URL, Engine, create_engine, make_url, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, external
from outboxq.cli.relay import RelayOptions
from outboxq.postgres import Database
from tests.support import app
from tests.support.cli import REPOSITORY, call, command, environment, run
from tests.support.leases import lease
from tests.support.ledger import effects, waiting
from tests.support.own_server import own_server
from tests.support.waiting import PATIENCE, wait_until

TARGET = "tests.support.app:jobs"


@pytest.fixture
def role(outboxq_database: Database, engine: Engine) -> Iterator[str]:
    """The URL of a role with a password that shows wherever it leaks."""
    url = make_url(outboxq_database.url)
    name = f"relay_{url.database}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {name} SUPERUSER LOGIN PASSWORD 'hunter2-do-not-print'"))
    yield url.set(username=name, password="hunter2-do-not-print").render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text(f"DROP ROLE {name}"))


@contextmanager
def started(*arguments: object, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A relay's process, which does not outlive the block."""
    with subprocess.Popen(
        command("relay", *arguments), cwd=REPOSITORY, env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_drained_relay_ends_when_nothing_waits(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """`--drain` runs what waits, sync and async, says how it went, and ends with 0 whatever became of the jobs."""
    with sessions.begin() as session:
        session.add_job(app.record, name="a")
        session.add_job(app.record_async, name="b")
        session.add_job(app.fail, name="c")
    said = run("relay", TARGET, "--drain", "--batch-size", 10, url=outboxq_database.url, cwd=REPOSITORY).ok()
    assert said.stdout == "done 2, failed attempts 3, dead 1\n"
    assert effects(engine) == ["a", "b"]
    assert waiting(engine) == 0
    started = [line for line in said.stderr.splitlines() if "relay started" in line]
    assert len(started) == 1
    assert " INFO [" in started[0]


def test_a_drained_relay_says_what_is_left(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """How many jobs of each sort a drain does not wait for: nothing ready or due is not nothing at all."""
    late = app.record.options(delay=timedelta(hours=1))
    with sessions.begin() as session:
        session.add_jobs([late.job(name="later")] * 4)
        session.add_job(external("mystery", queue="ledger"))
        session.add_job(app.record_async, name="paused")
        session.add_jobs([external("ship", queue="depot").job()] * 2)
        session.add_jobs([late.job(name="failed")] * 3)
        session.add_job(external("held", queue="ledger"))
        session.execute(text("INSERT INTO outboxq.queue VALUES ('ledger-async', now())"))
        session.flush()
        # As an attempt leaves a job that failed, and a relay one that it holds.
        session.execute(text("UPDATE outboxq.job SET attempt = 1 WHERE args ->> 'name' = 'failed'"))
        held = session.execute(text("SELECT id FROM outboxq.job WHERE kind = 'held'")).scalar_one()
        lease(session.connection(), held, "1 hour")
    said = run(
        "relay", TARGET, "--drain", "--queue", "ledger", "--queue", "ledger-async", url=outboxq_database.url,
        cwd=REPOSITORY,
    ).ok()  # fmt: skip
    assert said.stdout == (
        "done 0, failed attempts 0, dead 0\n"
        "left: 3 in backoff after a failed attempt, 4 due later, "
        "1 of kinds that are paused, or that this registry does not know, 1 in paused queues, "
        "1 held by others, or new, 2 in queues that are not served\n"
    )


def test_only_the_queues_that_are_named_are_served(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """`--queue` leaves the other queues alone."""
    with sessions.begin() as session:
        session.add_job(app.record, name="a")
        session.add_job(app.record_async, name="b")
    run("relay", TARGET, "--drain", "--queue", "ledger=2", url=outboxq_database.url, cwd=REPOSITORY).ok()
    assert effects(engine) == ["a"]


LEASED_TARGET = "tests.support.failover_app:jobs"


def test_calls_share_as_many_connections_as_the_command_line_says(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """`--call-connections 3`: the first log line has slots and connections apart, and those of calls."""
    with sessions.begin() as session:
        session.add_jobs([external("record_under_lease", queue="leased").job(name=f"{n:02}") for n in range(20)])
    said = run(
        "relay", LEASED_TARGET, "--drain", "--queue", "leased=30", "--queue", "ledger=2", "--call-connections", 3,
        url=outboxq_database.url, cwd=REPOSITORY,
    ).ok()  # fmt: skip
    assert effects(engine) == [f"{n:02}" for n in range(20)]
    (started,) = [line for line in said.stderr.splitlines() if "relay started" in line]
    # The dispatcher's, those of its calls, of two slots, and of the lease.
    assert started.partition("relay started: ")[2] == (
        "queues=leased,ledger slots=32 connections=7 call_slots=30 call_connections=3"
    )


@pytest.mark.parametrize("given", [None, 7])
def test_each_process_shares_as_many_connections_as_its_supervisor_was_told(given: int | None) -> None:
    """The children's command lines hold `--call-connections` if it was given, and else leave the default alone."""
    options = RelayOptions(target=TARGET, call_connections=given)
    line = options.of_one_process()
    assert line.count("--call-connections") == (given is not None)
    assert given is None or line[line.index("--call-connections") + 1] == "7"
    assert options.config(None).call_connections == given


def test_a_batch_size_is_refused_if_all_queues_are_in_lease_mode(outboxq_database: Database) -> None:
    """A relay that could not use it does not start, and says what to give instead."""
    done = run(
        "relay", LEASED_TARGET, "--drain", "--queue", "leased=2", "--batch-size", 10, url=outboxq_database.url,
        cwd=REPOSITORY,
    )  # fmt: skip
    assert done.exit_code == 2, done
    assert "batch_size=10 is for queues in transaction mode" in done.stderr
    assert "leased=10" in done.stderr


@pytest.mark.wide
def test_the_registry_is_found_in_the_current_directory(outboxq_database: Database, tmp_path: Path) -> None:
    """The console script finds `myapp.jobs` where it is called, as `python -m` does."""
    package = tmp_path / "myapp"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "jobs.py").write_text(
        "from outboxq import Context, Jobs\n\njobs = Jobs()\n\n\n"
        "@jobs.handler()\ndef greet(ctx: Context, name: str) -> None: ...\n"
    )
    script = Path(command()[0]).with_name("outboxq")
    done = subprocess.run(
        [script, "relay", "myapp.jobs:jobs", "--drain"],
        cwd=tmp_path, env=environment(outboxq_database.url), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done 0, failed attempts 0, dead 0\n"), done.stderr


def test_log_level_silences_what_is_below_it(outboxq_database: Database) -> None:
    """`--log-level error` leaves nothing to read where nothing failed."""
    said = run("relay", TARGET, "--drain", "--log-level", "error", url=outboxq_database.url, cwd=REPOSITORY).ok()
    assert said.stderr == ""


@pytest.mark.wide
def test_a_relay_stops_on_sigterm_when_its_handler_is_done(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """SIGTERM lets the running handler commit, and ends the process with 0."""
    with sessions.begin() as session:
        session.add_job(app.record_slowly, name="slow", seconds=3.0)
    with started(TARGET, env=environment(outboxq_database.url)) as process:
        wait_until(lambda: call("jobs", "list", "--running", "--json", url=outboxq_database.url).json["jobs"], "a run")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert effects(engine) == ["slow"]


@pytest.mark.wide
@pytest.mark.usefixtures("fresh_processes")
def test_several_processes_get_the_url_where_nobody_else_can_read_it(
    role: str, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """The children's command lines hold neither URL; their environment does. SIGTERM ends them all."""
    options = ("--processes", 2, "--queue", "ledger=2", "--batch-size", 5, "--poll-seconds", 0.5)
    with started(TARGET, *options, env=environment(role, OUTBOXQ_LISTEN_URL=role)) as process:
        children = wait_until(
            lambda: len(found := psutil.Process(process.pid).children()) == 2 and found, "two relay processes"
        )
        wait_until(lambda: relays(engine) >= 2, "both relays to listen")
        lines = [child.cmdline() for child in children]
        variables = [child.environ() for child in children]
        with sessions.begin() as session:
            session.add_job(app.record, name="by a child")
        wait_until(lambda: effects(engine) == ["by a child"], "the job to be done")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert not any(child.is_running() for child in children)
    for line, environ in zip(lines, variables, strict=True):
        assert "hunter2" not in " ".join(line)
        assert line[line.index("relay") :][:2] == ["relay", TARGET]
        assert tuple(line[line.index("--queue") :][:2]) == ("--queue", "ledger=2")
        assert tuple(line[line.index("--batch-size") :][:2]) == ("--batch-size", "5")
        assert "hunter2" in environ["OUTBOXQ_DATABASE_URL"]
        assert "hunter2" in environ["OUTBOXQ_LISTEN_URL"]
    assert "hunter2" not in errors


def relays(engine: Engine) -> int:
    """How many listeners are connected to this test's database."""
    with engine.connect() as connection:
        return connection.execute(
            text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name = 'outboxq listener'"
            )
        ).scalar_one()


def test_several_processes_drain_together(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """`--processes 2 --drain` ends with 0 when both have found nothing more, each job done once."""
    with sessions.begin() as session:
        for number in range(20):
            session.add_job(app.record, name=f"{number:02}")
    run("relay", TARGET, "--processes", 2, "--drain", url=outboxq_database.url, cwd=REPOSITORY).ok()
    assert effects(engine) == [f"{number:02}" for number in range(20)]


def test_processes_that_cannot_be_started_like_this_end_it(outboxq_database: Database) -> None:
    """A wrong target is no reason to start children again and again: the whole ends with 2."""
    said = run("relay", "tests.support.app:nosuch", "--processes", 2, url=outboxq_database.url, cwd=REPOSITORY)
    assert said.exit_code == 2
    assert "has no 'nosuch'" in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.first_and_last
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"database": "not there"}, 'database "not there" does not exist'), ({"username": "stranger"}, "stranger")],
)
def test_what_the_server_refuses_at_the_first_connection_ends_the_relay(
    outboxq_database: Database, wrong: dict[str, str], said: str, processes: int
) -> None:
    """With the server's own words, once: no waiting mends a wrong database or role."""
    url = make_url(outboxq_database.url).set(**wrong).render_as_string(hide_password=False)
    ended = run("relay", TARGET, "--processes", processes, url=url, cwd=REPOSITORY)
    assert ended.exit_code == 2
    assert ended.stderr.startswith("Error: ")
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.fixture
def hba() -> Iterator[Path]:
    """A pg_hba.conf by which `postgres` gets in, `worker` with a password, and no other role."""
    with tempfile.TemporaryDirectory(prefix="outboxq-test-") as name:
        path = Path(name, "pg_hba.conf")
        path.write_text("host all postgres 127.0.0.1/32 trust\nhost all worker 127.0.0.1/32 scram-sha-256\n")
        # The server's own user reads it.
        path.parent.chmod(0o755)
        yield path


@pytest.mark.wide
def test_a_role_that_the_server_does_not_let_in_ends_the_relay(hba: Path) -> None:
    """Exit code 2 and one line: for a wrong password, for none, and for a role without a line in pg_hba.conf."""
    words = {"worker:wrong": "authentication failed", "worker": "no password supplied", "other": "no pg_hba.conf entry"}
    with own_server({"hba_file": str(hba)}) as server:
        engine = create_engine(server.url)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE ROLE worker LOGIN PASSWORD 'right'; CREATE ROLE other LOGIN")
        engine.dispose()
        for login, said in words.items():
            name, _, password = login.partition(":")
            url = make_url(server.url).set(username=name, password=password or None)
            ended = run("relay", TARGET, url=url.render_as_string(hide_password=False), cwd=REPOSITORY)
            assert (ended.exit_code, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
            assert said in ended.stderr
            assert "wrong" not in ended.stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_missing_tables_end_the_relay_with_one_error(outboxq_database: Database, empty: Engine, processes: int) -> None:
    """However many processes: what is missing and the command that makes it, said once."""
    ended = run("relay", TARGET, "--processes", processes, url=outboxq_database.url, cwd=REPOSITORY)
    assert ended.exit_code == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "run `outboxq migrate`" in ended.stderr


@pytest.mark.wide
def test_a_relay_says_why_it_waits_for_its_database(outboxq_database: Database) -> None:
    """While no server answers the relay waits, and its log names host, port and cause; SIGTERM ends the wait."""
    with socket.socket() as bound:
        # Bound and not listening: refused, and no other process's meanwhile.
        bound.bind(("127.0.0.1", 0))
        url = make_url(outboxq_database.url).set(
            host="127.0.0.1", port=bound.getsockname()[1], password="hunter2-do-not-print", query={}
        )
        _waits(url)


def _waits(url: URL) -> None:
    with started(TARGET, env=environment(url.render_as_string(hide_password=False))) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert f":{url.port}: " in line
        assert "Connection refused" in line
        for _ in range(3):
            again = process.stderr.readline()
            assert "trying again" in again
            assert "(Connection refused)" in again
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "hunter2" not in line + rest


@pytest.fixture
def empty(outboxq_database: Database, engine: Engine) -> Engine:
    """This test's database without outboxq's tables."""
    call("migrate", "--to", 0, url=outboxq_database.url).ok()
    return engine


def test_migrate_installs_the_tables_once(outboxq_database: Database, empty: Engine) -> None:
    """A second run finds nothing to do; JSON names the steps."""
    url = outboxq_database.url
    first = run("migrate", "--json", url=url).ok().json
    assert (first["schema"], first["before"]) == ("outboxq", 0)
    assert first["after"] > 0
    again = run("migrate", url=url).ok().stdout
    assert again == f"schema 'outboxq' is at step {first['after']} already\n"
    assert run("stats", "--json", url=url).ok().json == {
        "queues": [],
        "parked_kinds": [],
        "unknown_effects": 0,
        "standby_delay_seconds": None,
    }


def test_migrate_prints_sql_without_a_database(outboxq_database: Database, empty: Engine) -> None:
    """`--sql` asks nobody, and what it prints installs the tables."""
    sql = run("migrate", "--sql").ok().stdout
    bare = create_engine(outboxq_database.url, isolation_level="AUTOCOMMIT")
    with bare.connect() as connection:
        connection.connection.cursor().execute(sql)
    bare.dispose()
    run("stats", url=outboxq_database.url).ok()


def test_migrate_refuses_to_drop_jobs(outboxq_database: Database, sessions: sessionmaker[OutboxSession]) -> None:
    """Going back is the database's to refuse while jobs wait, with what to do about them."""
    with sessions.begin() as session:
        session.add_job(app.record, name="precious")
    said = run("migrate", "--to", 0, url=outboxq_database.url)
    assert said.exit_code == 1
    (line,) = said.stderr.splitlines()
    assert "would drop jobs" in line
    assert "outboxq jobs cancel" in line
    run("stats", url=outboxq_database.url).ok()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--to", "99"), "to=99"),
        (("--to", "-1"), "to=-1"),
        (("--sql", "--json"), "--json"),
        (("--schema", ""), "schema"),
    ],
)
def test_migrate_refuses_what_cannot_be(outboxq_database: Database, options: tuple[str, ...], expected: str) -> None:
    """Steps and schemas that do not exist are wrong usage."""
    said = call("migrate", *options, url=outboxq_database.url)
    assert said.exit_code == 2
    assert expected in said.stderr
    assert said.stderr.startswith('{"error":' if "--json" in options else "Error: ")
