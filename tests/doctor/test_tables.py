"""The doctor compares the tables with what the code needs, and looks at how they are vacuumed."""

from pathlib import Path

import psycopg
import pytest

from outboxq.migrations import LATEST
from outboxq.postgres import Database, Server
from outboxq.tables import NEEDED_VERSION
from tests.support.cli import run
from tests.support.doctor import Finding, examine, execute, named, only
from tests.support.urls import libpq_url
from tests.support.waiting import wait_until

READY_INDEX = "CREATE INDEX {} ON outboxq.job (queue, (-priority), seq) WHERE state = '{}'"


def test_a_database_without_tables_is_told(outboxq_server: Server) -> None:
    """No tables: one clear problem, and the command that makes them."""
    with outboxq_server.create_database() as database:
        found = only(database.url, "tables-missing")
    assert found["severity"] == "problem"
    assert "outboxq migrate" in found["advice"]


def test_another_schema_without_tables_is_told(outboxq_database: Database) -> None:
    """--schema decides where the tables are looked for."""
    assert "'elsewhere'" in only(outboxq_database.url, "tables-missing", "--schema", "elsewhere")["title"]


def test_tables_of_an_older_step_are_a_problem(outboxq_database: Database) -> None:
    """A marker below the needed step is a problem that names both, and the tables' parts are not compared."""
    execute(
        outboxq_database.url,
        f"DELETE FROM outboxq.migration WHERE step >= {NEEDED_VERSION}",
        "DROP INDEX outboxq.job_ready",
    )
    found = only(outboxq_database.url, "tables-old")
    assert (found["detail"]["step"], found["detail"]["needed_step"]) == (NEEDED_VERSION - 1, NEEDED_VERSION)
    assert named(outboxq_database.url, "index-missing") == []


def test_a_step_that_waits_is_a_warning(outboxq_database: Database) -> None:
    """This code works on the tables as they are; what the step adds is missing, and the tables' parts differ."""
    execute(
        outboxq_database.url, f"DELETE FROM outboxq.migration WHERE step = {LATEST}", "DROP INDEX outboxq.job_ready"
    )
    found = only(outboxq_database.url, "tables-behind")
    assert (found["severity"], found["detail"]["step"], found["detail"]["latest_step"]) == (
        "warning",
        LATEST - 1,
        LATEST,
    )
    assert named(outboxq_database.url, "index-missing") == []


def test_tables_of_a_newer_step_are_only_told(outboxq_database: Database) -> None:
    """A marker above ours is no problem: old code lives with newer tables."""
    execute(outboxq_database.url, "INSERT INTO outboxq.migration (step) VALUES (99)", "DROP INDEX outboxq.job_ready")
    found = only(outboxq_database.url, "tables-new")
    assert (found["severity"], found["detail"]["step"]) == ("info", 99)
    assert named(outboxq_database.url, "index-missing") == []


@pytest.mark.first_and_last
@pytest.mark.parametrize("table", ["dead_job", "inbox", "effect", "deployment"])
def test_a_missing_table_is_named(outboxq_database: Database, table: str) -> None:
    """A table that somebody dropped is named, although the marker stands."""
    execute(outboxq_database.url, f"DROP TABLE outboxq.{table}")
    assert only(outboxq_database.url, "table-missing")["detail"]["table"] == table


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "name",
    [
        "job_ready", "job_scheduled", "job_leased", "job_suspect", "dead_job_queue", "inbox_expires", "effect_expires",
        "effect_open", "effect_unknown", "dead_job_died",
    ],
)  # fmt: skip
def test_a_missing_index_is_named(outboxq_database: Database, name: str) -> None:
    """Each index of `outboxq.tables` is missed when it is gone."""
    execute(outboxq_database.url, f"DROP INDEX outboxq.{name}")
    assert only(outboxq_database.url, "index-missing")["detail"]["index"] == name


@pytest.mark.first_and_last
@pytest.mark.parametrize("table", ["job", "inbox", "effect", "deployment"])
def test_a_missing_primary_key_is_named(outboxq_database: Database, table: str) -> None:
    """Without its primary key a table lets the same job, message or effect in twice."""
    execute(outboxq_database.url, f"ALTER TABLE outboxq.{table} DROP CONSTRAINT {table}_pkey")
    assert only(outboxq_database.url, "index-missing")["detail"]["table"] == table


def test_an_index_of_another_shape_is_named(outboxq_database: Database) -> None:
    """The right name over the wrong predicate serves no claim."""
    execute(outboxq_database.url, "DROP INDEX outboxq.job_ready", READY_INDEX.format("job_ready", "leased"))
    assert "leased" in only(outboxq_database.url, "index-different")["detail"]["definition"]


