"""Hooks of a registry run beside the jobs: whatever they do, no job is the worse for it, and it is counted."""

import asyncio
import functools
import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.emitter import Emitter
from outboxq.events import Event, JobDied, JobDone, JobRetried, RelayStarted, RelayStopped
from outboxq.handlers.hooks import HEARD, EventHook
from outboxq.observability.logging import EventLog, JsonFormatter, log_event
from outboxq.postgres import Database
from outboxq.relay.hook_thread import HookThread
from outboxq.relay.limits import HookLimits, RelayLimits
from outboxq.relay.state import RelayReport
from tests.support.ledger import waiting
from tests.support.limits import with_limits
from tests.support.waiting import wait_until

TWICE = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)
PATIENT = HookLimits(finish_seconds=60.0)


@pytest.fixture
def drained(outboxq_database: Database, sessions: sessionmaker[OutboxSession]) -> Callable[..., RelayReport]:
    """Enqueues so many jobs of the registry's first handler, and drains; the report."""

    def run(jobs: Jobs, count: int = 3, limits: HookLimits = PATIENT) -> RelayReport:
        with sessions.begin() as session:
            for _ in range(count):
                session.add_job(next(iter(jobs.resolve().handlers.values())))
        relay = Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1, batch_size=50))
        return with_limits(relay, RelayLimits(hooks=limits)).drain()

    return run


def with_handler(jobs: Jobs, flavour: str = "sync") -> Jobs:
    if flavour == "sync":

        @jobs.handler(queue="q")
        def act(ctx: Context) -> None: ...

    else:

        @jobs.handler(queue="q")
        async def act_async(ctx: AsyncContext) -> None: ...

    return jobs


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_hooks_are_told_in_order_in_a_thread_of_their_own(flavour: str, drained: Callable[..., RelayReport]) -> None:
    """Sync and async ones, those of included registries too; the last event is the relay's own end."""
    told, threads = list[Event](), set[str]()
    jobs, inner, started, loops = Jobs(hooks=[told.append]), Jobs(), list[RelayStarted](), set[int]()
    with_handler(jobs, flavour)

    @inner.on(JobDone)
    async def count(event: JobDone) -> None:
        await asyncio.sleep(0)
        threads.add(threading.current_thread().name)
        loops.add(id(asyncio.get_running_loop()))

    inner.on(RelayStarted)(started.append)
    jobs.include(inner)
    report = drained(jobs, 20)
    assert threads == {"outboxq-hooks"}
    assert len(loops) == 1
    assert [type(event) for event in told] == [RelayStarted, *[JobDone] * 20, RelayStopped]
    assert len(started) == 1
    seqs = [event.job.seq for event in told if isinstance(event, JobDone)]
    assert seqs == sorted(seqs)
    assert told[-1] == RelayStopped(20, 0, 0, 0)
    assert (report.hook_failures, report.hook_events_dropped) == (0, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "outboxq-hooks"]


