"""Fixtures of this project's tests: a database with its history, and sessions."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.postgres import Database, Server

PROJECT = Path(__file__).parents[1]


def config_for(url: str) -> Config:
    """This project's history, for the database `url`."""
    config = Config(PROJECT / "alembic.ini")
    config.attributes["url"] = url
    return config


@pytest.fixture(scope="session")
def outboxq_template(outboxq_server: Server) -> str:
    """The database that each test's is copied from."""
    return outboxq_server.create_template(lambda url: command.upgrade(config_for(url), "head"))


@pytest.fixture
def alembic_config(outboxq_database: Database) -> Config:
    """This project's history, for this test's database."""
    return config_for(outboxq_database.url)


@pytest.fixture
def engine(outboxq_database: Database) -> Iterator[Engine]:
    """An engine on this test's database."""
    engine = create_engine(outboxq_database.url, pool_size=10)
    yield engine
    engine.dispose()


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[OutboxSession]:
    """Makes the application's sessions."""
    return sessionmaker(engine, class_=OutboxSession)
