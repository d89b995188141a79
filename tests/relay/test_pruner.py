"""The pruner deletes what has expired and nothing else, in small transactions, and waits for nobody."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, NullPool, make_url, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, Relay, RelayConfig
from outboxq.admin.roles import roles_sql
from outboxq.config import SlotGroup
from outboxq.database.driver import DriverConnection
from outboxq.database.engines import RELAY_NAME, listen_connector, resolve_engines
from outboxq.effects.api import Effects
from outboxq.emitter import Emitter
from outboxq.errors import ResultNotStorable
from outboxq.events import Event, JobDone, Pruned
from outboxq.inbox import Inbox
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from outboxq.relay.maintenance.pruner import Pruner
from outboxq.relay.maintenance.task import draw_pause
from outboxq.statements import prune as statements
from tests.conftest import StartRelay
from tests.support import app
from tests.support.waiting import PATIENCE, wait_until

FILL_INBOX = """
INSERT INTO outboxq.inbox (consumer, message_id, expires_at)
SELECT 'tests', :prefix || n, clock_timestamp() + make_interval(secs => :seconds) FROM generate_series(1, :count) AS n
"""
FILL_EFFECT = """
INSERT INTO outboxq.effect (scope, key, status, in_doubt, provider_key, lock_token, locked_until, expires_at)
SELECT 'tests', :prefix || n, :status, :in_doubt, gen_random_uuid(), gen_random_uuid(), clock_timestamp(),
  clock_timestamp() + make_interval(secs => :seconds) FROM generate_series(1, :count) AS n
"""
# What each DELETE took, in which transaction, and how that was set.
LEDGER = """
CREATE TABLE batch_ledger (rows bigint, xid text, isolation text, commits text);
CREATE FUNCTION note_batch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO batch_ledger SELECT count(*), pg_current_xact_id()::text, current_setting('transaction_isolation'),
    current_setting('synchronous_commit') FROM gone;
  RETURN NULL;
END $$;
CREATE TRIGGER note AFTER DELETE ON outboxq.inbox REFERENCING OLD TABLE AS gone
FOR EACH STATEMENT EXECUTE FUNCTION note_batch();
"""
WAITS_FOR_LOCK = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
EXPIRED, KEPT = -60, 3600

MakePruner = Callable[..., Pruner]


def fill_inbox(engine: Engine, prefix: str = "m", count: int = 1, seconds: float = EXPIRED) -> None:
    with engine.begin() as connection:
        connection.execute(text(FILL_INBOX), {"prefix": prefix, "count": count, "seconds": seconds})


def fill_effect(
    engine: Engine,
    prefix: str = "e",
    count: int = 1,
    seconds: float | None = EXPIRED,
    status: str = "done",
    in_doubt: bool = False,
) -> None:
    values = {"prefix": prefix, "count": count, "seconds": seconds, "status": status, "in_doubt": in_doubt}
    with engine.begin() as connection:
        connection.execute(text(FILL_EFFECT), values)


def keys(engine: Engine, table: str = "inbox") -> list[str]:
    column = {"inbox": "message_id", "effect": "key"}[table]
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT {column} FROM outboxq.{table} ORDER BY 1")).scalars())


def count(engine: Engine, table: str) -> int:
    with engine.connect() as connection:
        return connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()


def emitter(events: list[Event]) -> Emitter:
    return Emitter([events.append], lambda *_: None)


@pytest.fixture
def make_pruner(outboxq_database: Database) -> MakePruner:
    """A pruner as the relay makes it; its thread is not started."""

    def make(
        events: list[Event] | None = None,
        url: str = outboxq_database.url,
        connect: Callable[[], DriverConnection] | None = None,
        stopping: threading.Event | None = None,
        **settings: float,
    ) -> Pruner:
        by_url = listen_connector(resolve_engines(url, None), None, lambda: None)
        emit = emitter([] if events is None else events)
        stopping = stopping or threading.Event()
        return Pruner(connect or by_url, "outboxq", emit, stopping, seconds=60, **settings)

    return make


@contextmanager
def held(engine: Engine, statement: str) -> Iterator[Connection]:
    """A transaction of somebody else that has executed `statement` and goes on."""
    with engine.connect() as connection:
        connection.execute(text(statement))
        yield connection
        connection.rollback()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_has_expired_goes_and_the_rest_stays(engine: Engine, make_pruner: MakePruner) -> None:
    """Messages and effects, each by its own expiry, in the database's time; the event has both counts."""
    events: list[Event] = []
    fill_inbox(engine, "old", 3)
    fill_inbox(engine, "new", 2, KEPT)
    for status in ("done", "failed", "retryable"):
        fill_effect(engine, f"old {status}", 2, status=status)
        fill_effect(engine, f"new {status}", 1, KEPT, status=status)
    fill_effect(engine, "for ever", 1, None)
    make_pruner(events).run_once()
    assert keys(engine) == ["new1", "new2"]
    assert keys(engine, "effect") == ["for ever1", "new done1", "new failed1", "new retryable1"]
    assert events == [Pruned(3, 6)]


