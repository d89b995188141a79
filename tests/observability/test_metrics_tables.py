"""`outboxq metrics`: what the tables say is what is exported, also of a database that refuses, is locked or is down."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, Relay
from outboxq.observability.metrics.exporter import DatabaseExporter
from outboxq.observability.metrics.exposition import expose, registry_of
from outboxq.observability.metrics.minutes import MinuteSums
from outboxq.observability.metrics.reading import Reading
from outboxq.observability.metrics.tables import PARTS
from outboxq.postgres import Database
from tests.observability.test_metrics_relay import CANARY
from tests.support import app
from tests.support.cli import call
from tests.support.ledger import enqueue
from tests.support.metrics import parsed, promtool, serving, value
from tests.support.staged import stage
from tests.support.waiting import wait_until

# A group whose first job is put off, a queue with a limit that is full and a rate that is used up, and a late schedule.
MORE = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, group_key, run_at, attempt) VALUES
  (gen_random_uuid(), 'grouped', 'k', '{}', 'grouped', 'a', now() + interval '1 hour', 1),
  (gen_random_uuid(), 'grouped', 'k', '{}', 'grouped', 'a', now(), 0),
  (gen_random_uuid(), 'grouped', 'k', '{}', 'grouped', 'a', now(), 0);
INSERT INTO outboxq.queue (name, max_running, rate_jobs, rate_seconds, rate_burst) VALUES ('accounts', 1, 60, 60, 1);
INSERT INTO outboxq.rate VALUES ('accounts', now() + interval '1 hour');
INSERT INTO outboxq.job (id, queue, kind, args, state, run_at, lease_owner, lease_token) VALUES
  (gen_random_uuid(), 'accounts', 'k', '{}', 'leased', now(), gen_random_uuid(), 1);
UPDATE outboxq.schedule SET next_at = now() - interval '10 minutes', paused_at = NULL WHERE name = 'nightly';
"""
RELAYS = """\
INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, seen_at, state, queues, kinds, slots, busy,
  listens, running, flush, limits) VALUES
  (gen_random_uuid(), 'h', 1, '1', 11, now(), 'serving', '{mail,quiet}', '{}', 3, 0, true, '[]', 1,
    '[{"name": "quiet", "running": 4}, {"name": "accounts", "running": 9}]'),
  (gen_random_uuid(), 'h', 2, '1', 11, now() - interval '2 minutes', 'serving', '{mail}', '{}', 5, 0, true, '[]', 1,
    '[{"name": "quiet", "running": 5}]');
"""


def exporter(engine: Engine, minutes: MinuteSums | None = None, schema: str = "outboxq") -> DatabaseExporter:
    return DatabaseExporter(connect=engine.connect, schema=schema, find=list, minutes=minutes)


def looked(found: DatabaseExporter) -> dict[object, float]:
    found.look()
    return parsed(expose(registry_of(lambda: {"db": found.read()}))[0].decode())  # type: ignore[return-value]


