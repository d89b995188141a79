"""The async calls of a dispatcher: each is one task; what follows its handler needs no other, or a connection."""

import asyncio
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest
from psycopg.errors import SerializationFailure
from sqlalchemy import Engine, insert, select
from sqlalchemy.exc import InvalidRequestError

from outboxq import AsyncContext, Jobs, OutboxSession
from outboxq.database.driver import ServerSession
from outboxq.events import Event, JobCrashed, JobDone
from outboxq.execution.leased_call import LeasedCall
from outboxq.relay.calls import TaskCall
from outboxq.relay.connections import CallConnections
from outboxq.relay.dispatcher import Dispatcher
from outboxq.relay.planner import Asked, Planner
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.calls import Calls, Gate, add_suspects, config, rows
from tests.support.ledger import effects
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
TENANT = ContextVar("tenant", default="none")


async def use_session(ctx: AsyncContext) -> None:
    await ctx.session.execute(select(1))


@pytest.mark.parametrize("uses", [False, True])
def test_a_conflict_is_tried_again_at_once_with_the_variables_from_before(
    engine: Engine, drain: Drain, uses: bool
) -> None:
    """Also if it was in another database, and the call left its session alone."""
    calls, seen = Calls("async"), list[str]()

    async def conflict(ctx: AsyncContext) -> None:
        seen.append(TENANT.get())
        TENANT.set("the first try's")
        if uses:
            await use_session(ctx)
        if len(seen) == 1:
            raise SerializationFailure("another transaction was first")

    calls.tasks["again"] = conflict
    calls.enqueue(engine, "again")
    events = drain(calls.jobs)
    assert seen == ["none", "none"]
    assert [(type(event), event.job.attempt) for event in events if hasattr(event, "job")] == [(JobDone, 1)]


