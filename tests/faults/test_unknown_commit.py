"""COMMIT was sent and nobody knows what became of it: for relays and for producers, there is exactly one effect."""

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from outboxq import AsyncContext, Context, JobHandle, Jobs, OutboxSession, RelayConfig, SlotGroup, find_job
from outboxq.events import JobDone
from outboxq.postgres import Database
from outboxq.testing import CommitProxy, RelayProcess, Trap
from outboxq.testing.crashes import COMMIT_SCRIPT
from tests.support import app
from tests.support.app import Account, Effect
from tests.support.matrices import diagonal
from tests.support.own_server import own_server
from tests.support.waiting import PATIENCE, wait_until

SetTrap = Callable[..., Trap]
# What ends a batch, and no other transaction of a relay's, releases the savepoint that was set with its claim.
ONE_SLOT = (SlotGroup(("ledger",)), SlotGroup(("ledger-async",)))

CUTS: dict[str, SetTrap] = {
    "cut-before-it-arrives": lambda proxy, text: proxy.cut_before_commit(containing=text),
    "reply-lost": lambda proxy, text: proxy.cut_after_commit(containing=text),
    "cut-before-it-arrives-thrice": lambda proxy, text: proxy.cut_before_commit(3, containing=text),
    "reply-lost-thrice": lambda proxy, text: proxy.cut_after_commit(3, containing=text),
}
STANDSTILLS: dict[str, SetTrap] = {
    "frozen-before-it-arrives": lambda proxy, text: proxy.freeze_at_commit(containing=text),
    "frozen-after-it-arrived": lambda proxy, text: proxy.freeze_at_commit(arrives=True, containing=text),
    "reply-held": lambda proxy, text: proxy.hold_reply(containing=text),
}


@pytest.fixture
def proxy(outboxq_database: Database) -> Iterator[CommitProxy]:
    with CommitProxy(outboxq_database.url) as proxy:
        yield proxy


@diagonal(
    pytest.mark.parametrize("cut", CUTS),
    pytest.mark.parametrize("kind", [app.record, app.record_async], ids=["sync", "async"]),
    pytest.mark.parametrize("batch_size", [1, 4]),
)
def test_a_relay_cut_off_at_commit_finds_out_what_stands(
    engine: Engine, sessions: sessionmaker[OutboxSession], proxy: CommitProxy, start_relay, cut, kind, batch_size: int
) -> None:
    """Committed or not, the relay on its next connection neither repeats nor drops a job of the batch."""
    names = enqueue(sessions, kind, 12)
    trap = CUTS[cut](proxy, COMMIT_SCRIPT)
    config = RelayConfig(groups=ONE_SLOT, batch_size=batch_size, poll_seconds=0.1)
    with start_relay(config=config, engine=proxy.url) as running:
        assert trap.reached.wait(PATIENCE)
        wait_until(lambda: left(engine) == 0, "the jobs to be done")
    assert ledger(engine) == names
    assert len(running.of(JobDone)) == len(names), "told as done, once each"
    assert trap.count == (3 if "thrice" in cut else 1)


@diagonal(
    pytest.mark.parametrize("cut", ["cut-before-it-arrives", "reply-lost"]),
    pytest.mark.parametrize("flavour", ["sync", "async"]),
    pytest.mark.parametrize(("claim", "writes"), [("transaction", True), ("lease", True), ("lease", False)]),
)
def test_a_relay_that_is_told_to_stop_finds_out_first(
    engine: Engine, sessions: sessionmaker[OutboxSession], proxy: CommitProxy, start_relay, cut, flavour, claim, writes
) -> None:
    """What stands is told before it ends: no other relay could count the job, or tell its hooks. Else it waits."""
    jobs = Jobs()

    @jobs.handler(queue="stopped", claim=claim)
    def stop(ctx: Context) -> None:
        ctx.session.add_all([Effect(name="stop")] * writes)
        running.relay.stop()

    @jobs.handler(queue="stopped-async", claim=claim)
    async def stop_async(ctx: AsyncContext) -> None:
        ctx.session.add_all([Effect(name="stop")] * writes)
        running.relay.stop()

    trap = CUTS[cut](proxy, COMMIT_SCRIPT if writes else "WITH oq_held")
    config = RelayConfig(groups=(SlotGroup(("stopped",)), SlotGroup(("stopped-async",))), poll_seconds=0.1)
    with start_relay(jobs, config, engine=proxy.url) as running:
        with sessions.begin() as session:
            session.add_job(stop if flavour == "sync" else stop_async)
        assert trap.reached.wait(PATIENCE)
    assert trap.count == 1
    # What a leased job without rows came to is settled again.
    is_done = cut == "reply-lost" or not writes
    assert (left(engine), len(running.of(JobDone))) == ((0, 1) if is_done else (1, 0))


