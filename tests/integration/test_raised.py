"""Whatever a handler raises is a failed attempt of its job, and of no other: no job ends its relay."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from greenlet import GreenletExit
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.context import AsyncBatchContext, BatchContext, BatchItem
from outboxq.postgres import Database
from tests.support.app import Effect
from tests.support.ledger import ledger, waiting

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


def drained(url: str, jobs: Jobs, **settings: object) -> None:
    """Drain in a thread: a KeyboardInterrupt that comes through fails the test, and does not end all of them."""
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(Relay(url, jobs, RelayConfig(**settings)).drain).exception()
    assert error is None, repr(error)


def dead_letters(engine: Engine) -> list[tuple[str, int, str]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT args->>'name', attempt, reason FROM outboxq.dead_job ORDER BY 1"))
        return [tuple(row) for row in rows]


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
