"""Expiry: a job that has not begun in time is dropped, whatever kept it, and nothing of it runs."""

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, BatchContext, BatchItem, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.events import Event, JobDone, JobEvent, JobExpired, JobRetried
from outboxq.postgres import Database
from tests.support.app import Effect
from tests.support.cli import call
from tests.support.ledger import dead, effects, rows, waiting
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
MODES = pytest.mark.parametrize("claim", ["transaction", "lease"])
HOUR = timedelta(hours=1)


def add(sessions: sessionmaker[OutboxSession], jobs: Jobs, kind: str, number: int = 1, **options: object) -> None:
    registry = jobs.resolve()
    with sessions.begin() as session:
        session.add_jobs([registry.find(kind).options(**options).job() for _ in range(number)])


def let_expire(engine: Engine, condition: str = "true") -> None:
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outboxq.job SET expires_at = now() - interval '1 second' WHERE {condition}"))


@pytest.mark.each_value
@MODES
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("batch_size", [1, 10])
def test_an_expired_job_is_dropped_and_the_others_run(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, claim: str, flavour: str, batch_size: int
) -> None:
    """Neither its handler nor a dead letter: an event says so. One whose time is not over runs."""
    jobs = Jobs()
    options = {"queue": "q", "kind": "write", "claim": claim}

    def write(ctx: Context) -> None:
        ctx.session.add(Effect(name="written"))

    async def write_async(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name="written"))

    jobs.handler(**options)(write if flavour == "sync" else write_async)
    add(sessions, jobs, "write", 2, expires=HOUR)
    let_expire(engine)
    add(sessions, jobs, "write", 2, expires=HOUR)
    add(sessions, jobs, "write")
    events = drain(jobs, batch_size=batch_size, slots_per_queue=1)
    assert sorted(type(event).__name__ for event in events if isinstance(event, JobEvent)) == [
        *["JobDone"] * 3,
        *["JobExpired"] * 2,
    ]
    # Not the time since another job began, or since the machine did.
    assert max(event.seconds for event in events if isinstance(event, JobExpired)) < 30
    assert effects(engine) == ["written"] * 3
    assert (waiting(engine), dead(engine)) == (0, 0)


def test_a_batch_handler_is_given_what_has_not_expired(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """In one call: an expiry does not keep jobs from running together."""
    jobs, calls = Jobs(), list[int]()

    class Nothing:
        pass

    @jobs.batch_handler(Nothing, queue="q", kind="many", expires=HOUR)
    def many(ctx: BatchContext, items: list[BatchItem[Nothing]]) -> None:
        calls.append(len(items))

    add(sessions, jobs, "many", 2)
    let_expire(engine)
    add(sessions, jobs, "many", 3)
    events = drain(jobs, batch_size=10, slots_per_queue=1)
    assert calls == [3]
    assert len([event for event in events if isinstance(event, JobExpired)]) == 2


@MODES
def test_a_retry_ends_when_its_job_has_expired(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, claim: str
) -> None:
    """The expiry stays with the job when it is put back."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="fail", claim=claim, retry=Backoff(first_seconds=3600.0))  # type: ignore[arg-type]
    def fail(ctx: Context) -> None:
        raise ValueError

    add(sessions, jobs, "fail", expires=timedelta(hours=2))
    events = drain(jobs)
    ((left,),) = rows(engine, "SELECT expires_at - created_at FROM outboxq.job")
    assert timedelta(minutes=119) < left < timedelta(minutes=121)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET run_at = now()"))
    let_expire(engine)
    events += drain(jobs)
    assert [type(event) for event in events if isinstance(event, JobEvent)] == [JobRetried, JobExpired]
    assert (waiting(engine), dead(engine)) == (0, 0)


def test_a_job_that_waited_in_its_batch_expires_there(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The time is looked at before each handler is called, and not only when the batch was claimed."""
    jobs, expired_soon = Jobs(), timedelta(seconds=1)

    @jobs.handler(queue="q", kind="slow")
    def slow(ctx: Context) -> None:
        ctx.session.add(Effect(name="slow"))
        wait_for_the_expiry(engine)

    @jobs.handler(queue="q", kind="late", expires=expired_soon)
    def late(ctx: Context) -> None:
        ctx.session.add(Effect(name="late"))

    with sessions.begin() as session:
        session.add_job(slow)
        session.add_job(late)
    events = drain(jobs, batch_size=2, slots_per_queue=1)
    assert [type(event) for event in events if isinstance(event, JobEvent)] == [JobDone, JobExpired]
    assert effects(engine) == ["slow"]


def wait_for_the_expiry(engine: Engine) -> None:
    over = "SELECT bool_and(expires_at < clock_timestamp()) FROM outboxq.job WHERE expires_at IS NOT NULL"
    wait_until(lambda: rows(engine, over) == [(True,)], "the job to expire")


def test_the_database_says_what_time_it_is(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay whose own clock is a year ahead drops nothing before its time."""
    jobs, real = Jobs(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3e7)

    @jobs.handler(queue="q", kind="write", expires=HOUR)
    def write(ctx: Context) -> None:
        ctx.session.add(Effect(name="written"))

    add(sessions, jobs, "write")
    drain(jobs)
    assert effects(engine) == ["written"]


def test_the_list_shows_when_a_job_expires(outboxq_database: Database, sessions: sessionmaker[OutboxSession]) -> None:
    """As a time; of others nothing."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="write")
    def write(ctx: Context) -> None: ...

    add(sessions, jobs, "write", expires=HOUR)
    add(sessions, jobs, "write")
    first, second = call("jobs", "list", "--json", url=outboxq_database.url).ok().json["jobs"]
    assert (first["expires_at"][-1], second["expires_at"]) == ("Z", None)


@MODES
def test_the_report_counts_what_expired(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], claim: str
) -> None:
    """Beside what was done and what failed."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="write", claim=claim)  # type: ignore[arg-type]
    def write(ctx: Context) -> None: ...

    add(sessions, jobs, "write", 3, expires=HOUR)
    let_expire(engine)
    add(sessions, jobs, "write")
    report = Relay(outboxq_database.url, jobs, RelayConfig(), hooks=()).drain()
    assert (report.done, report.failed, report.died, report.expired, report.cancelled) == (1, 0, 0, 3, 0)
