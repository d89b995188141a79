"""What the tests of this example stand on: a provider at work, a database, and relays that know where it is."""

from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import sessionmaker

from examples.payments.models import Base
from examples.payments.provider import Provider, serve
from examples.payments.support import LIMIT_SECONDS, Books, Till
from outboxq import OutboxSession
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database, Server


# A project of its own overrides `outboxq_prepare`. The examples share their test session with the tests of outboxq
# itself, so each has its own template.
@pytest.fixture(scope="module")
def outboxq_template(outboxq_server: Server) -> str:
    """A database with this example's tables and outboxq's."""

    def prepare(url: str) -> None:
        engine = create_engine(url)
        with engine.begin() as connection:
            migrate(connection)
            Base.metadata.create_all(connection)
        engine.dispose()

    return outboxq_server.create_template(prepare)


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
        monkeypatch.setenv("PAYMENTS_URL", address)
        yield Till(address, http)


@pytest.fixture
def books(engine: Engine) -> Books:
    """The shop's database, to look into."""
    return Books(engine)
