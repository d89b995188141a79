"""Fixtures for users' tests: a PostgreSQL server per test session, a database with outboxq's tables per test.

pytest imports this module in every project where outboxq is installed, so only the fixtures import the rest of outboxq.

To have your own tables in each database, override the session fixture `outboxq_prepare`:

    @pytest.fixture(scope="session")
    def outboxq_prepare():
        def prepare(url: str) -> None:
            ...  # `alembic upgrade head`, or Base.metadata.create_all()
        return prepare
"""

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Protocol

import pytest

from outboxq.awaited import awaited

if TYPE_CHECKING:
    from outboxq.postgres import Database, Server

_SOURCE = pytest.StashKey[str]()
_WORKER_SOURCE = "outboxq_source"


class _WorkerNode(Protocol):
    config: pytest.Config
    workeroutput: dict[str, object]


@pytest.fixture(scope="session")
def outboxq_server(request: pytest.FixtureRequest) -> "Iterator[Server]":
    """The PostgreSQL server of this test session: that of `OUTBOXQ_TEST_DATABASE_URL`, or one that is started."""
    from outboxq import config
    from outboxq.postgres import find_server

    with find_server(configured_url=config.test_database_url(), binaries=config.local_binaries()) as server:
        source = f"PostgreSQL {server.version} from {server.source}"
        request.config.stash[_SOURCE] = source
        # A worker of pytest-xdist prints no summary, so it passes the source to the process that prints one.
        getattr(request.config, "workeroutput", {})[_WORKER_SOURCE] = source
        yield server


@pytest.fixture(scope="session")
def outboxq_prepare() -> Callable[[str], None]:
    """Return a function that makes the tables of the template database; by default outboxq's tables only.

    Each test's database is a copy of the template.
    """
    from sqlalchemy import create_engine

    from outboxq.migrations.runner import migrate

    def prepare(url: str) -> None:
        engine = create_engine(url)
        with engine.begin() as connection:
            migrate(connection)
        engine.dispose()

    return prepare


@pytest.fixture(scope="session")
def outboxq_template(outboxq_server: "Server", outboxq_prepare: Callable[[str], None]) -> str:
    """The name of the template database from which each test's database is copied."""
    return outboxq_server.create_template(outboxq_prepare)


@pytest.fixture
def outboxq_database(outboxq_server: "Server", outboxq_template: str) -> "Iterator[Database]":
    """A database for this test only, a copy of the template; `.url` is SQLAlchemy's URL for psycopg."""
    with outboxq_server.create_database(template=outboxq_template) as database:
        yield database


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """Fail the setup of a test that calls a helper of `outboxq.testing` without the `await` that it needs."""
    with awaited.counting():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Fail a test that calls a helper of `outboxq.testing` without the `await` that it needs."""
    with awaited.counting():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Fail the teardown of a test that calls a helper of `outboxq.testing` without the `await` that it needs."""
    with awaited.counting():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: _WorkerNode) -> None:
    """Record which PostgreSQL a worker of pytest-xdist has used, for the summary at the end."""
    source = getattr(node, "workeroutput", {}).get(_WORKER_SOURCE)
    if isinstance(source, str):
        node.config.stash[_SOURCE] = source


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report which PostgreSQL the tests ran on."""
    source = config.stash.get(_SOURCE, None)
    if source is not None:
        terminalreporter.write_line(f"outboxq: {source}")
