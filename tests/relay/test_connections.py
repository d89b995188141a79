"""How many connections a relay holds: a slot has one while it works, and gives it back when it sleeps."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.util import await_only

import outboxq.effects.transactions as transactions
from outboxq import AsyncContext, Context, Jobs, OutboxSession, RelayConfig, SlotGroup
from outboxq.database.engines import EFFECTS_NAME, make_async_engine, make_engine
from outboxq.effects.transactions import AsyncEngineTransactions, EngineTransactions
from outboxq.events import DatabaseBack, DatabaseLost, JobDone, RelayStarted
from outboxq.postgres import Database
from outboxq.relay.idle import SlotSleep
from outboxq.relay.limits import RelayLimits
from outboxq.tables import SCHEMA
from tests.conftest import StartRelay
from tests.support.waiting import wait_until

COUNT = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND application_name LIKE :name"
)

CUT = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name = 'outboxq relay' AND datname = current_database()"
)

# What is over is closed soon.
SOON = RelayLimits(linger_seconds=0.5)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over of the effects' connections is closed soon too."""
    monkeypatch.setattr(transactions, "LINGER_SECONDS", 0.5)


@pytest.fixture
def looker(outboxq_database: Database) -> Iterator[Engine]:
    engine = create_engine(outboxq_database.url, isolation_level="AUTOCOMMIT")
    yield engine
    engine.dispose()


def held(looker: Engine, name: str = "outboxq%") -> int:
    with looker.connect() as connection:
        return int(connection.execute(COUNT, {"name": name}).scalar_one())


class Gate:
    """Handlers that wait until all of them are inside."""

    def __init__(self) -> None:
        self.inside = threading.Semaphore(0)
        self.open = threading.Event()

    def pass_through(self) -> None:
        self.inside.release()
        assert self.open.wait(60)


def seven_queues(gate: Gate, flavours: tuple[str, ...]) -> Jobs:
    jobs = Jobs()

    def work(ctx: Context) -> None:
        if ctx.job.queue.endswith("0"):
            ctx.once("scope", key=str(ctx.job.id), call=lambda _key: None, provider_remembers=None)
        gate.pass_through()

    async def work_async(ctx: AsyncContext) -> None:
        gate.inside.release()
        while not gate.open.is_set():  # noqa: ASYNC110  # opened by another thread
            await asyncio.sleep(0.01)

    for number in range(7):
        flavour = flavours[number % len(flavours)]
        jobs.handler(queue=f"queue {number}", kind=f"kind {number}")(work if flavour == "sync" else work_async)
    return jobs