def test_nothing_is_told_where_nothing_has_expired(engine: Engine, make_pruner: MakePruner) -> None:
    """An idle installation logs nothing once a minute."""
    events: list[Event] = []
    fill_inbox(engine, "new", 2, KEPT)
    make_pruner(events).run_once()
    assert events == []


def test_the_connection_is_closed_after_a_round(engine: Engine, make_pruner: MakePruner) -> None:
    """Between two rounds the pruner costs no connection, also where the round failed."""
    pruner = make_pruner()
    for statement in ("SELECT 1", "DROP TABLE outboxq.inbox"):
        with engine.begin() as connection:
            connection.execute(text(statement))
        pruner.run_once()
        wait_until(lambda: count_connections(engine) == 0, "the connection to close")


def count_connections(engine: Engine) -> int:
    ours = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = :name")
    with engine.connect() as connection:
        return connection.execute(ours, {"name": RELAY_NAME}).scalar_one()


@pytest.mark.large
def test_many_expired_messages_go_in_batches_beside_the_work(
    engine: Engine, sessions: sessionmaker[OutboxSession], make_pruner: MakePruner, start_relay: StartRelay
) -> None:
    """25,000 rows in transactions of at most 1,000, while messages are accepted and jobs are done."""
    fill_inbox(engine, "old", 25_000)
    with engine.begin() as connection:
        connection.connection.cursor().execute(LEDGER)
    events: list[Event] = []
    inbox, accepted = Inbox("tests"), 0
    with start_relay(config=RelayConfig(prune_seconds=0)) as running, ThreadPoolExecutor(1) as pool:
        pruning = pool.submit(make_pruner(events).run_once)
        while not pruning.done() or accepted < 10:
            with sessions.begin() as session:
                # Also the ids that are being deleted: accepted anew where they are gone, else duplicates.
                inbox.accept(session, f"old{accepted + 1}")
                assert inbox.accept(session, f"new {accepted}")
                session.add_job(app.record, name=f"job {accepted}")
            accepted += 1
        pruning.result()
        wait_until(lambda: len(running.of(JobDone)) == accepted, "the jobs")
    assert events == [Pruned(25_000, 0)]
    left = keys(engine)
    assert {key for key in left if key.startswith("new ")} == {f"new {number}" for number in range(accepted)}
    with engine.connect() as connection:
        batches = connection.execute(text("SELECT rows, xid FROM batch_ledger WHERE rows > 0")).all()
    assert sum(rows for rows, _ in batches) == 25_000
    assert max(rows for rows, _ in batches) == Pruner.batch_rows
    assert len({xid for _, xid in batches}) == len(batches)


def test_a_batch_waits_for_no_disk_and_no_standby_and_fails_for_no_neighbour(
    engine: Engine, outboxq_database: Database, make_pruner: MakePruner
) -> None:
    """COMMIT is not waited for, as what a crash undoes is deleted again; READ COMMITTED, whatever the default is."""
    fill_inbox(engine, "old", 3)
    with engine.begin() as connection:
        connection.connection.cursor().execute(LEDGER)
        for setting in ("default_transaction_isolation = 'serializable'", "default_transaction_read_only = on"):
            connection.exec_driver_sql(f"ALTER DATABASE {outboxq_database.name} SET {setting}")
    make_pruner().run_once()
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT rows, isolation, commits FROM batch_ledger")).all()
    assert rows == [(3, "read committed", "off")]


