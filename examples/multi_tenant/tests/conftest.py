"""What the tests of this project stand on: a database whose owner is bound by row level security."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, make_url, text

from outboxq.postgres import Database, Server

PROJECT = Path(__file__).parents[1]


@pytest.fixture
def role(outboxq_server: Server) -> Iterator[str]:
    """A role of this test's own, which can do nothing but log in; its password is its name."""
    name = f"documents_{secrets.token_hex(6)}"
    engine = create_engine(outboxq_server.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD '{name}'"))
        try:
            yield name
        finally:
            connection.execute(text(f"DROP ROLE {name}"))
    engine.dispose()


@pytest.fixture
def superuser_database(outboxq_server: Server, role: str) -> Iterator[Database]:
    """The database as the server's superuser sees it, whom row level security does not bind."""
    with outboxq_server.create_database() as database:
        engine = create_engine(outboxq_server.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"ALTER DATABASE {database.name} OWNER TO {role}"))
        engine.dispose()
        yield database


@pytest.fixture
def database_url(superuser_database: Database, role: str) -> str:
    """The database as the application and its relay see it, with this project's history."""
    url = make_url(superuser_database.url).set(username=role, password=role).render_as_string(hide_password=False)
    command.upgrade(config_for(url), "head")
    return url


@pytest.fixture
def alembic_config(database_url: str) -> Config:
    """This project's history, for this test's database."""
    return config_for(database_url)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """The application's engine."""
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


def config_for(url: str) -> Config:
    """This project's history, for the database `url`."""
    config = Config(PROJECT / "alembic.ini")
    config.attributes["url"] = url
    return config
