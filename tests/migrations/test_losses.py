"""What a downgrade loses: each step says it, and the database refuses it until it is named."""

from pathlib import Path

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Engine, text

from outboxq import migrations
from outboxq.errors import ConfigError, MigrationRefused
from outboxq.migrations import LATEST
from outboxq.migrations.losses import HARMLESS, LOSSES, NAMES, Loss
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from tests.migrations.catalog import read_catalog
from tests.migrations.project import run_psql
from tests.support.cli import call
from tests.support.plain_rows import insert_row

# The tables of the guards that nothing may be discarded from.
KEPT = {1: {"job", "dead_job"}, 4: {"inbox", "effect"}}
_JOB = "'01929e1c-0000-7000-8000-000000000001'"
# By the names of the losses: what counts, and as many rows that do not.
ROWS = {
    "batches": (insert_row("batch"), None),
    "schedules": (insert_row("schedule"), None),
    "groups": (insert_row("job", {"state": "'grouped'", "group_key": "'g'"}), None),
    "expiry": (insert_row("job", {"id": _JOB, "expires_at": "now() + interval '1 day'"}), insert_row("job")),
    "unique-keys": (
        insert_row("unique_key", {"kept_until": "now() + interval '1 day'"}),
        insert_row("unique_key", {"kept_until": "now() - interval '1 day'"}),
    ),
    "cancellations": (insert_row("cancel_request", {"job_id": _JOB}), insert_row("cancel_request")),
    "paused-kinds": (insert_row("paused_kind"), None),
    "limits": (insert_row("queue", {"name": "'l'", "max_running": "1"}), insert_row("queue", {"name": "'m'"})),
    "finished-jobs": (insert_row("done_job"), insert_row("done_job", {"expires_at": "now() - interval '1 day'"})),
    "audit": (insert_row("audit"), None),
    "history": (insert_row("stat"), None),
    "keep-dead": (insert_row("queue", {"name": "'k'", "keep_dead_seconds": "0"}), None),
    "disabled-schedules": (
        insert_row("schedule", {"declared": "true", "owner": "'shop'", "paused_at": "now()", "disabled_at": "now()"}),
        None,
    ),
}
_COLUMNS = """\
SELECT relname || '.' || attname, relname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE relnamespace = 'outboxq'::regnamespace AND relkind = 'r' AND attnum > 0 AND NOT attisdropped
  AND relname <> 'migration'"""


def columns(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return {str(column): str(table) for column, table in connection.execute(text(_COLUMNS))}


def downgrade(engine: Engine, to: int, **arguments: object) -> None:
    with engine.begin() as connection:
        migrations.downgrade(Operations(MigrationContext.configure(connection)), to=to, **arguments)  # type: ignore[arg-type]


def fill(engine: Engine) -> None:
    with engine.begin() as connection:
        for statements in ROWS.values():
            for statement in filter(None, statements):
                connection.exec_driver_sql(statement)


def counted(loss: Loss) -> str:
    """As a refusal says it: one of each was filled in, and the schedule that is disabled is one of two."""
    return f"{2 if loss.name == 'schedules' else 1} {loss.what}"


@pytest.fixture
def installed(empty_engine: Engine) -> Engine:
    """The empty database, with the tables in it."""
    with empty_engine.begin() as connection:
        migrate(connection)
    return empty_engine


def test_each_table_and_column_of_a_step_says_what_a_downgrade_loses(empty_engine: Engine) -> None:
    """Guarded, or harmless for a reason: a new step's are in one of them."""
    assert set(NAMES) == set(ROWS)
    before: dict[str, str] = {}
    for step in range(1, LATEST + 1):
        with empty_engine.begin() as connection:
            migrate(connection, to=step)
        found = columns(empty_engine)
        tables = set(found.values()) - set(before.values())
        added = tables | {column for column, table in found.items() if column not in before and table not in tables}
        guarded = {part for loss in LOSSES.get(step, ()) for part in loss.parts} | KEPT.get(step, set())
        assert added <= guarded | set(HARMLESS), (step, added - guarded - set(HARMLESS))
        assert guarded <= added | {"job.state"}, (step, guarded - added)
        before = found


def test_with_rows_in_all_of_them_it_goes_down_step_by_step_as_far_as_it_is_named(
    database: Database, installed: Engine
) -> None:
    """Each loss by itself, with its count: nothing has changed until the last one is named."""
    fill(installed)
    for step in range(LATEST - 1, 7, -1):
        losses = LOSSES.get(step + 1, ())
        before = read_catalog(database.url)
        for number in range(len(losses)):
            with pytest.raises(MigrationRefused) as refused:
                downgrade(installed, step, discard=[each.name for each in losses[:number]])
            said = str(refused.value)
            missing = losses[number:]
            assert 'would lose in schema "outboxq": ' + "; ".join(map(counted, missing)) in said
            assert "--discard " + " --discard ".join(each.name for each in missing) in said
            assert read_catalog(database.url) == before
        downgrade(installed, step, discard=[each.name for each in losses])
    with installed.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar() == 3


@pytest.mark.parametrize("to", [10, 8])
def test_the_first_block_refuses_all_that_its_steps_would_lose(installed: Engine, to: int) -> None:
    """A downgrade over many steps is refused before the first of them, in AUTOCOMMIT too; its hint can be copied."""
    fill(installed)
    with pytest.raises(MigrationRefused, match="would lose") as refused:
        downgrade(installed.execution_options(isolation_level="AUTOCOMMIT"), to)
    lost = [each for step, losses in LOSSES.items() if step > to for each in losses]
    assert "; ".join(map(counted, lost)) in str(refused.value)
    assert "--discard " + " --discard ".join(each.name for each in lost) in str(refused.value)
    with installed.begin() as connection:
        assert connection.execute(text("SELECT max(step) FROM outboxq.migration")).scalar() == LATEST
    downgrade(installed, to, discard=NAMES)


def test_the_offline_sql_refuses_the_same(installed: Engine, database: Database, tmp_path: Path) -> None:
    """The guard is part of the SQL of each step, and what was named is not."""
    fill(installed)
    steps = range(LATEST, 8, -1)
    for discard, is_refused in ((), True), (NAMES, False):
        blocks = [migrations.downgrade_sql(step, "outboxq", discard) for step in steps]
        script = ";\n".join(["BEGIN", *blocks, "COMMIT;"])
        if is_refused:
            with pytest.raises(AssertionError, match="would lose"):
                run_psql(database.url, script, tmp_path)
        else:
            run_psql(database.url, script, tmp_path)


def test_the_command_names_what_it_refuses_and_takes_it(installed: Engine, database: Database) -> None:
    """Its hint can be copied."""
    fill(installed)
    refused = call("migrate", "--to", 10, url=database.url)
    assert refused.exit_code == 1
    assert "1 finished jobs that are kept" in refused.stderr
    names = [loss.name for step in (11, 15) for loss in LOSSES[step]]
    assert f"--discard {' --discard '.join(names)}" in refused.stderr
    given = [part for name in names for part in ("--discard", name)]
    call("migrate", "--to", 10, *given, url=database.url).ok()
    unknown = call("migrate", "--to", 8, "--discard", "everything", url=database.url)
    assert unknown.exit_code == 2
    assert "discard takes names of batches, schedules" in unknown.stderr


def test_a_name_that_is_no_loss_is_refused(installed: Engine) -> None:
    """Also a text for a list of texts."""
    for discard in (["jobs"], "batches"):
        with pytest.raises(ConfigError, match="discard takes names of"):
            downgrade(installed, 8, discard=discard)
