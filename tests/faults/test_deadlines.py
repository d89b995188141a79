"""Deadlines: a handler that does not end in time is stopped, recorded and retried, and harms nobody else."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, QueuePool, create_engine, make_url, text
from sqlalchemy.orm import sessionmaker

import outboxq.relay.deadlines as deadlines
from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig, cancel, external
from outboxq.config import SlotGroup
from outboxq.errors import RegistryError, RelayStuck
from outboxq.events import (
    DatabaseBack,
    DatabaseLost,
    Event,
    JobCrashed,
    JobDied,
    JobDone,
    JobInterrupted,
    JobRetried,
    JobsSuspected,
    RelayStopped,
)
from outboxq.execution.batch_state import BatchState
from outboxq.fault_points import FaultPoint, fault_action
from outboxq.handlers.context import BatchContext, BatchItem
from outboxq.handlers.options import DEFAULT_TIMEOUT_SECONDS
from outboxq.postgres import Database
from outboxq.relay.deadlines import DeadlineEnforcer, Runner
from outboxq.relay.limits import RelayLimits
from outboxq.relay.queue_claims import Sweep
from tests.conftest import StartRelay
from tests.execution.test_raised import Named
from tests.support.app import Account, Effect
from tests.support.cli import environment, run
from tests.support.driver_waits import driver_waits
from tests.support.ledger import effects, of, rows
from tests.support.limits import FOLLOW_ON, with_limits
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Event]]
ONCE = Backoff(max_attempts=1)
TWICE = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)
TIMED_OUT = "outboxq.errors.HandlerTimedOut"


# Longer than anything is waited for.
LONG = 10 * PATIENCE


# What is cancelled has all the time to end in order: nothing is cut off because a machine is busy.
PATIENT = RelayLimits(cut_after_seconds=LONG, free_after_seconds=LONG)
pytestmark = pytest.mark.relay_limits(PATIENT)
# What does not end when it is cancelled is cut off soon.
CUT_SOON = replace(PATIENT, cut_after_seconds=0.3)
cut_soon = pytest.mark.relay_limits(CUT_SOON)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets handlers that hang go on, at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def close_behind_its_slots(engine: Engine, release: threading.Event) -> None:
    """A slot that was given up returns its connection when it wakes: to a pool that is closed by then it stays open."""
    release.set()
    pool = engine.pool
    assert isinstance(pool, QueuePool)
    wait_until(lambda: pool.checkedout() == 0, "the slots to return their connections")
    engine.dispose()


def add(sessions: sessionmaker[OutboxSession], jobs: Jobs, *kinds: str) -> None:
    registry = jobs.resolve()
    with sessions.begin() as session:
        for kind in kinds:
            session.add_job(registry.find(kind))


def dead_errors(engine: Engine) -> list[dict[str, object]]:
    """The errors of the only dead letter."""
    ((errors,),) = rows(engine, "SELECT errors FROM outboxq.dead_job")
    assert isinstance(errors, list)
    return errors


def recording(lifespan: Callable[[], AbstractAsyncContextManager[None]] | None = None) -> Jobs:
    """A registry with a handler of each flavour that just writes a row."""
    jobs = Jobs(lifespan=lifespan)

    @jobs.handler(queue="sync", timeout_seconds=20)
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name="good"))

    @jobs.handler(queue="async", timeout_seconds=20)
    async def good_async(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name="good"))

    return jobs


@pytest.mark.parametrize("seconds", [0, -1, 0.0, float("nan"), float("inf"), "30", True, 1e9])
def test_a_deadline_that_cannot_be_is_refused(seconds: object) -> None:
    """At the decorator, with what it takes."""

    def nothing(ctx: Context) -> None: ...

    with pytest.raises(RegistryError, match="timeout_seconds takes"):
        Jobs().handler(timeout_seconds=seconds)(nothing)


def test_the_deadline_is_five_minutes_unless_given() -> None:
    """None is no deadline."""
    jobs = Jobs()

    @jobs.handler()
    def default(ctx: Context) -> None: ...

    @jobs.handler(timeout_seconds=None)
    def endless(ctx: Context) -> None: ...

    assert DEFAULT_TIMEOUT_SECONDS == default.timeout_seconds == 300
    assert endless.timeout_seconds is None


def backends(jobs: Jobs, flavour: str, name: str) -> set[int]:
    """Register a handler that tells which backend it ran on; the pids."""
    pids: set[int] = set()
    query = text("SELECT pg_backend_pid()")

    if flavour == "sync":

        @jobs.handler(kind=name, queue="sync", timeout_seconds=20)
        def tell(ctx: Context) -> None:
            pids.add(ctx.session.scalar(query))
            ctx.session.add(Effect(name=name))

    else:

        @jobs.handler(kind=name, queue="async", timeout_seconds=20)
        async def tell_async(ctx: AsyncContext) -> None:
            pids.add(await ctx.session.scalar(query))
            ctx.session.add(Effect(name=name))

    return pids


@pytest.mark.large
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_statement_that_hangs_is_cancelled_in_its_savepoint(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, flavour: str
) -> None:
    """The job is retried and buried as timed out; its batch is done in the same transaction on the same connection."""
    jobs = Jobs()
    first, last = backends(jobs, flavour, "first"), backends(jobs, flavour, "last")

    if flavour == "sync":

        @jobs.handler(kind="hang", queue="sync", retry=TWICE, timeout_seconds=1)
        def hang(ctx: Context) -> None:
            ctx.session.add(Effect(name="hang"))
            ctx.session.execute(text("SELECT pg_sleep(20)"))

    else:

        @jobs.handler(kind="hang", queue="async", retry=TWICE, timeout_seconds=0.5)
        async def hang_async(ctx: AsyncContext) -> None:
            ctx.session.add(Effect(name="hang"))
            await ctx.session.execute(text("SELECT pg_sleep(20)"))

    add(sessions, jobs, "first", "hang", "last")
    events = drain(jobs, batch_size=3, slots_per_queue=1)
    assert effects(engine) == ["first", "last"]
    assert first == last
    assert len(first) == 1
    assert [event.job.attempt for event in of(events, JobDone)] == [1, 1]
    assert not of(events, JobsSuspected)
    assert not of(events, DatabaseLost)
    errors = dead_errors(engine)
    assert [(error["attempt"], error["type"]) for error in errors] == [(1, TIMED_OUT), (2, TIMED_OUT)]
    assert all("test_deadlines.py" in " ".join(error["where"]) for error in errors)


def test_the_relay_cancels_what_several_statements_take_together(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """No statement of its own is over the limit: the running one is cancelled from outside, and the connection kept."""
    jobs = Jobs()
    pids: set[int] = set()

    @jobs.handler(queue="sync", retry=TWICE, timeout_seconds=0.6)
    def dawdle(ctx: Context) -> None:
        pids.add(ctx.session.scalar(text("SELECT pg_backend_pid()")))
        for _ in range(100):
            ctx.session.execute(text("SELECT pg_sleep(0.25)"))

    add(sessions, jobs, "dawdle")
    events = drain(jobs, slots_per_queue=1)
    assert [error["type"] for error in dead_errors(engine)] == [TIMED_OUT, TIMED_OUT]
    assert len(pids) == 1
    assert not of(events, JobsSuspected)


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_who_ends_in_time_pays_nothing(
    sessions: sessionmaker[OutboxSession], drain: Drain, flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay sends as much for a job with a deadline as for one without."""
    driver = psycopg.Connection if flavour == "sync" else psycopg.AsyncConnection
    # When a slot looks at its other queues, and claims from the start, depends on how long these take.
    limits = replace(FOLLOW_ON, cut_after_seconds=LONG, free_after_seconds=LONG)
    monkeypatch.setattr(Sweep, "take_turn", lambda _sweep: False)

    def statements(seconds: float | None) -> int:
        jobs = Jobs()
        if flavour == "sync":

            @jobs.handler(kind="work", queue="sync", timeout_seconds=seconds)
            def work(ctx: Context) -> None:
                ctx.session.add(Effect(name="work"))

        else:

            @jobs.handler(kind="work", queue="async", timeout_seconds=seconds)
            async def work_async(ctx: AsyncContext) -> None:
                ctx.session.add(Effect(name="work"))

        add(sessions, jobs, *["work"] * 20)
        with driver_waits(driver) as waits:
            assert len(of(drain(jobs, limits, slots_per_queue=1), JobDone)) == 20
        return sum(thread.name in ("outboxq-slot", "outboxq-loop") for thread in waits)

    assert statements(None) == statements(60.0) > 20


