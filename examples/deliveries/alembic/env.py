"""Alembic's environment: this application's tables, in the database that `DELIVERIES_DATABASE_URL` names."""

from alembic import context
from sqlalchemy import NullPool, create_engine

from deliveries.models import Base
from deliveries.settings import read_settings


def run() -> None:
    """Run the history online."""
    # Tests name the database of theirs.
    url = context.config.attributes.get("url") or read_settings().database_url
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata, transaction_per_migration=True)
        with context.begin_transaction():
            context.run_migrations()


run()
