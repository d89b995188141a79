"""The doctor looks at schedules: late, unhandled, no longer declared, paused for long, and dying ones."""

import pytest

from outboxq.postgres import Database
from tests.support.doctor import execute, named, only

APP = "tests.support.app:jobs"


def add(url: str, name: str, **columns: str) -> None:
    values = {
        "name": f"'{name}'", "kind": "'record'", "queue": "'ledger'", "cron": "'@daily'", "time_zone": "'UTC'",
        "missed": "'one'", "next_at": "now() + interval '1 day'", **columns,
    }  # fmt: skip
    execute(url, f"INSERT INTO outboxq.schedule ({', '.join(values)}) VALUES ({', '.join(values.values())})")


def test_late_schedules_are_named(outboxq_database: Database) -> None:
    """Those that are due for more than a minute, and not paused: no relay fires them."""
    url = outboxq_database.url
    add(url, "late", next_at="now() - interval '10 minutes'")
    add(url, "soon")
    add(url, "paused", next_at="now() - interval '10 minutes'", paused_at="now() - interval '10 minutes'")
    found = only(url, "schedule-late")
    assert (found["severity"], found["detail"]["name"]) == ("problem", "late")
    assert 590 < found["detail"]["late_seconds"] < 700


def test_schedules_of_a_clock_that_was_ahead_are_named(outboxq_database: Database) -> None:
    """Due later than their next time; not what is due then, was fired minutes ahead, or cannot be read here."""
    url, minute = outboxq_database.url, "date_trunc('minute', now())"
    add(url, "by cron", next_at="now() + interval '300 days'")
    add(
        url, "by interval", cron="'@every 1h'", next_at="now() + interval '2 hours'", last_at="now() - interval '1 day'"
    )
    add(url, "paused", next_at="now() + interval '300 days'", paused_at="now()")
    add(url, "next", next_at="date_trunc('day', now(), 'UTC') + interval '1 day'")
    add(url, "yearly", cron="'@yearly'", next_at="date_trunc('year', now(), 'UTC') + interval '1 year'")
    add(url, "late", next_at="now() - interval '10 seconds'")
    add(
        url,
        "fired",
        cron="'@every 1m'",
        next_at=f"{minute} + interval '9 minutes'",
        last_at=f"{minute} + interval '8 minutes'",
    )
    add(url, "of mars", time_zone="'Mars'", next_at="now() + interval '300 days'")
    found = named(url, "schedule-ahead")
    assert [(each["severity"], each["detail"]["name"]) for each in found] == [
        ("problem", "by cron"), ("problem", "by interval"),
    ]  # fmt: skip
    assert "outboxq schedules resume 'by cron'" in found[0]["advice"]
    assert found[0]["detail"]["expected_at"] < found[0]["detail"]["next_at"]


@pytest.mark.wide
def test_disabled_schedules_are_named(outboxq_database: Database) -> None:
    """With their owner, as good to know; neither as paused for long nor as no longer declared."""
    url = outboxq_database.url
    since = "now() - interval '30 days'"
    add(url, "gone", declared="true", owner="'shop'", paused_at=since, disabled_at=since)
    found = only(url, "schedule-disabled", APP)
    assert (found["severity"], found["detail"]["owner"]) == ("info", "shop")
    assert "outboxq schedules adopt gone" in found["advice"]
    assert named(url, "schedule-paused", APP) == named(url, "schedule-not-declared", APP) == []


@pytest.mark.wide
def test_schedules_that_are_paused_for_long_are_named(outboxq_database: Database) -> None:
    """For more than a week; that is good to know, and no fault."""
    url = outboxq_database.url
    add(url, "forgotten", paused_at="now() - interval '30 days'")
    add(url, "just now", paused_at="now()")
    found = only(url, "schedule-paused")
    assert (found["severity"], found["detail"]["name"]) == ("info", "forgotten")
    assert "outboxq schedules resume forgotten" in found["advice"]


@pytest.mark.wide
def test_schedules_that_the_registry_does_not_know_are_named(outboxq_database: Database) -> None:
    """Of a kind that it has no handler for, in a queue of its own; and what its code declared once."""
    url = outboxq_database.url
    add(url, "fine")
    add(url, "unknown", kind="'mystery'")
    add(url, "elsewhere", kind="'mystery'", queue="'depot'")
    add(url, "was declared", declared="true")
    assert only(url, "schedule-kind-unknown", APP)["detail"]["name"] == "unknown"
    assert only(url, "schedule-not-declared", APP)["detail"]["name"] == "was declared"
    assert named(url, "schedule-kind-unknown") == named(url, "schedule-not-declared") == []


def test_schedules_whose_jobs_die_are_named(outboxq_database: Database) -> None:
    """By the newest dead letters of their queues."""
    url = outboxq_database.url
    add(url, "dying")
    add(url, "well")
    execute(
        url,
        "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, "
        "created_at) SELECT gen_random_uuid(), 'ledger', 'record', '{}', "
        "CASE WHEN n < 3 THEN '{\"outboxq.schedule\": \"dying\"}'::jsonb ELSE '{}' END, "
        "0, 1, 0, '[]', 'gone', now() FROM generate_series(1, 5) AS n",
    )
    found = only(url, "schedule-dead")
    assert found["detail"] == {"name": "dying", "kind": "record", "queue": "ledger", "jobs": 2}
    assert "outboxq dead list --kind record" in found["advice"]
