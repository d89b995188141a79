"""Handlers that leave the driver's connection in the middle of something: failed, and in nobody's way."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession
from outboxq.database.driver import driver_connection
from outboxq.events import DatabaseLost, Event, JobCrashed, JobLeaseLost
from outboxq.handlers.context import BatchContext, BatchItem
from tests.execution.test_raised import Named, dead_letters
from tests.support.app import Effect
from tests.support.ledger import ledger, waiting
from tests.support.matrices import diagonal
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Event]]
ONCE = Backoff(max_attempts=1)
ROWS = "SELECT generate_series(1, 100000)"
# Kept, or the garbage collector would finish them.
LEFT: list[object] = []


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    LEFT.clear()


def leave(session: Session, how: str) -> None:
    driver = driver_connection(session.connection())
    assert isinstance(driver, psycopg.Connection)
    if how.startswith("pipeline"):
        left = driver.pipeline()
        left.__enter__()
    elif how.startswith("copy"):
        left = driver.cursor().copy(f"COPY ({ROWS}) TO STDOUT")
        next(left.__enter__().rows())
    elif how.startswith("load"):
        left = driver.cursor().copy("COPY effect_ledger (name) FROM STDIN")
        left.__enter__().write_row(("half a line",))
    elif how.startswith("stream"):
        left = driver.cursor().stream(ROWS)
        next(left)
    else:
        return
    LEFT.append(left)
    if how.endswith("raises"):
        raise ValueError(how)


async def leave_async(ctx: AsyncContext, how: str) -> None:
    driver = driver_connection((await ctx.session.connection()).sync_connection)
    assert isinstance(driver, psycopg.AsyncConnection)
    if how.startswith("pipeline"):
        left = driver.pipeline()
        await left.__aenter__()
    elif how.startswith("copy"):
        left = driver.cursor().copy(f"COPY ({ROWS}) TO STDOUT")
        await anext((await left.__aenter__()).rows())
    elif how.startswith("load"):
        left = driver.cursor().copy("COPY effect_ledger (name) FROM STDIN")
        await (await left.__aenter__()).write_row(("half a line",))
    elif how.startswith("stream"):
        left = driver.cursor().stream(ROWS)
        await anext(left)
    else:
        return
    LEFT.append(left)
    if how.endswith("raises"):
        raise ValueError(how)


def build(form: str) -> tuple[Jobs, Callable[[str], object]]:
    jobs = Jobs()
    flavour, how = form.split("-")
    if how == "group":

        @jobs.batch_handler(Named, queue="q", retry=ONCE, timeout_seconds=1)
        def write_all(ctx: BatchContext, items: list[BatchItem[Named]]) -> None:
            for item in items:
                ctx.session.add(Effect(name=item.args.name))
                leave(ctx.session, item.args.name)

        return jobs, lambda name: write_all.job(name=name)
    options = {"claim": "lease"} if how == "lease" else {"batchable": how == "shared"}
    if flavour == "sync":

        @jobs.handler(queue="q", retry=ONCE, timeout_seconds=20, **options)
        def write(ctx: Context, name: str) -> None:
            ctx.session.add(Effect(name=name))
            leave(ctx.session, name)

        return jobs, lambda name: write.job(name=name)

    @jobs.handler(queue="q", retry=ONCE, timeout_seconds=20, **options)
    async def write_async(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        await leave_async(ctx, name)

    return jobs, lambda name: write_async.job(name=name)


@pytest.mark.first_and_last
@pytest.mark.timeout(60)
@diagonal(
    pytest.mark.parametrize(
        "form",
        [
            "sync-transaction",
            "async-transaction",
            "sync-lease",
            "async-lease",
            "sync-shared",
            "async-shared",
            "sync-group",
        ],
    ),
    pytest.mark.parametrize("batch_size", [10, 1]),
)
def test_a_handler_that_leaves_a_statement_unfinished_fails_alone_and_holds_up_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, form: str, batch_size: int
) -> None:
    """Its connection cannot even be rolled back: it is closed, the attempt counts, and the others are done once."""
    jobs, job = build(form)
    left = [f"{how}{end}" for how in ("copy", "load", "pipeline", "stream") for end in ("", " that raises")]
    with sessions.begin() as session:
        for how in left:
            session.add_jobs([job(how), job(f"behind {how}")])
    events = drain(jobs, slots_per_queue=1, batch_size=batch_size)
    assert ledger(engine) == {f"behind {how}": 1 for how in left}
    assert waiting(engine) == 0
    reasons = {"raises": "ValueError"}
    assert dead_letters(engine) == [
        (how, 1, f"gave up after 1 of 1 attempts: {reasons.get(how.split()[-1], 'outboxq.errors.HandlerError')}")
        for how in left
    ]
    assert not [event for event in events if isinstance(event, DatabaseLost | JobLeaseLost | JobCrashed)]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_thread_left_in_a_statement_reads_nothing_of_the_next_connection(
    claim: Any,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its statement ends before its connection is closed: the socket's number and its memory are then another's."""
    jobs, close = Jobs(), psycopg.Connection.close
    left, closed_beneath = dict[object, tuple[int, threading.Thread]](), list[bool]()

    @jobs.handler(queue="q", claim=claim, retry=ONCE)
    def leave_thread(ctx: Context) -> None:
        cursor = ctx.session.connection().connection.cursor()
        backend = cursor.connection.info.backend_pid

        def wait() -> None:
            with pytest.raises(psycopg.OperationalError):
                cursor.execute("SELECT pg_sleep(600)")

        thread = threading.Thread(target=wait, daemon=True)
        left[cursor.connection] = backend, thread
        thread.start()
        wait_until(lambda: sleeps(engine, backend), "the statement")

    @jobs.handler(queue="q", claim=claim, retry=ONCE)
    def note(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))

    def look_and_close(connection: "psycopg.Connection[Any]") -> None:
        if connection in left:
            backend, thread = left.pop(connection)
            closed_beneath.append(is_in_statement(thread))
            # Its backend sleeps on, and the thread too if nothing has ended its statement.
            with engine.begin() as other:
                other.execute(select(func.pg_terminate_backend(backend)))
            thread.join(PATIENCE)
        close(connection)

    monkeypatch.setattr(psycopg.Connection, "close", look_and_close)
    with sessions.begin() as session:
        for name in "abcde":
            session.add_job(leave_thread)
            session.add_job(note, name=name)
    drain(jobs, slots_per_queue=1)
    assert closed_beneath == [False] * 5
    assert ledger(engine) == dict.fromkeys("abcde", 1)
    assert len(dead_letters(engine)) == 5


