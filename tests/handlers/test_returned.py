"""What a handler returns: values are dropped, and what shows that its work was not done is no reason to try again."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import (
    AsyncBatchContext,
    AsyncContext,
    BatchContext,
    BatchItem,
    Context,
    DeadLetter,
    Discard,
    Done,
    Jobs,
    OutboxSession,
    Retry,
    Snooze,
)
from outboxq.events import Event, JobDied, JobDone
from outboxq.job import Job
from tests.support.app import Effect
from tests.support.together import together

Drain = Callable[..., list[Event]]
Handlers = Callable[[Callable[[str], object]], tuple[Jobs, Any]]


def _plain(**options: Any) -> Handlers:
    def make(returned: Callable[[str], object]) -> tuple[Jobs, Any]:
        jobs = Jobs()

        @jobs.handler(kind="act", **options)
        def act(ctx: Context, name: str) -> Any:
            ctx.session.add(Effect(name=name))
            return returned(name)

        return jobs, act

    return make


def _asynchronous(**options: Any) -> Handlers:
    def make(returned: Callable[[str], object]) -> tuple[Jobs, Any]:
        jobs = Jobs()

        @jobs.handler(kind="act", **options)
        async def act(ctx: AsyncContext, name: str) -> Any:
            ctx.session.add(Effect(name=name))
            return returned(name)

        return jobs, act

    return make


@dataclass
class Named:
    name: str


def _batch(returned: Callable[[str], object]) -> tuple[Jobs, Any]:
    jobs = Jobs()

    @jobs.batch_handler(Named, kind="act")
    def act(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> Any:
        ctx.session.add_all([Effect(name=item.args.name) for item in items])
        return [returned(item.args.name) for item in items]

    return jobs, act


def _async_batch(returned: Callable[[str], object]) -> tuple[Jobs, Any]:
    jobs = Jobs()

    @jobs.batch_handler(Named, kind="act")
    async def act(ctx: AsyncBatchContext, items: Sequence[BatchItem[Named]]) -> Any:
        ctx.session.add_all([Effect(name=item.args.name) for item in items])
        return [returned(item.args.name) for item in items]

    return jobs, act


WAYS: dict[str, tuple[Handlers, int]] = {
    "sync": (_plain(), 1),
    "sync-batch-of-10": (_plain(), 10),
    "batchable": (_plain(batchable=True), 10),
    "lease": (_plain(claim="lease"), 1),
    "lease-ten-slots": (_plain(claim="lease"), 10),
    "async": (_asynchronous(), 1),
    "async-batchable": (_asynchronous(batchable=True), 10),
    "async-lease": (_asynchronous(claim="lease"), 1),
    "batch-handler-alone": (_batch, 1),
    "batch-handler": (_batch, 10),
    "async-batch-handler": (_async_batch, 10),
}
EVERY_WAY = pytest.mark.parametrize(("handlers", "batch_size"), WAYS.values(), ids=WAYS)


def names(engine: Engine) -> list[str]:
    with Session(engine) as session:
        return list(session.scalars(select(Effect.name).order_by(Effect.name)))


async def nobody_awaits() -> None: ...


@pytest.mark.first_and_last
@EVERY_WAY
def test_a_value_is_dropped_and_the_job_is_done(
    handlers: Handlers,
    batch_size: int,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its rows stand, at the first attempt; one warning for the kind says so, without the value."""
    values: dict[str, object] = {"a": {"ok": "secret"}, "b": [1, 2], "c": "secret", "d": 0, "e": ValueError("secret")}
    jobs, act = handlers(values.__getitem__)
    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in values)
    with caplog.at_level(logging.WARNING):
        events = drain(jobs, **together(jobs.resolve().find("act").claim, batch_size))
    assert names(engine) == list(values)
    assert [type(event) for event in events if hasattr(event, "job")] == [JobDone] * len(values)
    (warning,) = [record for record in caplog.records if "returned" in record.message]
    assert warning.name == "outboxq.relay"
    assert "kind=act" in warning.message
    assert "secret" not in warning.message


