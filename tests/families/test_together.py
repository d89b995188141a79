"""Features of flow control on one job, or in one queue: none takes away what another one promises."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig, external, schedules
from outboxq.admin import queues
from outboxq.admin.dead_letters import DeadFilter, retry_page
from outboxq.errors import ArgumentError
from outboxq.events import Event
from outboxq.job import OWN_HEADERS
from outboxq.queue_limits import make_limits
from outboxq.statements import cancel as cancel_statements
from tests.conftest import StartRelay
from tests.support.ledger import rows
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]


def test_what_belongs_to_one_job_is_refused_with_coalescing() -> None:
    """A run of another job may stand for it: its expiry, those that follow it and its batch would be lost."""
    jobs = Jobs()

    @jobs.handler(coalesce="k")
    def index(ctx: Context) -> None: ...

    with pytest.raises(ArgumentError, match="coalesce= or expires=, not both"):
        index.options(expires=timedelta(minutes=1))
    with pytest.raises(ArgumentError, match="is coalesced, and cannot be followed"):
        index.job().then(index.job())
    with pytest.raises(ArgumentError, match="is coalesced, and cannot be in a batch"):
        index.job().in_batch("0" * 32)


def test_a_dead_letter_of_a_group_waits_in_its_group_again(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain
) -> None:
    """As a ready job it would run beside the others of its group."""
    jobs = Jobs()

    @jobs.handler(queue="q", group="g", retry=Backoff(max_attempts=1))
    def fail(ctx: Context) -> None:
        raise ValueError

    with sessions.begin() as session:
        session.add_job(fail)
    drain(jobs)
    with engine.begin() as connection:
        retry_page(connection, DeadFilter())
    assert rows(engine, "SELECT state FROM outboxq.job") == [("grouped",)]


def test_headers_that_are_passed_on_do_not_pass_a_chain_on(sessions: sessionmaker[OutboxSession], drain: Drain) -> None:
    """What follows a job is its own; a trace may go to others."""
    jobs, ran = Jobs(), []

    @jobs.handler(queue="q")
    def last(ctx: Context) -> None:
        ran.append("last")

    @jobs.handler(queue="q")
    def mail(ctx: Context) -> None:
        ran.append(ctx.headers["trace"])

    @jobs.handler(queue="q")
    def first(ctx: Context) -> None:
        ctx.session.add_job(mail.options(headers=ctx.headers))

    with sessions.begin() as session:
        session.add_jobs([first.options(headers={"trace": "1"}).job().then(last.job())])
    drain(jobs)
    assert sorted(ran) == ["1", "last"]


@pytest.mark.parametrize("name", sorted(OWN_HEADERS))
def test_headers_of_outboxq_s_own_are_refused(name: str) -> None:
    """A job that was given them would be followed, called back or unique as another one."""
    with pytest.raises(ArgumentError, match=name):
        external("k", queue="q").options(headers={name: "x"}).job()


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_rate_does_not_forget_what_has_passed_its_group(
    sessions: sessionmaker[OutboxSession], engine: Engine, start_relay: StartRelay, claim: str
) -> None:
    """A retry that waits outside of its group's order is asked for tokens, though nothing else waits."""
    jobs, attempts = Jobs(), []

    @jobs.handler(
        queue="q",
        claim=claim,  # type: ignore[arg-type]  # one of the two modes
        group="g",
        on_failure="pass",
        retry=Backoff(max_attempts=3, first_seconds=0.3, jitter=0),
    )
    def work(ctx: Context) -> None:
        attempts.append(ctx.job.attempt)
        if len(attempts) == 1:
            raise ValueError

    with engine.begin() as connection:
        queues.set_limits(connection, ["q"], make_limits(rate="100/s", burst=20))
    with sessions.begin() as session:
        session.add_job(work)
    with start_relay(jobs, RelayConfig(poll_seconds=0.2)):
        wait_until(lambda: attempts == [1, 2], "the retry")


def test_failed_jobs_hold_nobody_up_where_code_lets_several_of_a_group_run(
    sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """`jobs.limit(per_group=2)` means what an operator's setting means."""
    jobs, ran = Jobs(), []
    jobs.limit("q", per_group=2)

    @jobs.handler(queue="q", group="g", retry=Backoff(max_attempts=3, first_seconds=3600, jitter=0))
    def work(ctx: Context, number: int) -> None:
        ran.append(number)
        if number < 3:
            raise ValueError

    with sessions.begin() as session:
        session.add_jobs(work.job(number=number) for number in range(1, 6))
    with start_relay(jobs, RelayConfig(slots_per_queue=2, poll_seconds=0.2)):
        wait_until(lambda: sorted(ran) == [1, 2, 3, 4, 5], "the jobs behind those that failed")


@pytest.mark.wide
def test_a_job_that_was_cancelled_stays_so_if_its_batch_is_rolled_back(
    sessions: sessionmaker[OutboxSession], engine: Engine, start_relay: StartRelay
) -> None:
    """The request comes back with the rollback, and the relay has not forgotten it."""
    jobs, ran, broke = Jobs(), [], []

    @jobs.handler(queue="q")
    def cancelled(ctx: Context) -> None:
        ran.append(ctx.job.id)

    @jobs.handler(queue="q")
    def breaks(ctx: Context) -> None:
        if not broke:
            broke.append(ctx.job.id)
            driver = ctx.session.connection().connection.driver_connection
            assert driver is not None
            driver.execute("ROLLBACK")

    with sessions.begin() as session:
        one = session.add_job(cancelled)
        session.add_job(breaks)
    with engine.begin() as connection:
        connection.execute(cancel_statements.request([one.id], "discard"))
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=50, lease_seconds=60)):
        wait_until(lambda: broke and not rows(engine, "SELECT FROM outboxq.job"), "both jobs to be over")
    assert ran == []


@pytest.mark.large
def test_a_unique_key_that_a_producer_holds_keeps_no_other_schedule_from_firing(
    sessions: sessionmaker[OutboxSession], engine: Engine, start_relay: StartRelay
) -> None:
    """Its own is tried again; the relay's other schedules go on within seconds."""
    jobs, ran = Jobs(), []

    @jobs.handler(queue="q", unique="u")
    def held(ctx: Context) -> None:
        ran.append("held")

    @jobs.handler(queue="q")
    def free(ctx: Context) -> None:
        ran.append("free")

    with sessions.begin() as session:
        schedules.put(session, "held", held.job(), cron="0 0 1 1 *")
        schedules.put(session, "free", free.job(), cron="0 0 1 1 *")
    earlier = "now() - interval '1 second' * CASE name WHEN 'held' THEN 2 ELSE 1 END"
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outboxq.schedule SET next_at = {earlier}"))
    with sessions() as session:
        session.add_job(held)
        session.flush()
        with start_relay(jobs, RelayConfig(slots_per_queue=1)):
            wait_until(lambda: ran == ["free"], "the other schedule")
        session.rollback()