def sleeps(engine: Engine, backend: int) -> bool:
    with engine.connect() as connection:
        query = text("SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = :pid")
        return bool(connection.scalar(query, {"pid": backend}))


def is_in_statement(thread: threading.Thread) -> bool:
    assert thread.ident is not None
    innermost = sys._current_frames().get(thread.ident)
    frames = () if innermost is None else traceback.walk_stack(innermost)
    return any(frame.f_code is psycopg.Connection.wait.__code__ for frame, _ in frames)


@pytest.mark.large
@pytest.mark.timeout(90)
@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_task_left_in_a_statement_reads_nothing_of_the_next_connection(
    claim: Any, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """As a thread."""
    jobs, ended = Jobs(), []

    @jobs.handler(queue="q", claim=claim, retry=ONCE)
    async def leave_task(ctx: AsyncContext) -> None:
        connection = await ctx.session.connection()

        async def wait() -> None:
            try:
                await connection.execute(text("SELECT pg_sleep(0.1)"))
            except Exception as error:  # noqa: BLE001  # that it is one is what matters
                ended.append(error)

        LEFT.append(asyncio.create_task(wait()))
        driver = driver_connection(connection.sync_connection)
        await asyncio.to_thread(wait_until, driver.lock.locked, "the statement")

    @jobs.handler(queue="q", claim=claim, retry=ONCE)
    async def note(ctx: AsyncContext, name: str) -> None:
        ctx.session.add(Effect(name=name))
        await ctx.session.execute(text("SELECT pg_sleep(0.15)"))

    with sessions.begin() as session:
        for name in "abcde":
            session.add_job(leave_task)
            session.add_job(note, name=name)
    drain(jobs, slots_per_queue=1)
    assert ledger(engine) == dict.fromkeys("abcde", 1)
    assert len(ended) == len(dead_letters(engine)) == 5
