"""This repository's own `alembic/`: thin revisions over the steps that users call."""

import os
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine

import outboxq
from outboxq import migrations
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from tests.migrations.catalog import fetch_value, read_catalog, schema_exists
from tests.migrations.project import Finished, run, run_psql

REPOSITORY = Path(outboxq.__file__).parents[1]


def alembic(*arguments: str, url: str | None) -> Finished:
    environment = {name: value for name, value in os.environ.items() if name != "OUTBOXQ_DATABASE_URL"}
    if url is not None:
        environment["OUTBOXQ_DATABASE_URL"] = url
    return run([sys.executable, "-m", "alembic", *arguments], cwd=REPOSITORY, env=environment)


@pytest.mark.wide
def test_the_history_goes_up_is_clean_and_goes_down(database: Database, other_database: Database) -> None:
    """`alembic upgrade head` here makes what `outboxq migrate` makes, `check` agrees, and base leaves nothing."""
    engine = create_engine(other_database.url)
    with engine.begin() as connection:
        migrate(connection)
    engine.dispose()

    assert alembic("upgrade", "head", url=database.url).code == 0
    assert read_catalog(database.url) == read_catalog(other_database.url)
    checked = alembic("check", url=database.url)
    assert checked.code == 0, checked.err
    assert "No new upgrade operations detected" in checked.out
    assert alembic("downgrade", "base", url=database.url).code == 0
    assert not schema_exists(database.url)


@pytest.mark.wide
def test_each_revision_is_a_transaction_of_its_own(database: Database) -> None:
    """The lock of step 7 is not held while step 8 reads the table; the offline SQL commits between them too."""
    assert alembic("upgrade", "head", url=database.url).code == 0
    transactions = "SELECT count(DISTINCT xmin::text) FROM outboxq.migration WHERE step > 0"
    assert fetch_value(database.url, transactions) == migrations.LATEST
    first, _, second = alembic("upgrade", "head", "--sql", url=None).out.partition("VALIDATE CONSTRAINT job_sizes")
    assert second
    assert "COMMIT;" in first.partition("job_sizes CHECK")[2]


@pytest.mark.wide
def test_check_sees_a_table_that_the_code_does_not_know(database: Database) -> None:
    """The check above looks into outboxq's schema."""
    assert alembic("upgrade", "head", url=database.url).code == 0
    engine = create_engine(database.url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE outboxq.stray (id bigint PRIMARY KEY)")
    engine.dispose()
    checked = alembic("check", url=database.url)
    assert checked.code != 0
    assert "stray" in checked.err


@pytest.mark.wide
def test_the_offline_sql_needs_no_database_and_does_the_same(database: Database, tmp_path: Path) -> None:
    """Both directions are written without a URL, and psql takes them."""
    up = alembic("upgrade", "head", "--sql", url=None)
    down = alembic("downgrade", "head:base", "--sql", url=None)
    assert (up.code, down.code) == (0, 0), up.err + down.err
    run_psql(database.url, up.out, tmp_path)
    assert fetch_value(database.url, "SELECT max(step) FROM outboxq.migration") == migrations.LATEST
    run_psql(database.url, down.out, tmp_path)
    assert not schema_exists(database.url)


def test_the_newest_revision_is_the_newest_step() -> None:
    """A step that is added gets its revision."""
    heads = alembic("heads", url=None)
    assert heads.out.split() == [f"{migrations.LATEST:04d}", "(head)"]
