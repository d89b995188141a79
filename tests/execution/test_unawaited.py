"""A coroutine of ours that an async handler forgets to await fails the attempt: nothing has come of it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from uuid import uuid4

import pytest
from sqlalchemy import Engine, insert
from sqlalchemy.orm import sessionmaker

from outboxq import (
    AsyncBatchContext,
    AsyncContext,
    Backoff,
    BatchItem,
    Inbox,
    Jobs,
    OutboxSession,
    cancel,
    find_job,
    schedules,
)
from outboxq.database.answers import Answer
from outboxq.events import Event, JobDied, JobDone
from tests.support.app import Effect
from tests.support.ledger import effects

Drain = Callable[..., list[Event]]
INBOX = Inbox("payments")


async def pay(key: str) -> str:
    return key


def write(ctx: AsyncContext, name: str = "row") -> Awaitable[object]:
    return ctx.session.execute(insert(Effect).values(name=name))


CALLS: dict[str, Callable[[AsyncContext], Awaitable[object]]] = {
    "once('bank', ...)": lambda ctx: ctx.once("bank", key="1", call=pay),
    "find_job(...)": lambda ctx: find_job(ctx.session, uuid4()),
    "cancel(...)": lambda ctx: cancel(ctx.session, uuid4()),
    "schedules.pause(...)": lambda ctx: schedules.pause(ctx.session, "nightly"),
    "schedules.remove(...)": lambda ctx: schedules.remove(ctx.session, "nightly"),
    "schedules.list_schedules(...)": lambda ctx: schedules.list_schedules(ctx.session),
    "inbox.accept(...)": lambda ctx: INBOX.accept(ctx.session, "m1"),
    "inbox.accept_all(...)": lambda ctx: INBOX.accept_all(ctx.session, ["m1"]),
    "ctx.session.execute(...)": write,
    "ctx.session.flush(...)": lambda ctx: ctx.session.flush(),
}


@pytest.mark.first_and_last
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_was_not_awaited_fails_the_attempt(
    call: str, claim: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The error names the call; none of the handler's rows stands."""
    jobs = Jobs()

    @jobs.handler(queue="q", claim=claim, retry=Backoff(max_attempts=1))
    async def forget(ctx: AsyncContext) -> None:
        await write(ctx)
        CALLS[call](ctx)

    with sessions.begin() as session:
        session.add_job(forget)
    [died] = [event for event in drain(jobs) if isinstance(event, JobDied)]
    assert died.error_type == "outboxq.errors.HandlerError"
    assert died.message == f"the handler did not await {call}: nothing has come of it"
    assert effects(engine) == []


@pytest.mark.parametrize("batchable", [False, True])
def test_calls_that_were_awaited_count_no_more(
    batchable: bool, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Directly, in a task, by gather, with a limit of time: all are awaited. One job's calls are not the next one's."""
    jobs = Jobs()

    @jobs.handler(queue="q", batchable=batchable)
    async def await_all(ctx: AsyncContext, name: str) -> None:
        await write(ctx, f"{name} 1")
        await asyncio.create_task(write(ctx, f"{name} 2"))  # type: ignore[arg-type]
        await asyncio.gather(write(ctx, f"{name} 3"))
        await asyncio.wait_for(write(ctx, f"{name} 4"), 60)
        assert await find_job(ctx.session, uuid4()) is None

    with sessions.begin() as session:
        session.add_jobs([await_all.job(name=name) for name in "ab"])
    events = drain(jobs, batch_size=10)
    assert sum(isinstance(event, JobDone) for event in events) == 2
    assert effects(engine) == [f"{name} {number}" for name in "ab" for number in range(1, 5)]


def test_a_handler_that_fails_by_itself_keeps_its_own_error(
    sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    jobs = Jobs()

    @jobs.handler(queue="q", retry=Backoff(max_attempts=1))
    async def fail(ctx: AsyncContext) -> None:
        write(ctx)
        raise LookupError("mine")

    with sessions.begin() as session:
        session.add_job(fail)
    [died] = [event for event in drain(jobs) if isinstance(event, JobDied)]
    assert died.message == "mine"


@dataclass
class Named:
    name: str


def test_a_batch_handler_may_not_forget_either(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Its jobs then run by themselves, and each fails."""
    jobs = Jobs()

    @jobs.batch_handler(Named, kind="named", queue="q", max_size=10, retry=Backoff(max_attempts=1))
    async def forget(ctx: AsyncBatchContext, items: Sequence[BatchItem[Named]]) -> None:
        ctx.session.add_all([Effect(name=item.args.name) for item in items])
        ctx.session.flush()

    with sessions.begin() as session:
        session.add_jobs([forget.job(name=name) for name in "ab"])
    died = [event for event in drain(jobs) if isinstance(event, JobDied)]
    assert [event.error_type for event in died] == ["outboxq.errors.HandlerError"] * 2
    assert effects(engine) == []


def test_an_answer_is_neither_true_nor_false_and_a_task_of_it_can_be_printed() -> None:
    """`if inbox.accept(...)` would always be true; asyncio asks the same of a task's coroutine, from Python 3.12 on."""

    async def printed() -> str:
        task = asyncio.ensure_future(Answer(pay("1"), "pay(...)"))
        said = repr(task)
        assert await task == "1"
        return said

    assert "Answer" in asyncio.run(printed())
    answer = Answer(pay("1"), "pay(...)")
    with pytest.raises(TypeError, match="await pay"):
        bool(answer)
    answer.close()
