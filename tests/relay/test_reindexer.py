"""The reindexer rebuilds a bloated index beside the work, and holds up nothing."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine, make_url, text
from sqlalchemy.orm import sessionmaker

import outboxq.relay.maintenance.reindexer
from outboxq import OutboxSession, Relay, RelayConfig
from outboxq.admin.roles import roles_sql
from outboxq.database.driver import DriverConnection
from outboxq.database.engines import listen_connector, resolve_engines
from outboxq.emitter import Emitter
from outboxq.events import Event, IndexRebuilt, JobDone
from outboxq.postgres import Database
from outboxq.relay.maintenance.reindexer import Reindexer
from tests.conftest import StartRelay
from tests.support import app
from tests.support.doctor import execute, open_session
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

MakeReindexer = Callable[..., Reindexer]

FILL = """
INSERT INTO outboxq.job (id, queue, kind, args)
SELECT gen_random_uuid(), 'default', 'record', '{"name": "x"}' FROM generate_series(1, 20000)
"""
# About what 20,000 jobs need, and far more than none does.
MIN_BYTES = 256 * 1024
FLUSH = "SELECT pg_stat_force_next_flush()"
SIZES = """
SELECT relname, pg_relation_size(indexrelid) AS bytes FROM pg_index JOIN pg_class ON oid = indexrelid
WHERE indrelid = 'outboxq.job'::regclass
"""
INVALID = """
SELECT relname FROM pg_index JOIN pg_class ON oid = indexrelid
WHERE indrelid = 'outboxq.job'::regclass AND NOT indisvalid ORDER BY 1
"""
REINDEXES = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'REINDEX%' AND state = 'active'"


@pytest.fixture
def make_reindexer(outboxq_database: Database) -> MakeReindexer:
    """A reindexer as the relay makes it, for small indexes; its thread is not started."""

    def make(
        events: list[Event] | None = None,
        url: str = outboxq_database.url,
        connect: Callable[[], DriverConnection] | None = None,
        stopping: threading.Event | None = None,
        **settings: float,
    ) -> Reindexer:
        by_url = listen_connector(resolve_engines(url, None), None, lambda: None)
        emit = Emitter([([] if events is None else events).append], lambda *_: None)
        stopping = stopping or threading.Event()
        return Reindexer(connect or by_url, "outboxq", emit, stopping, min_bytes=MIN_BYTES, **settings)

    return make


@pytest.fixture
def drained(outboxq_database: Database) -> Database:
    """20,000 jobs were worked off, and vacuum has been."""
    execute(
        outboxq_database.url,
        FILL,
        "DELETE FROM outboxq.job",
        FLUSH,
        "VACUUM outboxq.job",
        FLUSH,
    )
    return outboxq_database


def sizes(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {row.relname: row.bytes for row in connection.execute(text(SIZES))}


def invalid(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text(INVALID)).scalars())


def rebuilt(events: list[Event]) -> list[str]:
    return [event.index for event in events if isinstance(event, IndexRebuilt)]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "outboxq.upkeep"]


@contextmanager
def looking(reindexer: Reindexer) -> Iterator[Callable[[], None]]:
    """A look in a thread; what is yielded waits for its end."""
    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(reindexer.run_once)
        yield lambda: looked.result(PATIENCE)
        looked.result(PATIENCE)


def reindexing(engine: Engine) -> int | None:
    with engine.connect() as connection:
        pids = connection.execute(text(REINDEXES)).scalars().all()
    return pids[0] if pids else None


def test_an_index_of_nothing_is_built_again(engine: Engine, drained: Database, make_reindexer: MakeReindexer) -> None:
    """One index a look, the largest first; what is small, or was built again, stays as it is."""
    before = sizes(engine)
    assert before["job_ready"] > MIN_BYTES < before["job_pkey"]
    events: list[Event] = []
    reindexer = make_reindexer(events)

    def looked(number: int) -> bool:
        """One look: it builds one index at most, and none while a vacuum of the server's own works on the table."""
        built = len(rebuilt(events))
        reindexer.run_once()
        assert len(rebuilt(events)) <= built + 1
        return len(rebuilt(events)) == number

    for number in (1, 2):
        wait_until(partial(looked, number), "an index that is built again")
    assert looked(2)
    assert sorted(rebuilt(events)) == ["job_pkey", "job_ready"]
    after = sizes(engine)
    assert after.keys() == before.keys()
    assert after["job_ready"] < MIN_BYTES > after["job_pkey"]
    first = next(event for event in events if isinstance(event, IndexRebuilt))
    assert (first.bytes_before, first.bytes_after) == (before[first.index], after[first.index])
    assert invalid(engine) == []


def test_an_index_that_is_full_stays(engine: Engine, outboxq_database: Database, make_reindexer: MakeReindexer) -> None:
    """A backlog is no waste: neither one that vacuum has counted, nor one that came since."""
    events: list[Event] = []
    for vacuum in ("SELECT 1", "VACUUM outboxq.job"):
        execute(outboxq_database.url, vacuum, FILL, FLUSH)
        make_reindexer(events).run_once()
    execute(outboxq_database.url, "VACUUM outboxq.job", FLUSH)
    make_reindexer(events).run_once()
    assert rebuilt(events) == []


