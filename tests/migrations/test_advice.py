"""What is said in place of tables that were migrated leads out, and never in a circle."""

import re

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from typer.main import get_command

from outboxq import Relay, RelayConfig, find_job
from outboxq.cli.app import app as commands
from outboxq.errors import MigrationRefused, SchemaError
from outboxq.migrations import LATEST
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from outboxq.tables import LATEST_VERSION
from tests.support import app
from tests.support.cli import REPOSITORY, call

NOWHERE = "00000000-0000-7000-8000-000000000000"


def findings(url: str) -> dict[str, str]:
    return {each["code"]: each["advice"] for each in call("doctor", "--json", url=url).json["findings"]}


def test_messages_name_the_newest_step() -> None:
    """One constant: who is sent to migrate is not sent to a step of before; nor by the package's own texts."""
    assert LATEST_VERSION == LATEST
    texts = [
        *(REPOSITORY / "outboxq").rglob("*.py"),
        *(REPOSITORY / "docs" / name for name in ("migrations.md", "ten-minutes.md")),
    ]
    named = {step for path in texts for step in re.findall(r"upgrade\(\s*op,\s*to=(\d+)", path.read_text())}
    # The documentation says what to do with the next one.
    assert named == {str(LATEST), str(LATEST + 1)}


def test_tables_restored_without_rows_are_known_by_all(database: Database, empty_engine: Engine) -> None:
    """Relay, doctor, commands and the migration say the same way out, and it leads out."""
    with empty_engine.begin() as connection:
        migrate(connection)
        # As `pg_dump --schema-only` leaves them.
        connection.exec_driver_sql("DELETE FROM outboxq.migration")
    with pytest.raises(SchemaError, match="restore the rows of the tables `migration` and `deployment` too, or drop"):
        Relay(database.url, app.jobs).drain()
    assert "pg_dump --schema-only" in findings(database.url)["tables-missing"]
    assert "pg_dump --schema-only" in call("stats", url=database.url).stderr
    with pytest.raises(MigrationRefused, match="pg_dump --schema-only"), empty_engine.begin() as connection:
        migrate(connection)
    with empty_engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA outboxq CASCADE")
        assert migrate(connection) == (0, LATEST)
    Relay(database.url, app.jobs).drain()


@pytest.mark.wide
def test_tables_in_another_schema_are_named(
    database: Database, empty_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a second installation, but the option; a variable names the schema for every command."""
    with empty_engine.begin() as connection:
        migrate(connection, schema="billing")
    with pytest.raises(SchemaError, match="in schema 'outboxq', but in 'billing': name that one with"):
        Relay(database.url, app.jobs).drain()
    assert "in 'billing'" in findings(database.url)["tables-missing"]
    assert "in 'billing'" in call("stats", url=database.url).stderr
    Relay(database.url, app.jobs, RelayConfig(schema="billing")).drain()
    monkeypatch.setenv("OUTBOXQ_SCHEMA", "billing")
    call("stats", url=database.url).ok()
    assert "tables-missing" not in findings(database.url)


def test_every_command_that_takes_a_schema_takes_it_from_the_variable() -> None:
    """By a walk through all commands."""
    found, todo = [], [get_command(commands)]
    while todo:
        command = todo.pop()
        todo += getattr(command, "commands", {}).values()
        found += [each for each in command.params if "--schema" in each.opts]
    assert len(found) > 40
    assert {each.envvar for each in found} == {"OUTBOXQ_SCHEMA"}


def test_find_job_says_that_the_tables_are_missing(empty_engine: Engine) -> None:
    """In one sentence, and not in SQL."""
    with Session(empty_engine) as session, pytest.raises(SchemaError, match=rf"upgrade\(op, to={LATEST}\)"):
        find_job(session, NOWHERE)
