"""`outboxq schedules`."""

from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, external, schedules
from outboxq.postgres import Database
from tests.support.cli import call
from tests.support.ledger import rows
from tests.support.scheduled import due_since, fired

PUT = ("schedules", "put", "report-7", "--kind", "report", "--queue", "reports")


def test_put_makes_a_schedule_that_show_shows(outboxq_database: Database) -> None:
    """With the arguments of its job, and its next five times in its own clocks."""
    url = outboxq_database.url
    words = ("--args", '{"tenant": 7, "price": 1.10}', "--fire-time", "at", "--priority", "3", "--jitter-seconds", "60")
    made = call(*PUT, *words, "--cron", "30 2 * * *", "--time-zone", "Europe/Berlin", "--json", url=url).ok()
    assert made.json["schedule"]["jitter_seconds"] == 60
    shown = call("schedules", "show", "report-7", "--json", url=url).ok().json
    assert shown["args"] == {"tenant": 7, "price": 1.10}
    assert shown["options"] == {"priority": 3, "fire_time": ["at"]}
    assert len(shown["next_fires"]) == 5
    assert shown["next_fires"][0][11:].startswith(("02:30:00+0", "03:00:00+0"))
    assert call("schedules", "list", "--queue", "reports", "--json", url=url).ok().json["more"] is False


def test_schedules_are_paused_resumed_run_and_removed(outboxq_database: Database, engine: Engine) -> None:
    """Each says what it did; one that is not there is said, and the exit code is 1."""
    url = outboxq_database.url
    call(*PUT, "--cron", "@daily", url=url).ok()
    assert call("schedules", "pause", "report-7", url=url).ok().stdout == "'report-7' is paused\n"
    again = call("schedules", "pause", "report-7", "none", url=url)
    assert (again.exit_code, again.stdout) == (1, "'report-7' was paused already\n")
    assert "no schedule 'none'" in again.stderr
    note = call(*PUT, "--cron", "@daily", url=url).ok()
    assert "is paused" in note.stderr
    ran = call("schedules", "run-now", "report-7", "--json", url=url).ok().json
    assert (UUID(ran["id"]).version, ran["kind"]) == (7, "report")
    assert len(fired(engine, "report-7")) == 1
    assert call("schedules", "resume", "report-7", "--json", url=url).ok().json == {
        "resumed": ["report-7"], "unchanged": [], "not_found": [],
    }  # fmt: skip
    assert call("schedules", "remove", "report-7", url=url).ok().stdout == "'report-7' is removed\n"
    assert call("schedules", "run-now", "report-7", url=url).exit_code == 1
    assert "no schedules found" in call("schedules", "list", url=url).ok().stderr


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cron", "0 0 31 2 *"), "schedule 'report-7': the cron text '0 0 31 2 *' is never due"),
        (("--cron", "0 30 2 * * *"), "the first of six would mean seconds"),
        (("--cron", "@daily", "--time-zone", "Mars"), "no time zone 'Mars'"),
        (("--cron", "@daily", "--args", "[1]"), "--args takes a JSON object"),
        (("--cron", "@daily", "--args", "{"), "--args takes a JSON object"),
        (
            ("--cron", "@daily", "--args", '{"at": 1}', "--fire-time", "at"),
            "argument 'at' is in --args and in --fire-time",
        ),
        (("--cron", "@daily", "--missed", "none"), "none"),
        ((), "takes --cron or --every"),
        (("--cron", "@daily", "--every", "1h"), "takes --cron or --every"),
        (("--every", "soon"), "the interval '@every soon' cannot be read"),
        (("--cron", "@daily", "--jitter-seconds", "100000"), "86400"),
    ],
)
def test_what_cannot_be_is_wrong_usage(outboxq_database: Database, words: tuple[str, ...], said: str) -> None:
    """Exit code 2, and what to do; nothing is written."""
    url = outboxq_database.url
    outcome = call(*PUT, *words, url=url)
    assert outcome.exit_code == 2
    assert said in outcome.stderr
    assert call("schedules", "list", "--json", url=url).ok().json["schedules"] == []


def test_a_job_whose_key_is_taken_is_not_said_to_be_added(outboxq_database: Database, engine: Engine) -> None:
    """The job that has the key is named, in the audit too."""
    url = outboxq_database.url
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        weekly = external("weekly", queue="reports").options(unique="55")
        schedules.put(session, "weekly", weekly.job(), cron="@hourly")
        waits = session.add_job(weekly)
    said = call("schedules", "run-now", "weekly", url=url).ok()
    assert said.stdout == f"no job of kind 'weekly' is added: job {waits.id} has its unique key\n"
    assert call("schedules", "run-now", "weekly", "--json", url=url).ok().json == {
        "id": None, "existing_id": str(waits.id), "kind": "weekly", "queue": "reports",
    }  # fmt: skip
    assert rows(engine, "SELECT changed, change->>'existing' FROM outboxq.audit") == [(0, str(waits.id))] * 2
    assert rows(engine, "SELECT id FROM outboxq.job") == [(waits.id,)]


def test_a_declared_schedule_is_not_put(outboxq_database: Database, engine: Engine) -> None:
    """Its code would change it back; it can be paused, and is fired no more."""
    url = outboxq_database.url
    call(*PUT, "--cron", "@daily", url=url).ok()
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.schedule SET declared = true"))
    outcome = call(*PUT, "--cron", "@hourly", url=url)
    assert outcome.exit_code == 1
    assert "declared by an application's code" in outcome.stderr
    call("schedules", "pause", "report-7", url=url).ok()
    due_since(engine, "report-7", timedelta(0))
