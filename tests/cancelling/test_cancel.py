"""Cancelling jobs that run: their handlers end, nothing that they wrote stands, and the company of a job does."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import (
    AsyncContext,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    Jobs,
    OutboxSession,
    RelayConfig,
    cancel,
    find_job,
    wait_for_result,
)
from outboxq.admin import dead_letters
from outboxq.admin.dead_letters import DeadFilter
from outboxq.errors import ArgumentError
from outboxq.events import (
    BatchRolledBack,
    DatabaseLost,
    Event,
    JobCancelled,
    JobDied,
    JobDone,
    JobEvent,
    JobRetried,
    JobSnoozed,
    JobsSuspected,
)
from outboxq.fault_points import FaultPoint, fault_action
from outboxq.handlers.options import ClaimMode
from outboxq.outbox.handle import JobHandle
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from outboxq.statements import cancel as cancel_statements
from tests.conftest import RunningRelay, StartRelay
from tests.support.app import Effect
from tests.support.ledger import dead, effects, rows, waiting
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Event]]
LONG = 10 * PATIENCE
ONCE = Backoff(max_attempts=1)
# What is told to end has all the time to do so: nothing is cut off because a machine is busy.
PATIENT = RelayLimits(cut_after_seconds=LONG, free_after_seconds=LONG)
CUT_SOON = replace(PATIENT, cut_after_seconds=0.3)
pytestmark = pytest.mark.relay_limits(PATIENT)
MODES = pytest.mark.parametrize("claim", ["transaction", "lease"])


@pytest.fixture
def begun() -> threading.Event:
    return threading.Event()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets handlers that hang go on, at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def add(sessions: sessionmaker[OutboxSession], jobs: Jobs, *kinds: str) -> list[JobHandle]:
    registry = jobs.resolve()
    with sessions.begin() as session:
        return [session.add_job(registry.find(kind)) for kind in kinds]


def requests(engine: Engine) -> list[UUID]:
    return [job_id for (job_id,) in rows(engine, "SELECT job_id FROM outboxq.cancel_request")]


def cancel_now(sessions: sessionmaker[OutboxSession], handle: JobHandle, **options: str) -> str:
    with sessions.begin() as session:
        return cancel(session, handle, **options)


def hanging(claim: ClaimMode, how: str, begun: threading.Event, release: threading.Event) -> Jobs:
    """A registry with a handler `hang` that writes a row, and then does not end unless it is cancelled."""
    jobs = Jobs()
    options = {"kind": "hang", "queue": "q", "claim": claim, "timeout_seconds": None, "retry": ONCE}

    def looks(ctx: Context) -> None:
        ctx.session.add(Effect(name="hang"))
        ctx.session.flush()
        begun.set()
        while not ctx.cancelled:
            release.wait(0.01)

    def works_outside(ctx: Context) -> None:
        begun.set()
        while not ctx.cancelled:
            release.wait(0.01)
        raise ValueError

    def sends(ctx: Context) -> None:
        ctx.session.add(Effect(name="hang"))
        ctx.session.flush()
        begun.set()
        ctx.session.execute(text("SELECT pg_sleep(600)"))

    def is_deaf(ctx: Context) -> None:
        ctx.session.add(Effect(name="hang"))
        ctx.session.flush()
        begun.set()
        release.wait(LONG)

    async def awaits(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name="hang"))
        await ctx.session.flush()
        begun.set()
        await asyncio.sleep(LONG)

    async def awaits_a_statement(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name="hang"))
        await ctx.session.flush()
        begun.set()
        await ctx.session.execute(text("SELECT pg_sleep(600)"))

    async def is_deaf_async(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name="hang"))
        await ctx.session.flush()
        begun.set()
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    handlers = (looks, works_outside, sends, is_deaf, awaits, awaits_a_statement, is_deaf_async)
    jobs.handler(**options)({each.__name__: each for each in handlers}[how])
    return jobs


def wait_for_the_end(running: RunningRelay, engine: Engine) -> None:
    wait_until(lambda: running.of(JobCancelled), "the job to be cancelled")
    assert (effects(engine), waiting(engine), dead(engine), requests(engine)) == ([], 0, 0, [])


@pytest.mark.first_and_last
@MODES
@pytest.mark.parametrize("how", ["looks", "works_outside", "sends", "awaits", "awaits_a_statement"])
def test_a_running_job_is_cancelled(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    claim: ClaimMode,
    how: str,
) -> None:
    """Its handler is told, or its statement or task is cancelled; its rows are undone, and it never runs again."""
    jobs = hanging(claim, how, begun, release)
    with start_relay(jobs) as running:
        (handle,) = add(sessions, jobs, "hang")
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, handle) == "requested"
        wait_for_the_end(running, engine)
    assert not running.of(JobDone)
    assert not running.of(JobRetried)
    assert not running.of(DatabaseLost)


@pytest.mark.first_and_last
@MODES
@pytest.mark.relay_limits(CUT_SOON)
@pytest.mark.parametrize("how", ["is_deaf", "is_deaf_async"])
def test_a_handler_that_does_not_listen_is_cut_off(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    claim: ClaimMode,
    how: str,
) -> None:
    """Its backend is ended, so that nothing of it can stand, and another slot takes the place of its own."""
    jobs = hanging(claim, how, begun, release)
    done = threading.Event()
    options = {"queue": "q", "kind": "next", "claim": claim, "timeout_seconds": None}

    def go_on(ctx: Context) -> None:
        done.set()

    async def go_on_async(ctx: AsyncContext) -> None:
        done.set()

    jobs.handler(**options)(go_on if how == "is_deaf" else go_on_async)
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        (handle,) = add(sessions, jobs, "hang")
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, handle) == "requested"
        wait_for_the_end(running, engine)
        add(sessions, jobs, "next")
        assert done.wait(PATIENCE)
        release.set()
    assert not running.of(JobsSuspected)


@pytest.mark.relay_limits(CUT_SOON)
def test_the_row_of_a_leased_run_that_was_cut_off_names_the_jobs_it_stood_for(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
) -> None:
    """They were taken along for good when it began: without their ids nobody could say what became of them."""
    jobs = Jobs()
    ran: list[UUID] = []

    @jobs.handler(claim="lease", timeout_seconds=None, keep=timedelta(days=1), coalesce="number")
    def is_deaf(ctx: Context, number: int) -> None:
        ran.append(ctx.job.id)
        begun.set()
        release.wait(LONG)

    with sessions.begin() as session:
        handles = [session.add_job(is_deaf, number=1) for _ in range(3)]
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        assert begun.wait(PATIENCE)
        (runs,) = ran
        with sessions.begin() as session:
            assert cancel(session, runs) == "requested"
        wait_for_the_end(running, engine)
        release.set()
    others = {handle.id for handle in handles} - {runs}
    ((kept, outcome, stands_for),) = rows(engine, "SELECT id, outcome, stands_for FROM outboxq.done_job")
    assert (kept, outcome, set(stands_for)) == (runs, "cancelled", others)


@MODES
def test_a_cancelled_job_may_become_a_dead_letter(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    claim: ClaimMode,
) -> None:
    """With the reason "cancelled"; the event says so."""
    jobs = hanging(claim, "looks", begun, release)
    with start_relay(jobs) as running:
        (handle,) = add(sessions, jobs, "hang")
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, handle, outcome="dead") == "requested"
        wait_until(lambda: running.of(JobDied), "the dead letter")
    assert rows(engine, "SELECT id, reason FROM outboxq.dead_job") == [(handle.id, "cancelled")]
    assert (effects(engine), waiting(engine), requests(engine)) == ([], 0, [])


@pytest.mark.first_and_last
@pytest.mark.parametrize("how", ["looks", "sends", "awaits", "awaits_a_statement"])
def test_the_company_of_a_cancelled_job_stands(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    how: str,
) -> None:
    """Jobs that share its transaction are committed in it: their rows, once each."""
    jobs = hanging("transaction", how, begun, release)

    if how in ("looks", "sends"):

        @jobs.handler(queue="q", kind="good")
        def good(ctx: Context) -> None:
            ctx.session.add(Effect(name=f"good {ctx.session.scalar(text('SELECT pg_current_xact_id()'))}"))

    else:

        @jobs.handler(queue="q", kind="good")
        async def good_async(ctx: AsyncContext) -> None:
            ctx.session.add(Effect(name=f"good {await ctx.session.scalar(text('SELECT pg_current_xact_id()'))}"))

    _, handle, _ = add(sessions, jobs, "good", "hang", "good")
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=3)) as running:
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, handle) == "requested"
        wait_until(lambda: running.of(JobCancelled), "the job to be cancelled")
        wait_until(lambda: len(running.of(JobDone)) == 2, "the others to be done")
    first, last = effects(engine)
    assert first == last
    assert (waiting(engine), dead(engine), requests(engine)) == (0, 0, [])
    assert not running.of(BatchRolledBack)


@pytest.mark.relay_limits(CUT_SOON)
def test_the_company_of_a_job_that_is_cut_off_runs_again(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
) -> None:
    """Their transaction is lost with its backend: they run again, uncounted, and none of them as a suspect."""
    jobs = hanging("transaction", "is_deaf", begun, release)

    @jobs.handler(queue="q", kind="good")
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name="good"))

    _, handle, _ = add(sessions, jobs, "good", "hang", "good")
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=3)) as running:
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, handle) == "requested"
        wait_until(lambda: running.of(JobCancelled), "the job to be cancelled")
        wait_until(lambda: len(running.of(JobDone)) == 2, "the others to be done")
        release.set()
    assert effects(engine) == ["good", "good"]
    assert [event.job.attempt for event in running.of(JobDone)] == [1, 1]
    assert not running.of(JobsSuspected)


def test_a_batch_handler_is_called_again_without_the_cancelled_job(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
) -> None:
    """One of its jobs is cancelled: the call ends, and the others run by themselves."""
    jobs, calls = Jobs(), list[int]()

    class Nothing:
        pass

    @jobs.batch_handler(Nothing, queue="q", kind="many", max_size=3)
    def many(ctx: BatchContext, items: list[BatchItem[Nothing]]) -> None:
        calls.append(len(items))
        ctx.session.add_all(Effect(name="item") for _ in items)
        if len(items) == 3:
            ctx.session.flush()
            begun.set()
            while not ctx.cancelled:
                release.wait(0.01)

    _, handle, _ = add(sessions, jobs, "many", "many", "many")
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=3)) as running:
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, handle) == "requested"
        wait_until(lambda: len(running.of(JobDone)) == 2, "the others to be done")
    assert [event.job.id for event in running.of(JobCancelled)] == [handle.id]
    assert effects(engine) == ["item", "item"]
    assert calls == [3, 1, 1]


def test_a_shared_run_goes_on_without_the_cancelled_job(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
) -> None:
    """Jobs of a batchable kind run together; after the cancellation each runs by itself, but the cancelled one."""
    jobs, ran = Jobs(), list[UUID]()

    @jobs.handler(queue="q", kind="each", batchable=True)
    def each(ctx: Context) -> None:
        ran.append(ctx.job.id)
        ctx.session.add(Effect(name="each"))
        if len(ran) == 2:
            begun.set()
            while not ctx.cancelled:
                release.wait(0.01)

    first, second, third = add(sessions, jobs, "each", "each", "each")
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=3)) as running:
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, second) == "requested"
        wait_until(lambda: len(running.of(JobDone)) == 2, "the others to be done")
    assert [event.job.id for event in running.of(JobCancelled)] == [second.id]
    assert effects(engine) == ["each", "each"]
    assert ran == [first.id, second.id, first.id, third.id]


@MODES
def test_a_job_that_ended_before_it_was_told_is_done(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    claim: ClaimMode,
) -> None:
    """Its relay does not hear of the request in time: what it did stands, and its request says so."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="good", claim=claim)
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name="good"))
        begun.set()
        assert release.wait(PATIENCE)

    with start_relay(jobs, RelayConfig(listen=False, lease_seconds=3600)) as running:
        (handle,) = add(sessions, jobs, "good")
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, handle) == "requested"
        release.set()
        wait_until(lambda: running.of(JobDone), "the job to be done")
    assert effects(engine) == ["good"]
    assert requests(engine) == [handle.id]


