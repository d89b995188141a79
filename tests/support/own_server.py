"""A server that a test may stop, starve and fill: the embedded one, whatever server the other tests use."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import Engine, create_engine

from outboxq import config
from outboxq.postgres import Database, PostgresUnavailable, Server
from outboxq.postgres.binaries import embedded_binaries, local_binaries
from outboxq.postgres.sources import start_cluster
from tests.support import app
from tests.support.urls import libpq_url
from tests.support.waiting import wait_until


@contextmanager
def own_server(settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server of the test's own, embedded or by OUTBOXQ_PG_BIN; skips the test where there is none."""
    configured = config.local_binaries()
    try:
        server = start_cluster(local_binaries(configured) if configured else embedded_binaries(), settings)
    except PostgresUnavailable as error:
        pytest.skip(f"needs a server of its own: {error}")
    with server:
        yield server


@contextmanager
def own_database(server: Server) -> Iterator[tuple[Database, Engine]]:
    """A database with the application's tables, and an engine on it."""
    database = server.create_database()
    app.prepare(database.url)
    engine = create_engine(database.url)
    try:
        yield database, engine
    finally:
        engine.dispose()
        # A server that a test has stopped for good takes its databases along.
        if server.pid is not None:
            database.drop()


def stop_fast(server: Server) -> None:
    """Stop the server as an operator does: sessions are ended, and data is written."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    wait_until(lambda: not answers(server.url), "the server to stop")
    # Its watchdog learns of it.
    server.stop_immediately()


def answers(url: str) -> bool:
    """Whether the server accepts connections."""
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(libpq_url(url), connect_timeout=5):
        return True
    return False
