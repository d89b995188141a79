"""Alembic's environment: the application's table, in the database that `SIGNUP_DATABASE_URL` names."""

from alembic import context
from sqlalchemy import NullPool, create_engine

from signup.models import Base
from signup.settings import read_settings


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
