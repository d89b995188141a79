"""The project's migrations."""

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text


def test_the_history_makes_the_tables_of_the_models(alembic_config: Config) -> None:
    """`alembic check` finds nothing to do, and does not look at outboxq's schema."""
    command.check(alembic_config)


def test_the_history_goes_back(alembic_config: Config, engine: Engine) -> None:
    """A downgrade leaves neither the application's tables nor outboxq's."""
    command.downgrade(alembic_config, "base")
    with engine.connect() as connection:
        tables = connection.scalars(text("SELECT tablename FROM pg_tables WHERE schemaname IN ('outboxq', 'public')"))
        assert set(tables) == {"alembic_version"}