@pytest.mark.parametrize("table", ["inbox", "effect"])
def test_a_row_that_cannot_be_deleted_keeps_no_other(
    engine: Engine,
    make_pruner: MakePruner,
    caplog: pytest.LogCaptureFixture,
    table: str,
) -> None:
    """The oldest ones refuse: all others, of several batches, go in the same round."""
    column, fill = {"inbox": ("message_id", FILL_INBOX), "effect": ("key", FILL_EFFECT)}[table]
    more = {"status": "done", "in_doubt": False} if table == "effect" else {}
    with engine.begin() as connection:
        for prefix, seconds, count in (("bad", -20, 3), ("good", -10, 40)):
            connection.execute(text(fill), {"prefix": prefix, "seconds": seconds, "count": count, **more})
        connection.exec_driver_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'kept'; END$$; "
            f"CREATE TRIGGER refuse BEFORE DELETE ON outboxq.{table} FOR EACH ROW "
            f"WHEN (OLD.{column} LIKE 'bad%%') EXECUTE FUNCTION refuse()"
        )
    events: list[Event] = []
    make_pruner(events, batch_rows=10).run_once()
    with engine.connect() as connection:
        left = sorted(connection.execute(text(f"SELECT {column} FROM outboxq.{table}")).scalars())
    assert left == ["bad1", "bad2", "bad3"]
    assert events == [Pruned(40, 0) if table == "inbox" else Pruned(0, 40)]
    assert caplog.text.count("could not be deleted") == 1


def test_a_round_is_bounded(engine: Engine, make_pruner: MakePruner) -> None:
    """What is left when a round has taken its share waits for the next one."""
    fill_inbox(engine, "old", 2 * Pruner.batch_rows + 500)
    fill_effect(engine, "old", 1)
    pruner = make_pruner(max_batches=2)
    pruner.run_once()
    assert (count(engine, "outboxq.inbox"), count(engine, "outboxq.effect")) == (500, 0)
    pruner.run_once()
    assert count(engine, "outboxq.inbox") == 0


@pytest.mark.parametrize(("status", "in_doubt"), [("started", False), ("unknown", False), ("retryable", True)])
def test_what_is_not_settled_cannot_have_an_expiry(engine: Engine, status: str, in_doubt: bool) -> None:
    """The table itself refuses it, whoever writes."""
    with pytest.raises(IntegrityError, match="effect_kept"):
        fill_effect(engine, status=status, in_doubt=in_doubt)
    fill_effect(engine, status=status, in_doubt=in_doubt, seconds=None)


@pytest.mark.parametrize("status", ["started", "unknown"])
def test_what_is_not_settled_is_never_pruned(engine: Engine, make_pruner: MakePruner, status: str) -> None:
    """A call that may be under way, and one whose outcome nobody knows: not even where the table's check is gone."""
    fill_effect(engine, "as it should be", status=status, seconds=None)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.effect DROP CONSTRAINT effect_kept"))
    fill_effect(engine, "with an expiry", status=status)
    fill_effect(engine, "done", status="done")
    make_pruner().run_once()
    assert keys(engine, "effect") == ["as it should be1", "with an expiry1"]


def test_two_pruners_share_the_work(engine: Engine, make_pruner: MakePruner, caplog: pytest.LogCaptureFixture) -> None:
    """Every row is deleted once, nobody waits for the other, and neither meets an error."""
    fill_inbox(engine, "old", 10_000)
    fill_effect(engine, "old", 10_000)
    events: list[Event] = []
    both = [make_pruner(events), make_pruner(events)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(pruner.run_once) for pruner in both]:
            done.result()
    assert keys(engine) == keys(engine, "effect") == []
    pruned = [event for event in events if isinstance(event, Pruned)]
    assert (sum(event.messages for event in pruned), sum(event.effects for event in pruned)) == (10_000, 10_000)
    assert warnings(caplog) == []


@pytest.mark.parametrize(("table", "column"), [("inbox", "message_id"), ("effect", "key")])
def test_a_row_that_is_locked_is_passed_over(
    engine: Engine, make_pruner: MakePruner, caplog: pytest.LogCaptureFixture, table: str, column: str
) -> None:
    """Nobody is waited for: the rows around it go, and it goes in a later round."""
    fill_inbox(engine, "row ", 3)
    fill_effect(engine, "row ", 3)
    with held(engine, f"SELECT FROM outboxq.{table} WHERE {column} = 'row 2' FOR KEY SHARE"):
        make_pruner().run_once()
        assert keys(engine, table) == ["row 2"]
    make_pruner().run_once()
    assert keys(engine, table) == []
    assert warnings(caplog) == []


