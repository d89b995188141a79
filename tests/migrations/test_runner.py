"""`outboxq.migrations.runner`: what `outboxq migrate` and `outboxq migrate --sql` do."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq import migrations
from outboxq.errors import ConfigError, MigrationRefused, SchemaError
from outboxq.migrations.runner import migrate, migration_sql
from outboxq.postgres import Database
from outboxq.statements import wake
from outboxq.statements.server import schema_version
from tests.migrations.catalog import is_empty, read_catalog, schema_exists
from tests.migrations.project import run_psql
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

LATEST = migrations.LATEST

# What SQL, psycopg, SQLAlchemy's text() and our own templates give a meaning to.
WILD_SCHEMAS = [
    "We\"ird; DROP's Name",
    "Upper Case",
    "select",
    "a :b ::c \\:d",
    "50% %s %%",
    "back\\slash",
    "@schema@ @step@",
    "$$ $1 $x$",
    "mötley → 48",
]


def test_migrating_again_changes_nothing(database: Database, empty_engine: Engine) -> None:
    """The second run finds every step done, and says so."""
    with empty_engine.begin() as connection:
        assert migrate(connection) == (0, LATEST)
    installed = read_catalog(database.url)
    with empty_engine.begin() as connection:
        applied = connection.execute(text("SELECT step, applied_at FROM outboxq.migration ORDER BY step")).all()
        assert migrate(connection) == (LATEST, LATEST)
        assert connection.execute(text("SELECT step, applied_at FROM outboxq.migration ORDER BY step")).all() == applied
    assert read_catalog(database.url) == installed


def test_steps_are_taken_up_and_back_one_at_a_time(database: Database, empty_engine: Engine) -> None:
    """`to` names the step to end at, from above and from below; 0 leaves nothing."""
    seen = []
    catalogs = []
    for target in (1, 2, 1, 2, 0, 0, 2):
        with empty_engine.begin() as connection:
            seen.append(migrate(connection, to=target))
            assert schema_version(connection, "outboxq") == (target or None)
        catalogs.append(read_catalog(database.url))
    assert seen == [(0, 1), (1, 2), (2, 1), (1, 2), (2, 0), (0, 0), (0, 2)]
    assert catalogs[0] == catalogs[2] != catalogs[1] == catalogs[3] == catalogs[6]
    assert is_empty(catalogs[4])
    assert is_empty(catalogs[5])


def test_a_step_that_a_rollback_took_back_was_never_there(database: Database, empty_engine: Engine) -> None:
    """Migrating is one with the caller's transaction."""
    with empty_engine.connect() as connection:
        migrate(connection)
        connection.rollback()
    assert not schema_exists(database.url)


def test_a_second_migration_waits_for_the_first_and_finds_its_work_done(
    database: Database, empty_engine: Engine
) -> None:
    """Two deployments at the same time both succeed, and the second reports that there was nothing to do."""

    def second() -> tuple[int, int]:
        with empty_engine.begin() as connection:
            return migrate(connection)

    with ThreadPoolExecutor() as pool, empty_engine.connect() as first:
        assert migrate(first) == (0, LATEST)
        waiting = pool.submit(second)
        try:
            with empty_engine.connect() as watcher:
                count = text(
                    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
                    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                )
                wait_until(lambda: watcher.execute(count).scalar() == 1, "the second migration to wait")
            assert not waiting.done()
        finally:
            first.commit()
        assert waiting.result(PATIENCE) == (LATEST, LATEST)


def test_many_migrations_at_once_all_succeed(database: Database, empty_engine: Engine) -> None:
    """The steps themselves wait for each other, also where each is a transaction of its own; one does the work."""
    autocommit = empty_engine.execution_options(isolation_level="AUTOCOMMIT")
    start = Barrier(6)

    def upgrade(index: int) -> None:
        with (autocommit if index % 2 else empty_engine).begin() as connection:
            start.wait(PATIENCE)
            migrations.upgrade(_operations(connection))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(upgrade, range(6)))
    with empty_engine.connect() as connection:
        steps = connection.execute(text("SELECT step FROM outboxq.migration ORDER BY step")).scalars().all()
    assert steps == list(range(LATEST + 1))


@pytest.mark.first_and_last
@pytest.mark.parametrize("schema", ["outboxq", *WILD_SCHEMAS])
def test_the_sql_for_psql_makes_the_same_and_may_be_run_twice(
    database: Database, other_database: Database, empty_engine: Engine, tmp_path: Path, schema: str
) -> None:
    """`migrate --sql` is what `migrate` does, in a transaction of its own."""
    with empty_engine.begin() as connection:
        migrate(connection, schema=schema)
    script = migration_sql(schema=schema)
    for _ in range(2):
        run_psql(other_database.url, script, tmp_path)
    installed = read_catalog(database.url, schema)
    assert not is_empty(installed)
    assert read_catalog(other_database.url, schema) == installed


def test_the_sql_up_to_a_step_stops_there(database: Database, empty_engine: Engine, tmp_path: Path) -> None:
    """`migration_sql(to=1)` makes step 1."""
    run_psql(database.url, migration_sql(to=1), tmp_path)
    with empty_engine.connect() as connection:
        assert schema_version(connection, "outboxq") == 1


