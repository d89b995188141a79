"""`outboxq relay --reload`: a relay that is started anew when the application's files change."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, external
from outboxq.postgres import Database
from tests.support.cli import REPOSITORY, Outcome, command, environment, run
from tests.support.waiting import PATIENCE, wait_until

# Whole programs.
pytestmark = pytest.mark.large

APPLICATION = """\
from outboxq import Context, Jobs
from sqlalchemy import text

jobs = Jobs()


@jobs.handler(queue="q")
def say(ctx: Context) -> None:
    ctx.session.execute(text("SELECT pg_advisory_xact_lock_shared(7)"))
    ctx.session.execute(text("INSERT INTO said VALUES ('{word}')"))
"""
say = external("say", queue="q")


class Reloading:
    """A relay with `--reload`, and what it and its children have logged."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self.process = process
        self.lines: list[str] = []
        self._source = directory / "myapp" / "jobs.py"
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def write(self, source: str) -> None:
        """Write it as in the same second: with as many bytes, its cache would be taken for current."""
        before = self._source.stat().st_mtime
        self._source.write_text(source)
        os.utime(self._source, (before, before))

    def wait_for(self, words: str, times: int = 1) -> None:
        wait_until(lambda: sum(words in line for line in self.lines) >= times, f"{words!r} in {self.lines}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


@pytest.fixture
def application(tmp_path: Path, engine: Engine) -> Path:
    """An application in a directory of its own, and the table that it writes."""
    (tmp_path / "myapp").mkdir()
    (tmp_path / "myapp" / "__init__.py").touch()
    (tmp_path / "myapp" / "jobs.py").write_text(APPLICATION.format(word="one"))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE said (word text)"))
    return tmp_path


@contextmanager
def reloading(directory: Path, url: str, *options: object) -> Iterator[Reloading]:
    """`outboxq relay --reload` in the application's directory; neither it nor its children outlive the block."""
    words = command("relay", "myapp.jobs:jobs", "--reload", "--poll-seconds", 0.5, *options)
    env = {name: value for name, value in environment(url).items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(words, cwd=directory, env=env, stderr=subprocess.PIPE, text=True) as process:
        relay = Reloading(process, directory)
        try:
            yield relay
        finally:
            left = relay.children() if process.poll() is None else []
            for each in (process, *left):
                each.kill()


def words_said(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT word FROM said ORDER BY word")).scalars())


@pytest.mark.wide
def test_a_change_starts_the_relay_with_the_new_code(
    application: Path, outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Also after a syntax error, with which the relay ends and is started again by the next change; Ctrl-C ends all."""
    with reloading(application, outboxq_database.url) as relay:
        relay.wait_for("waiting for jobs")
        _say(sessions)
        wait_until(lambda: words_said(engine) == ["one"], "the first code to run")
        relay.write(APPLICATION.format(word="two"))
        relay.wait_for("waiting for jobs", times=2)
        _say(sessions)
        wait_until(lambda: words_said(engine) == ["one", "two"], "the second code to run")
        relay.write("def (\n")
        relay.wait_for("SyntaxError")
        relay.wait_for("ended with exit code 2: it starts again when a .py file changes")
        assert relay.children() == []
        relay.write(APPLICATION.format(word="zzz"))
        relay.wait_for("waiting for jobs", times=3)
        _say(sessions)
        wait_until(lambda: words_said(engine) == ["one", "two", "zzz"], "the third code to run")
        children = relay.children()
        assert len(children) == 1
        assert relay.end(signal.SIGINT) == 0
        assert not children[0].is_running()
    assert sum("myapp/jobs.py has changed" in line for line in relay.lines) == 3


def _say(sessions: sessionmaker[OutboxSession]) -> None:
    with sessions.begin() as session:
        session.add_job(say)


@pytest.mark.wide
def test_a_running_handler_ends_before_the_relay_is_started_again(
    application: Path, outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """A change does not roll back what is being done: the old code finishes its job."""
    with reloading(application, outboxq_database.url) as relay, engine.connect() as holder:
        holder.execute(text("SELECT pg_advisory_lock(7)"))
        relay.wait_for("waiting for jobs")
        _say(sessions)
        wait_until(lambda: _waits(engine), "the handler to wait")
        relay.write(APPLICATION.format(word="two"))
        relay.wait_for("relay is stopping")
        assert words_said(engine) == []
        holder.execute(text("SELECT pg_advisory_unlock(7)"))
        relay.wait_for("waiting for jobs", times=2)
        assert words_said(engine) == ["one"]
        assert relay.end(signal.SIGTERM) == 0


def _waits(engine: Engine) -> bool:
    with engine.connect() as connection:
        waiting = text(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' AND datname = current_database()"
        )
        return connection.execute(waiting).scalar_one() > 0


@pytest.mark.wide
def test_other_files_change_nothing(application: Path, outboxq_database: Database) -> None:
    """Only .py files count, and only those of the directories that are named."""
    watched = application / "watched"
    watched.mkdir()
    with reloading(application, outboxq_database.url, "--reload-dir", watched) as relay:
        relay.wait_for("waiting for jobs")
        relay.write(APPLICATION.format(word="two"))
        (watched / "notes.txt").write_text("nothing")
        (watched / "more.py").write_text("x = 1\n")
        relay.wait_for("watched/more.py has changed: starting")
        relay.wait_for("waiting for jobs", times=2)
        assert relay.end(signal.SIGTERM) == 0
    assert sum("has changed" in line for line in relay.lines) == 1


def test_the_relay_ends_if_the_process_that_watches_is_killed(application: Path, outboxq_database: Database) -> None:
    """It sees the end of the pipe, and stops as it does at SIGTERM."""
    with reloading(application, outboxq_database.url) as relay:
        relay.wait_for("waiting for jobs")
        (child,) = relay.children()
        relay.end(signal.SIGKILL)
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the relay to end")
    relay.wait_for("relay stopped")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--reload", "--processes", 2), "leave --processes out"),
        (("--reload", "--drain"), "leave --drain out"),
        (("--reload-dir", "."), "add --reload"),
        (("--reload", "--reload-dir", "nosuch"), "none at nosuch"),
    ],
)
def test_what_cannot_be_reloaded_is_wrong_usage(
    options: tuple[object, ...], expected: str, outboxq_database: Database
) -> None:
    """Development wants one relay that stays: exit code 2, and what to do."""
    said = run("relay", "tests.support.app:jobs", *options, url=outboxq_database.url, cwd=REPOSITORY)
    assert said.exit_code == 2
    assert expected in said.stderr.splitlines()[-1]


@pytest.mark.wide
def test_without_the_extra_it_says_what_to_install(outboxq_database: Database) -> None:
    """No traceback of a missing module: exit code 2, and the extra's name."""
    code = (
        "import sys\nsys.modules['watchfiles'] = None\nfrom outboxq.__main__ import main\n"
        "main(['relay', 'tests.support.app:jobs', '--reload'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(outboxq_database.url), capture_output=True, text=True, check=False
    )
    said = Outcome(done.returncode, done.stdout, done.stderr)
    assert said.exit_code == 2, said
    assert said.stderr == "Error: --reload needs watchfiles: pip install 'outboxq[reload]'\n"
