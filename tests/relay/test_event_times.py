"""How long jobs waited and ran, as their events say it."""

import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import (
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    DeadLetter,
    Discard,
    Jobs,
    OutboxSession,
    Relay,
    RelayConfig,
    Snooze,
)
from outboxq.clock import DatabaseClock
from outboxq.events import (
    ClaimsEmpty,
    ClaimsFailed,
    Event,
    EventOfJob,
    JobDied,
    JobDiscarded,
    JobDone,
    JobRetried,
    JobsClaimed,
    JobSnoozed,
)
from outboxq.postgres import Database
from tests.support.app import Child
from tests.support.ledger import of
from tests.support.limits import many_at_once

HOUR = 3600.0
LATER = Backoff(max_attempts=9, first_seconds=HOUR)
TOOK = 0.02


@dataclass(frozen=True)
class Item:
    name: str = ""


def registry(claim: str) -> Jobs:
    jobs = Jobs()
    mode = {"queue": "q", "claim": claim, "retry": LATER}

    @jobs.handler(**mode)
    def done(ctx: Context) -> None:
        time.sleep(TOOK)

    @jobs.handler(**mode)
    def fails(ctx: Context) -> None:
        time.sleep(TOOK)
        raise ValueError

    @jobs.handler(**mode)
    def refused_at_commit(ctx: Context) -> None:
        time.sleep(TOOK)
        ctx.session.add(Child(id=1, parent_id=404))

    @jobs.handler(**mode)
    def snoozes(ctx: Context) -> Snooze:
        time.sleep(TOOK)
        return Snooze(timedelta(hours=1))

    @jobs.handler(**mode)
    def discards(ctx: Context) -> Discard:
        time.sleep(TOOK)
        return Discard("no")

    @jobs.handler(**mode)
    def dies(ctx: Context) -> DeadLetter:
        time.sleep(TOOK)
        return DeadLetter("no")

    return jobs


def enqueue(sessions: sessionmaker[OutboxSession], jobs: Jobs) -> None:
    with sessions.begin() as session:
        for handler in jobs.resolve().handlers.values():
            session.add_job(handler)


@pytest.mark.first_and_last
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("batch_size", [1, 50])
def test_each_event_of_a_job_says_how_long_it_waited_and_ran(
    claim: str,
    batch_size: int,
    outboxq_database: Database,
    sessions: sessionmaker[OutboxSession],
    engine: Engine,
) -> None:
    """The wait from when it was due; the run also of a job that failed, at its COMMIT too."""
    jobs, told = registry(claim), list[Event]()
    enqueue(sessions, jobs)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET run_at = run_at - interval '1 hour'"))
    config = many_at_once(jobs, RelayConfig(slots_per_queue=1, batch_size=batch_size))
    Relay(outboxq_database.url, jobs, config, hooks=[told.append]).drain()
    events = [event for event in told if isinstance(event, EventOfJob)]
    kinds = {JobDone: 1, JobRetried: 2, JobSnoozed: 1, JobDiscarded: 1, JobDied: 1}
    assert {kind: len(of(told, kind)) for kind in kinds} == kinds
    for event in events:
        assert HOUR <= event.waited_seconds < HOUR + 600
        assert TOOK <= event.seconds < 60


def test_each_job_of_a_batch_handler_has_its_share_of_the_time(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """The sum is that of the call."""
    jobs, told, took = Jobs(), list[Event](), list[float]()

    @jobs.batch_handler(Item, queue="q")
    def together(ctx: BatchContext, items: list[BatchItem[Item]]) -> None:
        began = time.perf_counter()
        time.sleep(10 * TOOK)
        took.append(time.perf_counter() - began)

    with sessions.begin() as session:
        session.add_jobs(together.job(name=str(number)) for number in range(10))
    config = many_at_once(jobs, RelayConfig(slots_per_queue=1, batch_size=50))
    Relay(outboxq_database.url, jobs, config, hooks=[told.append]).drain()
    shares = [event.seconds for event in of(told, JobDone)]
    assert len(shares) == 10
    assert len(set(shares)) == 1
    assert sum(took) <= sum(shares) < 5 * sum(took)


def test_the_wait_is_told_by_the_databases_clock(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose clock is an hour ahead says the same."""
    jobs, told, real = registry("transaction"), list[Event](), time.time
    enqueue(sessions, jobs)
    monkeypatch.setattr(time, "time", lambda: real() + HOUR)
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1), hooks=[told.append]).drain()
    waits = [event.waited_seconds for event in told if isinstance(event, EventOfJob)]
    assert len(waits) == 6
    assert all(wait < 600 for wait in waits)


def test_the_databases_clock_is_compared_in_the_middle_of_a_round_trip() -> None:
    """What it showed was between the question and the answer."""
    clock = DatabaseClock()
    now = time.time()
    clock.compare(now + 500.0, now - 1.0, now + 1.0)
    assert abs(clock.ahead_seconds - 500.0) < 100.0


def test_claims_are_told_to_hooks_that_ask_for_them(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """How many jobs each took, and how often none: what a slot found last, when the relay ends."""
    jobs, told, others = registry("transaction"), list[Event](), list[Event]()
    jobs.on(JobsClaimed, ClaimsEmpty, ClaimsFailed)(told.append)
    enqueue(sessions, jobs)
    config = many_at_once(jobs, RelayConfig(slots_per_queue=1, batch_size=4))
    Relay(outboxq_database.url, jobs, config, hooks=[others.append]).drain()
    claimed = of(told, JobsClaimed)
    assert [event.count for event in claimed] == [4, 2]
    assert all(event.queue == "q" and event.seconds > 0 for event in claimed)
    assert {event.queue for event in of(told, ClaimsEmpty)} == {"q"}
    assert not [event for event in others if isinstance(event, JobsClaimed | ClaimsEmpty)]
    assert of(told, ClaimsFailed) == []