def test_who_waits_for_a_row_lock_gives_up(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By lock_timeout, before the server's own deadline, and the error says so."""
    jobs = Jobs()
    # The relay's comes a tenth of a second later, in which a busy machine does nothing.
    monkeypatch.setattr(deadlines, "end_other_transaction", lambda *_arguments, **_named: None)

    @jobs.handler(queue="sync", retry=ONCE, timeout_seconds=1)
    def wait(ctx: Context) -> None:
        ctx.session.execute(text("UPDATE account SET balance = 1"))

    with sessions.begin() as session:
        session.add(Account(id=1))
    add(sessions, jobs, "wait")
    with engine.begin() as connection:
        connection.execute(text("SELECT FROM account FOR UPDATE"))
        drain(jobs, slots_per_queue=1)
    (error,) = dead_errors(engine)
    assert error["type"] == "psycopg.errors.LockNotAvailable"
    assert "lock timeout" in str(error["message"])


def test_a_deadline_of_one_job_is_not_the_next_ones(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Each has its own within one transaction, and one without a deadline has those of its role again."""
    jobs, seen = Jobs(), {}
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    query = text("SELECT " + ", ".join(f"current_setting('{name}')" for name in names))

    def tell(kind: str, seconds: float | None) -> None:
        @jobs.handler(kind=kind, queue="sync", timeout_seconds=seconds)
        def handler(ctx: Context) -> None:
            seen[kind] = tuple(ctx.session.execute(query).one())

    tell("short", 20.0)
    tell("long", 60.0)
    tell("endless", None)
    with engine.connect() as connection:
        role = tuple(connection.execute(query).one())
    add(sessions, jobs, "short", "long", "endless")
    drain(jobs, batch_size=3, slots_per_queue=1)
    assert seen == {"short": ("20s", "18s", "30s"), "long": ("1min", "54s", "70s"), "endless": role}


def test_a_cancellation_never_hits_another_job_of_the_batch(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job ends just as it is to be cancelled: the one behind it in its transaction is not failed for it."""
    jobs, decided, behind = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="sync", timeout_seconds=0.1)
    def late(ctx: Context) -> None:
        assert decided.wait(PATIENCE)

    @jobs.handler(queue="sync", retry=ONCE, timeout_seconds=PATIENCE)
    def busy(ctx: Context) -> None:
        behind.set()
        for _ in range(20):
            ctx.session.execute(text("SELECT pg_sleep(0.02)"))

    cancel, original = DeadlineEnforcer._cancel, deadlines.end_other_transaction

    def decide(enforcer: DeadlineEnforcer, batch: BatchState, deadline: float) -> None:
        cancel(enforcer, batch, deadline)
        decided.set()

    def end_too_late(*arguments: object, **named: object) -> None:
        decided.set()
        assert behind.wait(PATIENCE)
        original(*arguments, **named)

    monkeypatch.setattr(DeadlineEnforcer, "_cancel", decide)
    monkeypatch.setattr(deadlines, "end_other_transaction", end_too_late)
    add(sessions, jobs, "late", "busy")
    events = drain(jobs, batch_size=2, slots_per_queue=1)
    assert [event.job.kind for event in of(events, JobDone)] == ["late", "busy"]
    assert not of(events, JobDied)


def test_a_cancellation_never_hits_the_commit(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job alone ends just as it is to be cancelled: its COMMIT waits until that is over, and stands."""
    jobs, cancelling = Jobs(), threading.Event()
    at_commit = threading.Event()

    @jobs.handler(queue="sync", retry=ONCE, timeout_seconds=0.2)
    def late(ctx: Context) -> None:
        ctx.session.add(Effect(name="late"))
        cancelling.wait(PATIENCE)

    original = deadlines.end_other_transaction

    def end_too_late(*arguments: object, **named: object) -> None:
        cancelling.set()
        assert at_commit.wait(PATIENCE)
        original(*arguments, **named)

    def arrived(point: FaultPoint) -> None:
        if point == "before-commit":
            at_commit.set()

    # A COMMIT that would be hit.
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS "
                "$$BEGIN PERFORM pg_sleep(0.5); RETURN NEW; END$$"
            )
        )
        connection.execute(
            text(
                "CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON effect_ledger DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION slowly()"
            )
        )
    monkeypatch.setattr(deadlines, "end_other_transaction", end_too_late)
    add(sessions, jobs, "late")
    with fault_action(arrived):
        events = drain(jobs, slots_per_queue=1)
    assert len(of(events, JobDone)) == 1
    assert effects(engine) == ["late"]


async def sleep_on(ctx: AsyncContext) -> None:
    await asyncio.sleep(20)


async def query_on(ctx: AsyncContext) -> None:
    await ctx.session.execute(text("SELECT pg_sleep(20)"))


async def query_after_query(ctx: AsyncContext) -> None:
    for _ in range(100):
        await ctx.session.execute(text("SELECT pg_sleep(0.05)"))


async def swallow_and_return(ctx: AsyncContext) -> None:
    try:
        await asyncio.sleep(20)
    except asyncio.CancelledError:
        ctx.session.add(Effect(name="swallowed"))


async def swallow_in_a_savepoint(ctx: AsyncContext) -> None:
    try:
        async with ctx.session.begin_nested():
            await ctx.session.execute(text("SELECT pg_sleep(20)"))
    except Exception:  # noqa: BLE001  # what the handler should not do
        ctx.session.add(Effect(name="swallowed"))


async def raise_another(ctx: AsyncContext) -> None:
    try:
        await asyncio.sleep(20)
    except asyncio.CancelledError:
        raise ValueError("instead") from None


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "body", [sleep_on, query_on, query_after_query, swallow_and_return, swallow_in_a_savepoint, raise_another]
)
def test_an_async_handler_is_cancelled_at_its_deadline(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, body: Callable[..., object]
) -> None:
    """Whatever it awaits and makes of it: failed as timed out, its connection goes on, its batch is done."""
    jobs = Jobs()
    first, last = backends(jobs, "async", "first"), backends(jobs, "async", "last")

    @jobs.handler(queue="async", retry=ONCE, timeout_seconds=0.3)
    async def late(ctx: AsyncContext) -> None:
        await body(ctx)

    add(sessions, jobs, "first", "late", "last")
    events = drain(jobs, batch_size=3, slots_per_queue=1)
    assert effects(engine) == ["first", "last"]
    assert first == last
    assert not of(events, JobsSuspected)
    (error,) = dead_errors(engine)
    assert error["type"] == TIMED_OUT
    if body is not swallow_and_return and body is not swallow_in_a_savepoint:
        assert f"in {body.__name__}" in " ".join(error["where"])


@pytest.mark.parametrize("body", [query_on, sleep_on])
def test_a_timeout_of_the_handlers_own_is_an_error_like_any_other(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, body: Callable[..., object]
) -> None:
    """A query that a handler gives up after a while costs neither the connection nor the batch."""
    jobs = Jobs()
    first, last = backends(jobs, "async", "first"), backends(jobs, "async", "last")

    @jobs.handler(queue="async", retry=ONCE)
    async def impatient(ctx: AsyncContext) -> None:
        async with asyncio.timeout(0.2):
            await body(ctx)

    add(sessions, jobs, "first", "impatient", "last")
    events = drain(jobs, batch_size=3, slots_per_queue=1)
    assert effects(engine) == ["first", "last"]
    assert first == last
    assert not of(events, JobsSuspected)
    (error,) = dead_errors(engine)
    assert error["type"] == "TimeoutError"


@cut_soon
def test_an_async_handler_that_goes_on_for_ever_is_cut_off(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, release: threading.Event
) -> None:
    """It swallows every cancellation: its backend is ended, the place recorded, and its slot replaced."""
    jobs = recording()

    @jobs.handler(queue="async", retry=ONCE, timeout_seconds=0.3)
    async def stubborn(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name="stubborn"))
        await ctx.session.flush()
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    add(sessions, jobs, "stubborn", "good_async", "good_async")
    config = RelayConfig(batch_size=2, slots_per_queue=1, poll_seconds=0.1)
    with start_relay(jobs, config) as relay:
        wait_until(lambda: len(relay.of(JobDone)) == 2, "the others")
        wait_until(lambda: len(relay.of(JobDied)) == 1, "the end of it to be told")
        release.set()
    assert effects(engine) == ["good", "good"]
    assert not relay.of(JobsSuspected)
    (error,) = dead_errors(engine)
    assert error["type"] == TIMED_OUT
    assert "in stubborn" in " ".join(error["where"])


def hang_in_sleep(release: threading.Event) -> None:
    release.wait(LONG)


def hang_in_a_loop(release: threading.Event) -> None:
    while not release.is_set():
        pass


@pytest.mark.each_value
@cut_soon
@pytest.mark.parametrize("hang", [hang_in_sleep, hang_in_a_loop])
@pytest.mark.parametrize("ending", ["write", "return"])
def test_a_sync_handler_that_hangs_is_cut_off(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    release: threading.Event,
    hang: Callable[[threading.Event], None],
    ending: str,
) -> None:
    """Recorded with its place; its batch runs again, not charged or suspected; nothing lands later."""
    jobs, woken = recording(), threading.Event()

    @jobs.handler(queue="sync", retry=ONCE, timeout_seconds=0.3)
    def stuck(ctx: Context) -> None:
        ctx.session.add(Effect(name="stuck"))
        ctx.session.flush()
        hang(release)
        if ending == "write":
            woken.set()
            ctx.session.add(Effect(name="too late"))
            ctx.session.flush()
        woken.set()

    add(sessions, jobs, "good", "stuck", "good")
    config = RelayConfig(batch_size=3, slots_per_queue=1, poll_seconds=0.1)
    with start_relay(jobs, config) as relay:
        wait_until(lambda: len(relay.of(JobDone)) == 2, "the others")
        assert [event.job.attempt for event in relay.of(JobDone)] == [1, 1]
        assert [event.job.crashes for event in relay.of(JobDone)] == [0, 0]
        abandoned = [thread for thread in threading.enumerate() if thread.name == "outboxq-slot"]
        assert len(abandoned) == 2
        release.set()
        assert woken.wait(PATIENCE)
        wait_until(lambda: sum(thread.is_alive() for thread in abandoned) == 1, "the thread to end")
    assert effects(engine) == ["good", "good"]
    assert not relay.of(JobsSuspected)
    assert not relay.of(DatabaseLost)
    (error,) = dead_errors(engine)
    assert error["type"] == TIMED_OUT
    assert f"in {hang.__name__}" in " ".join(error["where"])
    assert rows(engine, "SELECT FROM outboxq.job") == []


@pytest.mark.large
@cut_soon
def test_a_batch_handler_that_hangs_charges_only_the_job_that_hangs_alone(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, release: threading.Event
) -> None:
    """For which of the jobs of a call it hung cannot be known: not for the first one, perhaps."""
    jobs = Jobs()

    @jobs.batch_handler(Named, queue="sync", retry=ONCE, timeout_seconds=0.5)
    def write_all(ctx: BatchContext, items: list[BatchItem[Named]]) -> None:
        ctx.session.add_all([Effect(name=item.args.name) for item in items])
        if any(item.args.name == "hangs" for item in items):
            release.wait(LONG)

    with sessions.begin() as session:
        session.add_jobs([write_all.job(name=name) for name in ("first", "hangs", "last")])
    drain(jobs, batch_size=10, slots_per_queue=1)
    assert effects(engine) == ["first", "last"]
    assert rows(engine, "SELECT args ->> 'name' FROM outboxq.dead_job") == [("hangs",)]
    (error,) = dead_errors(engine)
    assert error["type"] == TIMED_OUT


@pytest.mark.large
@cut_soon
def test_slots_that_are_replaced_stay_within_the_pool(
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    outboxq_database: Database,
    release: threading.Event,
) -> None:
    """Hanging handlers, more of them than the user's pool has places: each gives its own to the slot that follows."""
    jobs = recording()

    @jobs.handler(queue="sync", retry=ONCE, timeout_seconds=0.2)
    def stuck(ctx: Context) -> None:
        release.wait(LONG)

    add(sessions, jobs, *["stuck"] * 6, "good")
    # A place for each of two slots, and one for the relay; its lease and its listener are not of the pool.
    own = create_engine(outboxq_database.url, pool_size=3, max_overflow=0, pool_timeout=PATIENCE)
    try:
        config = RelayConfig(groups=(SlotGroup(("sync",), 2),), poll_seconds=0.1)
        with start_relay(jobs, config, engine=own) as relay:
            wait_until(lambda: len(relay.of(JobDone)) == 1, "the good one")
            wait_until(lambda: len(relay.of(JobDied)) == 6, "the end of the others to be told")
            release.set()
            wait_until(lambda: sum(t.name == "outboxq-slot" for t in threading.enumerate()) == 2, "the threads to end")
        assert own.pool.checkedout() == 0
    finally:
        own.dispose()


@pytest.mark.large
@cut_soon
def test_many_that_hang_at_once_are_dealt_with_at_once(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    release: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of twelve hanging slots waits for another to be replaced."""
    jobs, enforce, at_once = recording(), DeadlineEnforcer._enforce, threading.Barrier(12)
    begun, seen = threading.Barrier(13), set()

    def enforce_together(enforcer: DeadlineEnforcer, runner: Runner, batch: BatchState, deadline: float) -> None:
        # Later ones are of slots that are looked at again before they are replaced, or of a job that another slot took
        # between the end of its transaction and its settlement.
        if runner not in seen and len(seen) < 12:
            seen.add(runner)
            at_once.wait(PATIENCE)
        enforce(enforcer, runner, batch, deadline)

    monkeypatch.setattr(DeadlineEnforcer, "_enforce", enforce_together)

    @jobs.handler(queue="sync", retry=ONCE, timeout_seconds=1)
    def stuck(ctx: Context) -> None:
        begun.wait(PATIENCE)
        release.wait(LONG)

    add(sessions, jobs, *["stuck"] * 12)
    with start_relay(jobs, RelayConfig(slots_per_queue=12, poll_seconds=0.1)) as relay:
        begun.wait(PATIENCE)
        add(sessions, jobs, "good")
        wait_until(lambda: len(relay.of(JobDied)) == 12 and relay.of(JobDone), "all to be dealt with")
        release.set()
    assert effects(engine) == ["good"]


@cut_soon
def test_a_relay_goes_on_although_all_its_slots_end_before_they_are_replaced(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    outboxq_database: Database,
    release: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a drain ends where nobody serves any more; what the watch could not settle in time changes nothing."""
    jobs, asked, finish, waits = recording(), [], DeadlineEnforcer.finish, threading.Event()
    waited: list[bool] = []

    def let_finish(enforcer: DeadlineEnforcer, *arguments: float) -> None:
        waits.set()
        finish(enforcer, *arguments)

    monkeypatch.setattr(DeadlineEnforcer, "finish", let_finish)

    @jobs.handler(queue="sync", retry=ONCE, timeout_seconds=0.3)
    def stuck(ctx: Context) -> None:
        if ctx.job.lease_token is None:
            release.wait(LONG)

    def connect() -> psycopg.Connection:
        if threading.current_thread().name == "outboxq-watch":
            asked.append(True)
            if len(asked) == 2:
                # The batch is seized: its slot ends meanwhile, and the relay waits for who settles it.
                release.set()
                waited.append(waits.wait(PATIENCE))
            raise OSError("no way to the database")
        return psycopg.connect(make_url(outboxq_database.url).set(drivername="postgresql").render_as_string(False))

    own = create_engine("postgresql+psycopg://", creator=connect, pool_size=5, max_overflow=5)
    try:
        add(sessions, jobs, "stuck", "good")
        config = RelayConfig(groups=(SlotGroup(("sync",), 1),), poll_seconds=0.1)
        with start_relay(jobs, config, engine=own) as relay:
            wait_until(lambda: len(asked) >= 2, "the watch to ask for the database")
            wait_until(lambda: len(relay.of(JobDone)) == 2, "both jobs")
            assert waited == [True]
            assert not relay.of(RelayStopped)
    finally:
        close_behind_its_slots(own, release)


@cut_soon
def test_a_relay_whose_watch_cannot_reach_the_database_goes_on(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    outboxq_database: Database,
    release: threading.Event,
) -> None:
    """The slot is replaced all the same; the hanging claim dies when its thread wakes, and its job runs alone."""
    jobs, refusing, entered = recording(), threading.Event(), threading.Event()

    @jobs.handler(queue="sync", retry=ONCE, timeout_seconds=0.3)
    def stuck(ctx: Context) -> None:
        entered.set()
        if ctx.job.lease_token is None:
            refusing.set()
            release.wait(LONG)
        ctx.session.add(Effect(name="alone"))

    def connect() -> psycopg.Connection:
        if refusing.is_set() and threading.current_thread().name == "outboxq-watch":
            raise OSError("no way to the database")
        return psycopg.connect(make_url(outboxq_database.url).set(drivername="postgresql").render_as_string(False))

    own = create_engine("postgresql+psycopg://", creator=connect, pool_size=5, max_overflow=5)
    try:
        add(sessions, jobs, "stuck", "good")
        config = RelayConfig(groups=(SlotGroup(("sync",), 1),), poll_seconds=0.1)
        with start_relay(jobs, config, engine=own) as relay:
            assert entered.wait(PATIENCE)
            wait_until(lambda: relay.of(JobDone), "the other job, on another slot")
            release.set()
            wait_until(lambda: len(relay.of(JobDone)) == 2, "the job that hung")
    finally:
        close_behind_its_slots(own, release)
    assert effects(engine) == ["alone", "good"]
    assert relay.of(JobsSuspected)


@pytest.mark.large
@cut_soon
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("suspect", [False, True])
def test_a_lease_is_no_way_around_the_deadline(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    release: threading.Event,
    flavour: str,
    writes: bool,
    suspect: bool,
) -> None:
    """In lease mode and as a suspect: the attempt is counted, no crash is, and what wakes up commits nothing."""
    jobs = recording()
    claim = "transaction" if suspect else "lease"
    attempts: list[int] = []

    if flavour == "sync":

        @jobs.handler(kind="stuck", queue="hang", claim=claim, retry=TWICE, timeout_seconds=0.3)
        def stuck(ctx: Context) -> None:
            attempts.append(ctx.job.attempt)
            if ctx.job.attempt == 1:
                if writes:
                    ctx.session.add(Effect(name="early"))
                    ctx.session.flush()
                release.wait(LONG)
            ctx.session.add(Effect(name="done"))

    else:

        @jobs.handler(kind="stuck", queue="hang", claim=claim, retry=TWICE, timeout_seconds=0.3)
        async def stuck_async(ctx: AsyncContext) -> None:
            attempts.append(ctx.job.attempt)
            if ctx.job.attempt == 1:
                if writes:
                    ctx.session.add(Effect(name="early"))
                    await ctx.session.flush()
                while not release.is_set():
                    try:
                        await asyncio.sleep(0.05)
                    except asyncio.CancelledError:
                        continue
            ctx.session.add(Effect(name="done"))

    add(sessions, jobs, "stuck")
    if suspect:
        with engine.connect() as connection, connection.begin() as transaction:
            connection.execute(text("DELETE FROM outboxq.job"))
            transaction.rollback()
    config = RelayConfig(slots_per_queue=1, poll_seconds=0.1)
    with start_relay(jobs, config) as relay:
        (done,) = wait_until(lambda: relay.of(JobDone), "the second attempt")
        release.set()
    assert attempts == [1, 2]
    assert (done.job.attempt, done.job.crashes) == (2, 0)
    (retried,) = relay.of(JobRetried)
    assert retried.error_type == TIMED_OUT
    assert "in stuck" in " ".join(retried.where)
    assert not relay.of(JobCrashed)
    assert effects(engine) == ["done"]
    assert rows(engine, "SELECT FROM outboxq.job") == []


def run_until_stuck(
    database: Database, jobs: Jobs, config: RelayConfig, limits: RelayLimits, *, names: str
) -> list[Event]:
    """Run a relay until it says that it must be replaced, and for which job; its events."""
    events: list[Event] = []
    relay = with_limits(Relay(database.url, jobs, config, hooks=[events.append]), limits)
    with pytest.raises(RelayStuck, match=f"{names}.* could not be freed .*must be replaced"):
        relay.run()
    return events


@asynccontextmanager
async def in_the_loop() -> AsyncIterator[None]:
    """A lifespan that cannot be left while the loop is blocked."""
    yield


@pytest.mark.large
def test_a_blocked_event_loop_is_recorded_and_its_relay_ends(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, release: threading.Event
) -> None:
    """Who blocks it pays, who is held up by it does not; then the process must be replaced, and says so."""
    jobs, waits = recording(in_the_loop), asyncio.Event()

    @jobs.handler(queue="async", retry=ONCE, timeout_seconds=2)
    async def spin(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name="spin"))
        await ctx.session.flush()
        await waits.wait()
        while not release.is_set():
            pass

    @jobs.handler(queue="async", retry=ONCE, timeout_seconds=2)
    async def innocent(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name="innocent"))
        await ctx.session.flush()
        waits.set()
        await asyncio.sleep(0.3)

    add(sessions, jobs, "spin", "innocent")
    started = time.monotonic()
    config = RelayConfig(slots_per_queue=2, drain_seconds=2 * PATIENCE)
    # Long enough for both jobs to be cut off.
    limits = replace(CUT_SOON, free_after_seconds=3.0)
    relay = run_until_stuck(outboxq_database, jobs, config, limits, names="^the handler of 'spin' [^,]*")
    assert time.monotonic() - started < PATIENCE, "it waited for the time to drain"
    release.set()
    assert len(of(relay, JobInterrupted)) == 1
    (error,) = dead_errors(engine)
    assert error["type"] == TIMED_OUT
    assert "in spin" in " ".join(error["where"])
    assert effects(engine) == []
    assert rows(engine, "SELECT kind, state, attempt FROM outboxq.job") == [("innocent", "ready", 0)]


@pytest.mark.large
def test_a_thread_that_never_ends_ends_its_relay(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, release: threading.Event
) -> None:
    """Not at once: the slots beside it work on until the time to notice is over, and finish what they run."""
    jobs = recording()

    @jobs.handler(queue="sync", retry=ONCE, timeout_seconds=0.2)
    def stuck(ctx: Context) -> None:
        release.wait(LONG)

    add(sessions, jobs, "stuck", "good")
    # Those of other tests may still hang.
    before = set(threading.enumerate())
    config = RelayConfig(slots_per_queue=1, poll_seconds=0.1)
    run_until_stuck(outboxq_database, jobs, config, replace(CUT_SOON, free_after_seconds=5.0), names="'stuck'")
    left = {thread for thread in threading.enumerate() if thread.name == "outboxq-slot"} - before
    assert len(left) == 1
    release.set()
    wait_until(lambda: not [thread for thread in left if thread.is_alive()], "the thread to end")
    assert effects(engine) == ["good"]
    assert len(dead_errors(engine)) == 1


def test_a_relay_that_ends_for_a_cancelled_handler_names_its_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, release: threading.Event
) -> None:
    """Its kind and its id, by which what blocks it is found in the log."""
    jobs, begun = Jobs(), threading.Event()

    @jobs.handler(queue="sync", timeout_seconds=None)
    def deaf(ctx: Context) -> None:
        begun.set()
        release.wait(LONG)

    with sessions.begin() as session:
        handle = session.add_job(deaf)

    def cancel_it() -> None:
        assert begun.wait(PATIENCE)
        with sessions.begin() as session:
            cancel(session, handle)

    threading.Thread(target=cancel_it).start()
    names = rf"^the handler of 'deaf' \(job {handle.id}\)"
    config = RelayConfig(slots_per_queue=1, poll_seconds=0.1)
    run_until_stuck(outboxq_database, jobs, config, replace(CUT_SOON, free_after_seconds=0.5), names=names)
    release.set()
    assert rows(engine, "SELECT FROM outboxq.job") == []


