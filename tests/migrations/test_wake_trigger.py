"""The trigger's side of waking up: NOTIFY is sent if somebody sleeps, and nobody falls asleep over a new job."""

from collections.abc import Iterator

import psycopg
import pytest

from outboxq.postgres import Database
from outboxq.statements import wake
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE

SCHEMA = "outboxq"
SENTINEL = "(nothing more)"
INSERT = (
    "INSERT INTO outboxq.job (id, queue, kind, args) "
    "SELECT gen_random_uuid(), queue, 'k', '{}' FROM unnest(%s::text[]) AS queue"
)


class Relay:
    """A connection that listens, and holds sleep flags."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection
        connection.execute(wake.listen(SCHEMA).encode())

    def falls_asleep(self, queue: str) -> bool:
        row = self.connection.execute(wake.try_sleep_flags(SCHEMA, [queue]).encode()).fetchone()
        assert row is not None
        return bool(row[1])

    def wakes_up(self, queue: str) -> None:
        self.connection.execute(wake.drop_sleep_flags(SCHEMA, [queue]).encode())

    def heard(self) -> list[str]:
        """The queues notified since the last call, up to a notification of our own: they come in order."""
        self.connection.execute("SELECT pg_notify(%s, %s)", [wake.channel_name(SCHEMA), SENTINEL])
        payloads: list[str] = []
        while SENTINEL not in payloads:
            fresh = [notice.payload for notice in self.connection.notifies(timeout=PATIENCE, stop_after=1)]
            assert fresh, "no notification came"
            payloads += fresh
        return payloads[:-1]


@pytest.fixture
def relay(outboxq_database: Database) -> Iterator[Relay]:
    """The relay's listening connection."""
    with psycopg.connect(libpq_url(outboxq_database.url), autocommit=True) as connection:
        yield Relay(connection)


@pytest.fixture
def producer(outboxq_database: Database) -> Iterator[psycopg.Connection]:
    """A producer, which commits when told to."""
    with psycopg.connect(libpq_url(outboxq_database.url)) as connection:
        yield connection


def test_a_sleeping_relay_is_notified_of_its_queue(relay: Relay, producer: psycopg.Connection) -> None:
    """At the commit, with the queue's name."""
    assert relay.falls_asleep("mail")
    producer.execute(INSERT, [["mail"]])
    assert relay.heard() == []
    producer.commit()
    assert relay.heard() == ["mail"]


def test_nobody_asleep_means_no_notification(relay: Relay, producer: psycopg.Connection) -> None:
    """A producer pays for NOTIFY only while a relay sleeps: neither before the flag nor after it."""
    producer.execute(INSERT, [["mail"]])
    producer.commit()
    assert relay.heard() == []
    assert relay.falls_asleep("mail")
    relay.wakes_up("mail")
    producer.execute(INSERT, [["mail"]])
    producer.commit()
    assert relay.heard() == []


def test_a_rolled_back_job_wakes_nobody(relay: Relay, producer: psycopg.Connection) -> None:
    """The notification belongs to the transaction of the job."""
    assert relay.falls_asleep("mail")
    producer.execute(INSERT, [["mail"]])
    producer.rollback()
    assert relay.heard() == []


def test_the_flags_of_other_installations_do_not_count(relay: Relay, producer: psycopg.Connection) -> None:
    """The schema's name is in the key: a relay of another schema sleeps undisturbed."""
    relay.connection.execute(wake.listen("other").encode())
    relay.connection.execute(wake.try_sleep_flags("other", ["mail"]).encode())
    producer.execute(INSERT, [["mail"]])
    producer.commit()
    assert relay.heard() == []


def test_one_insert_into_several_queues_wakes_each_that_sleeps_once(relay: Relay, producer: psycopg.Connection) -> None:
    """Only the queues under a flag are notified, and each once."""
    assert relay.falls_asleep("mail")
    assert relay.falls_asleep("ledger")
    producer.execute(INSERT, [["mail", "depot", "ledger", "mail", "ledger", "mail"]])
    producer.commit()
    assert sorted(relay.heard()) == ["ledger", "mail"]


def test_an_insert_of_nothing_wakes_nobody_and_locks_nothing(relay: Relay, producer: psycopg.Connection) -> None:
    """A statement without rows runs the trigger, which finds nothing to do."""
    assert relay.falls_asleep("mail")
    producer.execute(INSERT, [[]])
    assert _advisory_locks_of(producer, relay) == 0
    producer.commit()
    assert relay.heard() == []


@pytest.mark.parametrize("state", ["ready", "scheduled"])
def test_a_scheduled_job_wakes_too(relay: Relay, producer: psycopg.Connection, state: str) -> None:
    """It may be due before the sleeper meant to wake."""
    assert relay.falls_asleep("mail")
    producer.execute(
        "INSERT INTO outboxq.job (id, queue, kind, args, state) VALUES (gen_random_uuid(), 'mail', 'k', '{}', %s)",
        [state],
    )
    producer.commit()
    assert relay.heard() == ["mail"]


def test_notify_off_suppresses_it_for_that_transaction_alone(relay: Relay, producer: psycopg.Connection) -> None:
    """`SET LOCAL outboxq.notify = 'off'` sends nothing and locks nothing; the next transaction notifies again."""
    assert relay.falls_asleep("mail")
    producer.execute("SET LOCAL outboxq.notify = 'off'")
    producer.execute(INSERT, [["mail", "depot"]])
    assert _advisory_locks_of(producer, relay) == 0
    producer.commit()
    assert relay.heard() == []
    producer.execute(INSERT, [["mail"]])
    producer.commit()
    assert relay.heard() == ["mail"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_nobody_falls_asleep_while_an_insert_is_uncommitted(
    relay: Relay, producer: psycopg.Connection, end: str
) -> None:
    """A sleeper that looked before the commit and slept after it would miss the job; other queues are free."""
    producer.execute(INSERT, [["mail"]])
    assert not relay.falls_asleep("mail")
    assert relay.falls_asleep("ledger")
    getattr(producer, end)()
    assert relay.falls_asleep("mail")


def test_producers_do_not_wait_for_each_other_nor_for_a_sleeper(
    relay: Relay, producer: psycopg.Connection, outboxq_database: Database
) -> None:
    """The lock is shared among producers, and only ever tried."""
    producer.execute(INSERT, [["mail"]])
    with psycopg.connect(libpq_url(outboxq_database.url)) as other:
        other.execute("SET LOCAL statement_timeout = '20s'")
        other.execute(INSERT, [["mail"]])
        assert _advisory_locks_of(other, relay) == 1
    producer.commit()
    assert relay.heard() == []


def test_the_flag_goes_with_its_process(relay: Relay, producer: psycopg.Connection, outboxq_database: Database) -> None:
    """A sleeper that dies leaves no flag behind: producers stop notifying, and another relay may take it."""
    with psycopg.connect(libpq_url(outboxq_database.url), autocommit=True) as connection:
        assert Relay(connection).falls_asleep("mail")
        assert not relay.falls_asleep("mail")
        assert connection.info.backend_pid != relay.connection.info.backend_pid
        ended = relay.connection.execute("SELECT pg_terminate_backend(%s, 20000)", [connection.info.backend_pid])
        assert ended.fetchone() == (True,)
    producer.execute(INSERT, [["mail"]])
    producer.commit()
    assert relay.heard() == []
    assert relay.falls_asleep("mail")


def _advisory_locks_of(producer: psycopg.Connection, relay: Relay) -> int:
    row = relay.connection.execute(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s", [producer.info.backend_pid]
    ).fetchone()
    assert row is not None
    return int(row[0])