@pytest.mark.first_and_last
@pytest.mark.parametrize("schema", WILD_SCHEMAS)
def test_a_schema_of_any_name_works_from_end_to_end(database: Database, empty_engine: Engine, schema: str) -> None:
    """Tables, the version marker, the SQL function, the sleep flag and the wake-up all carry the name."""
    with empty_engine.begin() as connection:
        assert migrate(connection, schema=schema) == (0, LATEST)
        assert schema_version(connection, schema) == LATEST
    with psycopg.connect(libpq_url(database.url), autocommit=True) as relay, relay.cursor() as cursor:
        cursor.execute(wake.listen(schema).encode())
        assert cursor.execute(wake.try_sleep_flags(schema, ["mail"]).encode()).fetchone() == ("mail", True)
        with psycopg.connect(libpq_url(database.url)) as producer:
            call = psycopg.sql.SQL("SELECT {}('greet', queue => 'mail')").format(
                psycopg.sql.Identifier(schema, "add_job")
            )
            producer.execute(call)
        heard = list(relay.notifies(timeout=PATIENCE, stop_after=1))
        assert [(notice.channel, notice.payload) for notice in heard] == [(wake.channel_name(schema), "mail")]
        cursor.execute(psycopg.sql.SQL("DELETE FROM {}").format(psycopg.sql.Identifier(schema, "job")))
    with empty_engine.begin() as connection:
        assert migrate(connection, to=0, schema=schema) == (LATEST, 0)
    assert not schema_exists(database.url, schema)


@pytest.mark.each_value
@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg"])
@pytest.mark.parametrize("schema", ["outboxq", 'We"ird; 50% :b \\:c'])
def test_other_drivers_migrate_too(
    database: Database, other_database: Database, empty_engine: Engine, driver: str, schema: str
) -> None:
    """A project's Alembic environment may use any driver, sync or async."""
    with empty_engine.begin() as connection:
        migrate(connection, schema=schema)
    url = make_url(other_database.url).set(drivername=f"postgresql+{driver}")
    if driver == "asyncpg":

        async def migrate_there() -> tuple[int, int]:
            engine = create_async_engine(url)
            async with engine.begin() as connection:
                result = await connection.run_sync(lambda sync: migrate(sync, schema=schema))
            await engine.dispose()
            return result

        assert asyncio.run(migrate_there()) == (0, LATEST)
    else:
        engine = create_engine(url)
        with engine.begin() as connection:
            assert migrate(connection, schema=schema) == (0, LATEST)
        engine.dispose()
    assert read_catalog(other_database.url, schema) == read_catalog(database.url, schema)


def test_two_installations_live_side_by_side(database: Database, empty_engine: Engine) -> None:
    """Each schema has a version of its own, and going back with one leaves the other."""
    with empty_engine.begin() as connection:
        migrate(connection, schema="one")
        assert migrate(connection, to=1, schema="two") == (0, 1)
        assert migrate(connection, to=0, schema="one") == (LATEST, 0)
    assert not schema_exists(database.url, "one")
    with empty_engine.connect() as connection:
        assert schema_version(connection, "two") == 1


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("", "1 to 63 bytes, got 0"),
        ("a\0b", "control character"),
        ("a\nb", "control character"),
        ("x" * 49, "at most 48 bytes"),
        ("ö" * 25, "at most 48 bytes"),
        ("\ud800", "lone surrogate"),
        ("pg_jobs", "may not begin with pg_"),
        ("a$outboxq$b", "may not hold"),
        ("a$function$b", "may not hold"),
    ],
)
def test_a_name_that_cannot_be_a_schema_is_refused(
    database: Database, empty_engine: Engine, schema: str, said: str
) -> None:
    """Refused with its reason before anything is sent."""
    with pytest.raises(ConfigError, match=said):
        migration_sql(schema=schema)
    with empty_engine.begin() as connection, pytest.raises(ConfigError, match=said):
        migrate(connection, schema=schema)


@pytest.mark.parametrize("step", [LATEST + 1, -1, True, "2"])
def test_a_step_that_does_not_exist_is_refused(database: Database, empty_engine: Engine, step: int) -> None:
    """The message says which steps there are, and that a newer version may know more."""
    said = f"steps 0 to {LATEST}, got to={step!r}: a newer outboxq may know it"
    with empty_engine.begin() as connection:
        with pytest.raises(ConfigError, match=said):
            migrate(connection, to=step)
        with pytest.raises(ConfigError, match=said):
            migrations.downgrade(_operations(connection), to=step)
        with pytest.raises(ConfigError, match=f"steps 1 to {LATEST}"):
            migrations.upgrade(_operations(connection), to=step)
    assert not schema_exists(database.url)
    with pytest.raises(ConfigError, match=f"steps 1 to {LATEST}, got to=0"):
        migration_sql(to=0)


def test_tables_of_a_newer_version_are_left_alone(database: Database, empty_engine: Engine) -> None:
    """Older code upgrades nothing there, and takes nothing back that it does not know."""
    with empty_engine.begin() as connection:
        migrate(connection)
        connection.execute(text("INSERT INTO outboxq.migration (step) VALUES (:step)"), {"step": LATEST + 1})
        assert migrate(connection) == (LATEST + 1, LATEST + 1)
        with pytest.raises(SchemaError, match=f"is at step {LATEST + 1}, and this outboxq knows steps up to {LATEST}"):
            migrate(connection, to=LATEST)
    installed = read_catalog(database.url)
    for target in range(LATEST + 1):
        with (
            pytest.raises(
                MigrationRefused, match=f"is at step {LATEST + 1}, and this outboxq knows steps up to {LATEST}"
            ),
            empty_engine.begin() as connection,
        ):
            migrations.downgrade(_operations(connection), to=target)
    assert read_catalog(database.url) == installed


def _operations(connection: Connection) -> Operations:
    return Operations(MigrationContext.configure(connection))
