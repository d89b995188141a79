"""The relay as a whole: queues and slots, starting and stopping, engines, outages and strangers."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, event, func, make_url, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig, SlotGroup, external
from outboxq.database.driver import driver_connection, run_script
from outboxq.database.engines import Engines
from outboxq.errors import ConfigError, RegistryError, SchemaError
from outboxq.events import (
    DatabaseBack,
    DatabaseLost,
    Event,
    JobDied,
    JobDone,
    JobRetried,
    JobsParked,
    RelayStarted,
    RelayStopped,
    RelayStopping,
)
from outboxq.postgres import Database, Server, start_embedded
from outboxq.relay.event_loop import LoopThread
from outboxq.relay.startup import Login, wait_for_database
from outboxq.statements.park import park_head
from tests.conftest import StartRelay
from tests.support import app
from tests.support.app import Effect
from tests.support.ledger import ledger, waiting
from tests.support.limits import FOLLOW_NEVER, with_limits
from tests.support.waiting import PATIENCE, wait_until


def ordering_jobs() -> tuple[Jobs, list[str]]:
    jobs, order = Jobs(), []

    @jobs.handler(queue="urgent")
    def urgent(ctx: Context, n: int) -> None:
        order.append(f"urgent {n}")

    @jobs.handler(queue="normal")
    def normal(ctx: Context, n: int) -> None:
        order.append(f"normal {n}")

    return jobs, order


def test_an_ordered_group_claims_from_its_first_queue_that_has_a_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """One slot for several queues, in strict precedence."""
    jobs, order = ordering_jobs()
    with sessions.begin() as session:
        for n in range(3):
            session.add_job(external("normal", queue="normal"), n=n)
            session.add_job(external("urgent", queue="urgent"), n=n)
    config = RelayConfig(groups=(SlotGroup(("urgent", "normal")),))
    Relay(outboxq_database.url, jobs, config, hooks=()).drain()
    assert order == ["urgent 0", "urgent 1", "urgent 2", "normal 0", "normal 1", "normal 2"]


@pytest.mark.parametrize("queues", [("normal",), ("urgent", "normal")])
def test_neither_ready_nor_due_jobs_starve_the_other(
    queues: tuple[str, ...], sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """A slot takes turns between the two indexes of each of its queues, whatever the others hold."""
    jobs, order = ordering_jobs()
    normal = external("normal", queue="normal")
    with sessions.begin() as session:
        session.add_jobs(normal.job(n=n) for n in range(6))
        session.add_jobs(normal.options(run_at=datetime(2020, 1, 1, tzinfo=UTC)).job(n=100 + n) for n in range(6))
    config = RelayConfig(groups=(SlotGroup(queues),))
    with_limits(Relay(outboxq_database.url, jobs, config, hooks=()), FOLLOW_NEVER).drain()
    due = [int(name.split()[1]) >= 100 for name in order]
    assert sorted(due) == [False] * 6 + [True] * 6
    # While both wait: a slot with ready jobs learns of a due one along with a claim.
    both = due[: min(11 - due[::-1].index(True), 11 - due[::-1].index(False))]
    assert all(1 <= sum(due[place : place + 3]) <= 2 for place in range(len(both) - 2))


def test_a_star_stands_for_every_queue_that_no_group_names(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Both flavours get their slots."""
    events: list[Event] = []
    config = RelayConfig(groups=(SlotGroup.parse("*=3"),))
    with sessions.begin() as session:
        session.add_job(app.record, name="a")
        session.add_job(app.record_async, name="b")
    report = Relay(outboxq_database.url, app.jobs, config, hooks=[events.append]).drain()
    assert report.done == 2
    assert RelayStarted(("ledger", "ledger-async"), 6, 7) in events


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (("nowhere=1",), "queue 'nowhere' has no handlers"),
        (("ledger=1", "ledger=2"), "named by two groups"),
        (("ledger,ledger-async=1",), "cannot share slots"),
        (("ledger=0",), "takes 1 to 200 slots"),
        (("ledger=many",), "takes NAMES=SLOTS"),
        (("ledger,ledger=1",), "named twice"),
        (("=1",), "takes 1 to 63 bytes"),
    ],
)
def test_groups_that_do_not_fit_are_refused_with_the_reason(groups: tuple[str, ...], message: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=message):
        Relay("postgresql://nowhere", app.jobs, RelayConfig(groups=tuple(map(SlotGroup.parse, groups))))


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 0}, {"batch_size": 1_001}, {"poll_seconds": 0}, {"drain_seconds": -1}, {"slots_per_queue": 0}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    """The message names the setting and its range."""
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=rf"{name} takes .*, got {value}"):
        RelayConfig(**settings)


