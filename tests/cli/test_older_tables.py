"""Every command on tables of an older step: what cannot work says which command mends it, in one line."""

import logging

import pytest
from sqlalchemy import Engine

from outboxq.observability.metrics.exporter import DatabaseExporter
from outboxq.postgres import Database
from outboxq.tables import NEEDED_VERSION
from tests.cli.test_help import COMMANDS
from tests.support.cli import Outcome, call
from tests.support.matrices import sampled

ID = "01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10"
# Without a database, or without an end: `migrate` is what mends, and a relay and the dashboard have tests of their own.
NOT_TRIED = {"dashboard", "demo", "torture", "migrate", "roles", "relay", "health"}
# What each step of before cannot do, whatever rows there are.
NEEDS_LATER: list[tuple[str, ...]] = [
    ("history",),
    ("relays", "list"),
    ("metrics", "--once"),
    ("metrics", "--once", "--from-history"),
    ("queues", "set", "q", "--keep-dead", "30d"),
    ("audit", "list"),
    ("audit", "show", ID),
    ("audit", "prune", "--older-than", "400d"),
    ("bulk", "stop", ID),
    ("bulk", "resume", ID),
    ("done", "list"),
    ("done", "list", "--since", "1h"),
    ("done", "show", ID),
    ("done", "run-again", ID),
    ("schedules", "adopt", "s"),
]
# These work, or find nothing of this name.
WORKS: list[tuple[str, ...]] = [
    ("stats",),
    ("explain", ID),
    ("explain", "--queue", "q"),
    ("top", "--once"),
    ("queues", "list"),
    ("queues", "pause", "q"),
    ("queues", "resume", "q"),
    ("queues", "set", "q", "--limit", "5"),
    ("kinds", "list"),
    ("kinds", "pause", "k", "--queue", "q"),
    ("kinds", "resume", "k", "--queue", "q"),
    ("jobs", "list"),
    ("jobs", "list", "--running"),
    ("jobs", "show", ID),
    ("jobs", "watch", ID, "--timeout", "1"),
    ("jobs", "cancel", ID),
    ("jobs", "cancel", "--all", "--yes"),
    ("jobs", "cancel", "--all", "--running", "--yes"),
    ("jobs", "change", ID, "--run-now"),
    ("batches", "list"),
    ("batches", "show", ID),
    ("dead", "list"),
    ("dead", "show", ID),
    ("dead", "retry", ID),
    ("dead", "retry", "--all", "--yes"),
    ("dead", "discard", ID),
    ("dead", "discard", "--all", "--yes"),
    ("inbox", "list"),
    ("inbox", "show", "c", "m"),
    ("inbox", "forget", "c", "m"),
    ("effects", "list"),
    ("effects", "show", "s", "k"),
    ("effects", "resolve", "s", "k", "--not-applied"),
    ("effects", "new-installation", "--yes"),
    ("schedules", "list"),
    ("schedules", "put", "s", "--kind", "k", "--queue", "q", "--cron", "@daily"),
    ("schedules", "show", "s"),
    ("schedules", "pause", "s"),
    ("schedules", "resume", "s"),
    ("schedules", "run-now", "s"),
    ("schedules", "remove", "s"),
]


def names_what_mends(said: Outcome) -> bool:
    """One line, and the exit code of what failed."""
    lines = said.stderr.splitlines()
    return said.exit_code == 1 and len(lines) == 1 and "run `outboxq migrate`" in lines[0]


def test_every_command_is_tried() -> None:
    """Each that asks the database."""
    tried = {words[: len(name)] for words in (*NEEDS_LATER, *WORKS, ("doctor",)) for name in COMMANDS}
    assert [name for name in COMMANDS if name not in tried and name[0] not in NOT_TRIED] == []


@pytest.mark.wide
@pytest.mark.parametrize("step", sampled([10, 9]))
def test_a_command_that_cannot_work_names_what_mends_it(outboxq_database: Database, step: int) -> None:
    """On tables that are too old for this version each one; on those of the step before what needs the newest alone."""
    url = outboxq_database.url
    call("migrate", "--to", step, url=url).ok()
    refused = [*NEEDS_LATER, *(WORKS if step < NEEDED_VERSION else ())]
    said = {words: call(*words, url=url) for words in refused}
    assert {words: each for words, each in said.items() if not names_what_mends(each)} == {}
    doctor = call("doctor", url=url)
    assert (doctor.exit_code, "Run `outboxq migrate`" in doctor.stdout) == (1, True)
    if step >= NEEDED_VERSION:
        said = {words: call(*words, url=url) for words in WORKS}
        wrong = ("SQLSTATE", "Traceback", "Error: an outboxq table", "No such option")
        assert {words: each for words, each in said.items() if any(text in each.stderr for text in wrong)} == {}


def test_top_says_why_a_part_is_not_known(outboxq_database: Database) -> None:
    """The rest is there; the parts that share a reason share a line."""
    url = outboxq_database.url
    call("migrate", "--to", 10, url=url).ok()
    said = call("top", "--once", url=url).ok()
    (line,) = said.stderr.splitlines()
    assert line.startswith("kinds, relays: ")
    assert "run `outboxq migrate`" in line
    parts = call("top", "--once", "--json", url=url).ok().json["not_known"]
    assert [each["part"] for each in parts] == ["kinds", "relays"]
    assert "outboxq migrate" in parts[0]["reason"]


@pytest.mark.wide
def test_an_exporter_says_once_that_tables_are_missing(
    outboxq_database: Database, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with what is there, and looks again."""
    call("migrate", "--to", 10, url=outboxq_database.url).ok()
    exporter = DatabaseExporter(connect=engine.connect, schema="outboxq", find=list)
    with caplog.at_level(logging.WARNING, "outboxq.metrics"):
        exporter.look()
        exporter.look()
        assert exporter.is_up
        assert [record.getMessage().count("outboxq migrate") for record in caplog.records] == [1]
        call("migrate", url=outboxq_database.url).ok()
        exporter.look()
    assert exporter.missing is None