def add_again(engine: Engine, job_id: UUID, kind: str, group: str | None = None) -> None:
    """Add a job with the id of one that is over, as its producer may choose it."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.job (id, queue, kind, args, group_key, state) "
                "VALUES (:id, 'q', :kind, '{}', :group, :state)"
            ),
            {"id": job_id, "kind": kind, "group": group, "state": "grouped" if group else "ready"},
        )


@pytest.mark.first_and_last
@MODES
@pytest.mark.parametrize("group", [None, "g"])
def test_a_request_that_outlived_its_job_does_not_end_a_later_one_of_its_id(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    drain: Drain,
    begun: threading.Event,
    release: threading.Event,
    claim: ClaimMode,
    group: str | None,
) -> None:
    """It runs once, soon, without an attempt more."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="good", claim=claim)
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name=f"attempt {ctx.job.attempt}"))
        begun.set()
        assert release.wait(PATIENCE)

    with start_relay(jobs, RelayConfig(listen=False, lease_seconds=3600)) as running:
        (handle,) = add(sessions, jobs, "good")
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, handle) == "requested"
        release.set()
        wait_until(lambda: running.of(JobDone), "the job to be done")
    add_again(engine, handle.id, "good", group)
    events = drain(jobs)
    assert not [event for event in events if isinstance(event, JobCancelled)]
    assert (effects(engine), waiting(engine)) == (["attempt 1", "attempt 1"], 0)