@pytest.mark.first_and_last
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_hook_that_raises_is_logged_and_counted(
    flavour: str,
    error: type[BaseException],
    drained: Callable[..., RelayReport],
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever it raises: the jobs are done, and the other hooks are told."""
    jobs, told = with_handler(Jobs()), list[Event]()

    def fail(event: JobDone) -> None:
        raise error("in a hook")

    async def fail_async(event: JobDone) -> None:
        raise error("in a hook")

    hook = fail if flavour == "sync" else fail_async
    jobs.on(JobDone)(hook)
    jobs.on(JobDone)(told.append)
    with caplog.at_level(logging.INFO, "outboxq"):
        report = drained(jobs)
    assert (report.done, report.hook_failures, report.hook_events_dropped) == (3, 3, 0)
    assert len(told) == 3
    assert waiting(engine) == 0
    failures = [record for record in caplog.records if record.message.startswith("a hook failed")]
    assert len(failures) == 3
    assert all(record.message.endswith(f".{hook.__qualname__} event=JobDone") for record in failures)
    assert all(record.exc_info and record.exc_info[0] is error for record in failures)
    written = [json.loads(JsonFormatter().format(record)) for record in failures]
    assert {line["message"] for line in written} == {failures[0].message}
    (stopped,) = [record.message for record in caplog.records if record.message.startswith("relay stopped")]
    assert stopped.endswith("hook_failures=3")


class Secretive:
    """A hook that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")

    def __call__(self, event: JobDone) -> None:
        raise ValueError("in a hook")


def fail_with(secret: str, event: JobDone) -> None:
    raise ValueError("in a hook")


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("hook", "named"),
    [
        (Secretive(), f"{__name__}.Secretive"),
        (functools.partial(fail_with, "canary"), f"{__name__}.fail_with"),
        (Secretive().__call__, f"{__name__}.Secretive.__call__"),
        (str.upper, "str.upper"),
        (["canary"].remove, "list.remove"),
    ],
    ids=["object", "partial", "method", "descriptor", "builtin"],
)
@pytest.mark.parametrize("of", ["registry", "relay"])
def test_a_hook_that_raises_is_named_and_not_shown(
    of: str, hook: Any, named: str, outboxq_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """What it is bound to may be a secret, or refuse to be shown, which must end neither the thread nor the relay."""
    jobs = with_handler(Jobs(hooks=[hook] if of == "registry" else ()))
    report = Relay(outboxq_database.url, jobs, hooks=[hook] if of == "relay" else ()).drain()
    # Of RelayStarted and RelayStopped.
    assert report.hook_failures == 2
    failures = [record for record in caplog.records if record.message.startswith("a hook failed: ")]
    assert [record.__dict__["outboxq_hook"] for record in failures] == [named] * 2
    assert not any("canary" in str(vars(record)) for record in failures)


def test_hooks_that_the_relay_was_given_are_counted_too(
    outboxq_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """They run in the thread in which the event happened; their errors are logged and counted alike."""

    def fail(event: Event) -> None:
        raise ValueError("in a hook")

    report = Relay(outboxq_database.url, with_handler(Jobs()), hooks=(fail, log_event)).drain()
    # Of RelayStarted and RelayStopped.
    assert report.hook_failures == 2


def test_an_async_hook_that_takes_too_long_is_cancelled(
    drained: Callable[..., RelayReport], caplog: pytest.LogCaptureFixture
) -> None:
    """After its time for one event, which is an error of it; the next event is told."""
    jobs, ended = with_handler(Jobs()), list[str]()

    @jobs.on(JobDone)
    async def hang(event: JobDone) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("cancelled")

    report = drained(jobs, 2, HookLimits(await_seconds=0.05, finish_seconds=60.0))
    assert (report.done, report.hook_failures) == (2, 2)
    assert ended == ["cancelled"] * 2
    assert "the hook took longer than 0.05 s for one event" in caplog.text


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_hook_that_blocks_holds_no_slot_for_longer_than_its_bound(
    flavour: str, drained: Callable[..., RelayReport], engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """All jobs are done while it blocks; what found no room is dropped, counted, and logged once."""
    jobs, released, told = with_handler(Jobs(), flavour), threading.Event(), list[Event]()

    @jobs.on(JobDone)
    def block(event: JobDone) -> None:
        told.append(event)
        released.wait(60)

    limits = HookLimits(waiting_events=10, hold_seconds=0.1, finish_seconds=0.2)
    began = time.monotonic()
    try:
        report = drained(jobs, 200, limits)
        # All in all one hold, for 189 events without room; each in turn would be 19 s.
        assert time.monotonic() - began < 15
        assert report.done == 200
        assert waiting(engine) == 0
        assert len(told) == 1
        # One is being told; ten waited, and were left when the relay ended.
        assert report.hook_events_dropped == 199
        (slow,) = [record.message for record in caplog.records if "too slow" in record.message]
        assert "dropped=1" in slow
        assert "hooks did not end within 0.2 s, and are left behind: dropped=10" in caplog.text
    finally:
        released.set()
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "outboxq-hooks"], "the thread's end")


def test_hooks_that_are_behind_get_no_events_until_half_of_them_are_told() -> None:
    """So that a hook which stays slow does not hold up a slot for each event that it takes."""
    turns, told = threading.Semaphore(0), list[object]()

    def tell(event: object) -> None:
        turns.acquire()
        told.append(event)

    thread = HookThread([EventHook(tell, HEARD)], HookLimits(waiting_events=4, hold_seconds=0.05))
    thread.start()
    event = RelayStarted((), 1, 1)
    try:
        assert thread.put(event)
        wait_until(lambda: not thread._events, "the first event to be taken")
        assert [thread.put(event) for _ in range(4)] == [True] * 4
        # Full: it waits for its time, and the next ones for none at all.
        began = time.monotonic()
        assert not thread.put(event)
        assert time.monotonic() - began >= 0.05
        thread._limits = HookLimits(waiting_events=4, hold_seconds=20)
        began = time.monotonic()
        assert not thread.put(event)
        assert time.monotonic() - began < 10
        turns.release()
        wait_until(lambda: len(told) == 1 and len(thread._events) == 3, "one to be told")
        assert not thread.put(event)
        turns.release()
        wait_until(lambda: len(thread._events) == 2, "half of them to be told")
        assert thread.put(event)
        assert thread.dropped == 3
    finally:
        turns.release(20)
        thread.finish()
    assert len(told) == 6


def test_room_that_comes_in_time_takes_the_event() -> None:
    """A full queue is waited for, up to the bound."""
    turns = threading.Semaphore(0)
    thread = HookThread([EventHook(lambda _: turns.acquire(), HEARD)], HookLimits(waiting_events=1, hold_seconds=600))
    thread.start()
    event = RelayStarted((), 1, 1)
    assert thread.put(event)
    wait_until(lambda: not thread._events, "the first event to be taken")
    assert thread.put(event)
    timer = threading.Timer(0.1, turns.release)
    timer.start()
    assert thread.put(event)
    turns.release(3)
    thread.finish()
    timer.join()
    assert (thread.dropped, thread.failures) == (0, 0)


class Held:
    """What a handler has in a variable."""


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.first_and_last
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("fate", ["told", "dropped", "left", "not asked for"])
def test_what_a_failed_handler_held_goes_when_its_event_was_told_or_dropped(
    fate: str, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Hooks see the whole traceback, and behind them, or if the event is dropped, nothing keeps the frames."""
    jobs, held, seen = Jobs(), list[weakref.ref[Held]](), list[object]()
    released, is_blocked = threading.Event(), fate in ("dropped", "left")

    @jobs.handler(queue="q", retry=TWICE)
    def fail(ctx: Context) -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        raise ValueError("wrong")

    @jobs.on(RelayStarted)
    def block(event: RelayStarted) -> None:
        if is_blocked:
            released.wait(60)

    if fate != "not asked for":

        @jobs.on(JobRetried, JobDied)
        def look(event: JobRetried | JobDied) -> None:
            assert event.exception is not None
            assert event.exception.__traceback__ is not None
            seen.append(held[len(seen)]() is not None)

    waiting_events = 1 if fate == "dropped" else 1_000
    limits = HookLimits(waiting_events=waiting_events, hold_seconds=0.05, finish_seconds=0.2 if is_blocked else 60.0)
    with sessions.begin() as session:
        session.add_job(fail)
    relay = with_limits(Relay(outboxq_database.url, jobs, hooks=()), RelayLimits(hooks=limits))
    try:
        relay.drain()
    finally:
        released.set()
    assert seen == ([True, True] if fate == "told" else [])
    assert [each() for each in held] == [None, None]


def test_hooks_may_use_what_the_lifespan_opened(drained: Callable[..., RelayReport]) -> None:
    """They are told the last events before it is left."""
    seen, opened = list[bool](), list[bool]()

    @contextmanager
    def lifespan() -> Iterator[None]:
        opened.append(True)
        yield
        opened.clear()

    jobs = with_handler(Jobs(lifespan=lifespan))

    @jobs.on(JobDone)
    def look(event: JobDone) -> None:
        time.sleep(0.02)
        seen.append(bool(opened))

    drained(jobs, 5)
    assert seen == [True] * 5


def test_an_event_that_no_hook_asked_for_costs_nothing() -> None:
    """A registry without hooks has no thread, and an emitter without `later` forgets at once."""
    thread = HookThread((), HookLimits())
    thread.start()
    assert not thread._thread.is_alive()
    events = list[Any]()
    Emitter([events.append], lambda *_: None, thread)(RelayStarted((), 1, 1))
    assert len(events) == 1
    thread.finish()
    assert (thread.dropped, thread.failures) == (0, 0)


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_a_done_job_is_logged_at_the_level_that_the_logger_has_at_that_moment(
    level: int, outboxq_database: Database, sessions: sessionmaker[OutboxSession], caplog: pytest.LogCaptureFixture
) -> None:
    """A log that would drop the event has no use for it; a change of the level holds for the next batch."""
    jobs = Jobs()

    @jobs.handler(queue="q")
    def act(ctx: Context) -> None:
        logging.getLogger("outboxq.relay").setLevel(level)

    caplog.set_level(logging.INFO, "outboxq.relay")
    caplog.handler.setLevel(logging.DEBUG)
    with sessions.begin() as session:
        session.add_job(act)
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1)).drain()
    logged = [record for record in caplog.records if record.getMessage().startswith("job done")]
    assert len(logged) == (level == logging.DEBUG)


def test_another_hook_is_told_what_the_log_has_no_use_for(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """One hook without a use for an event takes it from no other."""
    jobs, told = with_handler(Jobs()), list[Event]()
    with sessions.begin() as session:
        session.add_job(next(iter(jobs.resolve().handlers.values())))
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=(EventLog(), told.append)).drain()
    assert [type(event) for event in told if isinstance(event, JobDone)] == [JobDone]
