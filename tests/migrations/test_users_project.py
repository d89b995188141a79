"""outboxq's steps inside a user's own Alembic history, run by the real `alembic` command."""

from pathlib import Path

import pytest

from outboxq.migrations import LATEST
from outboxq.postgres import Database
from tests.migrations.catalog import fetch_value, is_empty, read_catalog, schema_exists
from tests.migrations.project import HISTORIES, make_project, run_psql

histories = pytest.mark.parametrize("history", HISTORIES.values(), ids=list(HISTORIES))

# Whole programs.
pytestmark = pytest.mark.large


@pytest.mark.wide
@histories
def test_a_history_goes_up_down_one_by_one_to_base_and_up_again(
    database: Database, tmp_path: Path, history: list[tuple[str, str]]
) -> None:
    """Every revision can be taken back, and the tables come back the same."""
    project = make_project(tmp_path, database.url, history)
    project.succeed("upgrade", "head")
    installed = read_catalog(database.url)
    assert [name for name, _ in installed["functions"]] == ["add_job", "keep_audit", "wake_relays"]

    steps = []
    for _ in history:
        project.succeed("downgrade", "-1")
        steps.append(
            fetch_value(database.url, "SELECT max(step) FROM outboxq.migration")
            if schema_exists(database.url)
            else None
        )
    # One step a revision; then nothing of ours, and last the project's own tables.
    assert steps == [*range(LATEST - 1, 0, -1), None, None][LATEST + 1 - len(history) :]
    assert is_empty(read_catalog(database.url, "public", without="alembic_version"))

    project.succeed("upgrade", "head")
    assert read_catalog(database.url) == installed
    project.succeed("downgrade", "base")
    assert not schema_exists(database.url)
    project.succeed("upgrade", "head")
    assert read_catalog(database.url) == installed


@histories
def test_check_is_clean_with_the_default_configuration(
    database: Database, tmp_path: Path, history: list[tuple[str, str]]
) -> None:
    """A schema of its own keeps outboxq's tables out of autogenerate, without any configuration."""
    project = make_project(tmp_path, database.url, history)
    project.succeed("upgrade", "head")
    assert "No new upgrade operations detected" in project.succeed("check")


@pytest.mark.wide
def test_check_with_include_schemas_needs_include_name_and_is_clean_with_it(database: Database, tmp_path: Path) -> None:
    """Where Alembic looks at every schema, it would drop ours; the shipped filter leaves it alone."""
    project = make_project(tmp_path, database.url, HISTORIES["a revision per step"])
    project.succeed("upgrade", "head")
    unfiltered = project.alembic("check", options="schemas")
    assert unfiltered.code != 0
    assert "remove_table" in unfiltered.err + unfiltered.out
    assert "No new upgrade operations detected" in project.succeed("check", options="schemas, filtered")


@pytest.mark.wide
@histories
def test_the_offline_sql_leaves_the_same_catalog_as_the_online_way(
    database: Database, other_database: Database, tmp_path: Path, history: list[tuple[str, str]]
) -> None:
    """`--sql` through psql does what the command does, upwards and downwards."""
    project = make_project(tmp_path, database.url, history)
    project.succeed("upgrade", "head")
    run_psql(other_database.url, project.succeed("upgrade", "head", "--sql"), tmp_path)
    installed = read_catalog(database.url)
    assert not is_empty(installed)
    assert read_catalog(other_database.url) == installed
    assert read_catalog(other_database.url, "public") == read_catalog(database.url, "public")

    run_psql(other_database.url, project.succeed("downgrade", "head:base", "--sql"), tmp_path)
    assert not schema_exists(other_database.url)
    assert is_empty(read_catalog(other_database.url, "public", without="alembic_version"))


def test_a_refused_downgrade_leaves_the_whole_history_where_it_was(database: Database, tmp_path: Path) -> None:
    """`alembic downgrade base` is one transaction: with a job in the table no revision is taken back."""
    project = make_project(tmp_path, database.url, HISTORIES["a revision per step"])
    project.succeed("upgrade", "head")
    installed = read_catalog(database.url)
    fetch_value(database.url, "SELECT outboxq.add_job('greet', '{\"secret\": \"hunter2\"}')")

    refused = project.alembic("downgrade", "base")
    assert refused.code != 0
    assert "the downgrade would drop jobs" in refused.err
    assert "outboxq jobs cancel" in refused.err
    assert "hunter2" not in refused.err
    assert read_catalog(database.url) == installed
    assert f"r{LATEST + 1} (head)" in project.succeed("current")