# Coroutines and generators that were never run, and classes: by the name of a job, and what its dead letter says.
FRUITLESS: dict[str, tuple[Callable[[], object], str]] = {
    "coroutine": (nobody_awaits, "returned a coroutine that was not run to its end"),
    "generator": (lambda: (each for each in ()), "returned a generator that was not run to its end"),
    "Retry": (lambda: Retry, "returned the class Retry, which is no outcome: return Retry(...)"),
    "Snooze": (lambda: Snooze, "returned the class Snooze"),
    "DeadLetter": (lambda: DeadLetter, "returned the class DeadLetter"),
    "Discard": (lambda: Discard, "returned the class Discard"),
    "Done": (lambda: Done, "returned the class Done"),
}


@pytest.mark.first_and_last
@EVERY_WAY
@pytest.mark.parametrize("guilty", [["coroutine"], list(FRUITLESS)], ids=["one", "of-each-sort"])
def test_what_nobody_has_run_and_a_class_are_dead_letters_at_once(
    handlers: Handlers,
    batch_size: int,
    guilty: list[str],
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Drain,
) -> None:
    """Every attempt would return the same. Its rows are undone, and its neighbours are done."""
    jobs, act = handlers(lambda name: FRUITLESS[name][0]() if name in FRUITLESS else None)
    neighbours = [f"beside {number}" for number in range(len(guilty) + 1)]
    with sessions.begin() as session:
        session.add_job(act, name=neighbours[0])
        for name, neighbour in zip(guilty, neighbours[1:], strict=True):
            session.add_jobs([act.job(name=name), act.job(name=neighbour)])
    events = drain(jobs, **together(jobs.resolve().find("act").claim, batch_size))
    assert names(engine) == neighbours
    died = [event.job.args for event in events if isinstance(event, JobDied)]
    assert sorted(died) == sorted(f'{{"name": "{name}"}}' for name in guilty)
    with engine.connect() as connection:
        dead = connection.execute(
            text("SELECT args->>'name', attempt, reason, errors->-1->>'message' FROM outboxq.dead_job")
        ).all()
        assert connection.scalar(text("SELECT count(*) FROM outboxq.job")) == 0
    assert sorted(name for name, *_ in dead) == sorted(guilty)
    for name, attempt, reason, message in dead:
        assert attempt == 1
        assert reason == f"another attempt cannot help: outboxq.errors.NothingDone: {message}"
        assert FRUITLESS[name][1] in message


def test_an_async_handlers_task_that_nobody_awaited_is_a_dead_letter(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """It would run on behind its job."""

    def returned(_name: str) -> object:
        return asyncio.ensure_future(nobody_awaits())

    jobs, act = _asynchronous()(returned)
    with sessions.begin() as session:
        session.add_job(act, name="a")
    (died,) = [event for event in drain(jobs) if isinstance(event, JobDied)]
    assert isinstance(died.job, Job)
    assert names(engine) == []


@pytest.mark.first_and_last
@pytest.mark.parametrize("value", [{"ok": True}, "done", 5, ["r1", "r2", "r3"], ["r1"]], ids=repr)
def test_one_value_of_a_batch_handler_is_for_all_of_its_jobs(
    value: object, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Also a list of values, of any length."""
    jobs = Jobs()

    @jobs.batch_handler(Named)
    def act(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> Any:
        ctx.session.add_all([Effect(name=item.args.name) for item in items])
        return value

    with sessions.begin() as session:
        session.add_jobs(act.job(name=name) for name in "ab")
    events = drain(jobs, batch_size=10, slots_per_queue=1)
    assert names(engine) == ["a", "b"]
    assert [type(event) for event in events if hasattr(event, "job")] == [JobDone] * 2