def test_counts_that_were_lost_cost_no_rebuild(
    engine: Engine, drained: Database, make_reindexer: MakeReindexer
) -> None:
    """A crash of the server forgets what came since vacuum: before anything is built, the jobs are counted."""
    events: list[Event] = []
    execute(drained.url, FILL, FLUSH, "SELECT pg_stat_reset_single_table_counters('outboxq.job'::regclass)")
    make_reindexer(events).run_once()
    assert rebuilt(events) == []


def test_an_index_of_dead_entries_waits_for_vacuum(outboxq_database: Database, make_reindexer: MakeReindexer) -> None:
    """While vacuum is held back the dead entries would be built in again."""
    events: list[Event] = []
    execute(outboxq_database.url, "VACUUM outboxq.job", FILL, "DELETE FROM outboxq.job", FLUSH)
    make_reindexer(events).run_once()
    assert rebuilt(events) == []


def test_an_index_of_the_user_is_the_users(engine: Engine, drained: Database, make_reindexer: MakeReindexer) -> None:
    """What outboxq did not make it neither builds again nor drops."""
    execute(
        drained.url, "CREATE INDEX mine ON outboxq.job (created_at)", FILL, "DELETE FROM outboxq.job",
        FLUSH, "VACUUM outboxq.job", FLUSH,
    )  # fmt: skip
    before = sizes(engine)["mine"]
    assert before > MIN_BYTES
    reindexer = make_reindexer()
    for _ in range(3):
        reindexer.run_once()
    assert sizes(engine)["mine"] == before


def test_claims_and_producers_go_on_beside_it(
    sessions: sessionmaker[OutboxSession], drained: Database, make_reindexer: MakeReindexer, start_relay: StartRelay
) -> None:
    """An index is built again while jobs are added and done: none is lost, none waits for it."""
    events: list[Event] = []
    reindexer = make_reindexer(events)
    added = 0
    with start_relay(config=RelayConfig(reindex=False)) as running:
        with looking(reindexer) as finished:
            for _ in range(20):
                with sessions.begin() as session:
                    session.add_job(app.record, name="beside")
                added += 1
            finished()
        wait_until(lambda: len(running.of(JobDone)) == added, "the jobs")
    assert len(rebuilt(events)) == 1