@diagonal(
    pytest.mark.parametrize("standstill", STANDSTILLS),
    pytest.mark.parametrize("kind", [app.record, app.record_async], ids=["sync", "async"]),
    pytest.mark.parametrize("then", ["cut", "release"]),
)
def test_a_relay_black_holed_at_commit_finds_out_what_stands(
    engine: Engine, sessions: sessionmaker[OutboxSession], proxy: CommitProxy, start_relay, standstill, kind, then: str
) -> None:
    """While nothing passes the job is committed or held by its transaction; afterwards it has one effect."""
    names = enqueue(sessions, kind, 3)
    trap = STANDSTILLS[standstill](proxy, COMMIT_SCRIPT)
    with start_relay(config=RelayConfig(groups=ONE_SLOT, poll_seconds=0.1), engine=proxy.url):
        assert trap.reached.wait(PATIENCE)
        assert len(ledger(engine)) == (0 if standstill == "frozen-before-it-arrives" else 1)
        trap.release() if then == "release" else proxy.cut()
        wait_until(lambda: left(engine) == 0, "the jobs to be done")
    assert ledger(engine) == names


@pytest.mark.parametrize("standstill", STANDSTILLS)
def test_a_relay_killed_while_its_commit_is_under_way_leaves_one_effect(
    engine: Engine, sessions: sessionmaker[OutboxSession], proxy: CommitProxy, outboxq_database: Database, standstill
) -> None:
    """What the next relay finds is what PostgreSQL decided; a vanished host's transaction holds its job until then."""
    names = enqueue(sessions, app.record, 3)
    trap = STANDSTILLS[standstill](proxy, COMMIT_SCRIPT)
    config = RelayConfig(groups=ONE_SLOT, poll_seconds=0.1)
    with RelayProcess("tests.support.app:jobs", proxy.url, config) as relay:
        assert trap.reached.wait(PATIENCE), relay.log
        relay.kill()
        proxy.cut()
    with RelayProcess("tests.support.app:jobs", outboxq_database.url, config):
        wait_until(lambda: left(engine) == 0, "the jobs to be done")
    assert ledger(engine) == names


@pytest.mark.parametrize("cut", ["cut-before-it-arrives", "reply-lost"])
def test_a_producer_cut_off_at_commit_can_read_the_truth_in_its_own_row(
    engine: Engine, proxy: CommitProxy, drain, cut: str
) -> None:
    """The job exists if and only if the business row does, and then takes effect once."""
    trap = CUTS[cut](proxy, "account")
    errors: list[BaseException] = []
    handle = place(proxy.url, errors)
    assert trap.reached.wait(PATIENCE)
    assert [type(error) for error in errors] == [OperationalError]
    stands = cut == "reply-lost"
    assert (accounts(engine), waiting_ids(engine)) == ((1, [handle.id]) if stands else (0, []))
    with engine.connect() as connection:
        found = find_job(connection, handle)
    assert (found.state if found else None) == ("waiting" if stands else None)
    drain()
    assert ledger(engine) == (["placed"] if stands else [])


@diagonal(
    pytest.mark.parametrize("standstill", STANDSTILLS),
    pytest.mark.parametrize("then", ["cut", "release"]),
)
def test_a_producer_black_holed_at_commit_can_read_the_truth_in_its_own_row(
    engine: Engine, proxy: CommitProxy, drain, standstill: str, then: str
) -> None:
    """The same while nothing passes, and whatever ends it: no job without its row, no row without its job."""
    trap = STANDSTILLS[standstill](proxy, "account")
    errors: list[BaseException] = []
    producer = threading.Thread(target=place, args=(proxy.url, errors))
    producer.start()
    assert trap.reached.wait(PATIENCE)
    arrived = standstill != "frozen-before-it-arrives"
    assert (accounts(engine), len(waiting_ids(engine))) == (int(arrived), int(arrived))
    trap.release() if then == "release" else proxy.cut()
    producer.join(PATIENCE)
    assert not producer.is_alive()
    assert len(errors) == (1 if then == "cut" else 0)
    stands = arrived or then == "release"
    wait_until(lambda: open_transactions(engine) == 0, "the server to notice")
    drain()
    assert (accounts(engine), ledger(engine)) == ((1, ["placed"]) if stands else (0, []))


