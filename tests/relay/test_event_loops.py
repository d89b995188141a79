"""What an async handler does to its event loop and to its task ends no relay, and costs no other job its rows."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.errors import RelayStuck
from outboxq.events import Event, JobDied, JobDone, RelayStopped
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from outboxq.relay.state import RelayReport
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.ledger import dead, effects
from tests.support.limits import with_limits
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
CLAIMS = pytest.mark.parametrize("claim", ["transaction", "lease"])
TWICE = Backoff(max_attempts=2, first_seconds=0, jitter=0)


@CLAIMS
def test_a_late_cancellation_ends_no_relay(
    claim: str, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """A time-out of the handler's own that it never disarmed; the slot sleeps by then."""
    jobs, cancelled = Jobs(), []

    @jobs.handler(queue="q", claim=claim)
    async def note(ctx: AsyncContext, name: str, seconds: float) -> None:
        ctx.session.add(Effect(name=name))
        task = asyncio.current_task()
        assert task is not None
        if seconds:
            asyncio.get_running_loop().call_later(seconds, lambda: cancelled.append(task.cancel()))

    with sessions.begin() as session:
        session.add_jobs([note.job(name=f"cancels {number}", seconds=0.3) for number in range(2)])
    with start_relay(jobs, RelayConfig(slots_per_queue=1, poll_seconds=0.1)) as running:
        wait_until(lambda: len(cancelled) == 2, "the cancellations")
        with sessions.begin() as session:
            session.add_job(note, name="behind", seconds=0.0)
        wait_until(lambda: len(running.of(JobDone)) == 3, "the job behind them")
        assert not running.of(RelayStopped)
    assert effects(engine) == ["behind", "cancels 0", "cancels 1"]


