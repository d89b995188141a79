"""Step 11 beside code of the step before, and today's code on the tables of step 10."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outboxq import Relay
from outboxq.events import Event, JobDone
from outboxq.migrations import LATEST
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from tests.migrations.catalog import read_catalog
from tests.support import app
from tests.support.cli import REPOSITORY, environment, run
from tests.support.ledger import enqueue, ledger, of
from tests.support.waiting import PATIENCE

# The last commit whose latest step was 10.
OLD = "7d1eacf"
PRODUCER = """
import sys
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from outboxq import OutboxSession
from outboxq.migrations import LATEST
from tests.support import app

assert LATEST == 10, LATEST
with sessionmaker(create_engine(sys.argv[1]), class_=OutboxSession).begin() as session:
    for number in range(20):
        session.add_job(app.record, name=f"{number} of old")
"""


@pytest.fixture(scope="module")
def old_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, and the handlers of tests, as they were before step 11."""
    target = tmp_path_factory.mktemp("old")
    archive = subprocess.run(["git", "archive", OLD, "outboxq", "tests/support"], cwd=REPOSITORY, capture_output=True)
    if archive.returncode:
        pytest.skip(f"this checkout has no history with the commit {OLD}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    return target


COMMAND = """
from outboxq.__main__ import main
from outboxq.migrations import LATEST

assert LATEST == 10, LATEST
main()
"""


def run_old(old_code: Path, url: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the Python of this environment on the old code."""
    env = {**environment(url), "PYTHONPATH": str(old_code)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=old_code, capture_output=True, text=True, timeout=2 * PATIENCE)


def test_step_11_changes_nothing_that_was_there_before(database: Database, empty_engine: Engine) -> None:
    """Tables, columns, constraints, indexes, functions and triggers of step 10 are the same behind it."""
    with empty_engine.begin() as connection:
        migrate(connection, to=10)
    before = read_catalog(database.url)
    with empty_engine.begin() as connection:
        migrate(connection, to=11)
    after = read_catalog(database.url)
    for part, rows in before.items():
        assert rows, part
        assert [row for row in after[part] if row in rows] == rows, part


@pytest.mark.large
def test_relays_producers_and_commands_of_before_work_on_the_tables_of_step_11(
    old_code: Path, outboxq_database: Database, engine: Engine
) -> None:
    """Beside those of today: every job runs once, whichever relay takes it."""
    url = outboxq_database.url
    names = enqueue(engine, [f"{number} of new" for number in range(20)], both_flavours=False)
    produced = run_old(old_code, url, "-c", PRODUCER, url)
    assert produced.returncode == 0, produced.stderr
    relay = [sys.executable, "-c", COMMAND, "relay", "tests.support.app:jobs", "--drain"]
    env = {**environment(url), "PYTHONPATH": str(old_code)}
    with subprocess.Popen(relay, env=env, cwd=old_code, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as old:
        events: list[Event] = []
        Relay(url, app.jobs, hooks=[events.append]).drain()
        _, said = old.communicate(timeout=2 * PATIENCE)
    assert old.returncode == 0, said.decode()
    assert ledger(engine) == Counter([*names, *(f"{number} of old" for number in range(20))])
    # And by itself, jobs of today's producers.
    enqueue(engine, ["last"], both_flavours=False)
    alone = run_old(old_code, url, "-c", COMMAND, "relay", "tests.support.app:jobs", "--drain")
    assert alone.returncode == 0, alone.stderr
    assert ledger(engine)["last"] == 1
    for command in (["stats"], ["jobs", "list"], ["dead", "list"]):
        outcome = run_old(old_code, url, "-c", COMMAND, *command, "--json")
        assert outcome.returncode == 0, (command, outcome.stderr)
    doctor = run_old(old_code, url, "-c", COMMAND, "doctor", "--json")
    assert "tables-new" in doctor.stdout, doctor.stdout
    refused = run_old(old_code, url, "-c", COMMAND, "migrate")
    assert "step 11" in refused.stdout + refused.stderr


def test_todays_code_works_on_the_tables_of_step_10_and_says_what_they_lack(
    database: Database, empty_engine: Engine
) -> None:
    """Relays, producers, stats, explain and the doctor work; commands that read the history ask for the migration."""
    url = database.url
    with empty_engine.begin() as connection:
        migrate(connection, to=10)
        app.Base.metadata.create_all(connection)
    enqueue(empty_engine, ["a", "b"])
    events: list[Event] = []
    Relay(url, app.jobs, hooks=[events.append]).drain()
    assert len(of(events, JobDone)) == 2
    for command in (["stats"], ["jobs", "list"], ["explain", "--queue", "ledger"]):
        run(*command, "--json", url=url).ok()
    assert {one["code"] for one in run("doctor", "--json", url=url).json["findings"]}.isdisjoint(
        {"check-not-made", "table-missing", "tables-old"}
    )
    for command in (["history"], ["relays", "list"]):
        refused = run(*command, url=url)
        assert refused.exit_code == 1, refused
        assert "run `outboxq migrate`" in refused.stderr
    assert run("migrate", "--json", url=url).ok().json["after"] == LATEST
    for command in (["history"], ["relays", "list"]):
        run(*command, url=url).ok()
