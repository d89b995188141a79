"""Runs this repository's revisions on the database that OUTBOXQ_DATABASE_URL names, or writes their SQL (`--sql`)."""

from collections.abc import Mapping
from logging.config import fileConfig

from alembic import context
from sqlalchemy import NullPool, create_engine

from outboxq.config import database_url
from outboxq.tables import SCHEMA, metadata

# Not `alembic_version`: the database may hold the history of another project.
VERSION_TABLE = "outboxq_alembic_version"


def is_ours(name: str | None, type_: str, _parents: Mapping[str, str | None]) -> bool:
    """The other way round than `outboxq.migrations.include_name`: here everything but outboxq's schema is foreign."""
    return type_ != "schema" or name == SCHEMA


def run_offline() -> None:
    """Write SQL, without a database."""
    context.configure(
        dialect_name="postgresql",
        # Else every percent sign is doubled, for a driver that is not there.
        dialect_opts={"paramstyle": "named"},
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        literal_binds=True,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def run_online() -> None:
    """Run the revisions, each in a transaction of its own."""
    engine = create_engine(database_url(), poolclass=NullPool, hide_parameters=True)
    with engine.connect() as connection:
        context.configure(
            connection=connection,
            target_metadata=metadata,
            version_table=VERSION_TABLE,
            include_schemas=True,
            include_name=is_ours,
            transaction_per_migration=True,
        )
        with context.begin_transaction():
            context.run_migrations()


if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)

if context.is_offline_mode():
    run_offline()
else:
    run_online()