@CLAIMS
def test_a_late_cancellation_is_not_the_next_job_s(
    claim: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """It comes while the next job of the slot waits for something."""
    jobs, is_cancelled, cancelled = Jobs(), asyncio.Event(), []

    @jobs.handler(queue="q", claim=claim, retry=Backoff(max_attempts=1))
    async def note(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        if name == "cancels":
            task = asyncio.current_task()
            assert task is not None

            def cancel() -> None:
                cancelled.append(task.cancel())
                is_cancelled.set()

            asyncio.get_running_loop().call_later(0.05, cancel)
        else:
            await is_cancelled.wait()
            await ctx.session.flush()

    with sessions.begin() as session:
        session.add_job(note, name="cancels")
        session.add_job(note, name="innocent")
    drain(jobs, slots_per_queue=1)
    assert cancelled == [False]
    assert effects(engine) == ["cancels", "innocent"]


@CLAIMS
def test_a_handler_that_cancels_every_task_fails_and_ends_no_relay(
    claim: str, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    jobs = Jobs()

    @jobs.handler(queue="q", claim=claim, retry=Backoff(max_attempts=1))
    async def note(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        await ctx.session.flush()
        if name == "cancels":
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.Event().wait()

    with sessions.begin() as session:
        session.add_jobs([note.job(name=name) for name in ("cancels", "behind")])
    with start_relay(jobs, RelayConfig(slots_per_queue=1, poll_seconds=0.1)) as running:
        wait_until(lambda: running.of(JobDone), "the job behind it")
        assert [event.job.kind for event in running.of(JobDied)] == ["note"]
        assert not running.of(RelayStopped)
    assert effects(engine) == ["behind"]


@CLAIMS
def test_a_handler_that_stops_its_loop_ends_no_relay(
    claim: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    jobs = Jobs()

    @jobs.handler(queue="q", claim=claim, retry=TWICE)
    async def note(ctx: AsyncContext, name: str, stops: bool) -> None:
        ctx.session.add(Effect(name=name))
        if stops:
            asyncio.get_running_loop().stop()

    with sessions.begin() as session:
        session.add_jobs([note.job(name="stops", stops=True), note.job(name="behind", stops=False)])
    drain(jobs, slots_per_queue=1)
    assert effects(engine) == ["behind", "stops"]


def test_a_factory_of_tasks_that_knows_of_no_context_is_no_obstacle(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """As they were written before Python 3.11."""

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        asyncio.get_running_loop().set_task_factory(lambda loop, coroutine: asyncio.Task(coroutine, loop=loop))
        yield

    jobs = Jobs(lifespan=lifespan)

    @jobs.handler(queue="q", retry=Backoff(max_attempts=1))
    async def note(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))

    with sessions.begin() as session:
        session.add_job(note, name="a")
    drain(jobs, slots_per_queue=1)
    assert effects(engine) == ["a"]


@pytest.mark.large
@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_child_task_that_blocks_the_loop_is_counted_against_its_job(
    claim: str,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
) -> None:
    """It is no handler that blocks it: each that ran is a suspect, runs alone, and is dead after `max_crashes`."""
    jobs, blocks = Jobs(), []

    @jobs.handler(queue="q", claim=claim, retry=TWICE, timeout_seconds=1)
    async def block(ctx: AsyncContext) -> None:
        async def child() -> None:
            blocks.append(threading.Event())
            blocks[-1].wait(60)

        async with asyncio.TaskGroup() as group:
            group.create_task(child())

    with sessions.begin() as session:
        session.add_job(block)
    config = RelayConfig(slots_per_queue=1, max_crashes=1, drain_seconds=0.1, lease_seconds=3, poll_seconds=0.1)
    limits = RelayLimits(cut_after_seconds=0.5, free_after_seconds=0.5)

    def live() -> None:
        """From the start of a process to the block that ends it, or until the job is buried."""
        before, relay = len(blocks), with_limits(Relay(outboxq_database.url, jobs, config, hooks=()), limits)
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(relay.run)
            wait_until(lambda: len(blocks) > before or dead(engine), "the next run of the job")
            if len(blocks) > before:
                with pytest.raises(RelayStuck):
                    run.result(60)
            relay.stop()
        blocks[-1].set()

    for _ in range(4):
        if not dead(engine):
            live()
    assert dead(engine) == 1
    assert len(blocks) <= 3


@pytest.mark.large
def test_a_callback_that_blocks_an_idle_loop_ends_its_relay(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
) -> None:
    """No job runs, whose deadline would find it: the process is to be replaced, and no job is charged."""
    jobs, stop, is_blocked = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="q", retry=TWICE)
    async def note(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))

        def block() -> None:
            is_blocked.set()
            stop.wait(120)

        if name == "leaves":
            asyncio.get_running_loop().call_later(0.3, block)

    with sessions.begin() as session:
        session.add_job(note, name="leaves")
    relay = Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1, drain_seconds=0.1), hooks=())
    with_limits(relay, RelayLimits(loop_patience_seconds=1.0))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(relay.run)
        assert is_blocked.wait(60)
        with sessions.begin() as session:
            session.add_job(note, name="behind")
        with pytest.raises(RelayStuck):
            run.result(60)
        stop.set()
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=()).drain()
    assert effects(engine) == ["behind", "leaves"]


@CLAIMS
def test_a_handler_that_closes_the_loop_s_generators_ends_no_relay(
    claim: str, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    jobs = Jobs()

    @jobs.handler(queue="q", claim=claim, retry=TWICE)
    async def note(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        if name == "closes":
            await asyncio.get_running_loop().shutdown_asyncgens()

    with sessions.begin() as session:
        session.add_jobs([note.job(name=name) for name in ("a", "closes", "b")])
    with start_relay(jobs, RelayConfig(slots_per_queue=1, poll_seconds=0.1)) as running:
        wait_until(lambda: len(running.of(JobDone)) == 3 or running.of(RelayStopped), "all jobs")
        assert not running.of(RelayStopped)
    assert effects(engine) == ["a", "b", "closes"]


@pytest.mark.large
def test_a_relay_that_is_told_to_stop_while_a_handler_blocks_its_loop_stops(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """It waits as long as it was told to, and closes what can be closed."""
    jobs, stop, began = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="q", retry=TWICE)
    async def block(ctx: AsyncContext) -> None:
        began.set()
        stop.wait(120)

    with sessions.begin() as session:
        session.add_job(block)
    relay = Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1, drain_seconds=0.5), hooks=())
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(relay.run)
        assert began.wait(60)
        relay.stop()
        try:
            assert run.result(60) == RelayReport(0, 0, 0)
        finally:
            stop.set()