def test_what_the_tables_say_is_exported(outboxq_database: Database, engine: Engine) -> None:
    """Every part, with the doctor's findings; and promtool has nothing to say."""
    stage(engine)
    with engine.begin() as connection:
        connection.execute(text(MORE + RELAYS))
    said = call("metrics", "--once", url=outboxq_database.url).ok().stdout
    found = parsed(said)
    assert value(found, "outboxq_exporter_up") == 1
    assert value(found, "outboxq_exporter_query_ok") == len(PARTS)
    assert value(found, "outboxq_queue_jobs", queue="mail", state="ready") == 1
    assert value(found, "outboxq_queue_jobs", queue="mail", state="leased") == 1
    assert value(found, "outboxq_queue_jobs", queue="mail", state="orphaned") == 1
    assert value(found, "outboxq_queue_jobs", queue="accounts", state="due") == 1
    assert value(found, "outboxq_queue_oldest_seconds", queue="accounts") > 1_400
    assert value(found, "outboxq_queue_paused", queue="mail") == 1
    assert value(found, "outboxq_queue_paused", queue="accounts") == 0
    assert value(found, "outboxq_queue_serving_slots", queue="mail") == 3
    assert value(found, "outboxq_queue_serving_slots", queue="quiet") == 3
    assert value(found, "outboxq_queue_serving_slots", queue="accounts") == 0
    assert value(found, "outboxq_dead_letters", queue="accounts") == 1
    assert value(found, "outboxq_parked_jobs", queue="accounts", kind="credit_account") == 1
    assert value(found, "outboxq_effects", status="unknown") == 1
    assert value(found, "outboxq_relays", state="serving") == 1
    assert value(found, "outboxq_relays", state="dead") == 1
    assert value(found, "outboxq_schedule_late_seconds", schedule="nightly") > 500
    assert value(found, "outboxq_schedule_last_fire_timestamp_seconds", schedule="nightly") > 1_000_000
    assert value(found, "outboxq_queue_limit", queue="accounts") == 1
    assert value(found, "outboxq_queue_limit", queue="quiet") == 4
    assert value(found, "outboxq_queue_limit_used", queue="accounts") == 1
    assert value(found, "outboxq_queue_limit_waiting", queue="accounts") == 2
    assert value(found, "outboxq_queue_rate_per_second", queue="accounts") == 1
    assert value(found, "outboxq_queue_rate_waiting", queue="accounts") == 2
    assert value(found, "outboxq_groups_blocked", queue="grouped") == 1
    assert value(found, "outboxq_group_blocked_jobs", queue="grouped") == 2
    assert value(found, "outboxq_group_blocked_seconds", queue="grouped") > 3_000
    assert value(found, "outboxq_batches_open") == 1
    assert value(found, "outboxq_batch_oldest_seconds") > 600
    assert value(found, "outboxq_doctor_findings", code="effects-unknown") == 1
    assert value(found, "outboxq_doctor_findings", code="group-blocked", severity="warning") == 1
    assert value(found, "outboxq_schema_step") >= 11
    assert value(found, "outboxq_relation_bytes", relation="job") > 0
    assert value(found, "outboxq_relation_bytes", relation="job_ready") > 0
    checked = promtool("check", "metrics", given=said)
    assert (checked.returncode, checked.stderr) == (0, "")
    # As a number of its own: it may stand among the digits of one that was measured.
    assert not re.search(r"\b4111\b", said)


def test_a_queue_that_is_only_served_has_its_zeros(engine: Engine) -> None:
    """And an empty database those of relays: a comparison with 0 is true of something."""
    found = looked(exporter(engine))
    for state in ("serving", "draining", "stopping", "dead"):
        assert ("outboxq_relays", frozenset({("database", "db"), ("state", state)})) in found
    with engine.begin() as connection:
        connection.execute(text(RELAYS))
    found = looked(exporter(engine))
    key = frozenset({("database", "db"), ("queue", "quiet"), ("state", "ready")})
    assert found["outboxq_queue_jobs", key] == 0


@contextmanager
def holding(engine: Engine, statement: str) -> Iterator[Connection]:
    with engine.connect() as connection:
        connection.execute(text(statement))
        yield connection
        connection.rollback()


def test_a_part_that_fails_takes_no_other_with_it(engine: Engine) -> None:
    """A table that is locked, or missing: its part is missing, which is said; the others are there."""
    with holding(engine, "LOCK TABLE outboxq.schedule"):
        found = looked(exporter(engine))
    assert value(found, "outboxq_exporter_query_ok", query="schedules") == 0
    assert value(found, "outboxq_exporter_query_ok") == len(PARTS) - 2
    assert value(found, "outboxq_exporter_up") == 1
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.relay_status RENAME TO gone"))
    found = looked(exporter(engine))
    assert value(found, "outboxq_exporter_query_ok", query="relays") == 0
    assert not any(name == "outboxq_relays" for name, _ in found)
    assert value(found, "outboxq_exporter_query_ok") == len(PARTS) - 1


def test_a_look_changes_nothing_and_waits_for_nothing(engine: Engine) -> None:
    """READ ONLY transactions: a part that writes is refused."""
    from outboxq.observability.metrics.tables import timed

    with engine.connect() as connection:
        reading = Reading()
        timed("x", lambda: connection.execute(text("CREATE TABLE x ()")), connection, reading)  # type: ignore[arg-type]
        assert reading.values["outboxq_exporter_query_ok"]["x",] == 0
        assert connection.execute(text("SELECT to_regclass('x')")).scalar() is None