@pytest.mark.large
@MODES
def test_a_request_for_an_earlier_job_of_its_id_interrupts_none_that_runs(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    claim: ClaimMode,
) -> None:
    """The look that reports a request for the job beside it does not report it."""
    jobs, runs = Jobs(), threading.Event()

    @jobs.handler(queue="q", kind="good", claim=claim)
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name="good"))
        begun.set()
        assert release.wait(PATIENCE)

    @jobs.handler(queue="q", kind="other", claim=claim)
    def other(ctx: Context) -> None:
        runs.set()
        ctx.session.execute(text("SELECT pg_sleep(60)"))

    good_one, other_one = add(sessions, jobs, "good", "other")
    with engine.begin() as connection:
        old = "INSERT INTO outboxq.cancel_request (job_id, requested_at) VALUES (:id, now() - interval '1 day')"
        connection.execute(text(old), {"id": good_one.id})
    with start_relay(jobs, RelayConfig(listen=False, slots_per_queue=2)) as running:
        assert begun.wait(PATIENCE)
        assert runs.wait(PATIENCE)
        assert cancel_now(sessions, other_one) == "requested"
        wait_until(lambda: running.of(JobCancelled), "the job beside it to end")
        release.set()
        wait_until(lambda: running.of(JobDone), "the job to be done")
        ended = [(type(event), event.job.id) for event in running.events if isinstance(event, JobEvent)]
    assert ended == [(JobCancelled, other_one.id), (JobDone, good_one.id)]
    assert effects(engine) == ["good"]


