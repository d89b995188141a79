"""Step 5 gives the tables settings for vacuum, and leaves alone what an operator has set."""

from sqlalchemy import Engine, create_engine, text

from outboxq.migrations.runner import migrate
from outboxq.postgres import Database

OURS = {
    "job": {"vacuum_index_cleanup=on", "vacuum_truncate=off"},
    "inbox": {"autovacuum_vacuum_scale_factor=0.02", "autovacuum_vacuum_threshold=5000", "vacuum_index_cleanup=on"},
    "effect": {"autovacuum_vacuum_scale_factor=0.02", "autovacuum_vacuum_threshold=5000", "vacuum_index_cleanup=on"},
}
OPTIONS = "SELECT coalesce(reloptions, '{}') FROM pg_class WHERE oid = to_regclass('outboxq.' || :name)"


def options(engine: Engine, table: str) -> set[str]:
    with engine.connect() as connection:
        return set(connection.execute(text(OPTIONS), {"name": table}).scalar_one())


def go_to(engine: Engine, step: int) -> None:
    with engine.begin() as connection:
        migrate(connection, to=step)


def test_the_settings_come_and_go_with_the_step(database: Database) -> None:
    """What earlier steps have set stays as it is, up and down."""
    engine = create_engine(database.url)
    go_to(engine, 4)
    before = {table: options(engine, table) for table in OURS}
    go_to(engine, 5)
    assert {table: options(engine, table) - before[table] for table in OURS} == OURS
    assert all(before[table] < options(engine, table) for table in OURS)
    go_to(engine, 4)
    assert {table: options(engine, table) for table in OURS} == before
    engine.dispose()


def test_what_an_operator_has_set_stays(database: Database) -> None:
    """Set before the step, it is left out by it; set after it, it outlives the way back."""
    engine = create_engine(database.url)
    go_to(engine, 4)
    with engine.begin() as connection:
        connection.execute(
            text("ALTER TABLE outboxq.job SET (vacuum_truncate = true, autovacuum_vacuum_threshold = 9)")
        )
        connection.execute(text("ALTER TABLE outboxq.inbox SET (autovacuum_vacuum_scale_factor = 0.5)"))
    go_to(engine, 5)
    assert {"vacuum_truncate=true", "autovacuum_vacuum_threshold=9", "vacuum_index_cleanup=on"} < options(engine, "job")
    assert "autovacuum_vacuum_scale_factor=0.5" in options(engine, "inbox")
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.effect SET (autovacuum_vacuum_threshold = 7)"))
    go_to(engine, 4)
    assert {"vacuum_truncate=true", "autovacuum_vacuum_threshold=9"} < options(engine, "job")
    assert options(engine, "inbox") == {"autovacuum_vacuum_scale_factor=0.5"}
    assert options(engine, "effect") == {"autovacuum_vacuum_threshold=7"}
    engine.dispose()


def test_claims_do_not_wait_for_the_step(database: Database) -> None:
    """The locks that it takes let others read and write the jobs meanwhile, and it does not wait for them."""
    engine = create_engine(database.url)
    go_to(engine, 4)
    with engine.connect() as claiming, engine.connect() as migrating:
        claiming.execute(text("DELETE FROM outboxq.job"))
        migrating.execute(text("SET LOCAL lock_timeout = '2s'"))
        migrate(migrating, to=5)
        claiming.execute(text("SET LOCAL lock_timeout = '2s'"))
        claiming.execute(text("SELECT FROM outboxq.job FOR UPDATE SKIP LOCKED"))
        migrating.commit()
    assert "vacuum_truncate=off" in options(engine, "job")
    engine.dispose()
