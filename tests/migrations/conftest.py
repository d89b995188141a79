"""Empty databases: migrations bring their own tables."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from outboxq.postgres import Database, Server


@pytest.fixture
def database(outboxq_server: Server) -> Iterator[Database]:
    """A database of this test's own, with nothing in it."""
    with outboxq_server.create_database() as database:
        yield database


@pytest.fixture
def other_database(outboxq_server: Server) -> Iterator[Database]:
    """A second one, to compare with."""
    with outboxq_server.create_database() as database:
        yield database


@pytest.fixture
def empty_engine(database: Database) -> Iterator[Engine]:
    """An engine on the empty database."""
    engine = create_engine(database.url)
    yield engine
    engine.dispose()