def test_a_request_for_an_earlier_job_of_its_id_has_no_outcome(
    engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """It may have been reported a moment ago, when the job that it was made for was there."""
    jobs = Jobs()
    jobs.handler(queue="q", kind="good")(lambda ctx: None)
    (handle,) = add(sessions, jobs, "good")
    with engine.begin() as connection:
        connection.execute(cancel_statements.request([handle.id], "discard"))
        asked_at = connection.execute(text("SELECT requested_at FROM outboxq.cancel_request")).scalar_one()
        later = cancel_statements.take_request(handle.id, asked_at + timedelta(seconds=1))
        assert connection.execute(later).scalars().all() == [None]
    assert requests(engine) == []


def test_a_request_for_a_later_job_of_an_id_counts(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Although there is one already, which was made for an earlier job."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="good")
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name="good"))

    (handle,) = add(sessions, jobs, "good")
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO outboxq.cancel_request (job_id, requested_at) VALUES (:id, now() - interval '1 day')"),
            {"id": handle.id},
        )
    with engine.begin() as connection:
        connection.execute(cancel_statements.request([handle.id], "discard"))
    events = drain(jobs)
    assert [event.job.id for event in events if isinstance(event, JobCancelled)] == [handle.id]
    assert (effects(engine), waiting(engine), requests(engine)) == ([], 0, [])