def test_a_call_that_has_ended_is_freed_by_no_garbage_collector(
    engine: Engine, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its job and the job's arguments: nothing of it refers to itself."""
    calls, init, refs = Calls("async"), TaskCall.__init__, list[weakref.ref[TaskCall]]()

    def note(call: TaskCall, *arguments: Any, **options: Any) -> None:
        init(call, *arguments, **options)
        refs.append(weakref.ref(call))

    monkeypatch.setattr(TaskCall, "__init__", note)
    calls.enqueue(engine, "leaves its session alone")
    gc.collect()
    gc.disable()
    try:
        drain(calls.jobs)
        assert [ref() for ref in refs] == [None]
    finally:
        gc.enable()


def test_a_task_that_was_left_behind_gets_no_session_of_a_call_that_is_settled(
    engine: Engine, start_relay: StartRelay, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While what it deferred waits for a connection, the context refuses as it does afterwards."""
    calls, answers, tasks = Calls("async"), list[str](), list[asyncio.Task[None]]()
    waits = Gate()
    # Called in the event loop, as the call begins to wait.
    monkeypatch.setattr(CallConnections, "_log_waiting", lambda _: waits.open())

    async def hold(ctx: AsyncContext) -> None:
        await use_session(ctx)
        await gate.wait_async()

    async def later(ctx: AsyncContext) -> None:
        await waits.wait_async()
        try:
            assert ctx.session is not None
            answers.append("given")
        except InvalidRequestError:
            answers.append("refused")

    async def leave(ctx: AsyncContext) -> None:
        ctx.defer(insert(Effect), {"name": "deferred"})
        tasks.append(asyncio.create_task(later(ctx)))

    calls.tasks |= {"holds": hold, "leaves": leave}
    calls.enqueue(engine, "holds", "leaves")
    with start_relay(calls.jobs, config(4, call_connections=1)) as running:
        wait_until(lambda: answers, "the task that was left behind")
        gate.open()
        wait_until(lambda: len(running.of(JobDone)) == 2, "both")
    assert answers == ["refused"]
    assert effects(engine) == ["deferred"]


def test_a_call_that_is_abandoned_between_its_handler_and_what_follows_waits_for_nothing(
    engine: Engine, start_relay: StartRelay, gate: Gate, made: list[Dispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay knew the handler's task alone, which had ended."""
    calls, go_on, abandoned = Calls("async"), TaskCall._go_on, list[TaskCall]()

    async def hold(ctx: AsyncContext) -> None:
        await use_session(ctx)
        await gate.wait_async()

    def abandon_first(call: TaskCall, task: Any = None) -> None:
        if "abandoned" in call.batch.job.args:
            abandoned.append(call)
            assert call.batch.owner.seize()
            call.abandon()
        go_on(call, task)

    monkeypatch.setattr(TaskCall, "_go_on", abandon_first)
    calls.tasks |= {"holds": hold, "abandoned": lambda ctx: ctx.defer(insert(Effect), {"name": "never"})}
    with start_relay(calls.jobs, config(4, call_connections=1)):
        calls.enqueue(engine, "holds")
        wait_until(lambda: made and made[0].connections.used, "the only connection to be lent")
        calls.enqueue(engine, "abandoned")
        wait_until(lambda: abandoned and made[0].busy == 1, "the end of the other call")
        gate.open()
    assert effects(engine) == []


def test_a_call_that_is_abandoned_as_it_starts_has_no_run(
    engine: Engine, start_relay: StartRelay, made: list[Dispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that abandoned it knew no task yet."""
    calls, start, abandoned = Calls("async"), LeasedCall.start, list[TaskCall]()

    def abandon_behind(leased: LeasedCall) -> Any:
        running = start(leased)
        (call,) = (each for each in made[0].calls if each.batch is leased.batch)
        assert isinstance(call, TaskCall)
        assert call.batch.owner.seize()
        call.abandon()
        abandoned.append(call)
        return running

    monkeypatch.setattr(LeasedCall, "start", abandon_behind)
    calls.enqueue(engine, "abandoned")
    with start_relay(calls.jobs, config(2, lease_seconds=30)):
        wait_until(lambda: abandoned and not made[0].busy, "its end")
    assert calls.began == []


@dataclass
class Slow:
    """An argument whose class looks, as it is made, at what the relay sees then."""

    name: str

    def __post_init__(self) -> None:
        if LOOKS is not None:
            LOOKS()


LOOKS: Callable[[], object] | None = None


def test_users_code_that_runs_before_the_handler_s_task_is_seen_to_run(
    engine: Engine, drain: Drain, made: list[Dispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it blocks the loop, its job is to blame, as its handler would be."""
    jobs, seen = Jobs(), list[tuple[bool, bool]]()

    @jobs.handler(queue="held", claim="lease")
    async def work(_ctx: AsyncContext, slow: Slow) -> None:
        assert slow.name == "Anna"

    with OutboxSession(engine) as session, session.begin():
        session.add_job(work, slow=Slow("Anna"))

    def look() -> None:
        for call in made[0].calls if made else ():
            in_thread = call.watch.thread == threading.get_ident()
            seen.append((call.watch.is_running(), in_thread and bool(call.watch.stack())))

    monkeypatch.setitem(globals(), "LOOKS", look)
    events = drain(jobs)
    assert seen == [(True, True)]
    assert [type(event) for event in events if hasattr(event, "job")] == [JobDone]


def test_a_result_is_settled_though_no_suspect_can_be_had_after_it(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the queue is held for its rate: the round in which it was taken ends without a claim."""
    calls, first, asked = Calls("async"), Planner.first, list[int]()

    def without_claims(
        planner: Planner, server: ServerSession, most: int | None = None, *, aside: bool = False
    ) -> Generator[Asked, None, None]:
        asked.append(aside)
        if sum(asked) == 2:
            return
        yield from first(planner, server, most, aside=aside)

    monkeypatch.setattr(Planner, "first", without_claims)
    add_suspects(engine, calls, 2, "suspect", "suspect too")
    with start_relay(calls.jobs, config(4, lease_seconds=2, heartbeat_seconds=0.1, poll_seconds=0.2)) as running:
        wait_until(lambda: len(running.of(JobDone)) == 2 and not rows(engine), "both suspects")
    assert sum(asked) >= 2
    assert not running.of(JobCrashed)
    assert Counter(calls.began) == {"suspect": 1, "suspect too": 1}