@pytest.mark.wide
def test_a_connection_that_is_lost_is_a_database_that_is_not_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nothing else is said of it; the next look begins anew."""

    def die(look: object) -> None:
        with engine.connect() as other:
            other.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            )
        look.connection.execute(text("SELECT 1"))  # type: ignore[attr-defined]

    found = exporter(engine)
    assert value(looked(found), "outboxq_exporter_up") == 1
    with monkeypatch.context() as patched:
        patched.setitem(PARTS, "effects", die)  # type: ignore[arg-type]
        assert looked(found) == {("outboxq_exporter_up", frozenset({("database", "db")})): 0}
    assert value(looked(found), "outboxq_queue_jobs_exact") == 0
    assert value(looked(found), "outboxq_exporter_up") == 1


@pytest.mark.wide
def test_what_is_exported_of_the_history_only_grows(engine: Engine) -> None:
    """From the minute on in which the exporter began; closed minutes stay although their rows are gone."""
    add = text(
        "INSERT INTO outboxq.stat AS s (grain, at, queue, kind, done, wait_seconds, run_seconds, wait, run) VALUES "
        "(60, date_bin('1 minute', now() - make_interval(mins => :ago), '2000-01-01'), 'q', 'k', :done, 1, 2, "
        "array_fill(1::bigint, ARRAY[20]), array_fill(1::bigint, ARRAY[20])) "
        "ON CONFLICT (grain, at, queue, kind) DO UPDATE SET done = s.done + excluded.done"
    )

    def put(ago: int, done: int) -> None:
        with engine.begin() as connection:
            connection.execute(add, {"ago": ago, "done": done})

    put(ago=600, done=1_000)
    minutes = MinuteSums()
    found = exporter(engine, minutes)
    assert value(looked(found), "outboxq_jobs_total") == 0
    put(ago=0, done=3)
    assert value(looked(found), "outboxq_jobs_total", queue="q", kind="k", outcome="done") == 3
    put(ago=0, done=4)
    assert value(looked(found), "outboxq_jobs_total", outcome="done") == 7
    # As if all of this were an hour ago.
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.stat SET at = at - interval '1 hour'"))
    assert minutes._since is not None
    minutes._since -= timedelta(hours=1)
    assert value(looked(found), "outboxq_jobs_total", outcome="done") == 7
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outboxq.stat"))
    put(ago=0, done=2)
    seen = looked(found)
    assert value(seen, "outboxq_jobs_total", outcome="done") == 9
    # Twice, or three times if a minute began meanwhile.
    assert value(seen, "outboxq_job_run_seconds_count") in (40, 60)


LARGE = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, run_at)
SELECT gen_random_uuid(), 'q' || number % 3, 'k', '{}', (ARRAY['ready', 'scheduled'])[1 + number % 2], now()
FROM generate_series(1, 30000) AS number;
INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, created_at)
SELECT gen_random_uuid(), 'q' || number % 50, 'k', '{}', '{}', 0, 1, 0, '[]', 'no luck', now()
FROM generate_series(1, 30000) AS number;
INSERT INTO outboxq.effect (scope, key, status, in_doubt, provider_key, attempts, lock_token, locked_until, expires_at)
SELECT 's', number::text, 'done', false, gen_random_uuid(), 1, gen_random_uuid(), now(), now() + interval '1 day'
FROM generate_series(1, 30000) AS number;
"""


@pytest.mark.large
def test_no_look_reads_a_large_table_from_end_to_end(engine: Engine) -> None:
    """Each statement that is sent walks an index of the tables that grow with the work, or does without them."""
    with engine.begin() as connection:
        connection.execute(text(MORE + RELAYS))
        connection.execute(text(LARGE))
        connection.execute(text("ANALYZE"))
    plans: dict[str, str] = {}

    def explain(connection: Connection, cursor: object, statement: str, parameters: object, *_: object) -> None:
        if statement.lstrip().startswith(("SELECT", "WITH")):
            with connection.connection.cursor() as second:
                second.execute(f"EXPLAIN {statement}", parameters)
                plans[statement] = "\n".join(line for (line,) in second.fetchall())

    event.listen(engine, "before_cursor_execute", explain)
    try:
        found = looked(exporter(engine, MinuteSums()))
    finally:
        event.remove(engine, "before_cursor_execute", explain)
    assert value(found, "outboxq_exporter_query_ok") == len(PARTS) + 1
    assert len(plans) > 20
    read = {statement for statement, plan in plans.items() if re.search(r"Seq Scan on (job|dead_job|effect)\b", plan)}
    assert read == set()