def test_an_effect_that_is_called_anew_at_this_moment_stays(engine: Engine, make_pruner: MakePruner) -> None:
    """Who claims an expired effect holds its row, and takes its expiry away."""
    fill_effect(engine, "retried", status="retryable")
    claim = "UPDATE outboxq.effect SET status = 'started', expires_at = NULL"
    with held(engine, claim) as claiming:
        make_pruner().run_once()
        claiming.commit()
    make_pruner().run_once()
    assert keys(engine, "effect") == ["retried1"]


@pytest.mark.parametrize("commits", [True, False])
def test_who_accepts_a_message_that_is_being_deleted_waits_and_then_knows(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], commits: bool
) -> None:
    """Deleted: accepted anew, with a new expiry. Not deleted after all: a duplicate, as long as it is there."""
    fill_inbox(engine, "old")
    with deleting(outboxq_database, statements.delete_messages) as deletion, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(accept, sessions, "old1")
        wait_until(lambda: count_waiting(engine) == 1, "the accepting transaction to wait for the deletion")
        deletion.execute("COMMIT" if commits else "ROLLBACK")
        assert accepting.result(PATIENCE) is commits
    with engine.connect() as connection:
        is_new = text("SELECT expires_at > clock_timestamp() FROM outboxq.inbox WHERE message_id = 'old1'")
        assert connection.execute(is_new).scalars().all() == [commits]


def test_who_calls_an_effect_that_is_being_deleted_gets_its_result(outboxq_database: Database, engine: Engine) -> None:
    """Nobody waits: what is not gone yet is remembered; once it is gone, the call is a new one."""
    fill_effect(engine, "old")
    effects, calls = Effects(engine), []
    with deleting(outboxq_database, statements.delete_effects) as deletion:
        with pytest.raises(ResultNotStorable):
            effects.once("tests", key="old1", call=calls.append)
        assert calls == []
        deletion.execute("COMMIT")
    effects.once("tests", key="old1", call=calls.append)
    effects.dispose()
    assert len(calls) == 1
    assert keys(engine, "effect") == ["old1"]


@contextmanager
def deleting(database: Database, deletion: Callable[[str, int], str]) -> Iterator["psycopg.Connection[object]"]:
    """A pruner's transaction, before its COMMIT."""
    url = make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statements.BEGIN.encode())
        assert connection.execute(deletion("outboxq", 10).encode()).fetchone() == (1,)
        yield connection


def accept(sessions: sessionmaker[OutboxSession], message_id: str) -> bool:
    with sessions.begin() as session:
        return Inbox("tests", retention=timedelta(days=1)).accept(session, message_id)


