"""Alembic's environment: this example's tables, in the database that `OUTBOXQ_DATABASE_URL` names."""

import os

from alembic import context
from sqlalchemy import NullPool, create_engine

from examples.transfers.models import Base


def run() -> None:
    """Run the history online."""
    url = context.config.attributes.get("url") or os.environ["OUTBOXQ_DATABASE_URL"]
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata, transaction_per_migration=True)
        with context.begin_transaction():
            context.run_migrations()


run()