# Blocks the loop of its process.
SPINNING = """
import time

from outboxq import AsyncContext, Backoff, Jobs, Relay
from outboxq.relay.limits import RelayLimits
from tests.support.app import Effect

Relay._limits = RelayLimits(cut_after_seconds=0.3, free_after_seconds=0.5)
jobs = Jobs()

@jobs.handler(queue="async", retry=Backoff(first_seconds=0.0), timeout_seconds=1.0)
async def spin(ctx: AsyncContext) -> None:
    if ctx.job.attempt < 3:
        ctx.session.add(Effect(name="spin"))
        await ctx.session.flush()
        while True:
            time.sleep(0.01)
    ctx.session.add(Effect(name="done"))
"""


@pytest.mark.large
def test_the_supervisor_replaces_a_relay_whose_loop_is_blocked(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, tmp_path: Path
) -> None:
    """Alone it ends with 3; a supervised one gives way to another at once, which does the job at its next attempt."""
    (tmp_path / "spinning.py").write_text(SPINNING)
    with sessions.begin() as session:
        session.add_job(external("spin", queue="async"))
    said = run("relay", "spinning:jobs", "--no-listen", url=outboxq_database.url, cwd=tmp_path)
    assert said.exit_code == 3
    assert effects(engine) == []
    assert rows(engine, "SELECT attempt, crashes FROM outboxq.job") == [(1, 0)]
    said = run("relay", "spinning:jobs", "--drain", "--processes", 2, url=outboxq_database.url, cwd=tmp_path).ok()
    assert "could not be freed" in said.stderr
    assert effects(engine) == ["done"]
    assert rows(engine, "SELECT FROM outboxq.job") == []