@pytest.mark.large
def test_a_transaction_id_that_a_crash_gave_to_somebody_else_tells_nothing() -> None:
    """After a crash PostgreSQL uses the ids of transactions again of which nothing had reached the log on disk.

    The relay's own had not committed, although whoever got its id since did: its job runs, and is no dead letter.
    """
    # Nothing but a COMMIT flushes the log.
    settings = {"wal_writer_delay": "10s", "autovacuum": "off", "bgwriter_delay": "10s"}
    with own_server(settings) as server, server.create_database() as database:
        app.prepare(database.url)
        engine = create_engine(database.url, poolclass=NullPool)
        # Anything that flushes the log at the wrong moment keeps the id from being used again: then once more.
        met = any(crash_while_a_handler_runs(engine, database.url, f"slow {turn}") for turn in range(5))
    assert met, "no crash gave the id back"


def crash_while_a_handler_runs(engine: Engine, url: str, name: str) -> bool:
    """Whether the id of its transaction was given to somebody else; the job is done once either way."""
    with OutboxSession(engine) as session:
        session.add_job(app.record_slowly, name=name, seconds=1.0)
        session.commit()
    config = RelayConfig(groups=ONE_SLOT, poll_seconds=0.1)
    with CommitProxy(url) as proxy, RelayProcess("tests.support.app:jobs", proxy.url, config):
        pid, xid = wait_until(lambda: writer(engine), "the handler to write")
        proxy.freeze()
        with engine.connect() as bystander:
            os.kill(pid, signal.SIGKILL)
            # For a moment the server goes on as if nothing had happened.
            wait_until(lambda: is_cut(bystander), "the server to crash")
        used = wait_until(lambda: uses_up(engine, xid), "the id to be passed")
        proxy.thaw()
        wait_until(lambda: count(engine, "SELECT count(*) FROM outboxq.job") == 0, "the job's end")
    assert ledger(engine).count(name) == 1
    assert count(engine, "SELECT count(*) FROM outboxq.dead_job") == 0
    return used == "by us"


def writer(engine: Engine) -> tuple[int, int] | None:
    """The backend whose handler has written its effect, and its transaction id."""
    query = (
        "SELECT pid, backend_xid::text::bigint FROM pg_stat_activity JOIN pg_locks USING (pid) "
        "WHERE pg_locks.relation = 'effect_ledger'::regclass AND mode = 'RowExclusiveLock'"
    )
    with engine.connect() as connection:
        row = connection.execute(text(query)).first()
    return None if row is None else (row[0], row[1])


def is_cut(connection: Connection) -> bool:
    try:
        connection.execute(text("SELECT 1"))
    except OperationalError:
        return True
    return False


def uses_up(engine: Engine, xid: int) -> str | None:
    """Commit, each with an id of its own, until `xid` belongs to one of ours or is passed; None while it recovers."""
    try:
        with engine.connect() as connection:
            while True:
                connection.execute(text("INSERT INTO account (balance) VALUES (0)"))
                drawn = connection.execute(text("SELECT pg_current_xact_id()::text::bigint")).scalar_one()
                connection.commit()
                if drawn >= xid:
                    return "by us" if drawn == xid else "passed"
    except OperationalError:
        return None


def enqueue(sessions: sessionmaker[OutboxSession], kind, number: int) -> list[str]:
    names = [f"job {index:02}" for index in range(number)]
    with sessions.begin() as session:
        for name in names:
            session.add_job(kind, name=name)
    return names


def place(url: str, errors: list[BaseException]) -> JobHandle:
    """A business row and its job in one transaction; the error of its COMMIT, if any, goes to `errors`."""
    engine = create_engine(url)
    try:
        with OutboxSession(engine) as session:
            session.add(Account(balance=0))
            handle = session.add_job(app.record, name="placed")
            session.flush()
            try:
                session.commit()
            except OperationalError as error:
                errors.append(error)
            return handle
    finally:
        engine.dispose()


def ledger(engine: Engine) -> list[str]:
    with Session(engine) as session:
        return sorted(session.scalars(select(Effect.name)))


def accounts(engine: Engine) -> int:
    return count(engine, "SELECT count(*) FROM account")


def left(engine: Engine) -> int:
    return count(engine, "SELECT (SELECT count(*) FROM outboxq.job) + (SELECT count(*) FROM outboxq.dead_job)")


def waiting_ids(engine: Engine) -> list[object]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT id FROM outboxq.job")).scalars())


def open_transactions(engine: Engine) -> int:
    return count(
        engine,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'",
    )


def count(engine: Engine, sql: str) -> int:
    with engine.connect() as connection:
        return connection.execute(text(sql)).scalar_one()
