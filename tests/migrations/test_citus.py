"""The guard of a Citus coordinator: each way of migrating installs it there, whenever Citus came."""

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import Engine

from outboxq.admin.roles import RIGHTS
from outboxq.migrations import LATEST
from outboxq.migrations.runner import migration_sql
from outboxq.postgres import Database
from outboxq.statements.citus import GUARDED, citus_state
from outboxq.tables import metadata
from tests.migrations.catalog import fetch_value, schema_exists
from tests.migrations.test_repository_alembic import alembic
from tests.support.citus import coordinator_url, manage, stand_in
from tests.support.cli import call
from tests.support.doctor import execute
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

TRIGGERED = (
    "SELECT array_agg(tgrelid::regclass::text ORDER BY tgrelid::regclass::text) FROM pg_trigger "
    "WHERE tgname = 'use_two_phase' AND tgenabled = 'O'"
)
IS_KNOWN = "SELECT count(*) FROM pg_dist_partition WHERE logicalrelid::text = 'outboxq.two_phase'"
OBJECTS = (
    "SELECT (SELECT count(*) FROM pg_class WHERE relname = 'two_phase') + "
    "(SELECT count(*) FROM pg_proc WHERE proname = 'use_two_phase') + "
    "(SELECT count(*) FROM pg_trigger WHERE tgname = 'use_two_phase')"
)
# Tables that relays and operators write in transactions of their own, none of which has rows of the user's.
APART = {
    "audit", "deployment", "gauge", "migration", "paused_kind", "progress", "queue", "relay", "relay_status",
    "stat",
}  # fmt: skip


def assert_guarded(url: str) -> None:
    assert fetch_value(url, TRIGGERED) == sorted(f"outboxq.{table}" for table in GUARDED)
    assert fetch_value(url, IS_KNOWN) == 1


def by_command(url: str) -> None:
    call("migrate", url=url).ok()


def by_offline_sql(url: str) -> None:
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        connection.execute(migration_sql().encode())


def by_alembic(url: str) -> None:
    assert alembic("upgrade", "head", url=url).code == 0


def is_without_guard(url: str) -> bool:
    return fetch_value(url, OBJECTS) == 0


@pytest.mark.first_and_last
@pytest.mark.parametrize("way", [by_command, by_offline_sql, by_alembic])
def test_each_way_of_migrating_installs_the_guard(database: Database, way: Callable[[str], None]) -> None:
    """Every table that a user's transaction writes has the trigger, and Citus knows the table that this writes."""
    stand_in(database.url)
    way(database.url)
    assert_guarded(database.url)
    way(database.url)
    assert_guarded(database.url)


def test_without_citus_there_is_no_guard(database: Database) -> None:
    """A table of the catalogue's name in another schema is not Citus."""
    execute(database.url, "CREATE TABLE public.pg_dist_partition (logicalrelid regclass)")
    by_command(database.url)
    assert is_without_guard(database.url)


def test_citus_may_come_later(database: Database) -> None:
    """`outboxq migrate` names the tables that it guards, also if they are at the latest step already; then none."""
    by_command(database.url)
    stand_in(database.url)
    said = call("migrate", url=database.url).ok()
    assert "a Citus coordinator" in said.stderr
    assert ", ".join(sorted(GUARDED)) in said.stderr
    assert f"is at step {LATEST} already" in said.stdout
    assert_guarded(database.url)
    assert call("migrate", url=database.url).ok().stderr == ""


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "change",
    [
        "DROP TRIGGER use_two_phase ON outboxq.inbox",
        "ALTER TABLE outboxq.job DISABLE TRIGGER use_two_phase",
        "DELETE FROM pg_catalog.pg_dist_partition",
        "DROP FUNCTION outboxq.use_two_phase CASCADE",
        "DROP TABLE outboxq.two_phase; DELETE FROM pg_catalog.pg_dist_partition",
    ],
)
def test_what_is_missing_of_the_guard_is_put_back(database: Database, empty_engine: Engine, change: str) -> None:
    """The doctor's query sees each part that is gone, as after pg_dump and a restore, and migrating mends it."""
    stand_in(database.url)
    by_command(database.url)
    with empty_engine.connect() as connection:
        assert connection.execute(citus_state("outboxq")).one().unguarded == []
    execute(database.url, change)
    with empty_engine.connect() as connection:
        assert connection.execute(citus_state("outboxq")).one().unguarded
    by_command(database.url)
    assert_guarded(database.url)


def test_roles_without_a_right_on_it_fire_the_guard(database: Database) -> None:
    """Producers and relays write their tables as before, whatever is in their search path."""
    stand_in(database.url)
    by_command(database.url)
    role = f"writer_{secrets.token_hex(6)}"
    with psycopg.connect(libpq_url(database.url)) as connection:
        connection.execute("INSERT INTO outboxq.two_phase VALUES (1)")
        connection.execute(
            f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA outboxq TO {role}; GRANT INSERT ON outboxq.job TO {role}; "
            "CREATE TABLE public.two_phase (n int); SET search_path = public".encode()
        )
        connection.execute(f"SET LOCAL ROLE {role}".encode())
        connection.execute("SELECT outboxq.add_job('send')")
        connection.execute("RESET ROLE")
        # It deleted what was there: so it ran.
        assert connection.execute("SELECT count(*) FROM outboxq.two_phase").fetchone() == (0,)
        connection.rollback()


