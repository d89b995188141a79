"""A migration that the database refuses says so in one line, whichever way it is run."""

import asyncio
from pathlib import Path

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq import migrations
from outboxq.errors import MigrationRefused
from outboxq.postgres import Database
from tests.migrations.project import HISTORIES, make_project, run_psql
from tests.support.cli import run

ADD_JOB = text("INSERT INTO outboxq.job (id, queue, kind, args) VALUES (gen_random_uuid(), 'mail', 'greet', '{}')")
REASON = 'the downgrade would drop jobs in schema "outboxq"'


def downgrade(connection: Connection) -> None:
    migrations.downgrade(Operations(MigrationContext.configure(connection)))


def with_a_job(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(ADD_JOB)
    engine.dispose()


def test_the_command_says_it_in_one_line(outboxq_database: Database) -> None:
    """With what to do, and exit code 1."""
    with_a_job(outboxq_database.url)
    outcome = run("migrate", "--to", 0, url=outboxq_database.url)
    assert outcome.exit_code == 1
    (said,) = outcome.stderr.splitlines()
    assert said.startswith(f"Error: {REASON}. Let a relay work them off")


@pytest.mark.wide
def test_alembic_ends_with_the_reason_and_not_with_our_sql(database: Database, tmp_path: Path) -> None:
    """Its traceback shows Python's frames alone: SQLAlchemy's error would repeat 160 lines of SQL."""
    project = make_project(tmp_path, database.url, HISTORIES["a revision per step"])
    project.succeed("upgrade", "head")
    with_a_job(database.url)
    refused = project.alembic("downgrade", "base")
    assert refused.code != 0
    assert refused.err.splitlines()[-1].startswith(f"outboxq.errors.MigrationRefused: {REASON}. Let a relay")
    assert "RAISE EXCEPTION" not in refused.err
    assert "DO $outboxq$" not in refused.err


def test_psql_shows_the_reason_and_not_our_sql(database: Database, tmp_path: Path) -> None:
    """The offline SQL of a downgrade."""
    project = make_project(tmp_path, database.url, HISTORIES["a revision per step"])
    project.succeed("upgrade", "head")
    with_a_job(database.url)
    with pytest.raises(AssertionError) as refused:
        run_psql(database.url, migrations.check_downgrade_sql(0, "outboxq") + ";", tmp_path)
    assert f"outboxq: {REASON}\n" in str(refused.value)
    assert "RAISE EXCEPTION" not in str(refused.value)


@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg", "psycopg"])
def test_every_driver_gives_the_reason_and_the_hint(outboxq_database: Database, driver: str) -> None:
    """An Alembic environment may have any of them."""
    with_a_job(outboxq_database.url)
    url = make_url(outboxq_database.url).set(drivername=f"postgresql+{driver}", query={})

    async def migrate_async() -> None:
        engine = create_async_engine(url)
        try:
            async with engine.begin() as connection:
                await connection.run_sync(downgrade)
        finally:
            await engine.dispose()

    def migrate() -> None:
        if driver != "psycopg2":
            asyncio.run(migrate_async())
            return
        engine = create_engine(url)
        try:
            with engine.begin() as connection:
                downgrade(connection)
        finally:
            engine.dispose()

    with pytest.raises(MigrationRefused, match=f"^{REASON}. Let a relay work them off, or cancel and discard them "):
        migrate()
