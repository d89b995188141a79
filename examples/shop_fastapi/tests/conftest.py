"""What the tests of this project stand on: a stocked database with its history, and a mail server."""

import socket
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import Envelope
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from outboxq.postgres import Database, Server
from shop.models import Product

PROJECT = Path(__file__).parents[1]


def config_for(url: str) -> Config:
    """This project's history, for the database `url`."""
    config = Config(PROJECT / "alembic.ini")
    config.attributes["url"] = url
    return config


@pytest.fixture(scope="session")
def outboxq_template(outboxq_server: Server) -> str:
    """The database that each test's is copied from."""

    def prepare(url: str) -> None:
        command.upgrade(config_for(url), "head")
        engine = create_engine(url)
        with Session(engine) as session, session.begin():
            session.add(Product(sku="cup", price_cents=4_50, stock=100))
            session.add(Product(sku="teapot", price_cents=39_00, stock=5))
        engine.dispose()

    return outboxq_server.create_template(prepare)


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


class Mailbox:
    """Takes every mail that comes."""

    def __init__(self) -> None:
        self.subjects: list[str] = []

    async def handle_DATA(  # noqa: N802  # the name that aiosmtpd gives it
        self, _server: object, _session: object, envelope: Envelope
    ) -> str:
        """A mail has come."""
        self.subjects.append(str(message_from_bytes(envelope.original_content or b"")["Subject"]))
        return "250 taken"


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mailbox]:
    """A mail server on loopback, where the relays of this test will find it."""
    mailbox = Mailbox()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    controller = Controller(mailbox, hostname="127.0.0.1", port=port)
    controller.start()
    monkeypatch.setenv("SHOP_SMTP", f"127.0.0.1:{port}")
    yield mailbox
    controller.stop()
