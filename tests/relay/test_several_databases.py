"""Several databases: a set of relays for each under one supervisor, and one that goes away stops no other."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, shard_of
from outboxq.errors import ArgumentError
from outboxq.postgres import Database, Server
from tests.support import app
from tests.support.cli import call, run
from tests.support.own_server import own_database, own_server
from tests.support.waiting import PATIENCE, wait_until

# Whole programs.
pytestmark = pytest.mark.large


@pytest.fixture
def second(outboxq_server: Server) -> Iterator[Database]:
    """Another database with the application's tables."""
    with outboxq_server.create_database() as database:
        app.prepare(database.url)
        yield database


@contextmanager
def relays(*options: str, urls: tuple[str, ...]) -> Iterator["subprocess.Popen[bytes]"]:
    """`outboxq relay` for several databases; ended at the end."""
    command = [sys.executable, "-m", "outboxq", "relay", "tests.support.app:jobs", "--queue", "ledger=1", *options]
    environment = {**os.environ, "OUTBOXQ_DATABASE_URL": " ".join(urls)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def add(url: str, name: str) -> None:
    engine = create_engine(url)
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        session.add_job(app.record, name=name)
    engine.dispose()


def execute(url: str, statement: str, *, end_sessions: bool = False) -> None:
    """In a transaction of its own; then, if asked for, end the relays' sessions."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(statement))
        if end_sessions:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND application_name LIKE 'outboxq%'"
                )
            )
    engine.dispose()


def recorded(url: str) -> list[str]:
    engine = create_engine(url)
    with engine.connect() as connection:
        found = list(connection.execute(text("SELECT name FROM effect_ledger ORDER BY name")).scalars())
    engine.dispose()
    return found


def test_a_database_that_goes_away_and_comes_back_stops_no_other(outboxq_database: Database) -> None:
    """Its own jobs wait, those of the other run on, and one SIGTERM ends both sets with 0."""
    with own_server() as server, own_database(server) as (second, _):
        urls = (outboxq_database.url, second.url)
        with relays("--poll-seconds", "0.2", urls=urls) as process:
            for url in urls:
                add(url, "before")
            wait_until(lambda: all(recorded(url) == ["before"] for url in urls), "both")
            server.stop_immediately()
            add(outboxq_database.url, "meanwhile")
            wait_until(lambda: recorded(outboxq_database.url) == ["before", "meanwhile"], "the one that is there")
            server.start_again()
            add(second.url, "later")
            wait_until(lambda: recorded(second.url) == ["before", "later"], "the one that came back")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0


def test_a_database_that_refuses_its_relays_later_stops_no_other(outboxq_database: Database, second: Database) -> None:
    """Theirs are started again after pauses, and work when the tables are there again."""
    urls = (outboxq_database.url, second.url)
    options = ("--poll-seconds", "0.2", "--log-format", "json")
    with relays(*options, urls=urls) as process:
        add(second.url, "before")
        wait_until(lambda: recorded(second.url) == ["before"], "the second one")
        execute(second.url, "ALTER SCHEMA outboxq RENAME TO elsewhere", end_sessions=True)
        add(outboxq_database.url, "first")
        wait_until(lambda: recorded(outboxq_database.url) == ["first"], "the other one")
        execute(second.url, "ALTER SCHEMA elsewhere RENAME TO outboxq")
        add(second.url, "mended")
        wait_until(lambda: recorded(second.url) == ["before", "mended"], "the one that was mended")
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
    names = {line.get("database") for line in map(json.loads, logged.decode().splitlines()) if "database" in line}
    assert names == {str(make_url(url).database) for url in urls}


def test_a_database_that_refuses_at_the_start_is_named(outboxq_database: Database, outboxq_server: Server) -> None:
    """Before anything starts, with 2: no restart mends a wrong name."""
    wrong = make_url(outboxq_database.url).set(database="no_such_database").render_as_string(hide_password=False)
    with relays(urls=(outboxq_database.url, wrong)) as process:
        _, logged = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2
    assert b"no_such_database" in logged


def test_a_drain_of_several_databases_ends_when_all_are_drained(outboxq_database: Database, second: Database) -> None:
    """With 0, and a line for each with its name."""
    urls = (outboxq_database.url, second.url)
    for url in urls:
        add(url, "once")
    with relays("--drain", urls=urls) as process:
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
    lines = sorted(line for line in said.decode().splitlines() if ": done" in line)
    assert lines == sorted(f"{make_url(url).database}: done 1, failed attempts 0, dead 0" for url in urls)


def test_stats_and_doctor_look_at_several_databases(outboxq_database: Database, second: Database) -> None:
    """Each by its name; one that cannot be reached is named, and the others are shown."""
    add(second.url, "waiting")
    urls = [outboxq_database.url, second.url]
    names = [make_url(url).database for url in urls]
    options = [part for url in urls for part in ("--database-url", url)]
    found = call("stats", "--json", *options).ok().json["databases"]
    assert [each["database"] for each in found] == names
    assert [sum(queue["ready"] for queue in each["queues"]) for each in found] == [0, 1]
    assert all(f"{name}:" in call("stats", *options).ok().stdout for name in names)
    gone = make_url(outboxq_database.url).set(port=1, host="127.0.0.1").render_as_string(hide_password=False)
    partly = call("stats", "--json", "--database-url", gone, "--database-url", second.url)
    assert partly.exit_code == 1
    assert [each["database"] for each in partly.json["databases"]] == [f"{name}" for name in names[1:]]
    examined = call("doctor", "--json", *options).json["databases"]
    assert [each["database"] for each in examined] == names


@pytest.mark.wide
def test_each_line_about_one_of_several_databases_names_it(
    outboxq_database: Database, outboxq_server: Server, tmp_path: Path
) -> None:
    """Of stats, of the doctor and of the relays, whatever is wrong with it; stats looks at the others all the same."""
    name = make_url(outboxq_database.url).database
    wrong = make_url(outboxq_database.url).set(query={"connect_timeout": "soon"}, database="wrong")
    with outboxq_server.create_database() as empty:
        bare = make_url(empty.url).database
        urls = [empty.url, wrong.render_as_string(hide_password=False), outboxq_database.url]
        options = [part for url in urls for part in ("--database-url", url)]
        said = call("stats", *options)
        assert said.exit_code == 2
        without, unusable, nothing = said.stderr.splitlines()
        assert without.startswith(f"{bare}: ")
        assert "`outboxq migrate`" in without
        assert unusable.startswith("wrong: the database URL cannot be used: bad value for connect_timeout")
        assert nothing == f"{name}: no queues found"
        assert call("stats", "--database-url", empty.url, "--database-url", outboxq_database.url).exit_code == 1
        for command in (("doctor",), ("relay", "tests.support.app:jobs", "--drain")):
            said = run(*command, *options[2:])
            assert said.exit_code == 2
            assert said.stderr.startswith("Error: wrong: the database URL cannot be used")
        said = run("relay", "tests.support.app:jobs", "--drain", *options[:2], *options[-2:])
        assert said.exit_code == 2
        assert said.stderr.startswith(f"Error: {bare}: ")
        # In a process of one of them, what its application does not allow.
        (tmp_path / "broken.py").write_text("from outboxq import Jobs\njobs = Jobs()\njobs.limit('mail', running=0)\n")
        app.prepare(empty.url)
        said = run("relay", "broken:jobs", "--drain", *options[:2], *options[-2:], cwd=tmp_path)
        errors = sorted(line for line in said.stderr.splitlines() if line.startswith("Error: "))
        assert [line.split(": ")[1] for line in errors] == sorted([str(bare), str(name)])


@pytest.mark.wide
@pytest.mark.parametrize(
    "garbage",
    ["root:hunter2", "://root:hunter2@x/y", "postgres_ql://root:hunter2@x/y", "postgresql://root:hunter2@x:port/y"],
)
@pytest.mark.parametrize("command", [("stats",), ("doctor",), ("relay", "tests.support.app:jobs", "--drain")])
def test_garbage_among_several_urls_is_refused_without_a_word_of_it(
    outboxq_database: Database, garbage: str, command: tuple[str, ...]
) -> None:
    """Which one it is, and what was expected; it may hold a password, and be taken for the name of a database."""
    for said in (
        run(*command, "--database-url", outboxq_database.url, "--database-url", garbage),
        run(*command, env={"OUTBOXQ_DATABASE_URL": f"{outboxq_database.url} {garbage}"}),
    ):
        assert said.exit_code == 2
        (line,) = said.stderr.splitlines()
        assert re.match("Error: (URL 2 of 2: |the text after URL 1 and a space is no PostgreSQL URL)", line)
        assert "postgresql://" in line
        assert "hunter2" not in line


def test_a_command_for_one_database_refuses_several(outboxq_database: Database, second: Database) -> None:
    """And so does a database that is named twice."""
    both = {"OUTBOXQ_DATABASE_URL": f"{outboxq_database.url} {second.url}"}
    refused = run("jobs", "list", env=both)
    assert (refused.exit_code, "works on one" in refused.stderr) == (2, True)
    url = outboxq_database.url
    twice = call("stats", "--database-url", url, "--database-url", url)
    assert (twice.exit_code, "named twice" in twice.stderr) == (2, True)


def test_a_key_stays_on_its_shard() -> None:
    """These are fixed: a key that moved would be looked for where it is not."""
    shards = ["eu-1", "eu-2", "us-1"]
    assert [shard_of(key, shards) for key in ("tenant-1", "tenant-2", "tenant-3", "", "ä")] == FIXED
    keys = [f"tenant-{number}" for number in range(3_000)]
    before = {key: shard_of(key, shards) for key in keys}
    assert all(900 < list(before.values()).count(name) < 1_100 for name in shards)
    after = {key: shard_of(key, [*reversed(shards), "us-2"]) for key in keys}
    assert {after[key] for key in keys if after[key] != before[key]} == {"us-2"}
    for wrong in ([], ["a", "a"], "abc"):
        with pytest.raises(ArgumentError):
            shard_of("key", wrong)


FIXED = ["eu-2", "eu-2", "eu-1", "eu-2", "eu-2"]