@pytest.mark.parametrize("ahead", ["-1 hour", "1 hour"])
def test_a_request_counts_whatever_clock_its_producer_has(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, ahead: str
) -> None:
    """A job that says to have been added an hour from now is cancelled like any other."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="good")
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name="good"))

    (handle,) = add(sessions, jobs, "good")
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE outboxq.job SET created_at = created_at + CAST(:ahead AS interval)"), {"ahead": ahead}
        )
        connection.execute(cancel_statements.request([handle.id], "discard"))
    events = drain(jobs)
    assert [event.job.id for event in events if isinstance(event, JobCancelled)] == [handle.id]


@MODES
def test_a_request_counts_for_a_run_that_takes_along_a_job_that_came_later(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, claim: ClaimMode
) -> None:
    """The run has the arguments and the time of that job, and the id of the cancelled one: it ends for both."""
    jobs, ran = Jobs(), list[UUID]()

    @jobs.handler(queue="q", claim=claim, coalesce="number")
    def one(ctx: Context, number: int) -> None:
        ran.append(ctx.job.id)

    with sessions.begin() as session:
        handle = session.add_job(one, number=1)
    with engine.begin() as connection:
        connection.execute(cancel_statements.request([handle.id], "discard"))
        connection.execute(text("UPDATE outboxq.job SET priority = 1"))
    with sessions.begin() as session:
        session.add_job(one, number=1)
    events = drain(jobs, batch_size=1, slots_per_queue=1)
    assert [event.job.id for event in events if isinstance(event, JobCancelled)] == [handle.id]
    assert (ran, waiting(engine), requests(engine)) == ([], 0, [])


def test_a_job_that_waits_is_cancelled_with_its_request(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """It was asked for when it ran, and came back since: nothing of that is left."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="good")
    def good(ctx: Context) -> None: ...

    (handle,) = add(sessions, jobs, "good")
    with engine.begin() as connection:
        connection.execute(cancel_statements.request([handle.id], "discard"))
    assert cancel_now(sessions, handle) == "cancelled"
    assert (waiting(engine), requests(engine)) == (0, [])


@MODES
def test_a_request_stands_until_the_job_is_gone(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, drain: Drain, claim: ClaimMode
) -> None:
    """A job that was put back to be retried before its relay heard of the request is dropped by its next claim."""
    jobs, handles, attempts = Jobs(), list[JobHandle](), list[int]()

    @jobs.handler(queue="q", kind="fail", claim=claim, retry=Backoff(first_seconds=3600.0))  # type: ignore[arg-type]
    def fail(ctx: Context) -> None:
        attempts.append(ctx.job.attempt)
        assert cancel_now(sessions, handles[0]) == "requested"
        raise ValueError

    handles += add(sessions, jobs, "fail")
    # It neither listens nor looks again.
    with start_relay(jobs, RelayConfig(listen=False, lease_seconds=3600)) as running:
        wait_until(lambda: running.of(JobRetried), "the attempt to fail")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET run_at = now()"))
    events = drain(jobs)
    assert [type(event) for event in events if isinstance(event, JobCancelled | JobRetried)] == [JobCancelled]
    assert attempts == [1]
    assert (waiting(engine), dead(engine), requests(engine)) == (0, 0, [])


