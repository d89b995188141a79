"""The relay's own strings, below SQLAlchemy: as long as they like, and lost connections are noticed."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from sqlalchemy import Connection, Engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq.database.driver import run_on_libpq, run_outside_transaction, run_script, wait_readable
from outboxq.postgres import Database
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

# Many times what a socket takes at once.
LONG = 16_000_000
LONG_SCRIPT = f"SELECT pg_catalog.length('{'x' * LONG}')"

_AUTHENTICATED = b"R\0\0\0\x08\0\0\0\0"
_READY_FOR_QUERY = b"Z\0\0\0\x05I"


@pytest.fixture
def connection(outboxq_database: Database) -> Iterator[psycopg.Connection]:
    """A thread's own connection, over TCP."""
    with closing(psycopg.connect(libpq_url(outboxq_database.url), autocommit=True)) as connection:
        assert connection.info.host
        assert not connection.info.host.startswith("/")
        yield connection


def test_a_long_script_is_sent_completely(connection: psycopg.Connection) -> None:
    """What the socket does not take at once is sent too, and the connection can be used afterwards."""
    assert run_on_libpq(connection.pgconn, LONG_SCRIPT) == [(str(LONG),)]
    assert run_on_libpq(connection.pgconn, "SELECT 1") == [("1",)]


def test_a_long_script_that_fails_leaves_its_connection_usable(connection: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        run_on_libpq(connection.pgconn, f"{LONG_SCRIPT}; SELECT 1 / 0")
    assert run_on_libpq(connection.pgconn, "SELECT 1") == [("1",)]


def test_a_long_script_is_sent_to_a_server_that_waits_to_be_read(
    connection: psycopg.Connection, engine: Engine
) -> None:
    """The server reads nothing until its notifications are read."""
    run_on_libpq(connection.pgconn, "LISTEN many")
    notify = "SELECT pg_notify('many', rpad(number::text, 7900)) FROM generate_series(1, 2000) AS number"
    wait_event = f"SELECT wait_event FROM pg_stat_activity WHERE pid = {connection.info.backend_pid}"
    with engine.connect() as other:
        run_script(other, f"{notify}; COMMIT")
        wait_until(lambda: run_outside_transaction(other, wait_event)[0][0] == "ClientWrite", "a server that waits")
    assert run_on_libpq(connection.pgconn, LONG_SCRIPT) == [(str(LONG),)]


@pytest.mark.wide
def test_a_long_answer_may_take_its_time(connection: psycopg.Connection) -> None:
    """Longer than a connection may be silent, if it comes in pieces."""
    # More than the server keeps back.
    piece = "repeat('x', 20000)"
    script = f"SELECT {piece} FROM generate_series(1, 12) WHERE pg_sleep(0.25) IS NOT NULL"
    assert len(run_on_libpq(connection.pgconn, script, answer_seconds=2.0)) == 12


def test_a_server_that_does_not_answer_is_noticed(connection: psycopg.Connection) -> None:
    with pytest.raises(psycopg.OperationalError, match=r"^a connection was not answered within 0\.2 s$"):
        run_on_libpq(connection.pgconn, f"SELECT pg_sleep({PATIENCE})", answer_seconds=0.2)


def test_a_server_that_takes_nothing_is_noticed() -> None:
    """The connection is half open, and the script does not fit into it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers: list[socket.socket] = []

        def welcome() -> None:
            peer, _ = server.accept()
            peers.append(peer)
            peer.recv(65_536)
            peer.sendall(_AUTHENTICATED + _READY_FOR_QUERY)

        thread = threading.Thread(target=welcome)
        thread.start()
        port = server.getsockname()[1]
        url = f"postgresql://nobody@127.0.0.1:{port}/none?sslmode=disable&gssencmode=disable"
        with (
            closing(psycopg.connect(url, autocommit=True)) as connection,
            pytest.raises(psycopg.OperationalError, match="not answered within"),
        ):
            run_on_libpq(connection.pgconn, LONG_SCRIPT, answer_seconds=0.2)
        thread.join(PATIENCE)
        peers[0].close()


def test_a_long_script_is_sent_on_an_engines_connection(engine: Engine) -> None:
    with engine.connect() as connection:
        sends_a_long_script(connection)


@pytest.mark.anyio
async def test_a_long_script_is_sent_on_an_async_engines_connection(outboxq_database: Database) -> None:
    engine = create_async_engine(make_url(outboxq_database.url))
    async with engine.connect() as connection:
        await connection.run_sync(sends_a_long_script)
    await engine.dispose()


def sends_a_long_script(connection: Connection) -> None:
    """In a transaction and outside of one, and another script behind them."""
    assert run_script(connection, LONG_SCRIPT) == [(LONG,)]
    run_script(connection, "ROLLBACK")
    assert run_outside_transaction(connection, LONG_SCRIPT) == [(LONG,)]
    assert run_outside_transaction(connection, "SELECT 1") == [(1,)]


def test_a_wait_may_be_longer_than_the_system_takes() -> None:
    """epoll takes 24 days: a time that was computed from a clock that was set may be years away."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.send(b"!")
        assert wait_readable([reader], 1.7e9)
