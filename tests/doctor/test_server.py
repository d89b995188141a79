"""The doctor looks at the server: slots, standbys, settings, connections; on a server that a test may break."""

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from psycopg import pq

from outboxq.postgres import Database, Server
from outboxq.testing import start_embedded
from tests.support.cli import call
from tests.support.doctor import examine, execute, named, only, open_session
from tests.support.urls import libpq_url
from tests.support.waiting import wait_until

SETTINGS = {"fsync": "on", "full_page_writes": "on", "wal_level": "logical", "max_connections": "20"}
APP = "tests.support.app:jobs"
SLOT = "left_behind"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of this module's own, healthy when it starts."""
    with start_embedded(settings=SETTINGS) as server:
        yield server


@pytest.fixture
def database(server: Server, outboxq_prepare: Callable[[str], None]) -> Iterator[Database]:
    with server.create_database() as database:
        outboxq_prepare(database.url)
        yield database


@contextmanager
def slot(url: str, kind: str) -> Iterator[None]:
    make = {
        "physical": f"SELECT pg_create_physical_replication_slot('{SLOT}', true)",
        "logical": f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
    }
    execute(url, make[kind])
    try:
        yield
    finally:
        free = f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{SLOT}' AND NOT active"
        wait_until(lambda: value(url, free) == 1, "the slot to be free")
        execute(url, f"SELECT pg_drop_replication_slot('{SLOT}')")


def value(url: str, query: str) -> object:
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


@contextmanager
def standby(url: str, slot_name: str | None = None) -> Iterator[None]:
    """What a standby does that runs an old query: it streams, and reports the oldest snapshot that it needs."""
    with psycopg.connect(libpq_url(url)) as connection:
        row = connection.execute(
            "SELECT pg_snapshot_xmin(pg_current_snapshot())::text, pg_current_wal_lsn()"
        ).fetchone()
    assert row is not None
    conninfo = psycopg.conninfo.make_conninfo(libpq_url(url), replication="true", application_name="far_away")
    walsender = pq.PGconn.connect(conninfo.encode())
    assert walsender.status == pq.ConnStatus.OK, walsender.get_error_message()
    try:
        using = f"SLOT {slot_name} " if slot_name else ""
        started = walsender.exec_(f"START_REPLICATION {using}PHYSICAL {row[1]}".encode())
        assert started.status == pq.ExecStatus.COPY_BOTH, walsender.get_error_message()
        walsender.put_copy_data(b"h" + struct.pack("!qIIII", 0, int(row[0]), 0, 0, 0))
        walsender.flush()
        yield
    finally:
        walsender.finish()


def use_up_transactions(url: str, number: int) -> None:
    execute(url, *["SELECT pg_current_xact_id()"] * number)


@contextmanager
def changed(url: str, name: str, setting: str) -> Iterator[None]:
    """A setting of the whole server, until the end of the block."""
    try:
        execute(url, f"ALTER SYSTEM SET {name} = '{setting}'", "SELECT pg_reload_conf()")
        wait_until(lambda: value(url, f"SHOW {name}") == setting, "the setting to be loaded")
        yield
    finally:
        execute(url, f"ALTER SYSTEM RESET {name}", "SELECT pg_reload_conf()")
        wait_until(lambda: value(url, f"SHOW {name}") != setting, "the setting to be gone")


@pytest.mark.wide
def test_a_healthy_database_has_no_findings(database: Database) -> None:
    """Nothing is found where nothing is wrong, with jobs waiting and a registry to compare, and the exit code is 0."""
    execute(database.url, "SELECT outboxq.add_job('record', '{}', 'ledger')")
    assert examine(database.url, APP) == []
    outcome = call("doctor", APP, url=database.url)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (0, "Nothing found: all is well.\n", "")


@pytest.mark.wide
def test_a_schema_of_another_name_is_healthy_too(server: Server) -> None:
    """Every statement goes to the schema that was named, whatever characters it has, and so does the advice."""
    with server.create_database() as database:
        call("migrate", "--schema", "Odd:name", url=database.url).ok()
        assert examine(database.url, "--schema", "Odd:name") == []
        execute(database.url, 'ALTER TABLE "Odd:name".job DISABLE TRIGGER wake_relays')
        advice = only(database.url, "trigger-missing", "--schema", "Odd:name")["advice"]
        execute(database.url, advice.partition(";")[0])
        assert examine(database.url, "--schema", "Odd:name") == []


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["physical", "logical"])
def test_a_slot_that_nobody_reads_is_named(database: Database, kind: str) -> None:
    """An inactive slot is named with what it retains and pins."""
    with slot(database.url, kind):
        found = only(database.url, "slot-inactive", "--older-than", 0)
        # The server knows since when, and a moment is nothing.
        assert named(database.url, "slot-inactive", "--older-than", 3600) == []
    assert found["detail"]["name"] == SLOT
    assert found["detail"]["retained_bytes"] >= 0
    assert ("pins a snapshot" in found["title"]) == (kind == "logical")
    assert named(database.url, "slot-inactive", "--older-than", 0) == []


@pytest.mark.wide
def test_a_slot_that_pins_a_snapshot_is_named(database: Database) -> None:
    """An active slot whose standby needs an old snapshot is named once enough transactions have passed."""
    url = database.url
    with slot(url, "physical"), standby(url, SLOT):
        use_up_transactions(url, 5)
        (found,) = wait_until(lambda: named(url, "snapshot-pinned-by-slot", "--older-than-transactions", 5), "xmin")
        assert named(url, "snapshot-pinned-by-slot") == []
    assert (found["detail"]["name"], found["detail"]["active"]) == (SLOT, True)
    assert found["detail"]["xmin_age"] >= 5


@pytest.mark.wide
def test_a_standby_that_pins_a_snapshot_is_named(database: Database) -> None:
    """hot_standby_feedback without a slot is named by the standby's name and its walsender's pid."""
    url = database.url
    with standby(url):
        use_up_transactions(url, 5)
        (found,) = wait_until(lambda: named(url, "snapshot-pinned-by-standby", "--older-than-transactions", 5), "xmin")
        assert found["detail"]["pid"] == value(url, "SELECT pid FROM pg_stat_replication")
        assert named(url, "snapshot-pinned-by-standby") == []
    assert found["detail"]["application_name"] == "far_away"


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("name", "code"),
    [("fsync", "fsync-off"), ("full_page_writes", "full-page-writes-off"), ("autovacuum", "autovacuum-off")],
)
def test_a_server_that_is_not_safe_is_told(database: Database, name: str, code: str) -> None:
    """What is switched off for the whole server, and must not be, is a warning."""
    with changed(database.url, name, "off"):
        found = only(database.url, code)
    assert (found["severity"], found["detail"]["setting"]) == ("warning", name)
    assert named(database.url, code) == []


@pytest.mark.wide
def test_connections_that_are_nearly_used_up_are_told(database: Database) -> None:
    """14 other sessions, that which makes databases, and the doctor's own, of the 17 that an ordinary role may have."""
    assert named(database.url, "connections-nearly-used-up") == []
    with ExitStack() as sessions:
        for _ in range(14):
            sessions.enter_context(open_session(database.url))
        found = only(database.url, "connections-nearly-used-up")
    assert found["detail"] == {"of": "the server", "open": 16, "allowed": 17}
