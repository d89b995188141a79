"""Code of steps before beside today's, on today's tables, and today's code on the tables of steps before."""

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

# By their latest step: the last commits that had it.
OLD = {10: "7d1eacf", 11: "825e858", 12: "78f39e6"}
PRODUCER = """
import sys
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from outboxq import OutboxSession
from tests.support import app

with sessionmaker(create_engine(sys.argv[1]), class_=OutboxSession).begin() as session:
    for number in range(20):
        session.add_job(app.record, name=f"{number} of old")
"""


@pytest.fixture(scope="module", params=OLD)
def old_code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, and the handlers of tests, as they were when that was the latest step."""
    step, target = request.param, tmp_path_factory.mktemp("old")
    what = ["git", "archive", OLD[step], "outboxq", "tests/support"]
    archive = subprocess.run(what, cwd=REPOSITORY, capture_output=True)
    if archive.returncode:
        pytest.skip(f"this checkout has no history with the commit {OLD[step]}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    latest = run_old(target, "", "-c", "from outboxq.migrations import LATEST; print(LATEST)")
    assert latest.stdout == f"{step}\n"
    return target


COMMAND = """
from outboxq.__main__ import main

main()
"""
# Those of its arguments, one after the other; in front of what each said is how it ended.
ENDED = "--- ended with "
COMMANDS = f"""
import contextlib, io, sys
from outboxq.__main__ import main

for line in sys.argv[1:]:
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(line.split())
        except SystemExit as end:
            code = end.code or 0
    print({ENDED!r} + str(code))
    print(said.getvalue())
"""


def run_old(old_code: Path, url: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the Python of this environment on the old code."""
    env = {**environment(url), "PYTHONPATH": str(old_code)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=old_code, capture_output=True, text=True)


@pytest.mark.first_and_last
@pytest.mark.parametrize("step", OLD)
def test_the_step_behind_changes_nothing_that_was_there_before(
    database: Database, empty_engine: Engine, step: int
) -> None:
    """Tables, columns, constraints, indexes, functions and triggers of a step are the same behind the next."""
    with empty_engine.begin() as connection:
        migrate(connection, to=step)
    before = read_catalog(database.url)
    with empty_engine.begin() as connection:
        migrate(connection, to=step + 1)
    after = read_catalog(database.url)
    for part, rows in before.items():
        assert rows, part
        assert [row for row in after[part] if row in rows] == rows, part


@pytest.mark.wide
def test_relays_producers_and_commands_of_before_work_on_todays_tables(
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
    lines = ["stats --json", "jobs list --json", "dead list --json", "doctor --json", "migrate"]
    ran = run_old(old_code, url, "-c", COMMANDS, *lines)
    assert ran.returncode == 0, ran.stderr
    *_, doctor, migrating = said_by = ran.stdout.split(ENDED)[1:]
    assert [said.split("\n")[0] for said in said_by[:3]] == ["0"] * 3, said_by
    assert "tables-new" in doctor
    assert f"step {LATEST}" in migrating


@pytest.mark.wide
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


@pytest.mark.wide
def test_todays_lists_and_doctor_work_on_the_tables_of_step_11(database: Database, empty_engine: Engine) -> None:
    """They say the same as behind step 12, whose indexes only lead there sooner."""

    def looks() -> list[object]:
        found: list[object] = [
            run(*command, "list", "--json", url=database.url).ok().json for command in (["dead"], ["effects"])
        ]
        told = {one["code"]: one["title"] for one in run("doctor", "--json", url=database.url).json["findings"]}
        assert "check-not-made" not in told
        return [*found, told["effects-abandoned"]]

    with empty_engine.begin() as connection:
        migrate(connection, to=11)
        connection.exec_driver_sql(
            "INSERT INTO outboxq.effect (scope, key, status, provider_key, lock_token, locked_until) SELECT 'pay', "
            "n::text, 'started', gen_random_uuid(), gen_random_uuid(), now() - interval '2 hours' "
            "FROM generate_series(1, 3) AS n"
        )
        connection.exec_driver_sql(
            "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, "
            "created_at, died_at) SELECT gen_random_uuid(), 'q', 'k', '{}', '{}', 0, 1, 0, '[]', 'gone', now(), "
            "now() - n * interval '1 hour' FROM generate_series(1, 3) AS n"
        )
    before = looks()
    assert run("migrate", "--json", url=database.url).ok().json["after"] == LATEST
    assert looks() == before
