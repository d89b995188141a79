"""Reading the history, and which relays live."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text

from outboxq.admin.history import quantile, read_history
from outboxq.admin.relays import RelaySummary, list_relays
from outboxq.postgres import Database
from outboxq.statements.history import BUCKETS
from tests.support.cli import call
from tests.support.ledger import rows

NONE = [0] * BUCKETS
ADD = text(
    "INSERT INTO outboxq.stat (grain, at, queue, kind, done, died, wait_seconds, run_seconds, wait, run) VALUES "
    "(:grain, date_bin('1 minute', now(), timestamptz '2000-01-01 00:00:00+00') - make_interval(mins => :ago), "
    ":queue, :kind, :done, :died, 1, 1, CAST(:wait AS bigint[]), CAST(:run AS bigint[]))"
)
RELAY = text(
    "INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, started_at, seen_at, state, queues, kinds, "
    "slots, busy, listens, running, flush) VALUES (gen_random_uuid(), :host, 7, '1', 11, now() - interval '1 hour', "
    "now() - make_interval(secs => :ago), 'serving', '{mail}', '{send,pay}', 4, 1, true, CAST(:running AS jsonb), 3)"
)


def buckets(**counts: int) -> list[int]:
    return [counts.get(f"b{place}", 0) for place in range(BUCKETS)]


def add(engine: Engine, ago: int, kind: str, done: int, *, queue: str = "q", died: int = 0, grain: int = 60) -> None:
    values = {"wait": buckets(b2=done), "run": buckets(b9=done + died)}
    with engine.begin() as connection:
        connection.execute(
            ADD, {"grain": grain, "ago": ago, "queue": queue, "kind": kind, "done": done, "died": died, **values}
        )


def test_the_history_is_read_by_minutes_hours_and_kinds(engine: Engine) -> None:
    """With rows of minutes and of hours together; filters leave the others out."""
    add(engine, 1, "a", 5)
    add(engine, 1, "b", 2, died=1)
    add(engine, 2, "a", 3, queue="other")
    add(engine, 49 * 60, "a", 100, grain=3600)
    with engine.connect() as connection:
        minutes = read_history(connection)
        assert [(row.done, row.died) for row in minutes] == [(3, 0), (7, 1)]
        assert minutes[1].at is not None
        assert minutes[1].at - minutes[0].at == timedelta(minutes=1)
        kinds = read_history(connection, by="kind", since=timedelta(days=3))
        assert [(row.queue, row.kind, row.done) for row in kinds] == [("other", "a", 3), ("q", "a", 105), ("q", "b", 2)]
        hours = read_history(connection, by="hour", since=timedelta(days=3))
        assert hours[0].done == 100
        assert sum(row.done for row in hours) == 110
        assert [row.done for row in read_history(connection, queue="q", kind="a")] == [5]
        (kind,) = read_history(connection, queue="q", kind="b", by="kind")
        assert 0.0025 <= (kind.wait_p50_seconds or 0) <= 0.005
        assert 0.5 <= (kind.run_p50_seconds or 0) <= (kind.run_p95_seconds or 0) <= (kind.run_p99_seconds or 0) <= 1.0


def test_quantiles_lie_in_the_bucket_that_has_them() -> None:
    """Spread evenly within it; without any job there is none, and beyond the last bound nothing is known."""
    assert quantile(NONE, 0.5) is None
    assert quantile(buckets(b9=100), 0.5) == pytest.approx(0.75)
    assert quantile(buckets(b0=50, b9=50), 0.99) == pytest.approx(0.5 + 0.5 * 49 / 50)
    assert quantile(buckets(b0=1), 1.0) == pytest.approx(0.001)
    assert quantile(buckets(b19=3), 0.5) == 43_200.0


def test_relays_are_listed_with_what_runs_there_for_long(outboxq_database: Database, engine: Engine) -> None:
    """One that has said nothing for a minute is dead."""
    running = (
        '[{"id": "00000000-0000-7000-8000-000000000007", "queue": "mail", "kind": "send", "attempt": 2, '
        '"seconds": 42.5, "pid": 99}]'
    )
    with engine.begin() as connection:
        connection.execute(RELAY, {"host": "one", "ago": 61, "running": "[]"})
        connection.execute(RELAY, {"host": "two", "ago": 50, "running": running})
        found = {relay.host: relay for relay in list_relays(connection)}
    assert {host: relay.state for host, relay in found.items()} == {"one": "dead", "two": "serving"}
    assert isinstance(found["two"], RelaySummary)
    assert found["two"].longest == "send for 42 s"
    assert (found["two"].running[0].pid, found["two"].kinds) == (99, ("send", "pay"))
    said = call("relays", "list", "--json", url=outboxq_database.url).ok().json["relays"]
    assert {relay["host"]: len(relay["running"]) for relay in said} == {"one": 0, "two": 1}
    assert "send for 42 s" in call("relays", "list", url=outboxq_database.url).ok().stdout


def test_however_many_relays_died_the_living_are_listed(engine: Engine) -> None:
    """Of more than the limit those that were seen last."""
    with engine.begin() as connection:
        for number in range(5):
            connection.execute(RELAY, {"host": f"dead {number}", "ago": 900 - number, "running": "[]"})
        connection.execute(RELAY, {"host": "alive", "ago": 5, "running": "[]"})
        found = list_relays(connection, limit=2)
    assert {relay.host for relay in found} == {"dead 4", "alive"}


def test_the_command_shows_the_history(outboxq_database: Database, engine: Engine) -> None:
    """As a table and as JSON; a span that is none is refused."""
    url = outboxq_database.url
    assert "no relay has written it down yet" in call("history", url=url).ok().stderr
    add(engine, 1, "a", 5)
    said = call("history", "--by", "kind", "--since", "24h", "--json", url=url).ok().json
    assert (said["by"], said["history"][0]["kind"], said["history"][0]["done"]) == ("kind", "a", 5)
    assert "wait_p95_seconds" in call("history", url=url).ok().stdout
    today, last_year = (f"{datetime.now(UTC) - timedelta(days=days):%Y-%m-%d}" for days in (1, 366))
    assert call("history", "--by", "kind", "--since", today, "--json", url=url).ok().json["history"][0]["done"] == 5
    for time in ("36d", last_year, "2999-01-01"):
        assert "--since takes a time within the last 35 days" in call("history", "--since", time, url=url).stderr
    for time in ("0m", "1w", "h"):
        refused = call("history", "--since", time, url=url)
        assert (
            refused.exit_code,
            "such as 30m, 24h or 7d, or 2026-01-31" in " ".join(refused.stderr.replace("│", " ").split()),
        ) == (2, True)


def test_rows_of_the_history_say_what_they_are(engine: Engine) -> None:
    """A histogram has 20 buckets, and a row the length of a minute or an hour."""
    for statement in (
        "INSERT INTO outboxq.stat (grain, at, queue, kind, wait, run) VALUES (61, now(), 'q', 'k', :b, :b)",
        "INSERT INTO outboxq.stat (grain, at, queue, kind, wait, run) VALUES (60, now(), 'q', 'k', '{1}', :b)",
    ):
        with pytest.raises(Exception, match="stat_"), engine.begin() as connection:
            connection.execute(text(statement), {"b": NONE})
    assert rows(engine, "SELECT * FROM outboxq.stat") == []