@pytest.mark.large
@pytest.mark.parametrize("flavours", [("sync",), ("async",), ("sync", "async")], ids="-".join)
def test_an_idle_relay_holds_four_connections_whatever_the_number_of_its_queues(
    flavours: tuple[str, ...], looker: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Before its first job, and after all of its slots have worked at the same time; then as many as it said."""
    gate = Gate()
    jobs = seven_queues(gate, flavours)
    with start_relay(jobs, RelayConfig(), limits=SOON) as running:
        (started,) = wait_until(lambda: running.of(RelayStarted), "the start")
        assert isinstance(started, RelayStarted)
        assert (started.slots, started.connections) == (14, 16)
        wait_until(lambda: 2 <= held(looker) <= 4, "an idle relay's connections")
        registry = jobs.resolve()
        with sessions.begin() as session:
            session.add_jobs(registry.find(f"kind {number % 7}").job() for number in range(14))
        for _ in range(14):
            assert gate.inside.acquire(timeout=60)
        assert held(looker) >= 14
        # ctx.once has connections of its own, for a moment; so has the server those that were closed.
        wait_until(lambda: held(looker) <= started.connections + 4, "a relay at work to hold as many as it said")
        gate.open.set()
        wait_until(lambda: len(running.of(JobDone)) == 14, "the jobs")
        wait_until(lambda: held(looker) <= 4, "an idle relay's connections")


@pytest.mark.large
def test_slots_that_wake_take_a_connection_that_is_there(
    looker: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Opening one takes longer than everything else between COMMIT and the handler."""
    pids: set[int] = set()
    jobs = Jobs()

    def note(ctx: Context) -> None:
        pids.add(ctx.session.scalar(text("SELECT pg_backend_pid()")) or 0)

    kinds = [jobs.handler(queue=f"queue {number}", kind=f"kind {number}")(note) for number in range(7)]
    with start_relay(jobs, RelayConfig(poll_seconds=30), limits=SOON) as running:
        wait_until(lambda: running.of(RelayStarted), "the start")
        for number in range(21):
            with sessions.begin() as session:
                session.add_job(kinds[number % 7])
            wait_until(lambda count=number + 1: len(running.of(JobDone)) == count, "the job")
        wait_until(lambda: held(looker) <= 4, "an idle relay's connections")
    assert len(pids) <= 4


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_spare_connections_that_were_cut_cost_no_job_and_are_found_out_once(
    flavour: str,
    looker: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one that turns out to be lost takes the others with it."""
    resting: set[SlotSleep] = set()
    pause_seconds = SlotSleep.pause_seconds

    def note(sleep: SlotSleep, *, flagged: bool) -> float:
        if flagged:
            resting.add(sleep)
        return pause_seconds(sleep, flagged=flagged)

    monkeypatch.setattr(SlotSleep, "pause_seconds", note)
    gate = Gate()
    jobs = seven_queues(gate, (flavour,))
    work = jobs.resolve().find("kind 1")

    def enqueue(count: int) -> None:
        with sessions.begin() as session:
            session.add_jobs(work.job() for _ in range(count))

    config = RelayConfig(groups=(SlotGroup(("queue 1",), 4),), poll_seconds=600)
    with start_relay(jobs, config, limits=RelayLimits(linger_seconds=600)) as running:
        enqueue(4)
        for _ in range(4):
            assert gate.inside.acquire(timeout=60)
        resting.clear()
        gate.open.set()
        wait_until(lambda: len(resting) == 4, "all slots at rest")
        assert held(looker, "outboxq relay") >= 4
        with looker.connect() as connection:
            connection.execute(CUT)
        enqueue(1)
        wait_until(lambda: len(running.of(JobDone)) == 5, "the job")
        wait_until(lambda: running.of(DatabaseBack), "the slot that met the lost one")
    assert len(running.of(DatabaseLost)) == 1


def test_a_relay_on_a_users_engine_returns_no_connection_to_its_pool(
    outboxq_database: Database, looker: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Its session settings, and its claims, would be found there by others."""
    jobs = Jobs()

    @jobs.handler(queue="async")
    async def work(ctx: AsyncContext) -> None:
        await (await ctx.session.connection()).execute(text("SELECT 1"))

    own = create_async_engine(outboxq_database.url, pool_size=5, connect_args={"application_name": "mine"})
    with start_relay(jobs, RelayConfig(), engine=own, limits=SOON) as running:
        with sessions.begin() as session:
            session.add_jobs(work.job() for _ in range(3))
        wait_until(lambda: len(running.of(JobDone)) == 3, "the jobs")
        wait_until(lambda: held(looker, "mine") >= 1, "the relay's connections")
    # The server sees a moment later that they were closed.
    wait_until(lambda: held(looker, "mine") == 0, "no connection of the relay's")


@pytest.fixture
def no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The garbage collector does not come by; and pools are over as soon as they are asked."""
    monkeypatch.setattr(transactions, "LINGER_SECONDS", -1)
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("of", ["claims", "records", "keeper"])
@pytest.mark.parametrize("close", ["trim", "dispose"])
def test_a_connection_that_is_in_use_while_its_pool_is_closed_is_closed_when_it_comes_back(
    close: str, of: str, looker: Engine, outboxq_database: Database
) -> None:
    """Its old pool would keep it; what comes later is kept by the new one, but not after the end."""
    transactions = EngineTransactions(
        make_engine(outboxq_database.url, application_name=EFFECTS_NAME, pooled=True), SCHEMA
    )
    gate = Gate()
    transact = (
        transactions.keeper_transaction() if of == "keeper" else partial(transactions.run, settles=of == "records")
    )
    user = threading.Thread(target=transact, args=(lambda _: gate.pass_through(),))
    user.start()
    assert gate.inside.acquire(timeout=60)
    getattr(transactions, close)()
    assert held(looker, EFFECTS_NAME) == 1
    gate.open.set()
    user.join()
    wait_until(lambda: held(looker, EFFECTS_NAME) == 0, "its end")
    transact(lambda _: None)
    wait_until(lambda: held(looker, EFFECTS_NAME) == (close == "trim"), "a later one")
    transactions.dispose()
    wait_until(lambda: held(looker, EFFECTS_NAME) == 0, "the end of all")


@pytest.mark.parametrize("of", ["claims", "records", "keeper"])
def test_a_connection_to_a_server_that_cannot_write_is_not_used_again(of: str, outboxq_database: Database) -> None:
    """The next one may find the primary, after a failover that left the old server a standby."""
    engine = make_engine(outboxq_database.url, application_name=EFFECTS_NAME, pooled=True)
    transactions = EngineTransactions(engine, SCHEMA)
    transact = (
        transactions.keeper_transaction() if of == "keeper" else partial(transactions.run, settles=of == "records")
    )

    def write_as_on_a_standby(connection: Connection) -> None:
        connection.execute(text("SET TRANSACTION READ ONLY"))
        connection.execute(text("CREATE TABLE never ()"))

    def backend(connection: Connection) -> object:
        return connection.scalar(text("SELECT pg_backend_pid()"))

    before = transact(backend)
    assert transact(backend) == before
    with pytest.raises(DBAPIError, match="read-only"):
        transact(write_as_on_a_standby)
    assert transact(backend) != before
    transactions.dispose()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("of", ["claims", "records", "keeper"])
@pytest.mark.parametrize("close", ["trim", "dispose"])
def test_so_is_a_connection_of_an_event_loop(close: str, of: str, looker: Engine, outboxq_database: Database) -> None:
    """The same for async callers."""
    engine = make_async_engine(outboxq_database.url, application_name=EFFECTS_NAME, pooled=True)
    transactions, inside = AsyncEngineTransactions(engine, SCHEMA), asyncio.Event()

    async def transact(work: Callable[[Connection], None]) -> None:
        if of == "keeper":
            await asyncio.to_thread(transactions.keeper_transaction(), work)
        else:
            await transactions.run(work, settles=of == "records")

    async def main() -> None:
        opened = asyncio.Event()

        def work(_: Connection) -> None:
            inside.set()
            await_only(opened.wait())

        user = asyncio.create_task(transact(work))
        await asyncio.wait_for(inside.wait(), 60)
        await getattr(transactions, close)()
        assert held(looker, EFFECTS_NAME) == 1
        opened.set()
        await user
        wait_until(lambda: held(looker, EFFECTS_NAME) == 0, "its end")
        await transact(lambda _: None)
        wait_until(lambda: held(looker, EFFECTS_NAME) == (close == "trim"), "a later one")
        await transactions.dispose()
        wait_until(lambda: held(looker, EFFECTS_NAME) == 0, "the end of all")

    asyncio.run(main())