ASYNC_ENGINE_ONLY = """
import sys
from sqlalchemy.ext.asyncio import create_async_engine
from outboxq import Relay, RelayConfig
from outboxq.errors import RelayStuck
from spinning import jobs

config = RelayConfig(poll_seconds=0.1, lease_seconds=1, max_crashes=1, drain_seconds=5)
try:
    Relay(create_async_engine(sys.argv[1]), jobs, config).run()
except RelayStuck:
    # As the command does: Python itself would wait for the loop.
    import os
    os._exit(3)
"""


@pytest.mark.wide
def test_without_a_sync_engine_a_blocked_loop_is_found_by_its_mark(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    outboxq_database: Database,
    tmp_path: Path,
) -> None:
    """Nothing can be recorded through a blocked loop: its process ends, and its job is bounded by max_crashes."""
    (tmp_path / "spinning.py").write_text(SPINNING)
    (tmp_path / "relay.py").write_text(ASYNC_ENGINE_ONLY)
    with sessions.begin() as session:
        session.add_job(external("spin", queue="async"))
    url = make_url(outboxq_database.url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    script = [sys.executable, tmp_path / "relay.py", url]
    for _ in range(2):
        assert subprocess.run(script, cwd=tmp_path, env=environment(), check=False).returncode == 3
    # Reaped by the second relay itself, or by whoever comes after it.
    with start_relay(recording(), RelayConfig(max_crashes=1)):
        wait_until(lambda: rows(engine, "SELECT FROM outboxq.dead_job"), "the reaper")
    assert effects(engine) == []
    assert rows(engine, "SELECT attempt, crashes FROM outboxq.dead_job") == [(0, 1)]


@contextmanager
def impatient_server(engine: Engine) -> Iterator[None]:
    """Within the block, new sessions of this database are ended after 300 ms of idling in a transaction."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(
            text(f'ALTER DATABASE "{engine.url.database}" SET idle_in_transaction_session_timeout = 300')
        )
        yield


@pytest.mark.large
@pytest.mark.parametrize(("seconds", "ends"), [(20.0, "done"), (None, "dead")])
def test_the_roles_own_idle_timeout(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, seconds: float | None, ends: str
) -> None:
    """A deadline wins over it; without one it ends the backend, and the job is bounded as one that crashes."""
    jobs = Jobs()
    runs: list[int] = []

    @jobs.handler(queue="sync", timeout_seconds=seconds)
    def pause(ctx: Context) -> None:
        runs.append(ctx.job.attempt)
        ctx.session.add(Effect(name="paused"))
        ctx.session.flush()
        time.sleep(0.8)

    add(sessions, jobs, "pause")
    with impatient_server(engine):
        events = drain(jobs, slots_per_queue=1, max_crashes=2, lease_seconds=5, heartbeat_seconds=0.5)
    if ends == "done":
        assert effects(engine) == ["paused"]
        assert len(of(events, JobDone)) == 1
        assert not of(events, DatabaseBack)
    else:
        assert effects(engine) == []
        assert runs == [1, 1, 1]
        assert [event.dead_letter for event in of(events, JobCrashed)] == [False, True]
        assert rows(engine, "SELECT attempt, crashes FROM outboxq.dead_job") == [(0, 2)]
