"""A downgrade never drops what still counts: it refuses, and everything stays where it was."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, Engine, TextClause, text
from sqlalchemy.exc import DBAPIError

from outboxq import migrations
from outboxq.errors import MigrationRefused
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from outboxq.statements.render import quote_identifier
from outboxq.statements.server import schema_version
from tests.migrations.catalog import read_catalog, schema_exists
from tests.migrations.project import run_psql
from tests.support.waiting import PATIENCE, wait_until

ADD_JOB = text("SELECT outboxq.add_job('greet', '{\"secret\": \"hunter2\"}')")
# As Python's add_job does it, which needs no step 2.
INSERT_JOB = text("INSERT INTO outboxq.job (id, queue, kind, args) VALUES (gen_random_uuid(), 'mail', 'greet', '{}')")
ADD_DEAD_LETTER = text(
    "INSERT INTO outboxq.dead_job "
    "(id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, created_at) VALUES "
    "(gen_random_uuid(), 'mail', 'greet', '{\"secret\": \"hunter2\"}', '{}', 0, 8, 0, '[]', 'gave up', now())"
)

ADD_MESSAGE = (
    "INSERT INTO outboxq.inbox (consumer, message_id, expires_at) "
    "VALUES ('shop', 'hunter2', clock_timestamp() + interval '{}')"
)
ADD_EFFECT = (
    "INSERT INTO outboxq.effect (scope, key, status, in_doubt, provider_key, lock_token, locked_until, result, "
    "expires_at) VALUES ('pay', 'hunter2', '{}', {}, gen_random_uuid(), gen_random_uuid(), now(), "
    "'\"hunter2\"', clock_timestamp() + CAST({} AS interval))"
)
NOBODY_KNOWS = "drop effects that are under way or whose outcome nobody knows"
WHAT_COUNTS = {
    "a call under way": (ADD_EFFECT.format("started", False, "NULL"), NOBODY_KNOWS),
    "an unknown effect": (ADD_EFFECT.format("unknown", False, "NULL"), NOBODY_KNOWS),
    "a failed call in doubt": (ADD_EFFECT.format("retryable", True, "NULL"), NOBODY_KNOWS),
    "a done effect": (ADD_EFFECT.format("done", False, "'1 hour'"), "forget effects that were called"),
    "a message": (ADD_MESSAGE.format("1 hour"), "forget messages that were accepted"),
}


@pytest.fixture
def installed(empty_engine: Engine) -> Engine:
    """The empty database, with the tables in it."""
    with empty_engine.begin() as connection:
        migrate(connection)
    return empty_engine


def downgrade(engine: Engine, to: int = 0) -> None:
    with engine.begin() as connection:
        migrations.downgrade(_operations(connection), to=to)


@pytest.mark.first_and_last
@pytest.mark.parametrize(("row", "named"), [(ADD_JOB, "jobs"), (ADD_DEAD_LETTER, "dead letters")])
@pytest.mark.parametrize("isolation_level", ["READ COMMITTED", "AUTOCOMMIT"])
def test_it_refuses_while_there_is_something_to_lose(
    database: Database, installed: Engine, row: object, named: str, isolation_level: str
) -> None:
    """The message names what is there and what to do, no payload, and every step is still in place."""
    with installed.begin() as connection:
        connection.execute(row)
    before = read_catalog(database.url)
    with pytest.raises(MigrationRefused) as refused:
        downgrade(installed.execution_options(isolation_level=isolation_level))
    message = str(refused.value)
    assert message == (
        f'the downgrade would drop {named} in schema "outboxq". Let a relay work them off, or cancel and discard them '
        "(outboxq jobs cancel, outboxq dead discard)."
    )
    assert "hunter2" not in message
    assert read_catalog(database.url) == before
    with installed.connect() as connection:
        assert schema_version(connection, "outboxq") == migrations.LATEST


def test_it_goes_through_once_the_work_is_done(database: Database, installed: Engine) -> None:
    """What was refused works as soon as the tables are empty."""
    with installed.begin() as connection:
        connection.execute(ADD_JOB)
    with pytest.raises(MigrationRefused, match="would drop jobs"):
        downgrade(installed)
    with installed.begin() as connection:
        connection.execute(text("DELETE FROM outboxq.job"))
    downgrade(installed)
    assert not schema_exists(database.url)


def test_going_back_to_a_step_that_keeps_the_tables_keeps_the_jobs(installed: Engine) -> None:
    """Only what would lose jobs is refused."""
    with installed.begin() as connection:
        connection.execute(ADD_JOB)
    downgrade(installed, to=1)
    with installed.connect() as connection:
        assert schema_version(connection, "outboxq") == 1
        assert connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar() == 1


def test_the_offline_sql_refuses_too(database: Database, installed: Engine, tmp_path: Path) -> None:
    """The guard is part of the SQL, not of the program that wrote it."""
    with installed.begin() as connection:
        connection.execute(ADD_JOB)
    before = read_catalog(database.url)
    steps = [migrations.downgrade_sql(step, "outboxq") for step in range(migrations.LATEST, 0, -1)]
    blocks = [migrations.check_downgrade_sql(0, "outboxq"), steps[0]]
    with pytest.raises(AssertionError, match="would drop jobs"):
        run_psql(database.url, ";\n".join(["BEGIN", *blocks, "COMMIT;"]), tmp_path)
    assert read_catalog(database.url) == before
    # Also each block by itself, as a frozen file may hold only one.
    with pytest.raises(AssertionError, match="would drop jobs"):
        run_psql(database.url, ";\n".join(["BEGIN", *steps, "COMMIT;"]), tmp_path)
    assert read_catalog(database.url) == before


@pytest.mark.first_and_last
@pytest.mark.parametrize("step", range(1, migrations.LATEST + 1))
def test_it_waits_for_an_open_transaction_and_sees_its_job(database: Database, installed: Engine, step: int) -> None:
    """A producer that has inserted but not committed cannot lose its job to the drop, whichever step is first."""
    downgrade(installed, to=step)
    before = read_catalog(database.url)
    with _downgrade_that_waits(installed) as (producer, waiting):
        producer.commit()
        with pytest.raises(MigrationRefused, match="would drop jobs"):
            waiting.result(PATIENCE)
    assert read_catalog(database.url) == before
    with installed.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar() == 1


@pytest.mark.first_and_last
@pytest.mark.parametrize(("row", "said"), WHAT_COUNTS.values(), ids=list(WHAT_COUNTS))
@pytest.mark.parametrize("target", [0, 3])
def test_what_makes_a_repetition_harmless_is_not_dropped(
    database: Database, installed: Engine, row: str, said: str, target: int
) -> None:
    """A message that was accepted and an effect that was called, or may have been, are still known afterwards."""
    with installed.begin() as connection:
        connection.execute(text(row))
    before = read_catalog(database.url)
    with pytest.raises(MigrationRefused) as refused:
        downgrade(installed.execution_options(isolation_level="AUTOCOMMIT"), to=target)
    message = str(refused.value)
    assert f'the downgrade would {said} in schema "outboxq"' in message
    assert "outboxq effects resolve" in message or 'TRUNCATE "outboxq".inbox, "outboxq".effect;' in message
    assert "hunter2" not in message
    assert read_catalog(database.url) == before
    with installed.connect() as connection:
        assert schema_version(connection, "outboxq") == migrations.LATEST


def test_the_memory_goes_once_it_has_expired_or_was_emptied(database: Database, installed: Engine) -> None:
    """What only waits to be pruned is no reason to refuse, nor what an operator has emptied on purpose."""
    with installed.begin() as connection:
        connection.execute(text(ADD_MESSAGE.format("-1 second")))
        connection.execute(text(ADD_EFFECT.format("done", False, "'-1 second'")))
    downgrade(installed, to=3)
    with installed.begin() as connection:
        migrate(connection)
        connection.execute(text(WHAT_COUNTS["a message"][0]))
        connection.execute(text(WHAT_COUNTS["an unknown effect"][0]))
    with installed.begin() as connection:
        connection.execute(text('TRUNCATE "outboxq".inbox, "outboxq".effect;'))
    downgrade(installed)
    assert not schema_exists(database.url)


@pytest.mark.parametrize("schema", ["outboxq", "We\"ird; DROP's 50% :name"])
def test_the_hint_can_be_copied_whatever_the_schema_is_called(empty_engine: Engine, schema: str) -> None:
    """Its TRUNCATE is SQL for this very schema."""
    with empty_engine.begin() as connection:
        migrate(connection, schema=schema)
        with connection.connection.cursor() as cursor:
            cursor.execute(ADD_MESSAGE.format("1 hour").replace("outboxq.", quote_identifier(schema) + "."))
    with pytest.raises(MigrationRefused, match="would forget messages") as refused, empty_engine.begin() as connection:
        migrate(connection, to=0, schema=schema)
    with empty_engine.begin() as connection, connection.connection.cursor() as cursor:
        cursor.execute(str(refused.value).partition("If that is meant: ")[2])
    with empty_engine.begin() as connection:
        assert migrate(connection, to=0, schema=schema) == (migrations.LATEST, 0)


def test_an_upgrade_keeps_the_work_and_a_downgrade_of_the_memory_too(installed: Engine) -> None:
    """Going from step 3 to 4 and back touches no job and no dead letter."""
    downgrade(installed, to=3)
    with installed.begin() as connection:
        connection.execute(ADD_JOB)
        connection.execute(ADD_DEAD_LETTER)
        jobs = connection.execute(text("SELECT * FROM outboxq.job")).all()
        dead = connection.execute(text("SELECT * FROM outboxq.dead_job")).all()
        assert migrate(connection) == (3, migrations.LATEST)
    downgrade(installed, to=3)
    with installed.connect() as connection:
        assert connection.execute(text("SELECT * FROM outboxq.job")).all() == jobs
        assert connection.execute(text("SELECT * FROM outboxq.dead_job")).all() == dead


@pytest.mark.first_and_last
@pytest.mark.parametrize("row", [row for row, _ in WHAT_COUNTS.values()], ids=list(WHAT_COUNTS))
def test_the_offline_sql_of_one_step_refuses_too(installed: Engine, row: str) -> None:
    """The block that drops the tables looks by itself, as a frozen file may hold only that one."""
    with installed.begin() as connection:
        connection.execute(text(row))
    downgrade(installed, to=4)
    block = migrations.downgrade_sql(4, "outboxq")
    with pytest.raises(DBAPIError, match="the downgrade would"), installed.begin() as connection:
        connection.exec_driver_sql(block)
    with installed.connect() as connection:
        assert schema_version(connection, "outboxq") == 4


def test_it_waits_for_an_open_transaction_and_sees_its_message(database: Database, installed: Engine) -> None:
    """A message that is accepted but not committed yet is not forgotten by the drop."""
    before = read_catalog(database.url)
    with _downgrade_that_waits(installed, text(WHAT_COUNTS["a message"][0]), to=3) as (receiver, waiting):
        receiver.commit()
        with pytest.raises(MigrationRefused, match="would forget messages"):
            waiting.result(PATIENCE)
    assert read_catalog(database.url) == before


def test_it_goes_on_when_the_open_transaction_rolls_back(database: Database, installed: Engine) -> None:
    """A job that never came to be is no reason to refuse."""
    with _downgrade_that_waits(installed) as (producer, waiting):
        producer.rollback()
        waiting.result(PATIENCE)
    assert not schema_exists(database.url)


@pytest.mark.first_and_last
@pytest.mark.parametrize("isolation_level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("from_step", [3, migrations.LATEST])
def test_it_refuses_a_transaction_whose_snapshot_may_be_too_old(
    database: Database, installed: Engine, isolation_level: str, from_step: int
) -> None:
    """Behind an old snapshot the guard would not see what was committed meanwhile, so it does not start."""
    downgrade(installed, to=from_step)
    before = read_catalog(database.url)
    engine = installed.execution_options(isolation_level=isolation_level)
    with pytest.raises(MigrationRefused, match=f"needs READ COMMITTED, this transaction is {isolation_level}"):
        downgrade(engine, to=0 if from_step == 3 else 3)
    assert read_catalog(database.url) == before
    # Nothing to lose: any transaction will do.
    downgrade(installed, to=3)
    downgrade(engine, to=1)
    assert read_catalog(database.url)["functions"] == []


@contextmanager
def _downgrade_that_waits(
    engine: Engine, row: TextClause = INSERT_JOB, to: int = 0
) -> Iterator[tuple[Connection, "Future[None]"]]:
    """A producer with an uncommitted row, and a downgrade that waits for its table lock."""
    waits_for_lock = text(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted "
        "AND mode = 'AccessExclusiveLock' AND wait_event_type = 'Lock' AND datname = current_database()"
    )
    with ThreadPoolExecutor() as pool, engine.connect() as producer:
        producer.execute(row)
        waiting = pool.submit(downgrade, engine, to)
        try:
            # In one transaction, pg_stat_activity would stay what it was at the first look.
            with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as watcher:
                wait_until(lambda: watcher.execute(waits_for_lock).scalar() == 1, "the downgrade to wait")
            assert not waiting.done()
            yield producer, waiting
        finally:
            # Whatever failed: the thread must come free.
            producer.close()


def _operations(connection: Connection) -> Operations:
    return Operations(MigrationContext.configure(connection))