def test_a_suspect_that_was_cancelled_does_not_run(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Its relay died before it had answered: the claim that finds the mark's job ends it."""
    jobs, ran = Jobs(), list[UUID]()

    @jobs.handler(queue="q", kind="kill")
    def kill(ctx: Context) -> None:
        ran.append(ctx.job.id)

    (handle,) = add(sessions, jobs, "kill")
    with engine.connect() as relay:
        relay.execute(text("DELETE FROM outboxq.job"))
        assert cancel_now(sessions, handle) == "requested"
        relay.rollback()
    events = drain(jobs)
    assert [type(event) for event in events if isinstance(event, JobsSuspected | JobCancelled)] == [
        JobsSuspected,
        JobCancelled,
    ]
    assert (ran, waiting(engine), dead(engine), requests(engine)) == ([], 0, 0, [])


def test_a_request_that_does_not_stand_any_more_ends_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """What a relay has read is asked again in the transaction that would end the job."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="good")
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name="good"))

    (handle,) = add(sessions, jobs, "good")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO outboxq.cancel_request (job_id) VALUES (:id)"), {"id": handle.id})

    def take_back(point: FaultPoint) -> None:
        if point == "after-claim":
            with engine.begin() as connection:
                connection.execute(text("DELETE FROM outboxq.cancel_request"))

    with fault_action(take_back):
        events = drain(jobs)
    assert [type(event) for event in events if isinstance(event, JobEvent)] == [JobSnoozed, JobDone]
    assert effects(engine) == ["good"]


@pytest.mark.parametrize("outcome", ["discard", "dead"])
def test_a_job_that_waits_is_gone_at_once(engine: Engine, sessions: sessionmaker[OutboxSession], outcome: str) -> None:
    """Without a relay; with a dead letter if that is asked for, and never both ready and dead."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="good")
    def good(ctx: Context) -> None: ...

    (handle,) = add(sessions, jobs, "good")
    assert cancel_now(sessions, handle, outcome=outcome) == "cancelled"
    assert cancel_now(sessions, handle, outcome=outcome) == "not_found"
    assert (waiting(engine), dead(engine), requests(engine)) == (0, int(outcome == "dead"), [])


def test_a_session_cancels_what_it_has_just_added(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """The job that is pending in the session is sent first, and then deleted."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="good")
    def good(ctx: Context) -> None: ...

    with sessions.begin() as session:
        assert cancel(session, session.add_job(good)) == "cancelled"
    assert waiting(engine) == 0


def test_an_async_connection_cancels(outboxq_database: Database, sessions: sessionmaker[OutboxSession]) -> None:
    """The same function; its result is awaited."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="good")
    def good(ctx: Context) -> None: ...

    (handle,) = add(sessions, jobs, "good")

    async def run() -> str:
        engine = create_async_engine(outboxq_database.url)
        try:
            async with engine.begin() as connection:
                return await cancel(connection, handle.id)
        finally:
            await engine.dispose()

    assert asyncio.run(run()) == "cancelled"


def test_a_job_is_cancelled_by_its_id_as_text(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """As a request brings it; what came of it is told as for any other."""
    jobs = Jobs()

    @jobs.handler
    def work(ctx: Context) -> None: ...

    (waits,) = add(sessions, jobs, "work")
    with engine.begin() as connection:
        assert cancel(connection, str(waits.id)) == "cancelled"
        assert cancel(connection, str(waits.id)) == "not_found"


@pytest.mark.parametrize("given", ["no uuid", "", None, 7])
def test_what_is_no_id_is_refused_at_the_call(engine: Engine, given: object) -> None:
    """Before the database sees it, and with what an id looks like."""
    form = "such as '0192"
    with engine.begin() as connection:
        with pytest.raises(ArgumentError, match=form):
            cancel(connection, given)  # type: ignore[call-overload]  # what is no id is refused at run time
        with pytest.raises(ArgumentError, match=form):
            find_job(connection, given)  # type: ignore[call-overload]  # what is no id is refused at run time
    with pytest.raises(ArgumentError, match=form):
        wait_for_result(engine, given)  # type: ignore[call-overload]  # what is no id is refused at run time


def test_another_outcome_is_refused(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """At the call, with what it takes."""
    with engine.connect() as connection, pytest.raises(ArgumentError, match="'discard' or 'dead', got 'kill'"):
        cancel(connection, UUID(int=1), "kill")  # type: ignore[call-overload]


@MODES
def test_a_group_goes_on_behind_its_cancelled_head(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    claim: ClaimMode,
) -> None:
    """The head is gone with its rows, and the next one of its group runs."""
    jobs = hanging(claim, "looks", begun, release)

    @jobs.handler(queue="q", kind="good", claim=claim, timeout_seconds=None)  # type: ignore[arg-type]
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name="good"))

    with sessions.begin() as session:
        handle = session.add_job(jobs.resolve().find("hang").options(group="g"))
        session.add_job(good.options(group="g"))
    with start_relay(jobs, RelayConfig(slots_per_queue=2)) as running:
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, handle) == "requested"
        wait_until(lambda: running.of(JobDone), "the next of the group to be done")
    assert [event.job.id for event in running.of(JobCancelled)] == [handle.id]
    assert (effects(engine), waiting(engine), requests(engine)) == (["good"], 0, [])


def test_jobs_that_a_cancelled_handler_added_are_not_there(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
) -> None:
    """Neither plain ones nor those with a unique key, which are sent last; its key is free again."""
    jobs = Jobs()

    @jobs.handler(queue="other", kind="child")
    def child(ctx: Context) -> None: ...

    @jobs.handler(queue="q", kind="parent")
    def parent(ctx: Context) -> None:
        ctx.session.add_job(child)
        ctx.session.add_job(child.options(unique="one"))
        ctx.session.flush()
        begun.set()
        while not ctx.cancelled:
            release.wait(0.01)

    (handle,) = add(sessions, jobs, "parent")
    with start_relay(jobs) as running:
        assert begun.wait(PATIENCE)
        assert cancel_now(sessions, handle) == "requested"
        wait_until(lambda: running.of(JobCancelled), "the job to be cancelled")
    assert (waiting(engine), requests(engine)) == (0, [])
    assert not running.of(JobDone)


def test_a_dead_letter_comes_back_without_its_cancellation(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A request that came when its job was dying does not end the job that an operator retries."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="fail", retry=ONCE)
    def fail(ctx: Context) -> None:
        if not ctx.job.errors.count("ValueError"):
            raise ValueError
        ctx.session.add(Effect(name="retried"))

    (handle,) = add(sessions, jobs, "fail")
    drain(jobs)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO outboxq.cancel_request (job_id) VALUES (:id)"), {"id": handle.id})
    with engine.begin() as connection:
        assert dead_letters.retry_page(connection, DeadFilter()).changed == (handle.id,)
    drain(jobs)
    assert (effects(engine), waiting(engine), requests(engine)) == (["retried"], 0, [])


def test_requests_are_pruned_an_hour_later_if_their_jobs_are_gone(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """One whose job is still there stays, however old: the job may come back from a retry or a crash.

    A later job of its id does not keep it.
    """
    jobs = Jobs()

    @jobs.handler(queue="q", kind="good")
    def good(ctx: Context) -> None: ...

    asked, later = add(sessions, jobs, "good", "good")
    young = UUID(int=2)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO outboxq.queue (name, paused_at) VALUES ('q', now())"))
        connection.execute(
            text("UPDATE outboxq.job SET created_at = now() - interval '3 hours' WHERE id = :id"), {"id": asked.id}
        )
        connection.execute(
            text(
                "INSERT INTO outboxq.cancel_request (job_id, requested_at) VALUES (:young, now()), "
                "(:asked, now() - interval '2 hours'), (:later, now() - interval '2 hours'), "
                "(:gone, now() - interval '2 hours')"
            ),
            {"asked": asked.id, "later": later.id, "gone": UUID(int=1), "young": young},
        )
    drain(jobs)
    assert set(requests(engine)) == {asked.id, young}
