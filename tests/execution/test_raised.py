"""Whatever a handler raises is a failed attempt of its job, and of no other: no job ends its relay."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from greenlet import GreenletExit
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.handlers.context import AsyncBatchContext, BatchContext, BatchItem
from outboxq.postgres import Database
from outboxq.testing import RelayProcess
from tests.support import faulty
from tests.support.app import Effect
from tests.support.ledger import ledger, waiting
from tests.support.limits import many_at_once
from tests.support.waiting import wait_until

TWICE = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)


class Stop(BaseException):
    """As gevent.Timeout: no Exception, and not known to any library."""


class Unreadable(BaseException):
    """Its own description ends a relay as well as it does."""

    @property
    def sqlstate(self) -> str:
        raise Stop

    def __str__(self) -> str:
        raise Stop


RAISED: dict[str, Callable[[], BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError()]),
    "GreenletExit": GreenletExit,
    "Stop": Stop,
    "Unreadable": Unreadable,
}


@dataclass
class Named:
    name: str


def wreck(name: str) -> None:
    if name in RAISED:
        raise RAISED[name]()


def build(form: str) -> tuple[Jobs, Callable[[str], object]]:
    """Handlers of one form, and what makes their jobs."""
    jobs = Jobs()
    flavour, _, how = form.partition(" ")

    if how == "group" and flavour == "sync":

        @jobs.batch_handler(Named, queue="q", retry=TWICE)
        def write_all(ctx: BatchContext, items: list[BatchItem[Named]]) -> None:
            ctx.session.add_all(Effect(name=item.args.name) for item in items)
            ctx.session.flush()
            for item in items:
                wreck(item.args.name)

        return jobs, lambda name: write_all.job(name=name)

    if how == "group":

        @jobs.batch_handler(Named, queue="q", retry=TWICE)
        async def write_all_async(ctx: AsyncBatchContext, items: list[BatchItem[Named]]) -> None:
            ctx.session.add_all(Effect(name=item.args.name) for item in items)
            await ctx.session.flush()
            for item in items:
                wreck(item.args.name)

        return jobs, lambda name: write_all_async.job(name=name)

    options = {"claim": "lease"} if how == "lease" else {"batchable": how == "shared"}
    if flavour == "sync":

        @jobs.handler(queue="q", retry=TWICE, **options)
        def write(ctx: Context, name: str) -> None:
            ctx.session.add(Effect(name=name))
            ctx.session.flush()
            wreck(name)

        return jobs, lambda name: write.job(name=name)

    @jobs.handler(queue="q", retry=TWICE, **options)
    async def write_async(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        await ctx.session.flush()
        wreck(name)

    return jobs, lambda name: write_async.job(name=name)


def kinds_that_cancel(jobs: Jobs) -> list[Callable[[str], object]]:
    """What makes jobs whose handlers cancel the task that they run in, which is their slot's."""

    @jobs.handler(queue="q", retry=TWICE)
    async def cancel_and_wait(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        cancel_this_task()
        await asyncio.sleep(0)

    @jobs.handler(queue="q", retry=TWICE)
    async def cancel_and_return(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        cancel_this_task()

    @jobs.handler(queue="q", retry=TWICE, timeout_seconds=None, claim="transaction")
    async def cancel_and_raise(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        cancel_this_task()
        raise ValueError

    return [
        lambda name: cancel_and_wait.job(name=name),
        lambda name: cancel_and_return.job(name=name),
        lambda name: cancel_and_raise.job(name=name),
    ]


def cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def drained(url: str, jobs: Jobs, **settings: object) -> None:
    """Drain in a thread: a KeyboardInterrupt that comes through fails the test, and does not end all of them."""
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(Relay(url, jobs, many_at_once(jobs, RelayConfig(**settings))).drain).exception()
    assert error is None, repr(error)


def dead_letters(engine: Engine) -> list[tuple[str, int, str]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT args->>'name', attempt, reason FROM outboxq.dead_job ORDER BY 1"))
        return [tuple(row) for row in rows]


@pytest.mark.large
@pytest.mark.parametrize("batch_size", [1, 20])
@pytest.mark.parametrize("how", ["transaction", "lease", "shared", "group"])
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_whatever_a_handler_raises_is_a_failed_attempt(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    flavour: str,
    how: str,
    batch_size: int,
) -> None:
    """One relay lives through all of them; each job is charged its attempts, and its neighbours are done once."""
    jobs, job = build(f"{flavour} {how}")
    with sessions.begin() as session:
        for name in RAISED:
            session.add_jobs([job(f"before {name}"), job(name)])
    drained(outboxq_database.url, jobs, slots_per_queue=1, batch_size=batch_size)
    assert ledger(engine) == {f"before {name}": 1 for name in RAISED}
    assert waiting(engine) == 0
    found = dead_letters(engine)
    assert [(name, attempt) for name, attempt, _ in found] == [(name, 2) for name in sorted(RAISED)]
    assert all(reason.startswith("gave up after 2 of 2") and reason.endswith(name) for name, _, reason in found)


@pytest.mark.parametrize("batch_size", [1, 20])
def test_a_handler_that_cancels_its_slots_task_has_failed(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, batch_size: int
) -> None:
    """Its cancellation hits itself: neither a statement of the relay's, nor the job behind it."""
    jobs = Jobs()
    made = kinds_that_cancel(jobs)

    @jobs.handler(queue="q", retry=Backoff(max_attempts=1))
    async def write(ctx: AsyncContext, name: str) -> None:
        await asyncio.sleep(0)
        ctx.session.add(Effect(name=name))

    with sessions.begin() as session:
        for number, job in enumerate(made):
            session.add_jobs([job(f"poison {number}"), write.job(name=f"behind {number}")])
    drained(outboxq_database.url, jobs, slots_per_queue=1, batch_size=batch_size)
    assert ledger(engine) == {f"behind {number}": 1 for number in range(3)}
    reason = "gave up after 2 of 2 attempts: asyncio.exceptions.CancelledError"
    assert dead_letters(engine) == [(f"poison {number}", 2, reason) for number in range(3)]


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "SystemExit"])
def test_a_task_of_a_handlers_that_ends_an_event_loop_does_not_end_the_relays(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, raised: str
) -> None:
    """asyncio stops its loop for these two: the handler meets the error in its await, and others go on."""
    jobs = Jobs()

    async def wreck_apart() -> None:
        wreck(raised)

    @jobs.handler(queue="q", retry=TWICE)
    async def gather(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        await asyncio.gather(asyncio.sleep(0), wreck_apart())

    @jobs.handler(queue="q")
    async def write(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))

    with sessions.begin() as session:
        session.add_jobs([gather.job(name="poison"), write.job(name="good")])
    drained(outboxq_database.url, jobs, slots_per_queue=1)
    assert ledger(engine) == {"good": 1}
    assert dead_letters(engine) == [("poison", 2, f"gave up after 2 of 2 attempts: {raised}")]


def test_a_signal_still_stops_a_relay_whose_handlers_raised_a_keyboard_interrupt(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """The one that a handler raises is its own; the one that SIGINT stands for ends the process in order."""
    with sessions.begin() as session:
        session.add_job(faulty.work, name="poison", fault="keyboard-interrupt")
        session.add_job(faulty.work, name="good")
    with RelayProcess("tests.support.faulty:jobs", outboxq_database.url, RelayConfig(poll_seconds=0.05)) as relay:
        wait_until(lambda: waiting(engine) == 0, "every job's end")
        assert relay.returncode is None
        os.kill(relay.pid, signal.SIGINT)
        assert wait_until(lambda: relay.returncode is not None and [relay.returncode], "its end") == [0]
    assert ledger(engine) == {faulty.trace("good"): 1}
    assert dead_letters(engine) == [("poison", 3, "gave up after 3 of 3 attempts: KeyboardInterrupt")]


@pytest.mark.large
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_job_that_ends_its_slot_by_an_error_is_dead_after_its_crashes(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, flavour: str, claim: str
) -> None:
    """A relay that closes in order behind it leaves the mark and the crash count as its death would."""
    jobs = Jobs()

    @jobs.handler(queue="sync", retry=TWICE, claim=claim)
    def write(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        ctx.session.flush()
        if name == "poison":
            raise ValueError

    @jobs.handler(queue="async", retry=TWICE, claim=claim)
    async def write_async(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        await ctx.session.flush()
        if name == "poison":
            raise ValueError

    kind = write if flavour == "sync" else write_async
    with sessions.begin() as session:
        session.add_jobs(kind.job(name=name) for name in ("poison", "good 1", "good 2"))

    def run(relay: Relay) -> BaseException | None:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(relay.run)
            wait_until(lambda: running.done() or waiting(engine) == 0, "its end")
            relay.stop()
            return running.exception()

    ends = []
    while waiting(engine):
        assert len(ends) < 10
        with relay_that_cannot_settle(outboxq_database.url, jobs) as relay:
            ends.append(type(run(relay)))
    # The first one died with the claim, in lease mode one with its company, two with the suspect; the last buried it.
    assert ends == [Stop] * (3 if claim == "transaction" else 4) + [type(None)]
    assert ledger(engine) == {"good 1": 1, "good 2": 1}
    assert dead_letters(engine) == [("poison", 0, "crashed 2 of 2 times while it ran alone")]


@contextmanager
def relay_that_cannot_settle(url: str, jobs: Jobs) -> Iterator[Relay]:
    """A relay that meets an error of a listener's, once, as it records a failed attempt."""
    engine, asynchronous = create_engine(url), create_async_engine(url)
    struck = []

    def strike(_connection: object, _cursor: object, statement: str, *_others: object) -> None:
        if not struck and statement.startswith(("INSERT INTO outboxq.job", "UPDATE outboxq.job SET")):
            struck.append(statement)
            raise Stop

    for each in (engine, asynchronous.sync_engine):
        event.listen(each, "before_cursor_execute", strike)
    settings = RelayConfig(slots_per_queue=1, max_crashes=2, lease_seconds=2, poll_seconds=0.05)
    try:
        yield Relay(engine, jobs, settings, async_engine=asynchronous)
    finally:
        engine.dispose()
        asyncio.run(asynchronous.dispose())