def test_a_registry_with_both_flavours_in_one_queue_is_refused_with_the_fix() -> None:
    """A queue is served by threads or by the event loop, not both."""
    jobs = Jobs()

    @jobs.handler()
    def one(ctx: Context) -> None: ...

    @jobs.handler()
    async def other(ctx: AsyncContext) -> None: ...

    with pytest.raises(RegistryError, match=r"queue='default-async'"):
        Relay("postgresql://nowhere", jobs)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_unknown_kinds_are_parked_and_shown_and_known_ones_run(
    batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """A rolling deploy: the job waits for a relay that knows it, no attempt counted, and blocks nobody."""
    with sessions.begin() as session:
        session.add_job(external("from_the_future", queue="ledger"), x=1)
        session.add_job(app.record, name="known")
        session.add_job(external("record_async", queue="ledger"), name="in the wrong queue")
    events = drain(batch_size=batch_size)
    assert ledger(engine) == {"known": 1}
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT kind, state, attempt, parked FROM outboxq.job ORDER BY kind")).all()
    assert [tuple(row) for row in rows] == [
        ("from_the_future", "scheduled", 0, 1),
        ("record_async", "scheduled", 0, 1),
    ]
    parked = [event for event in events if isinstance(event, JobsParked)]
    assert {kind for event in parked for kind in event.kinds} <= {"from_the_future", "record_async"}


@pytest.mark.wide
def test_200_000_jobs_of_an_unknown_kind_at_the_head_hold_the_queue_up_only_while_they_are_parked(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """They are parked ten thousand at a time: a relay gets past them in some dozen claims, not 200,000."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.job (id, queue, kind, args) "
                "SELECT gen_random_uuid(), 'ledger', 'stranger', '{}' FROM generate_series(1, 200000)"
            )
        )
    with sessions.begin() as session:
        session.add_jobs(app.record.job(name=f"known {n}") for n in range(100))
    events = drain(slots_per_queue=1)
    assert ledger(engine) == {f"known {n}": 1 for n in range(100)}
    assert waiting(engine) == 200_000
    parked = [event for event in events if isinstance(event, JobsParked)]
    assert len(parked) <= 100
    assert sum(event.count for event in parked) >= 200_000


@pytest.mark.parametrize("state", ["ready", "scheduled"])
def test_parking_finds_its_jobs_by_their_keys_whatever_statistics_say(state: str, engine: Engine) -> None:
    """Analyzed when no such job was there: a join of ten thousand with all of them took minutes."""
    fill = (
        "INSERT INTO outboxq.job (id, queue, kind, args, state, run_at) "
        "SELECT gen_random_uuid(), 'ledger', 'stranger', '{{}}', '{}', now() - interval '1 hour' "
        "FROM generate_series(1, {})"
    )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ALTER TABLE outboxq.job SET (autovacuum_enabled = off)")
        connection.exec_driver_sql(fill.format("scheduled" if state == "ready" else "ready", 5_000))
        connection.exec_driver_sql("ANALYZE outboxq.job")
        connection.exec_driver_sql(fill.format(state, 50_000))
        question = f"EXPLAIN {park_head('outboxq', 'ledger', state, ('record',), 10_000)}"
        plan = "\n".join(row[0] for row in connection.exec_driver_sql(question))
    head, _, rest = plan.partition("CTE picked")
    assert f"job_{state}" in head
    assert f"job_{state}" not in rest
    assert rest.count("Index Cond: (id = ANY") == 2
    assert "Seq Scan" not in plan


def test_lifespan_state_reaches_sync_and_async_handlers(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """Entered once before the first job, left after the last, whatever kind of generator it is."""
    for asynchronous in (False, True):
        steps: list[str] = []

        def lifespan_sync(steps: list[str] = steps) -> Iterator[str]:
            steps.append("entered")
            yield "state"
            steps.append("left")

        async def lifespan_async(steps: list[str] = steps) -> AsyncIterator[str]:
            steps.append("entered")
            await asyncio.sleep(0)
            yield "state"
            steps.append("left")

        jobs = Jobs(lifespan=lifespan_async if asynchronous else lifespan_sync)

        @jobs.handler(queue="s")
        def look(ctx: Context, steps: list[str] = steps) -> None:
            steps.append(ctx.state)

        jobs.include(Jobs())
        looks = steps

        @jobs.handler(queue="a")
        async def look_async(ctx: AsyncContext) -> None:
            looks.append(ctx.state)  # noqa: B023  # drained within this round

        with sessions.begin() as session:
            session.add_job(external("look", queue="s"))
            session.add_job(external("look_async", queue="a"))
        Relay(outboxq_database.url, jobs, hooks=()).drain()
        assert steps == ["entered", "state", "state", "left"]


def test_a_state_that_no_lifespan_gave_says_so(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """Instead of an error of None; it is false, and every handler has the same."""
    jobs, seen = Jobs(), []

    @jobs.handler(retry=Backoff(max_attempts=1))
    def look(ctx: Context) -> None:
        seen.append(ctx.state)
        ctx.state.client.get("/")

    with sessions.begin() as session:
        session.add_job(look)
    events: list[object] = []
    Relay(outboxq_database.url, jobs, hooks=(events.append,)).drain()
    assert not seen[0]
    (died,) = [each for each in events if isinstance(each, JobDied)]
    assert "ctx.state has no 'client', because it is empty: what a lifespan yields" in died.message


@pytest.mark.large
def test_a_handler_chains_jobs_atomically_and_drain_runs_them_too(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """ctx.session.add_job is one with the handler's rows: a failed attempt enqueues nothing."""
    jobs = Jobs()

    @jobs.handler(queue="first", retry=Backoff(max_attempts=2, first_seconds=0))
    def first(ctx: Context) -> None:
        ctx.session.add_job(second, attempt=ctx.job.attempt)
        # The other queue's slot has polled and ended, ours and the lease's are left: only another round finds the job.
        wait_until(lambda: relay_connections(engine) == 2, "the other slot's end")
        if ctx.job.attempt == 1:
            raise ValueError("not yet")

    @jobs.handler(queue="second")
    async def second(ctx: AsyncContext, attempt: int) -> None:
        ctx.session.add(Effect(name=f"second {attempt}"))

    with sessions.begin() as session:
        session.add_job(first)
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=()).drain()
    assert ledger(engine) == {"second 2": 1}
    assert waiting(engine) == 0


def relay_connections(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(
            text(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE application_name = 'outboxq relay' AND datname = current_database()"
            )
        ).scalar_one()


class Gate:
    """Handlers of both flavours that write a row and wait until they are let go."""

    def __init__(self) -> None:
        self.jobs, self.open = Jobs(), threading.Event()

        @self.jobs.handler(queue="ledger")
        def pass_gate(ctx: Context, name: str) -> None:
            ctx.session.add(Effect(name=name))
            ctx.session.flush()
            assert self.open.wait(PATIENCE)

        @self.jobs.handler(queue="ledger-async")
        async def pass_gate_async(ctx: AsyncContext, name: str) -> None:
            ctx.session.add(Effect(name=name))
            await ctx.session.flush()
            await asyncio.to_thread(self.open.wait, PATIENCE)


def add_gated(sessions: sessionmaker[OutboxSession], gate: Gate, count: int) -> None:
    """So many jobs of each flavour."""
    find = gate.jobs.resolve().find
    with sessions.begin() as session:
        for flavour, kind in (("sync", "pass_gate"), ("async", "pass_gate_async")):
            session.add_jobs(find(kind).job(name=f"{flavour} {n}") for n in range(count))


def test_stop_lets_running_handlers_finish(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """No claim after stop(), and what was running is committed."""
    config = RelayConfig(slots_per_queue=1, drain_seconds=600)
    gate = Gate()
    add_gated(sessions, gate, 3)
    with start_relay(gate.jobs, config) as running:
        wait_until(lambda: written(engine) == 2, "both handlers at work")
        running.relay.stop()
        wait_until(lambda: running.of(RelayStopping), "the relay to know")
        gate.open.set()
        wait_until(lambda: running.of(RelayStopped), "the end of the relay")
    assert ledger(engine) == {"sync 0": 1, "async 0": 1}
    assert waiting(engine) == 4
    assert running.of(RelayStopping) == [RelayStopping(2, 600.0)]
    assert running.of(RelayStopped) == [RelayStopped(done=2, failed_attempts=0, dead=0, abandoned=0)]


def written(engine: Engine) -> int:
    """How many handlers have written their effect, and are not committed."""
    sent = "datname = current_database() AND state = 'idle in transaction' AND query LIKE 'INSERT INTO effect_ledger%'"
    with engine.connect() as connection:
        return connection.execute(text(f"SELECT count(*) FROM pg_stat_activity WHERE {sent}")).scalar_one()


def locked(engine: Engine) -> int:
    """How many jobs some transaction holds."""
    # Committed: a lock that is rolled back would leave the mark of a claim that died.
    with engine.begin() as connection:
        free = connection.execute(text("SELECT id FROM outboxq.job FOR UPDATE SKIP LOCKED")).all()
        return connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one() - len(free)


def test_what_does_not_finish_in_time_is_rolled_back_and_waits_again(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Past drain_seconds the relay returns; a handler that comes to its end later cannot commit any more."""
    jobs, release, ended = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="ledger")
    def stuck(ctx: Context) -> None:
        ctx.session.add(Effect(name="stuck"))
        ctx.session.flush()
        release.wait(PATIENCE)
        ended.set()

    @jobs.handler(queue="ledger-async")
    async def stuck_async(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name="stuck async"))
        await ctx.session.flush()
        await asyncio.sleep(60)

    with sessions.begin() as session:
        session.add_job(stuck)
        session.add_job(stuck_async)
    config = RelayConfig(drain_seconds=0.2, slots_per_queue=1)
    with start_relay(jobs, config) as running:
        wait_until(lambda: locked(engine) == 2, "both handlers")
    assert running.of(RelayStopped) == [RelayStopped(done=0, failed_attempts=0, dead=0, abandoned=2)]
    release.set()
    assert ended.wait(PATIENCE)
    wait_until(lambda: locked(engine) == 0, "the rollback")
    assert ledger(engine) == {}
    assert waiting(engine) == 2


@pytest.mark.large
def test_the_relay_survives_a_restart_of_the_database(outboxq_prepare: Callable[[str], None]) -> None:
    """It says that the database is away and back, and every job is done once."""
    with start_embedded() as server, server.create_database() as database:
        outboxq_prepare(database.url)
        engine = create_engine(database.url)
        sessions = sessionmaker(engine, class_=OutboxSession)
        with sessions.begin() as session:
            session.add_jobs(app.record_slowly.job(name=f"sync {n}", seconds=0.05) for n in range(30))
            session.add_jobs(app.record_async.job(name=f"async {n}", seconds=0.05) for n in range(30))
        events: list[Event] = []
        relay = Relay(database.url, app.jobs, RelayConfig(slots_per_queue=2), hooks=[events.append])
        thread = threading.Thread(target=relay.run)
        thread.start()
        try:
            wait_until(lambda: sum(isinstance(event, JobDone) for event in events) > 10, "some work")
            server.stop_immediately()
            wait_until(lambda: any(isinstance(event, DatabaseLost) for event in events), "the loss to be noticed")
            server.start_again()
            wait_until(lambda: any(isinstance(event, DatabaseBack) for event in events), "the way back")
            engine.dispose()
            wait_until(lambda: waiting(engine) == 0, "the rest of the work")
        finally:
            relay.stop()
            thread.join(PATIENCE)
        names = [f"{flavour} {n}" for flavour in ("sync", "async") for n in range(30)]
        assert ledger(engine) == dict.fromkeys(names, 1)
        engine.dispose()


@pytest.mark.large
def test_an_outage_is_waited_out_with_growing_pauses(outboxq_prepare: Callable[[str], None]) -> None:
    """Idle slots, sync and async, do not spin while the database is away; the listener's bell does not shorten it."""
    with start_embedded() as server, server.create_database() as database:
        outboxq_prepare(database.url)
        lost: list[tuple[float, DatabaseLost]] = []

        def hook(event: Event) -> None:
            if isinstance(event, DatabaseLost):
                lost.append((time.monotonic(), event))

        started = threading.Event()
        relay = Relay(
            database.url,
            app.jobs,
            RelayConfig(slots_per_queue=1, poll_seconds=600),
            hooks=[hook, lambda event: started.set() if isinstance(event, RelayStarted) else None],
        )
        thread = threading.Thread(target=relay.run)
        thread.start()
        try:
            assert started.wait(PATIENCE)
            own = create_engine(database.url)
            wait_until(lambda: sleep_flags(own) == 2, "both slots asleep")
            own.dispose()
            server.stop_immediately()
            wait_until(lambda: any(event.retry_seconds > 1 for _, event in lost), "a pause of over a second")
        finally:
            relay.stop()
            thread.join(PATIENCE)
            server.start_again()
        assert lost[-1][0] - lost[0][0] > 0.7, "the pauses before it were kept"


def sleep_flags(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(
            text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted")
        ).scalar_one()


@pytest.mark.large
def test_a_relay_waits_for_a_database_that_is_down_at_its_start(outboxq_prepare: Callable[[str], None]) -> None:
    """It retries and says so, without the URL in the message."""
    with start_embedded() as server, server.create_database() as database:
        outboxq_prepare(database.url)
        server.stop_immediately()
        events: list[Event] = []
        relay = Relay(database.url, app.jobs, hooks=[events.append])
        thread = threading.Thread(target=relay.run)
        thread.start()
        try:
            wait_until(lambda: any(isinstance(event, DatabaseLost) for event in events), "the first try")
            assert not any(isinstance(event, RelayStarted) for event in events)
            server.start_again()
            wait_until(lambda: any(isinstance(event, RelayStarted) for event in events), "the start")
        finally:
            relay.stop()
            thread.join(PATIENCE)
        assert "127.0.0.1" not in repr(events)


def test_a_connection_that_is_lost_behind_the_check_is_an_outage(engine: Engine) -> None:
    """What is asked then is not sent by SQLAlchemy, and need not be in a transaction that it knows of."""
    looks: list[Connection] = []
    lost: list[object] = []

    def look(connection: Connection) -> None:
        connection.rollback()
        if not looks:
            with engine.connect() as other:
                pid = {"pid": driver_connection(connection).info.backend_pid}
                other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), pid)
        looks.append(connection)
        run_script(connection, "SELECT")

    engines = Engines(engine, None, owns_sync=False, owns_asynchronous=False)
    wait_for_database(engines, RelayConfig(), LoopThread(), lost.append, threading.Event(), look, Login(60))
    assert [type(each) for each in lost] == [DatabaseLost]
    assert len(looks) == 2


def test_a_statement_that_is_cancelled_as_the_relay_starts_is_tried_again(engine: Engine) -> None:
    """By an operator, or by a time-out that a busy server ran into."""
    looks: list[Connection] = []
    lost: list[object] = []

    def look(connection: Connection) -> None:
        looks.append(connection)
        if len(looks) == 1:
            connection.execute(text("SET LOCAL statement_timeout = 1"))
            connection.execute(text("SELECT pg_sleep(60)"))

    engines = Engines(engine, None, owns_sync=False, owns_asynchronous=False)
    wait_for_database(engines, RelayConfig(), LoopThread(), lost.append, threading.Event(), look, Login(60))
    assert [type(each) for each in lost] == [DatabaseLost]
    assert len(looks) == 2


@pytest.mark.parametrize("to", [None, 1])
def test_missing_or_older_tables_end_the_relay_with_the_command(outboxq_server: Server, to: int | None) -> None:
    """At once, not in a loop: waiting would not mend it."""
    from outboxq.migrations.runner import migrate

    with outboxq_server.create_database() as database:
        if to is not None:
            engine = create_engine(database.url)
            with engine.begin() as connection:
                migrate(connection, to=to)
            engine.dispose()
        with pytest.raises(SchemaError, match="outboxq migrate"):
            Relay(database.url, app.jobs).run()


def test_the_relay_works_on_the_users_own_engines(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Engine events run (tokens, connectors), and no session setting of the relay stays in the pool."""
    own = create_engine(outboxq_database.url, pool_size=6)
    own_async = create_async_engine(outboxq_database.url, pool_size=6)
    connects: list[object] = []
    event.listen(own, "do_connect", lambda *arguments: connects.append(arguments))
    event.listen(own_async.sync_engine, "do_connect", lambda *arguments: connects.append(arguments))
    with sessions.begin() as session:
        session.add_job(app.record, name="a")
        session.add_job(app.record_async, name="b")
    report = Relay(own, app.jobs, async_engine=own_async, hooks=()).drain()
    assert report.done == 2
    assert len(connects) >= 4
    with own.connect() as connection:
        assert connection.execute(text("SHOW plan_cache_mode")).scalar() == "auto"
    own.dispose()
    asyncio.run(own_async.dispose())


def test_engines_that_do_not_fit_are_refused_with_the_remedy(outboxq_database: Database) -> None:
    """A missing flavour, another driver, a pool that is too small."""
    url = outboxq_database.url
    with pytest.raises(ConfigError, match="async_engine="):
        Relay(create_engine(url), app.jobs)
    with pytest.raises(ConfigError, match="there is no sync engine"):
        Relay(create_async_engine(url), app.jobs)
    with pytest.raises(ConfigError, match="the relay needs psycopg, and this engine uses asyncpg"):
        Relay(create_async_engine(url.replace("+psycopg", "+asyncpg")), app.jobs)
    with pytest.raises(ConfigError, match="pool holds 2"):
        Relay(create_engine(url, pool_size=1, max_overflow=1), app.jobs, async_engine=create_async_engine(url))
    with pytest.raises(ConfigError, match="outboxq needs postgresql"):
        Relay("sqlite://", app.jobs)


@pytest.mark.first_and_last
@pytest.mark.parametrize("spelling", ["postgres", "postgresql", "postgresql+asyncpg", "postgresql+psycopg2"])
def test_a_url_may_be_spelled_in_any_way(
    spelling: str, outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """The relay makes psycopg engines of it."""
    with sessions.begin() as session:
        session.add_job(app.record, name="a")
    url = outboxq_database.url.replace("postgresql+psycopg", spelling)
    assert Relay(url, app.jobs, hooks=()).drain().done == 1


@pytest.mark.first_and_last
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1"])
def test_text_arrives_in_whatever_encoding_the_clients_of_a_database_have(
    encoding: str, flavour: str, engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Names of queues go out in it, and arguments come in."""
    jobs, told = Jobs(), []

    if flavour == "sync":

        @jobs.handler(queue="grüße", kind="tell")
        def tell(ctx: Context, name: str) -> None:
            told.append((name, ctx.job.run_at < ctx.session.scalar(select(func.clock_timestamp()))))
    else:

        @jobs.handler(queue="grüße", kind="tell")
        async def tell_async(ctx: AsyncContext, name: str) -> None:
            told.append((name, ctx.job.run_at < await ctx.session.scalar(select(func.clock_timestamp()))))

    with sessions.begin() as session:
        for _ in range(3):
            session.add_job(external("tell", queue="grüße"), name="größer")
        setting = f"SET client_encoding = '{encoding}'"
        session.execute(text(f'ALTER DATABASE "{outboxq_database.name}" {setting}'))
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=()).drain()
    assert told == [("größer", True)] * 3


@pytest.mark.first_and_last
@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_hook_that_fails_breaks_no_job(
    error: type[BaseException],
    outboxq_database: Database,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged, and the next hook is called, whatever it raises: here in the slots' threads."""
    events: list[Event] = []

    def broken(event: Event) -> None:
        if isinstance(event, JobDone):
            raise error("hook")

    with sessions.begin() as session:
        session.add_job(app.record, name="a")
    assert Relay(outboxq_database.url, app.jobs, hooks=[broken, events.append]).drain().done == 1
    assert any(isinstance(event, JobDone) for event in events)
    assert "a hook failed" in caplog.text


def test_default_logging_names_the_job_and_never_its_payload(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], caplog: pytest.LogCaptureFixture
) -> None:
    """One record per event, fields in `extra`."""
    caplog.set_level("DEBUG", "outboxq")
    with sessions.begin() as session:
        handle = session.add_job(app.fail, name="4242-4242")
    Relay(outboxq_database.url, app.jobs).drain()
    assert f"job failed and will run again: kind=fail queue=ledger id={handle.id} attempt=1" in caplog.text
    assert "job moved to the dead letters" in caplog.text
    assert "4242" not in caplog.text
    assert any(getattr(record, "outboxq_kind", None) == "fail" for record in caplog.records)


def test_deadlocks_are_retried_for_free(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """40P01 is nobody's fault: the job runs again at once, and no attempt is charged."""
    jobs, calls, first_locked, go_on = Jobs(), [], threading.Event(), threading.Event()

    @jobs.handler(queue="ledger", retry=Backoff(max_attempts=1))
    def lock_both(ctx: Context) -> None:
        calls.append(ctx.job.attempt)
        ctx.session.execute(text("SET LOCAL deadlock_timeout = '50ms'"))
        ctx.session.execute(text("UPDATE account SET balance = 1 WHERE id = 1"))
        first_locked.set()
        assert go_on.wait(PATIENCE)
        ctx.session.execute(text("UPDATE account SET balance = 1 WHERE id = 2"))
        ctx.session.add(Effect(name="both"))

    def other_waits() -> bool:
        with engine.connect() as looking:
            found = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid AND wait_event_type = 'Lock'")
            return looking.scalar(found, {"pid": pid}) == 1

    with sessions.begin() as session:
        session.add_all([app.Account(id=1), app.Account(id=2)])
        session.add_job(lock_both)
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        with engine.begin() as connection, ThreadPoolExecutor(1) as thread:
            pid = connection.scalar(text("SELECT pg_backend_pid()"))
            connection.execute(text("SET LOCAL deadlock_timeout = '1h'"))
            connection.execute(text("UPDATE account SET balance = 2 WHERE id = 2"))
            assert first_locked.wait(PATIENCE)
            updated = thread.submit(connection.execute, text("UPDATE account SET balance = 2 WHERE id = 1"))
            # Who begins to wait last finds the deadlock: the handler.
            wait_until(other_waits, "the other to wait for the handler's row")
            go_on.set()
            updated.result(PATIENCE)
        wait_until(lambda: running.of(JobDone), "the job")
        assert not running.of(JobRetried)
    assert len(calls) >= 2
    assert set(calls) == {1}
    assert ledger(engine) == {"both": 1}


def test_a_terminated_backend_costs_a_reconnect_and_no_attempt(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """The claim died with its connection: the job waits as it was, and runs again."""
    gate = Gate()
    add_gated(sessions, gate, 1)
    with start_relay(gate.jobs, RelayConfig(slots_per_queue=1)) as running:
        wait_until(lambda: written(engine) == 2, "both handlers at work")
        with engine.begin() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() AND datname = current_database()"
                )
            )
        gate.open.set()
        wait_until(lambda: len(running.of(JobDone)) == 2, "both jobs")
        assert [event.job.attempt for event in running.of(JobDone)] == [1, 1]
    assert ledger(engine) == {"sync 0": 1, "async 0": 1}


def test_an_operational_error_of_the_handler_itself_is_a_failed_attempt(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Only the loss of the relay's own connection is free."""
    jobs = Jobs()

    @jobs.handler(retry=Backoff(max_attempts=1))
    def connects_elsewhere(ctx: Context) -> None:
        raise OperationalError("SELECT 1", {"secret": "value"}, Exception("no route"))

    with sessions.begin() as session:
        session.add_job(connects_elsewhere)
    assert Relay(outboxq_database.url, jobs, hooks=()).drain().died == 1
    with engine.connect() as connection:
        errors = str(connection.execute(text("SELECT errors FROM outboxq.dead_job")).scalar())
    assert "secret" not in errors


def test_idle_slots_end_when_the_relay_stops(start_relay: StartRelay, engine: Engine) -> None:
    """They sleep for ten minutes, and are not waited for: `start_relay` would give up after one."""
    with start_relay(config=RelayConfig(poll_seconds=600)):
        wait_until(lambda: sleep_flags(engine) == 2, "both queues' slots to sleep")


class TokenServiceDownError(Exception):
    pass


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_whatever_an_engine_raises_instead_of_a_connection_is_an_outage(
    flavour: str, outboxq_database: Database, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """A token service that is down at the start, and again later: the relay waits, says so, and works on."""
    jobs, down, served = Jobs(), threading.Event(), threading.Event()

    if flavour == "sync":

        @jobs.handler(queue="q")
        def work(ctx: Context) -> None:
            served.set()

    else:

        @jobs.handler(queue="q")
        async def work(ctx: AsyncContext) -> None:
            served.set()

    make = create_engine if flavour == "sync" else create_async_engine
    own = make(make_url(outboxq_database.url), poolclass=NullPool)

    def connect(*_: object) -> None:
        if down.is_set():
            raise TokenServiceDownError("secret")

    event.listen(own if flavour == "sync" else own.sync_engine, "do_connect", connect)
    down.set()
    with start_relay(jobs, RelayConfig(poll_seconds=0.1, slots_per_queue=1), engine=own) as running:
        wait_until(lambda: running.of(DatabaseLost), "the outage at the start")
        down.clear()
        wait_until(lambda: running.of(RelayStarted), "the start")
        with sessions.begin() as session:
            session.add_job(work)
        assert served.wait(30)
        served.clear()
        down.set()
        before = len(running.of(DatabaseLost))
        with sessions() as session:
            session.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            )
        wait_until(lambda: len(running.of(DatabaseLost)) > before + 1, "the outage later")
        down.clear()
        with sessions.begin() as session:
            session.add_job(work)
        assert served.wait(30)
    errors = {each.error for each in running.of(DatabaseLost)}
    assert "TokenServiceDownError" in errors
    assert not any("secret" in error for error in errors)


def test_due_jobs_come_by_their_time_and_ready_ones_by_priority(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """As the README says: a priority is for the jobs that are ready."""
    with sessions.begin() as session:
        for name, priority in (("third", 9), ("first", 1), ("second", 5)):
            session.add_job(app.record.options(delay=timedelta(hours=1), priority=priority), name=name)
    with engine.begin() as connection:
        order = "CASE args->>'name' WHEN 'first' THEN 3 WHEN 'second' THEN 2 ELSE 1 END"
        connection.execute(text(f"UPDATE outboxq.job SET run_at = now() - interval '1 minute' * {order}"))
    app.calls.clear()
    drain(slots_per_queue=1)
    assert app.calls == ["first", "second", "third"]


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_relay_that_is_stopped_as_it_starts_says_that_it_stops(flavour: str, outboxq_database: Database) -> None:
    """As at any other moment: who counts on the event waits for it."""
    jobs, events = Jobs(), []

    if flavour == "sync":

        @jobs.handler(queue="q")
        def wait(ctx: Context) -> None: ...
    else:

        @jobs.handler(queue="q")
        async def wait(ctx: AsyncContext) -> None: ...

    def stop(event: Event) -> None:
        events.append(type(event))
        if isinstance(event, RelayStarted):
            relay.stop()

    relay = Relay(outboxq_database.url, jobs, hooks=[stop])
    relay.run()
    assert events == [RelayStarted, RelayStopping, RelayStopped]