@pytest.mark.wide
def test_the_way_down_removes_it(database: Database) -> None:
    """Tables that stay keep it until the last is gone; then nothing of it is left."""
    stand_in(database.url)
    by_command(database.url)
    call("migrate", "--to", 8, url=database.url).ok()
    assert fetch_value(database.url, TRIGGERED) == [
        f"outboxq.{name}" for name in ("dead_job", "effect", "inbox", "job")
    ]
    call("migrate", "--to", 0, url=database.url).ok()
    assert is_without_guard(database.url)
    assert not schema_exists(database.url)


@pytest.mark.wide
def test_another_schema_has_a_guard_of_its_own(database: Database) -> None:
    """The name is quoted wherever it stands."""
    stand_in(database.url)
    schema = 'it\'s "a:b" 100% @schema@'
    call("migrate", "--schema", schema, url=database.url).ok()
    with psycopg.connect(libpq_url(database.url)) as connection:
        rows = connection.execute("SELECT tgrelid FROM pg_trigger WHERE tgname = 'use_two_phase'").fetchall()
    assert len(rows) == len(GUARDED)
    call("migrate", "--schema", schema, "--to", 0, url=database.url).ok()
    assert is_without_guard(database.url)


@pytest.mark.wide
def test_it_waits_for_running_handlers_without_holding_others_up(database: Database) -> None:
    """A trigger's lock is had for a moment only, as the other locks of migrations."""
    by_command(database.url)
    stand_in(database.url)
    with ThreadPoolExecutor() as pool, psycopg.connect(libpq_url(database.url)) as handler:
        handler.execute("SELECT outboxq.add_job('send')")
        waiting = pool.submit(call, "migrate", url=database.url)
        with psycopg.connect(libpq_url(database.url), autocommit=True) as other:
            wait_until(lambda: _has_tried(other), "the migration to try")
            # Between two tries nothing is locked.
            other.execute("SELECT outboxq.add_job('send')")
        handler.commit()
        assert waiting.result(PATIENCE).ok()
    assert_guarded(database.url)


def _has_tried(connection: psycopg.Connection) -> bool:
    row = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
    ).fetchone()
    return row == (1,)


def test_tables_that_citus_manages_are_refused(database: Database) -> None:
    """The refusal names them, and nothing is changed."""
    stand_in(database.url)
    by_command(database.url)
    manage(database.url, "outboxq.job")
    manage(database.url, "outboxq.inbox")
    refused = call("migrate", url=database.url)
    assert refused.exit_code != 0
    assert "(inbox, job)" in refused.stderr
    assert "undistribute_table" in refused.stderr


def test_a_distributed_schema_is_named(database: Database) -> None:
    """Other tables of such a schema are on a worker: migrate says that outboxq's are on the coordinator."""
    stand_in(database.url)
    execute(
        database.url,
        "CREATE SCHEMA outboxq",
        "INSERT INTO pg_catalog.pg_dist_schema VALUES ('outboxq'::regnamespace)",
    )
    said = call("migrate", url=database.url).ok().stderr
    assert "is distributed by Citus" in said
    assert "on the coordinator" in said


def test_each_table_is_guarded_or_written_apart() -> None:
    """A new table is decided on; what producers and receivers may write is guarded."""
    names = {table.name for table in metadata.tables.values()}
    assert names == set(GUARDED) | APART
    parts = [RIGHTS["producer"], RIGHTS["unique_producer"], RIGHTS["receiver"]]
    rights = [item for part in parts for item in (*part.tables.items(), *part.inserts.items())]
    written = {table for table, given in rights if given != ("SELECT",)}
    assert written <= set(GUARDED)


def test_a_real_coordinator_prepares_transactions() -> None:
    """On Citus, a transaction that adds a job and writes rows on one worker is committed in two phases."""
    url, schema = coordinator_url(), f"outboxq_{secrets.token_hex(4)}"
    notices: list[str] = []
    call("migrate", "--schema", schema, url=url).ok()
    try:
        with psycopg.connect(libpq_url(url), autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {schema}.spread (n int PRIMARY KEY)".encode())
            connection.execute(f"SELECT create_distributed_table('{schema}.spread', 'n')".encode())
            connection.add_notice_handler(lambda said: notices.append(said.message_primary or ""))
            connection.execute("SET citus.log_remote_commands = on")
            with connection.transaction():
                connection.execute(f"INSERT INTO {schema}.spread VALUES (1)".encode())
                connection.execute(f"SELECT {schema}.add_job('send')".encode())
            connection.execute(f"DROP TABLE {schema}.spread; DELETE FROM {schema}.job".encode())
        assert any("PREPARE TRANSACTION" in said for said in notices)
    finally:
        call("migrate", "--schema", schema, "--to", 0, url=url).ok()