def test_it_is_looked_at_no_more_often_for_many_who_scrape(engine: Engine) -> None:
    """A scrape looks at no database."""
    looks: list[int] = []
    found = exporter(engine)

    @contextmanager
    def connect() -> Iterator[Connection]:
        looks.append(1)
        with engine.connect() as connection:
            yield connection

    found.connect = connect
    found.start()
    try:
        threads = [threading.Thread(target=found.read) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert looks == [1]
        assert found.is_up
        assert found.is_alive
    finally:
        found.stop()


@pytest.mark.wide
def test_several_databases_are_served_by_one_process(
    outboxq_database: Database, engine: Engine, tmp_path: Path
) -> None:
    """Each with its name; one that is down takes the other not with it, and no password is said."""
    enqueue(engine, [CANARY, CANARY])
    down = "postgresql://nobody:hunter2-secret@127.0.0.1:1/none"
    options = ("--database", f"here={outboxq_database.url}", "--database", f"down={down}")
    with serving("metrics", "--listen", "0", *options, url="", log=tmp_path / "log") as served:
        wait_until(lambda: served.value("outboxq_exporter_up", database="here") == 1, "a look")
        found = served.samples()
        assert value(found, "outboxq_queue_jobs", database="here", state="ready") == 2
        assert value(found, "outboxq_exporter_up", database="down") == 0
        assert {dict(labels)["database"] for name, labels in found if name == "outboxq_exporter_up"} == {"here", "down"}
        assert CANARY not in served.get()
        assert served.get("/healthz") == "ok\n"
    assert "hunter2" not in (tmp_path / "log").read_text()


def test_once_says_by_its_exit_code_that_a_database_is_down() -> None:
    """And prints that it is."""
    ended = call("metrics", "--once", "--database", "down=postgresql://127.0.0.1:1/none")
    assert ended.exit_code == 1
    assert 'outboxq_exporter_up{database="down"} 0.0' in ended.stdout


@pytest.mark.parametrize("given", ["x", "=postgresql://h/d", "a="])
def test_a_database_has_a_name_and_a_url(given: str) -> None:
    """Anything else is wrong usage."""
    assert call("metrics", "--once", "--database", given).exit_code == 2


@pytest.mark.wide
def test_every_series_is_one_that_work_leads_to(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Families that rules and board ask for, and that neither part exports here, are the supervisor's or producers'."""
    from outboxq.observability.metrics.counter import EventCounter
    from outboxq.relay.metrics import read_relay
    from tests.observability.test_metrics_rules import SERIES, expressions, family_of

    stage(engine)
    with engine.begin() as connection:
        connection.execute(text(MORE + RELAYS))
    with sessions.begin() as session:
        session.add_job(app.record, name="a")
        session.add_job(app.fail, name="b")
    counter = EventCounter()
    relay = Relay(outboxq_database.url, app.jobs, hooks=[counter])
    relay.drain()
    exposed = expose(registry_of(lambda: {"db": read_relay(relay.look(), counter)}))[0].decode()
    exposed += call("metrics", "--once", url=outboxq_database.url).ok().stdout
    there = set(re.findall(r"^# TYPE (\S+)", exposed, re.MULTILINE))
    asked = {family_of(name).name for text in expressions() for name, _ in SERIES.findall(text)}
    elsewhere = {"outboxq_relay_child_ends_total", "outboxq_enqueued_jobs_total", "outboxq_inbox_messages_total"}
    # No queue is under a lease here, and no handler calls `once`.
    assert asked - there <= elsewhere | {"outboxq_calls", "outboxq_effect_calls_total"}
