"""What the tests of this project stand on: a provider at work, a database, and relays that know where it is."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.postgres import Database, Server
from payments.provider import Provider, serve
from payments.testing import LIMIT_SECONDS, Books, Till

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
    engine = create_engine(outboxq_database.url)
    yield engine
    engine.dispose()


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[OutboxSession]:
    """Makes the application's sessions."""
    return sessionmaker(engine, class_=OutboxSession)


@pytest.fixture
def till(monkeypatch: pytest.MonkeyPatch) -> Iterator[Till]:
    """A provider that listens on loopback, where the relays of this test will find it."""
    with serve(Provider()) as address, httpx.Client(base_url=address, timeout=LIMIT_SECONDS) as http:
        monkeypatch.setenv("PAYMENTS_PROVIDER_URL", address)
        yield Till(address, http)


@pytest.fixture
def books(engine: Engine) -> Books:
    """The shop's database, to look into."""
    return Books(engine)
