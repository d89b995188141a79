"""A listening connection that nobody answers any more: the relay polls meanwhile, and gets itself another."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import Engine, make_url, text

from outboxq import RelayConfig
from outboxq.database import driver
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from outboxq.relay.listener import HearingCheck, Listener
from outboxq.tables import SCHEMA
from tests.conftest import StartRelay
from tests.support.ledger import enqueue, ledger, rows, waiting
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until


class Proxy:
    """Forwards connections to a server, until it stops doing so without closing them."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._swallowing: set[socket.socket] = set()
        self.port: int = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def swallow_everything(self) -> None:
        """What comes in on today's connections is taken and forgotten; new connections are served."""
        self._swallowing.update(self._sockets)

    def close(self) -> None:
        for each in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    thread = threading.Thread(target=self._forward, args=(source, sink))
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if source not in self._swallowing:
                    sink.sendall(data)
        if source not in self._swallowing:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(outboxq_database: Database) -> Iterator[Proxy]:
    url = make_url(outboxq_database.url)
    assert url.host is not None
    proxy = Proxy(url.host, url.port or 5432)
    yield proxy
    proxy.close()


@pytest.fixture
def listen_url(outboxq_database: Database, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way through the proxy; what is asked on it is answered at once, or not at all."""
    monkeypatch.setattr(driver, "ANSWER_SECONDS", 0.3)
    through_proxy = make_url(outboxq_database.url).set(host="127.0.0.1", port=proxy.port)
    return through_proxy.render_as_string(hide_password=False)


PROBING = RelayLimits(probe_seconds=0.3)


def test_a_half_open_listener_is_replaced_and_jobs_are_done_meanwhile(
    start_relay: StartRelay, engine: Engine, proxy: Proxy, listen_url: str
) -> None:
    """Its TCP connection is healthy and nobody is behind it: only a question that is not answered tells."""
    with start_relay(config=RelayConfig(listen_url=listen_url, poll_seconds=0.5), limits=PROBING):
        first = wait_until(lambda: listening(engine), "the relay to listen")
        proxy.swallow_everything()
        names = enqueue(engine, ["meanwhile-1", "meanwhile-2"])
        wait_until(lambda: waiting(engine) == 0, "the relay to go on by polling")
        wait_until(lambda: listening(engine) - first, "another listener")
    assert ledger(engine) == dict.fromkeys(names, 1)


def test_a_half_open_listener_of_an_idle_relay_is_replaced(
    start_relay: StartRelay, engine: Engine, proxy: Proxy, listen_url: str
) -> None:
    """While no slot asks anything of it, the listener asks by itself."""
    with start_relay(config=RelayConfig(listen_url=listen_url, poll_seconds=600), limits=PROBING):
        first = wait_until(lambda: listening(engine), "the relay to listen")
        wait_until(lambda: probed(engine), "a probe, behind all that the slots have asked")
        proxy.swallow_everything()
        wait_until(lambda: listening(engine) - first, "another listener")


def test_a_listener_that_is_half_open_before_it_was_heard_is_replaced(
    outboxq_database: Database, proxy: Proxy, listen_url: str
) -> None:
    """While it waits for the proof that notifications arrive, it asks by itself too."""
    listeners: list[psycopg.Connection] = []

    def listen() -> psycopg.Connection:
        listeners.append(psycopg.connect(libpq_url(listen_url), autocommit=True))
        return listeners[-1]

    def produce() -> psycopg.Connection:
        if len(listeners) == 1:
            proxy.swallow_everything()
        return psycopg.connect(libpq_url(outboxq_database.url), autocommit=True)

    hearing = HearingCheck(produce, patience_seconds=600.0, poll_seconds=1.0)
    listener = Listener(listen, SCHEMA, lambda _queue: None, probe_seconds=0.3, hearing=hearing)
    listener.start()
    try:
        wait_until(lambda: hearing.passed, "a listener that hears")
    finally:
        listener.stop()
    assert len(listeners) == 2


def probed(engine: Engine) -> bool:
    """Whether the last question of this test's listener was its own."""
    query = (
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'outboxq listener' "
        "AND query = 'SELECT'"
    )
    return bool(rows(engine, query))


def listening(engine: Engine) -> set[int]:
    """The server processes that listen in this test's database."""
    query = (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'outboxq listener' "
        "AND query <> ''"
    )
    with engine.connect() as connection:
        return set(connection.execute(text(query)).scalars())
