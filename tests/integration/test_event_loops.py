"""What an async handler does to its event loop and to its task ends no relay, and costs no other job its rows."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session, sessionmaker

from outboxq import AsyncContext, Backoff, Jobs, OutboxSession, RelayConfig
from outboxq.events import Event, JobDied, JobDone, RelayStopped
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
CLAIMS = pytest.mark.parametrize("claim", ["transaction", "lease"])
TWICE = Backoff(max_attempts=2, first_seconds=0, jitter=0)


def effects(engine: Engine) -> list[str]:
    with Session(engine) as session:
        return sorted(session.scalars(select(Effect.name)))


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
            await asyncio.sleep(10)

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