def test_a_role_that_only_works_on_jobs_is_not_disturbed(
    engine: Engine, drained: Database, make_reindexer: MakeReindexer, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay's role of `outboxq roles` may build no index: it says so once, below a warning, and tries nothing."""
    name = f"upkeep_{uuid4().hex}"
    caplog.set_level(logging.INFO, "outboxq.upkeep")
    execute(drained.url, f"CREATE ROLE {name} LOGIN", roles_sql({"relay": name}))
    try:
        before = sizes(engine)
        reindexer = make_reindexer(url=make_url(drained.url).set(username=name).render_as_string(hide_password=False))
        reindexer.run_once()
        reindexer.run_once()
        assert sizes(engine) == before
    finally:
        execute(drained.url, f"DROP OWNED BY {name}", f"DROP ROLE {name}")
    (message,) = said(caplog)
    assert "may not build it again" in message
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_two_relays_do_not_build_at_once(engine: Engine, drained: Database, make_reindexer: MakeReindexer) -> None:
    """One keeps up, the others pass by: an advisory lock, held as long as the session."""
    events: list[Event] = []
    with open_session(drained.url, "SELECT pg_advisory_lock(hashtext('outboxq upkeep'), hashtext('outboxq'))"):
        make_reindexer(events).run_once()
        assert rebuilt(events) == []
    make_reindexer(events).run_once()
    assert len(rebuilt(events)) == 1


@pytest.mark.parametrize(
    "statement",
    ["LOCK TABLE outboxq.job IN SHARE UPDATE EXCLUSIVE MODE", "LOCK TABLE outboxq.job IN SHARE MODE"],
)
def test_somebody_who_works_on_the_table_is_not_waited_for(
    drained: Database, make_reindexer: MakeReindexer, caplog: pytest.LogCaptureFixture, statement: str
) -> None:
    """Vacuum, another REINDEX, a migration: nothing is begun that would wait, and it comes back later."""
    caplog.set_level(logging.INFO, "outboxq.upkeep")
    events: list[Event] = []
    with open_session(drained.url, statement):
        make_reindexer(events).run_once()
    assert (rebuilt(events), said(caplog)) == ([], [])

    def again() -> bool:
        # The server's own vacuum may have come to the table meanwhile, and is not waited for either.
        make_reindexer(events).run_once()
        return bool(rebuilt(events))

    wait_until(again, "the index to be rebuilt")
    assert len(rebuilt(events)) == 1


def test_an_old_transaction_is_not_waited_for(
    drained: Database, make_reindexer: MakeReindexer, caplog: pytest.LogCaptureFixture
) -> None:
    """REINDEX CONCURRENTLY would wait for its end, so it is not begun."""
    caplog.set_level(logging.INFO, "outboxq.upkeep")
    events: list[Event] = []
    pinned = ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT count(*) FROM pg_class")
    with open_session(drained.url, *pinned):
        make_reindexer(events, old_seconds=0.0).run_once()
    assert (rebuilt(events), said(caplog)) == ([], [])


def test_a_pooler_is_left_alone(
    engine: Engine, drained: Database, make_reindexer: MakeReindexer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its backend is another than the connection was told of: not even a setting is made there."""
    caplog.set_level(logging.INFO, "outboxq.upkeep")
    sent: list[str] = []

    class Pooled:
        """A connection whose answer to who it talks to is not what the first greeting said."""

        def __init__(self, pgconn: object) -> None:
            self._pgconn = pgconn
            self.backend_pid = 1

        def send_query(self, query: bytes) -> None:
            sent.append(query.decode())
            self._pgconn.send_query(query)

        def __getattr__(self, name: str) -> object:
            return getattr(self._pgconn, name)

    with psycopg.connect(libpq_url(drained.url), autocommit=True) as connection:
        pooled = SimpleNamespace(pgconn=Pooled(connection.pgconn))
        make_reindexer(connect=lambda: pooled).run_once()
    assert sent == ["SELECT pg_catalog.pg_backend_pid()::text"]
    assert "pooler" in said(caplog)[0]


def test_a_relay_that_stops_gives_up_what_it_builds_and_the_next_one_clears_it_away(
    engine: Engine, drained: Database, make_reindexer: MakeReindexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A REINDEX that waits is cancelled; the invalid index that it leaves is dropped by the next look, and only it."""
    patient = (
        outboxq.relay.maintenance.reindexer.statements.settings().replace("'5s'", "'10min'").replace("'60s'", "'10min'")
    )
    monkeypatch.setattr(outboxq.relay.maintenance.reindexer.statements, "settings", lambda: patient)
    stopping = threading.Event()
    events: list[Event] = []
    # A writer whose transaction is young: the REINDEX begins, and waits for it.
    writer = "UPDATE outboxq.job SET kind = kind WHERE false"
    execute(drained.url, "CREATE INDEX CONCURRENTLY mine_ccnew ON outboxq.job (created_at)")
    with open_session(drained.url, writer), looking(make_reindexer(events, stopping=stopping)) as finished:
        wait_until(lambda: reindexing(engine), "the REINDEX")
        wait_until(lambda: invalid(engine), "its new index")
        stopping.set()
        finished()
        wait_until(lambda: reindexing(engine) is None, "the server to give up")
    assert rebuilt(events) == []
    (left,) = invalid(engine)
    assert left.endswith("_ccnew")
    make_reindexer(events).run_once()
    assert invalid(engine) == []
    assert "mine_ccnew" in sizes(engine)
    assert len(rebuilt(events)) == 1


def test_one_that_failed_is_not_tried_with_each_look(
    engine: Engine, drained: Database, make_reindexer: MakeReindexer, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A wait for a lock is bounded; after that it rests for hours, and says so once."""
    caplog.set_level(logging.INFO, "outboxq.upkeep")
    impatient = outboxq.relay.maintenance.reindexer.statements.settings().replace("'5s'", "'200ms'")
    monkeypatch.setattr(outboxq.relay.maintenance.reindexer.statements, "settings", lambda: impatient)
    events: list[Event] = []
    reindexer = make_reindexer(events)
    with open_session(drained.url, "UPDATE outboxq.job SET kind = kind WHERE false"):
        reindexer.run_once()
    (message,) = said(caplog)
    assert "55P03" in message
    reindexer.run_once()
    assert (rebuilt(events), len(invalid(engine))) == ([], 1)


def test_no_connection_and_no_tables_are_no_matter(
    engine: Engine, outboxq_database: Database, make_reindexer: MakeReindexer
) -> None:
    """Whatever happens, it never raises: the relay's work does not depend on it."""

    def refuse() -> DriverConnection:
        raise OSError("nobody there")

    make_reindexer(connect=refuse).run_once()
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA outboxq CASCADE"))
    make_reindexer().run_once()


@pytest.mark.parametrize(("reindex", "indexes"), [(True, 1), (False, 0)])
def test_a_relay_keeps_up_unless_it_is_told_not_to(
    outboxq_database: Database, drained: Database, monkeypatch: pytest.MonkeyPatch, reindex: bool, indexes: int
) -> None:
    """The thread lives as long as the relay; `reindex=False` is for whoever does it otherwise."""
    made: list[Reindexer] = []
    start = Reindexer.start

    def note(reindexer: Reindexer) -> None:
        made.append(reindexer)
        start(reindexer)

    monkeypatch.setattr(Reindexer, "start", note)
    events: list[Event] = []
    relay = Relay(outboxq_database.url, app.jobs, RelayConfig(reindex=reindex), hooks=[events.append])
    thread = threading.Thread(target=relay.run)
    thread.start()
    wait_until(lambda: any(type(event).__name__ == "RelayStarted" for event in events), "the relay")
    relay.stop()
    thread.join(PATIENCE)
    assert len(made) == indexes
    assert not any(thread.name == "outboxq-reindexer" for thread in threading.enumerate())
