"""The listener's thread outlives every error: without it a relay would poll for as long as it runs."""

import logging
import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg.pq.abc import PGconn
from sqlalchemy import make_url

from outboxq.database import driver
from outboxq.postgres import Database
from outboxq.relay.listener import HearingCheck, IdleSlot, Listener
from outboxq.tables import SCHEMA
from outboxq.testing.proxy import CommitProxy
from tests.support.waiting import wait_until

ANSWER_SECONDS = 30.0


def libpq(database: Database) -> str:
    return make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.fixture
def listener(outboxq_database: Database) -> Iterator[Listener]:
    url = libpq(outboxq_database)
    listener = Listener(lambda: psycopg.connect(url, autocommit=True), SCHEMA, lambda _queue: None, probe_seconds=10.0)
    listener.start()
    yield listener
    listener.stop()


def test_an_error_that_nobody_thought_of_is_told_and_survived(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither psycopg's nor the system's: the slot is answered, and the next one is flagged on a new connection."""
    ignore: Callable[[], None] = lambda: None  # noqa: E731
    with caplog.at_level(logging.WARNING, logger="outboxq.listener"):
        refused = listener.fall_asleep(IdleSlot(frozenset(("lone surrogate \ud800",)), ignore))
        assert refused.result(timeout=ANSWER_SECONDS) is None
        flagged = None
        while not flagged:
            # Without a connection the answer is no.
            flagged = listener.fall_asleep(IdleSlot(frozenset(("mail",)), ignore)).result(timeout=ANSWER_SECONDS)
    assert [record.error_type for record in caplog.records] == ["UnicodeEncodeError"]


def test_a_notification_that_comes_late_still_counts(
    outboxq_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """On a slow machine the warning is taken back, and slots sleep under their flags."""
    url, held = libpq(outboxq_database), []

    class Held:
        """A producer's connection whose COMMIT waits until the test lets it go."""

        def __init__(self) -> None:
            self.connection = psycopg.connect(url, autocommit=True)
            self.connection.execute("BEGIN")
            self.pgconn = self
            held.append(self.connection)

        def send_query(self, script: bytes) -> None:
            self.connection.pgconn.send_query(script)

        def finish(self) -> None: ...

        def __getattr__(self, name: str) -> object:
            return getattr(self.connection.pgconn, name)

    hearing = HearingCheck(Held, patience_seconds=0.1, poll_seconds=1.0)  # type: ignore[arg-type]
    listener = Listener(
        lambda: psycopg.connect(url, autocommit=True), SCHEMA, lambda _queue: None, probe_seconds=10.0, hearing=hearing
    )
    with caplog.at_level(logging.INFO, logger="outboxq.listener"):
        listener.start()
        try:
            wait_until(lambda: caplog.records, "the warning")
            slot = IdleSlot(frozenset(("mail",)), lambda: None)
            assert listener.fall_asleep(slot).result(timeout=ANSWER_SECONDS) is None
            held[0].execute("COMMIT")
            wait_until(lambda: listener.fall_asleep(slot).result(timeout=ANSWER_SECONDS), "the sleep flag")
        finally:
            listener.stop()
            held[0].close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert len(held) == 1


def test_a_relay_listens_if_it_cannot_be_checked(outboxq_database: Database) -> None:
    """A server that is full has no connection left for the check; it is made with the next connection."""
    url = libpq(outboxq_database)

    def refuse() -> psycopg.Connection:
        raise psycopg.OperationalError("too many connections")

    hearing = HearingCheck(refuse, patience_seconds=30.0, poll_seconds=1.0)
    listener = Listener(
        lambda: psycopg.connect(url, autocommit=True), SCHEMA, lambda _queue: None, probe_seconds=10.0, hearing=hearing
    )
    listener.start()
    try:
        slot = IdleSlot(frozenset(("mail",)), lambda: None)
        wait_until(lambda: listener.fall_asleep(slot).result(timeout=ANSWER_SECONDS), "the sleep flag")
    finally:
        listener.stop()
    assert not hearing.passed


def test_silence_of_a_dead_connection_is_no_missing_notification(
    outboxq_database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the relay says that notifications do not arrive, the server has answered it on that connection."""
    monkeypatch.setattr(driver, "ANSWER_SECONDS", 0.3)
    url, opened = libpq(outboxq_database), list[psycopg.Connection]()
    with CommitProxy(outboxq_database.url) as proxy:

        def connect() -> psycopg.Connection:
            # The first way to the server swallows what comes, without an end; the second one is direct.
            opened.append(psycopg.connect(url if opened else libpq_through(proxy), autocommit=True))
            return opened[-1]

        def connect_and_freeze() -> psycopg.Connection:
            producer = psycopg.connect(url, autocommit=True)
            if len(opened) == 1:
                proxy.freeze()
            return producer

        hearing = HearingCheck(connect_and_freeze, patience_seconds=0.5, poll_seconds=1.0)
        listener = Listener(connect, SCHEMA, lambda _queue: None, probe_seconds=600.0, hearing=hearing)
        with caplog.at_level(logging.INFO, logger="outboxq.listener"):
            listener.start()
            try:
                slot = IdleSlot(frozenset(("mail",)), lambda: None)
                wait_until(lambda: listener.fall_asleep(slot).result(timeout=ANSWER_SECONDS), "the sleep flag")
            finally:
                proxy.thaw()
                listener.stop()
    assert len(opened) == 2
    assert not caplog.records


def test_a_connection_that_is_lost_wakes_the_slots(outboxq_database: Database) -> None:
    """Although there is no other one yet: nothing notifies of what is committed from then on."""
    opened, woken = list[psycopg.Connection](), threading.Event()

    def connect() -> psycopg.Connection:
        if opened:
            raise OSError("no route to host")
        opened.append(psycopg.connect(libpq(outboxq_database), autocommit=True))
        return opened[0]

    listener = Listener(connect, SCHEMA, lambda _queue: None, probe_seconds=10.0)
    listener.start()
    try:
        assert listener.fall_asleep(IdleSlot(frozenset(("mail",)), woken.set)).result(ANSWER_SECONDS)
        with psycopg.connect(libpq(outboxq_database), autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 60000)", [opened[0].info.backend_pid])
        assert woken.wait(ANSWER_SECONDS)
    finally:
        listener.stop()


def test_a_thread_that_could_not_be_waited_for_closes_its_sockets_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that connects to a host that does not answer; a slot that wakes it after that gets no error."""
    connects, released = threading.Event(), threading.Event()

    def connect() -> psycopg.Connection:
        connects.set()
        released.wait(ANSWER_SECONDS)
        raise OSError("no route to host")

    listener = Listener(connect, SCHEMA, lambda _queue: None, probe_seconds=10.0)
    listener.start()
    assert connects.wait(ANSWER_SECONDS)
    with monkeypatch.context() as patch:
        patch.setattr(listener._thread, "join", lambda _seconds: None)
        listener.stop()
    assert listener._wake_writer.fileno() >= 0
    released.set()
    wait_until(lambda: listener._wake_reader.fileno() == listener._wake_writer.fileno() == -1, "the sockets to close")
    listener.wake_up(IdleSlot(frozenset(("mail",)), lambda: None))


def test_a_stop_that_is_read_with_a_request_is_not_missed(outboxq_database: Database) -> None:
    """The thread ends at once, and not with the next probe."""
    url = libpq(outboxq_database)

    class Stopping(Listener):
        def take_requests(self, connection: PGconn | None) -> None:
            # As another thread has it that calls `stop` at this moment.
            self._is_stopping = True
            self._wake_writer.send(b"!")
            super().take_requests(connection)

    listener = Stopping(lambda: psycopg.connect(url, autocommit=True), SCHEMA, lambda _queue: None, probe_seconds=600.0)
    listener.start()
    listener.fall_asleep(IdleSlot(frozenset(("mail",)), lambda: None))
    listener._thread.join(ANSWER_SECONDS)
    assert not listener._thread.is_alive()


def test_a_thread_that_does_not_start_leaves_no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay ends with the error."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    listener = Listener(psycopg.connect, SCHEMA, lambda _queue: None, probe_seconds=10.0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        listener.start()
    assert listener._wake_reader.fileno() == listener._wake_writer.fileno() == -1


def libpq_through(proxy: CommitProxy) -> str:
    return make_url(proxy.url).set(drivername="postgresql").render_as_string(hide_password=False)
