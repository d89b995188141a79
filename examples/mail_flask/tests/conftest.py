"""What the tests of this project stand on: a mail server, a database with its history, and the application."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from flask.testing import FlaskClient
from sqlalchemy import Engine, create_engine

from outboxq.postgres import Database, Server
from signup.app import create_app, db
from signup.mailbox import Mailbox, serve

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
    """An engine on this test's database, to look into it."""
    engine = create_engine(outboxq_database.url)
    yield engine
    engine.dispose()


@pytest.fixture
def client(outboxq_database: Database) -> Iterator[FlaskClient]:
    """Calls the application, without a server."""
    app = create_app(outboxq_database.url)
    yield app.test_client()
    with app.app_context():
        db.engine.dispose()


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mailbox]:
    """A mail server on loopback, where the relays of this test will find it."""
    mailbox = Mailbox()
    with serve(mailbox) as address:
        monkeypatch.setenv("SIGNUP_SMTP", address)
        yield mailbox
