"""Databases with tables of a test module's own, and sessions on them."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outboxq import OutboxSession
from outboxq.postgres import Database, Server
from tests.support.own_tables import database_with


@pytest.fixture(scope="module")
def database(request: pytest.FixtureRequest, outboxq_server: Server, outboxq_template: str) -> Iterator[Database]:
    """The module's database: outboxq's tables, and those of the module's `Base`."""
    with database_with(request.module.Base.metadata, outboxq_server, outboxq_template) as database:
        yield database


@pytest.fixture(params=[OutboxSession, Session], ids=["OutboxSession", "Session"])
def session(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Session]:
    """A session of outboxq's, and a plain one."""
    with request.param(engine) as session:
        yield session
