"""Migrates the tables for the command `outboxq migrate`, without Alembic revisions in the user's project."""

import io
from collections.abc import Callable, Collection

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection

from outboxq import migrations
from outboxq.config import check_schema
from outboxq.errors import SchemaError
from outboxq.migrations.losses import check_discard
from outboxq.migrations.server import check_server
from outboxq.statements.server import lock_version, schema_version, try_lock_version, version_lock_holders


def migrate(
    connection: Connection,
    *,
    to: int | None = None,
    schema: str = "outboxq",
    waits: Callable[[list[str]], None] | None = None,
    discard: Collection[str] = (),
) -> tuple[int, int]:
    """Bring the tables to step `to` (None: the latest; a lower one: downgrade) in the connection's transaction.

    Tables of a newer outboxq stay unchanged if no step is named.

    Args:
        waits: Called before a wait for another migration, with a text for each session that it waits for.
        discard: Names of data that a downgrade may lose, as its refusal gives them.

    Returns:
        The step before and the step after.

    Raises:
        ConfigError: there is no such step, the name cannot be a schema, or the server or the database is not supported.
        SchemaError: a newer outboxq made the tables, so this one cannot downgrade them to `to`.
    """
    check_schema(schema)
    check_discard(discard)
    target = migrations.check_step(migrations.LATEST if to is None else to, lowest=0)
    before = _locked_version(connection, schema, waits)
    if before > migrations.LATEST:
        if to is not None:
            raise SchemaError(
                f"schema {schema!r} is at step {before}, and this outboxq knows steps up to {migrations.LATEST}: "
                f"go back to step {to} with the newer outboxq that made step {before}"
            )
        return before, before
    operations = Operations(MigrationContext.configure(connection))
    if target < before or target == 0:
        migrations.downgrade(operations, to=target, schema=schema, discard=discard)
    else:
        check_server(connection)
        migrations.upgrade(operations, to=target, schema=schema)
    return before, target


def migrate_committing(
    connection: Connection,
    *,
    to: int | None = None,
    schema: str = "outboxq",
    waits: Callable[[list[str]], None] | None = None,
    discard: Collection[str] = (),
) -> tuple[int, int]:
    """Bring the tables to step `to` like `migrate`, but in several transactions, so that locks are held only briefly.

    If the process ends between two transactions, the next call continues with the remaining steps.

    Args:
        connection: A connection outside a transaction.

    Returns:
        The step before and the step after.
    """
    check_schema(schema)
    target = migrations.check_step(migrations.LATEST if to is None else to, lowest=0)
    found: list[int] = []
    for stop in migrations.COMMIT_BEHIND:
        with connection.begin():
            found.append(_locked_version(connection, schema, waits))
            if found[-1] < stop < target:
                migrate(connection, to=stop, schema=schema)
    with connection.begin():
        _, after = migrate(connection, to=to, schema=schema, waits=waits, discard=discard)
    return found[0], after


def _locked_version(connection: Connection, schema: str, waits: Callable[[list[str]], None] | None) -> int:
    """Keep other migrations out until the transaction ends, and return the step of the tables, 0 without tables.

    `waits` is called before a wait, with a text for each session that holds the lock.
    """
    # If another migration is in progress, the steps would wait for it, but the version read would be outdated.
    if not try_lock_version(connection, schema):
        if waits is not None:
            waits(version_lock_holders(connection, schema))
        lock_version(connection, schema)
    return schema_version(connection, schema) or 0


def migration_sql(*, to: int | None = None, schema: str = "outboxq") -> str:
    """Return the SQL by which `migrate` makes the tables of step `to` where none exist, for `psql` or for review.

    Raises:
        ConfigError: there is no such step, or the name cannot be a schema.
    """
    output = io.StringIO()
    context = MigrationContext.configure(
        dialect_name="postgresql",
        # Otherwise every percent sign is doubled, for a driver that is not used here.
        dialect_opts={"paramstyle": "named"},
        opts={"as_sql": True, "output_buffer": output},
    )
    last = migrations.check_step(migrations.LATEST if to is None else to, lowest=1)
    operations, done = Operations(context), 0
    for stop in (*(step for step in migrations.COMMIT_BEHIND if step < last), last):
        with context.begin_transaction():
            if done == 0:
                migrations.upgrade(operations, to=stop, schema=schema)
            else:
                for step in range(done + 1, stop + 1):
                    operations.execute(migrations.step_clause(step, schema))
                operations.execute(migrations.guard_clause(schema))
        done = stop
    return output.getvalue()