def test_an_index_under_another_name_is_as_good(outboxq_database: Database) -> None:
    """What counts is the index, not what a DBA called it."""
    execute(outboxq_database.url, "ALTER INDEX outboxq.job_ready RENAME TO ready_ones")
    assert [one for one in examine(outboxq_database.url) if one["code"].startswith("index")] == []


def test_an_invalid_index_is_a_problem_where_no_other_serves(outboxq_database: Database) -> None:
    """An index of ours that was never finished is a problem; beside a whole twin it only costs."""
    url = outboxq_database.url
    execute(url, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outboxq.job_ready'::regclass")
    found = only(url, "index-invalid")
    assert (found["severity"], found["detail"]["index"]) == ("problem", "job_ready")
    execute(url, READY_INDEX.format("twin", "ready"))
    assert only(url, "index-invalid")["severity"] == "warning"


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("change", "meaning"),
    [
        ("ALTER TABLE outboxq.job DISABLE TRIGGER wake_relays", "wake no relay"),
        ("DROP TRIGGER wake_relays ON outboxq.job", "wake no relay"),
        ("ALTER TABLE outboxq.audit DISABLE TRIGGER keep_audit", "rewrite what the audit says"),
        ("DROP TRIGGER keep_audit ON outboxq.audit", "rewrite what the audit says"),
    ],
)
def test_a_trigger_that_does_not_fire_is_named(outboxq_database: Database, change: str, meaning: str) -> None:
    """Disabled or dropped: nothing wakes the relays, or holds the audit as it was written."""
    execute(outboxq_database.url, change)
    found = only(outboxq_database.url, "trigger-missing")
    assert found["severity"] == "warning"
    assert found["detail"]["trigger"] in change
    assert meaning in found["title"]
    assert f"ALTER TABLE outboxq.{found['detail']['table']} ENABLE TRIGGER" in found["advice"]


RENAMED = 'jobs\'s "odd"; 50% :place'


def mend(url: str, findings: list[Finding]) -> None:
    """What the advice says: run the SQL of each finding."""
    execute(url, *(finding["detail"]["sql"] for finding in findings))


def test_a_renamed_schema_is_found_and_can_be_mended(outboxq_database: Database) -> None:
    """The functions keep the old name in their texts; the finding has the SQL that makes them for the new one."""
    url, schema = outboxq_database.url, ("--schema", RENAMED)
    quoted = RENAMED.replace('"', '""')
    execute(url, f'ALTER SCHEMA outboxq RENAME TO "{quoted}"')
    found = named(url, "function-different", *schema)
    assert [(one["severity"], one["detail"]["function"]) for one in found] == [
        ("problem", "add_job"),
        ("problem", "wake_relays"),
    ]
    mend(url, found)
    assert [one["code"] for one in examine(url, *schema) if one["code"].startswith(("function", "trigger"))] == []
    execute(url, f"SELECT \"{quoted}\".add_job('ship')")
    # Also what later steps set on them, which a function that is made again would lose.
    with psycopg.connect(libpq_url(url)) as connection:
        rows = connection.execute(
            "SELECT proconfig FROM pg_proc JOIN pg_namespace n ON n.oid = pronamespace WHERE nspname = %s", [RENAMED]
        ).fetchall()
    assert rows == [(["search_path=pg_catalog, pg_temp"],)] * 3


def test_a_function_that_was_changed_is_named(outboxq_database: Database) -> None:
    """What runs at each producer's INSERT is what the migrations wrote, or the doctor names it."""
    url = outboxq_database.url
    execute(
        url,
        "CREATE OR REPLACE FUNCTION outboxq.wake_relays() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
    )
    found = named(url, "function-different")
    assert [one["detail"]["function"] for one in found] == ["wake_relays"]
    mend(url, found)
    assert named(url, "function-different") == []


def test_a_missing_function_is_named(outboxq_database: Database) -> None:
    """SQL producers need add_job."""
    url = outboxq_database.url
    execute(url, "DROP FUNCTION outboxq.add_job")
    found = only(url, "function-missing")
    assert found["detail"]["function"] == "add_job"
    mend(url, [found])
    assert named(url, "function-missing") + named(url, "function-different") == []


def test_autovacuum_switched_off_for_the_table_is_a_problem(outboxq_database: Database) -> None:
    """A queue without vacuum slows down without end."""
    execute(outboxq_database.url, "ALTER TABLE outboxq.job SET (autovacuum_enabled = false)")
    (found,) = [one for one in named(outboxq_database.url, "autovacuum-off") if "table" in one["detail"]]
    assert (found["severity"], found["detail"]["table"]) == ("problem", "job")


