"""What `outboxq relay` logs: text with times in UTC, or JSON, of the application too."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, external
from outboxq.postgres import Database
from tests.support import app
from tests.support.cli import REPOSITORY, command, environment, run
from tests.support.waiting import PATIENCE

APPLICATION = """\
import logging
{set_up}
from outboxq import Context, Jobs

jobs = Jobs()
logging.getLogger("myapp").warning("imported")


@jobs.handler(queue="q")
def work(ctx: Context) -> None:
    ctx.log.warning("working", extra={{"step": 1}})
    logging.getLogger("myapp").warning("two\\nlines")
"""
TRACE = "0af7651916cd43dd8448eb211c80319c"
work = external("work", queue="q").options(headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})


def drained(
    directory: Path, url: str, sessions: sessionmaker[OutboxSession], *options: str, set_up: str = ""
) -> list[str]:
    """What a relay of this application logged while it ran one job."""
    (directory / "application.py").write_text(APPLICATION.format(set_up=set_up))
    with sessions.begin() as session:
        session.add_job(work)
    said = run("relay", "application:jobs", "--drain", *options, url=url, cwd=directory).ok()
    return said.stderr.splitlines()


def test_text_has_times_in_utc(
    tmp_path: Path, outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """With their zone, as the JSON has them."""
    (started,) = [line for line in drained(tmp_path, outboxq_database.url, sessions) if "relay started" in line]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO \[\d+\] relay started: ", started)


@pytest.mark.parametrize("set_up", ["", "logging.basicConfig(format='mine: %(message)s')"], ids=["none", "basicConfig"])
def test_every_line_is_json_if_asked_for(
    set_up: str, tmp_path: Path, outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """The application's records too, those of before the relay has begun included, though it calls `basicConfig`."""
    lines = drained(tmp_path, outboxq_database.url, sessions, "--log-format", "json", set_up=set_up)
    records = [json.loads(line) for line in lines]
    messages = [record["message"] for record in records]
    assert messages == ["imported", "relay started", "working", "two\nlines", "relay stopped"]
    working = records[2]
    assert (working["logger"], working["trace_id"], working["fields"]["step"]) == ("outboxq.handler", TRACE, 1)


def test_the_applications_own_set_up_stands_without_the_option(
    tmp_path: Path, outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """A format that it has chosen is not replaced."""
    set_up = "logging.basicConfig(format='mine: %(message)s')"
    lines = drained(tmp_path, outboxq_database.url, sessions, set_up=set_up)
    assert "mine: working" in lines
    assert any(line.startswith("mine: relay started") for line in lines)


def test_an_error_at_the_start_is_json_too(outboxq_database: Database) -> None:
    """One line that a collector of logs can read; the exit code stays."""
    said = run("relay", "nosuch:jobs", "--log-format", "json", url=outboxq_database.url, cwd=REPOSITORY)
    assert said.exit_code == 2
    (line,) = said.stderr.splitlines()
    record = json.loads(line)
    assert record["level"] == "CRITICAL"
    assert "no module 'nosuch'" in record["message"]


def test_the_processes_of_a_supervisor_log_json_too(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """The option reaches the children."""
    with sessions.begin() as session:
        session.add_job(app.record, name="a")
    options = ("--processes", 2, "--drain", "--log-format", "json")
    said = run("relay", "tests.support.app:jobs", *options, url=outboxq_database.url, cwd=REPOSITORY).ok()
    events = [json.loads(line)["event"] for line in said.stderr.splitlines()]
    assert sorted(events) == ["RelayStarted", "RelayStarted", "RelayStopped", "RelayStopped"]


def test_a_relay_says_that_it_waits(outboxq_database: Database) -> None:
    """After what it serves, so that silence is understood; not if it drains."""
    words = command("relay", "tests.support.app:jobs")
    with subprocess.Popen(
        words, cwd=REPOSITORY, env=environment(outboxq_database.url), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        started, waiting = process.stderr.readline(), process.stderr.readline()
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert "relay started: queues=" in started
    assert waiting.endswith("waiting for jobs, until SIGTERM or Ctrl-C\n")
    drained_relay = run("relay", "tests.support.app:jobs", "--drain", url=outboxq_database.url, cwd=REPOSITORY).ok()
    assert "waiting for jobs" not in drained_relay.stderr