def count_waiting(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(text(WAITS_FOR_LOCK)).scalar_one()


@pytest.mark.large
def test_a_locked_table_costs_a_second_and_not_the_other_table(
    engine: Engine, make_pruner: MakePruner, caplog: pytest.LogCaptureFixture
) -> None:
    """A migration at work: one warning, whatever the number of rounds, and the effects are pruned all the same."""
    fill_inbox(engine)
    fill_effect(engine)
    events: list[Event] = []
    pruner = make_pruner(events)
    with held(engine, "LOCK TABLE outboxq.inbox"):
        pruner.run_once()
        pruner.run_once()
    assert events == [Pruned(0, 1)]
    (said,) = warnings(caplog)
    assert "expired messages could not be deleted: LockNotAvailable (55P03): it is tried again in the next" in said
    pruner.run_once()
    assert keys(engine) == []


@pytest.fixture
def role_without_rights(outboxq_database: Database, engine: Engine) -> Iterator[str]:
    """The URL of a role that may do with effects and batches what it wants, and only look at messages."""
    name = f"pruner_{uuid4().hex}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD '{name}'"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA outboxq TO {name}"))
        connection.execute(text(f"GRANT SELECT ON outboxq.inbox, outboxq.queue TO {name}"))
        tables = ", ".join(f"outboxq.{each}" for each in ("effect", "batch", "job", "dead_job", "unique_key"))
        connection.execute(text(f"GRANT ALL ON {tables}, outboxq.cancel_request TO {name}"))
    yield make_url(outboxq_database.url).set(username=name, password=name).render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {name}"))
        connection.execute(text(f"DROP ROLE {name}"))


def test_missing_rights_are_said_once_with_the_command_that_mends_them(
    engine: Engine, make_pruner: MakePruner, role_without_rights: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A relay whose role is from before the inbox works on, and names `outboxq roles --sql`."""
    fill_inbox(engine)
    pruner = make_pruner(url=role_without_rights)
    pruner.run_once()
    pruner.run_once()
    (said,) = warnings(caplog)
    assert "expired messages could not be deleted: InsufficientPrivilege (42501)" in said
    assert "outboxq roles --sql" in said
    assert keys(engine) == ["m1"]


def test_the_rights_of_a_relay_are_enough_to_prune(
    outboxq_database: Database, engine: Engine, make_pruner: MakePruner, role_without_rights: str
) -> None:
    """What `outboxq roles --sql` prints; deleting a row that must not be waited for takes UPDATE too."""
    fill_inbox(engine)
    fill_effect(engine)
    role = str(make_url(role_without_rights).username)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"REVOKE ALL ON ALL TABLES IN SCHEMA outboxq FROM {role}")
        connection.exec_driver_sql(roles_sql({"relay": role}))
    events: list[Event] = []
    make_pruner(events, url=role_without_rights).run_once()
    assert events == [Pruned(1, 1)]


@pytest.mark.parametrize("drop", ["DROP TABLE outboxq.inbox", "DROP SCHEMA outboxq CASCADE"])
def test_missing_tables_are_said_with_the_command_that_makes_them(
    engine: Engine, make_pruner: MakePruner, caplog: pytest.LogCaptureFixture, drop: str
) -> None:
    """Somebody dropped them while the relay ran."""
    with engine.begin() as connection:
        connection.execute(text(drop))
    make_pruner().run_once()
    said = warnings(caplog)
    assert len(said) == (6 if "SCHEMA" in drop else 1)
    assert all("outboxq migrate" in warning for warning in said)


def test_each_kind_of_error_is_said(
    engine: Engine, make_pruner: MakePruner, role_without_rights: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning about one does not hide another."""
    pruner = make_pruner(url=role_without_rights)
    pruner.run_once()
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE outboxq.inbox"))
    pruner.run_once()
    assert [("42501" in said, "42P01" in said) for said in warnings(caplog)] == [(True, False), (False, True)]


def test_an_outage_is_nobodys_business_but_the_slots(
    outboxq_database: Database, engine: Engine, make_pruner: MakePruner, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that cannot be made, or that is lost: no error, no warning, and the next round is as any other."""
    fill_inbox(engine)
    connect = listen_connector(resolve_engines(outboxq_database.url, None), None, lambda: None)

    def refuse() -> DriverConnection:
        raise OSError("nobody there")

    def connect_and_lose() -> DriverConnection:
        lost = connect()
        with engine.connect() as connection:
            ended = text("SELECT pg_terminate_backend(:pid, 10000)")
            assert connection.execute(ended, {"pid": lost.info.backend_pid}).scalar_one()
        return lost

    make_pruner(connect=refuse).run_once()
    make_pruner(connect=connect_and_lose).run_once()
    assert keys(engine) == ["m1"]
    make_pruner().run_once()
    assert keys(engine) == []
    assert warnings(caplog) == []


@pytest.mark.large
def test_a_batch_costs_the_same_whatever_the_table_holds(engine: Engine) -> None:
    """100,000 rows, half of them expired: both indexes, no Sort, and no look at the whole table."""
    fill_inbox(engine, "old message ", 50_000)
    fill_inbox(engine, "new message ", 50_000, KEPT)
    fill_effect(engine, "old effect ", 50_000)
    fill_effect(engine, "new effect ", 50_000, KEPT)
    with engine.connect() as connection:
        connection.execute(text("ANALYZE outboxq.inbox, outboxq.effect"))
        connection.commit()
        for deletion, indexes in (
            (statements.delete_messages, {"inbox_expires", "inbox_pkey"}),
            (statements.delete_effects, {"effect_expires", "effect_pkey"}),
        ):
            nodes = plan(connection, deletion("outboxq", Pruner.batch_rows))
            types = {node["Node Type"] for node in nodes}
            assert {"Sort", "Incremental Sort", "Seq Scan", "Hash Join", "Merge Join"}.isdisjoint(types), nodes
            assert {node["Index Name"] for node in nodes if "Index Name" in node} == indexes
            scanned = next(node for node in nodes if str(node.get("Index Name")).endswith("_expires"))
            assert scanned["Actual Rows"] == Pruner.batch_rows


def test_a_look_at_nothing_costs_nothing(engine: Engine) -> None:
    """The walk of the index ends at the first row that has not expired."""
    fill_inbox(engine, "new message ", 20_000, KEPT)
    with engine.connect() as connection:
        nodes = plan(connection, statements.delete_messages("outboxq", Pruner.batch_rows))
        buffers = nodes[0]["Shared Hit Blocks"] + nodes[0]["Shared Read Blocks"]
        assert buffers <= 10


def plan(connection: Connection, deletion: str) -> list[dict[str, object]]:
    """The plan that ran as the pruner runs it, flattened; its effect is rolled back."""
    with connection.connection.cursor() as cursor:
        cursor.execute(statements.BEGIN)
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {deletion}")
        found = cursor.fetchone()[0]
        cursor.execute("ROLLBACK")
    pending = [(json.loads(found) if isinstance(found, str) else found)[0]["Plan"]]
    nodes = []
    while pending:
        node = pending.pop(0)
        pending.extend(node.pop("Plans", []))
        nodes.append(node)
    return nodes


@pytest.mark.large
def test_a_relay_stops_promptly_while_it_prunes(engine: Engine, start_relay: StartRelay) -> None:
    """After the batch that it is at: what has expired is no reason to keep anybody waiting."""
    fill_inbox(engine, "old", 60_000)
    with start_relay(config=RelayConfig(prune_seconds=1)) as running:
        wait_until(lambda: count(engine, "outboxq.inbox") < 60_000, "the first batch")
    assert count(engine, "outboxq.inbox") > 0
    assert [event.messages % Pruner.batch_rows for event in running.of(Pruned)] == [0]


def test_a_pruner_that_was_stopped_has_ended(engine: Engine, make_pruner: MakePruner) -> None:
    """No round of it goes on behind the back of whoever stopped it: its engine and its hooks may be gone by then."""
    telling, told = threading.Event(), threading.Event()

    class Slow(list[Event]):
        def append(self, event: Event) -> None:
            telling.set()
            assert told.wait(PATIENCE)

    fill_inbox(engine)
    pruner = make_pruner(Slow(), first_seconds=0.01)
    pruner.start()
    assert telling.wait(PATIENCE)
    stopping = threading.Thread(target=pruner.stop)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive()
    told.set()
    stopping.join(PATIENCE)
    assert not stopping.is_alive()


def test_a_running_relay_prunes_again_and_again(engine: Engine, start_relay: StartRelay) -> None:
    """Not only at its start."""
    with start_relay(config=RelayConfig(prune_seconds=1)):
        for number in range(2):
            fill_inbox(engine, f"round {number} ")
            wait_until(lambda: keys(engine) == [], f"round {number}")


def test_a_relay_that_prunes_once_a_day_begins_with_its_first_minute(engine: Engine, start_relay: StartRelay) -> None:
    """One that is deployed more often than that would never prune."""
    fill_inbox(engine)
    limits = RelayLimits(first_prune_seconds=0.2)
    with start_relay(config=RelayConfig(prune_seconds=86_400), limits=limits):
        wait_until(lambda: keys(engine) == [], "the first round")


def test_a_relay_on_an_async_engine_prunes(outboxq_database: Database, engine: Engine) -> None:
    """Its connection comes through the event loop."""
    fill_inbox(engine)
    own = create_async_engine(outboxq_database.url, poolclass=NullPool)
    config = RelayConfig(groups=(SlotGroup(("ledger-async",)),))
    events: list[Event] = []
    Relay(own, app.jobs, config, hooks=[events.append]).drain()
    assert [event for event in events if isinstance(event, Pruned)] == [Pruned(1, 0)]


@given(st.floats(1, 86_400), st.floats(0, 1, exclude_max=True))
def test_a_pause_is_drawn_from_the_later_half(seconds: float, draw: float) -> None:
    """Never longer than what was asked for, so that relays which were started together do not prune together."""
    assert seconds / 2 <= draw_pause(seconds, lambda: draw) <= seconds


def test_the_pauses_of_a_pruner_differ() -> None:
    """The draw is random by default."""
    assert len({draw_pause(60.0) for _ in range(20)}) > 15