def test_lost_autovacuum_settings_are_named(outboxq_database: Database) -> None:
    """With PostgreSQL's defaults, a fifth of the table has to be dead first."""
    execute(outboxq_database.url, "ALTER TABLE outboxq.job RESET (autovacuum_vacuum_scale_factor)")
    found = only(outboxq_database.url, "autovacuum-settings-lost")
    assert found["detail"] == {"table": "job", "settings": ["autovacuum_vacuum_scale_factor"]}
    execute(outboxq_database.url, found["advice"])
    assert not named(outboxq_database.url, "autovacuum-settings-lost")


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("table", "setting", "severity"),
    [
        ("job", "autovacuum_vacuum_threshold=50", "info"),
        ("job", "vacuum_truncate=true", "info"),
        ("job", "vacuum_index_cleanup=off", "warning"),
        ("inbox", "autovacuum_vacuum_scale_factor=0.2", "info"),
        ("effect", "vacuum_index_cleanup=auto", "info"),
    ],
)
def test_settings_that_somebody_changed_are_named(
    outboxq_database: Database, table: str, setting: str, severity: str
) -> None:
    """They are the operator's to choose, so it is only said; entries that stay in the queue's indexes are a warning."""
    assert not named(outboxq_database.url, "autovacuum-settings-changed")
    execute(outboxq_database.url, f"ALTER TABLE outboxq.{table} SET ({setting})")
    found = only(outboxq_database.url, "autovacuum-settings-changed")
    assert (found["severity"], found["detail"]) == (severity, {"table": table, "settings": [setting]})


def test_another_spelling_of_our_settings_is_no_change(outboxq_database: Database) -> None:
    """`true` is `on`, and `0.0` is `0`."""
    settings = "autovacuum_vacuum_scale_factor = 0.0, vacuum_index_cleanup = true, vacuum_truncate = no"
    execute(outboxq_database.url, f"ALTER TABLE outboxq.job SET ({settings})")
    assert not named(outboxq_database.url, "autovacuum-settings-changed")


@pytest.mark.wide
def test_an_index_of_nothing_is_named(outboxq_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs space and vacuum's time, and no claim: good to know, until it is built again as the advice says."""
    monkeypatch.setattr("outboxq.doctor.vacuum.MIN_BYTES", 256 * 1024)
    url = outboxq_database.url
    flush = "SELECT pg_stat_force_next_flush()"
    fill = "SELECT outboxq.add_job('ship') FROM generate_series(1, 10000)"
    execute(url, fill, "DELETE FROM outboxq.job", flush)

    def vacuumed() -> list[Finding]:
        # An ANALYZE of autovacuum's may hold a snapshot, behind which nothing is removed yet.
        execute(url, "VACUUM outboxq.job", flush)
        return named(url, "index-mostly-empty")

    found = wait_until(vacuumed, "vacuum has removed all entries")
    assert {(one["severity"], one["detail"]["index"]) for one in found} == {("info", "job_pkey"), ("info", "job_ready")}
    for one in found:
        execute(url, one["advice"].rpartition(": ")[2])
    assert not named(url, "index-mostly-empty")


@pytest.mark.wide
def test_dead_rows_are_counted(outboxq_database: Database) -> None:
    """Rows that vacuum should have removed are named with the last vacuum, from the limit on."""
    url = outboxq_database.url
    execute(
        url,
        "ALTER TABLE outboxq.job SET (autovacuum_enabled = false)",
        "SELECT outboxq.add_job('ship') FROM generate_series(1, 300)",
        "DELETE FROM outboxq.job",
        "SELECT pg_stat_force_next_flush()",
    )
    (found,) = wait_until(lambda: named(url, "dead-tuples", "--dead-rows", 300), "the counts to arrive")
    assert found["detail"] == {"table": "job", "dead": 300, "live": 0, "vacuumed_seconds_ago": None}
    assert named(url, "dead-tuples", "--dead-rows", 301) == []
    execute(url, "VACUUM outboxq.job", "SELECT pg_stat_force_next_flush()")
    assert not named(url, "dead-tuples", "--dead-rows", 300)


def test_the_doctor_needs_no_registry_and_no_directory(outboxq_database: Database, tmp_path: Path) -> None:
    """As a process of its own, anywhere: text for people, and nothing on standard error."""
    execute(outboxq_database.url, "DROP INDEX outboxq.job_ready")
    outcome = run("doctor", url=libpq_url(outboxq_database.url), cwd=tmp_path)
    assert outcome.exit_code == 1
    assert outcome.stderr == ""
    assert outcome.stdout.startswith("Problems:\n  index-missing: index 'job_ready' on job is missing\n      Make it")
