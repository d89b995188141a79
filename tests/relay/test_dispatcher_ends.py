"""Calls under a lease that end: in a relay that stops, beside refusals, and with jobs that come after them."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, DeadLetter, Jobs, OutboxSession, RelayConfig, Snooze
from outboxq.events import JobCrashed, JobDone, JobInterrupted, JobRetried, JobSnoozed
from outboxq.relay.dispatcher import Dispatcher
from outboxq.relay.limits import RelayLimits
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.ledger import effects
from tests.support.waiting import PATIENCE, wait_until


def test_a_relay_that_stops_rests_between_calls_that_used_their_session(
    sessions: sessionmaker[OutboxSession], start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dispatcher that went round and round would keep the event loop from the calls that are still running."""
    jobs, leave, stopped, running = Jobs(), threading.Event(), threading.Event(), threading.Semaphore(0)
    rests, rest = list[int](), Dispatcher.rest

    @jobs.handler(queue="calls", claim="lease")
    async def call(ctx: AsyncContext, name: str) -> None:
        running.release()
        await asyncio.to_thread((leave if name == "last" else stopped).wait, PATIENCE)
        ctx.session.add(Effect(name=name))

    def counted(dispatcher: Dispatcher, loop: Any) -> None:
        rests.append(len(dispatcher.calls))
        rest(dispatcher, loop)

    monkeypatch.setattr(Dispatcher, "rest", counted)
    with sessions.begin() as session:
        session.add_jobs(call.job(name=name) for name in ("first", "last"))
    with start_relay(jobs, RelayConfig(slots_per_queue=4)) as relay:
        for _ in range(2):
            assert running.acquire(timeout=PATIENCE)
        relay.relay.stop()
        stopped.set()
        wait_until(lambda: relay.of(JobDone), "the first call")
        before = len(rests)
        # Looks, and not a time: each is a turn of the event loop that the dispatcher shares with the call.
        threading.Event().wait(0.3)
        assert len(rests) < before + 50
        leave.set()
    assert len(relay.of(JobDone)) == 2
    assert not relay.of(JobInterrupted)


def test_a_session_may_first_be_used_in_another_thread_of_the_handler(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Its connection is the call's, whose thread settles the job."""
    jobs = Jobs()

    @jobs.handler(queue="calls", claim="lease")
    def call(ctx: Context) -> None:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(lambda: [ctx.session.add(Effect(name="beside")), ctx.session.flush()]).result()

    with sessions.begin() as session:
        session.add_job(call)
    with start_relay(jobs) as relay:
        wait_until(lambda: relay.of(JobDone), "the job")
    assert effects(engine) == ["beside"]
    assert not relay.of(JobCrashed)


def test_an_outcome_that_is_refused_holds_up_no_other_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """What refuses it is no fault of a row: the others go on all the same."""
    jobs = Jobs()

    @jobs.handler(queue="calls", claim="lease")
    def call(ctx: Context, number: int) -> DeadLetter | None:
        del ctx
        return DeadLetter("no") if number == 0 else None

    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION outboxq.refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$BEGIN PERFORM 1 FROM outboxq.no_such_table; RETURN NEW; END$$"
            )
        )
        connection.execute(
            text(
                "CREATE TRIGGER refuse BEFORE INSERT ON outboxq.dead_job FOR EACH ROW EXECUTE FUNCTION outboxq.refuse()"
            )
        )
    with sessions.begin() as session:
        session.add_jobs(call.job(number=number) for number in range(12))
    with start_relay(jobs, RelayConfig(slots_per_queue=3)) as relay:
        wait_until(lambda: len(relay.of(JobDone)) == 11, "the others")
    with engine.connect() as connection:
        (row,) = connection.execute(text("SELECT state, attempt FROM outboxq.job"))
    assert tuple(row) == ("scheduled", 0)


def test_a_relay_that_stops_waits_for_the_row_of_a_job_that_is_done(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Otherwise the job would run again, as one whose relay died."""
    jobs, leave, entered = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="calls", claim="lease")
    def call(ctx: Context) -> None:
        del ctx
        entered.set()
        leave.wait(PATIENCE)

    with sessions.begin() as session:
        session.add_job(call)
    with engine.connect() as operator, start_relay(jobs) as relay:
        assert entered.wait(PATIENCE)
        operator.execute(text("SELECT FROM outboxq.job FOR UPDATE"))
        relay.relay.stop()
        leave.set()
        threading.Timer(1.0, operator.rollback).start()
    assert len(relay.of(JobDone)) == 1
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one() == 0


@pytest.mark.first_and_last
@pytest.mark.parametrize("seconds", [0.0, 0.2])
@pytest.mark.parametrize("uses_session", [False, True])
def test_the_next_job_of_a_group_and_a_job_that_comes_back_need_no_poll(
    sessions: sessionmaker[OutboxSession], start_relay: StartRelay, uses_session: bool, seconds: float
) -> None:
    """Nothing notifies of them, so what settles the one before says that they may wait, also while the relay sleeps."""
    jobs = Jobs()

    @jobs.handler(queue="groups", claim="lease", group=lambda name: name, retry=Backoff(first_seconds=0.1))
    def call(ctx: Context, name: str) -> None:
        del name
        time.sleep(seconds)
        if uses_session:
            ctx.session.execute(text("SELECT 1"))

    @jobs.handler(queue="back", claim="lease")
    def back(ctx: Context) -> Snooze | None:
        if uses_session:
            ctx.session.execute(text("SELECT 1"))
        return Snooze(timedelta(seconds=0.2)) if len(relay.of(JobSnoozed)) < 2 else None

    with start_relay(jobs, RelayConfig(slots_per_queue=4, poll_seconds=3600)) as relay:
        with sessions.begin() as session:
            session.add_jobs(call.job(name="a") for _ in range(4))
            session.add_job(back)
        wait_until(lambda: len(relay.of(JobDone)) == 5, "all jobs, long before a poll is due")


def test_a_job_whose_call_was_cut_off_comes_back_without_a_poll(
    sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """What cuts it off settles it in a thread of its own, which says that it may wait."""
    jobs, leave = Jobs(), threading.Event()

    @jobs.handler(queue="calls", claim="lease", timeout_seconds=0.2, retry=Backoff(first_seconds=0.1))
    def call(ctx: Context) -> None:
        if ctx.job.attempt == 1:
            leave.wait(PATIENCE)

    limits = RelayLimits(cut_after_seconds=0.1, free_after_seconds=PATIENCE)
    config = RelayConfig(slots_per_queue=2, poll_seconds=3600)
    with start_relay(jobs, config, limits=limits) as relay:
        with sessions.begin() as session:
            session.add_job(call)
        try:
            wait_until(lambda: relay.of(JobDone), "its second attempt, long before a poll is due")
        finally:
            leave.set()
    assert len(relay.of(JobRetried)) == 1
