"""The row of a leased job that another transaction holds when its handler has ended: no failure of the job's."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Discard, Jobs, OutboxSession, RelayConfig, Snooze
from outboxq.events import JobCrashed, JobDone
from tests.conftest import StartRelay
from tests.execution.test_raised import dead_letters
from tests.support.app import Effect
from tests.support.ledger import ledger, waiting
from tests.support.waiting import PATIENCE, wait_until

ONCE = Backoff(max_attempts=1)
QUICKLY = RelayConfig(slots_per_queue=1, lease_seconds=1, heartbeat_seconds=0.05, poll_seconds=0.05)


@contextmanager
def row_held(engine: Engine, name: str) -> Iterator[None]:
    """As a forgotten session of an operator's does."""
    with engine.begin() as connection:
        held = text("SELECT FROM outboxq.job WHERE args->>'name' = :name FOR UPDATE")
        assert connection.execute(held, {"name": name}).all() == [()]
        yield


@pytest.mark.first_and_last
@pytest.mark.parametrize("end", ["return", "snooze", "discard"])
def test_a_job_whose_row_is_held_past_its_deadlines_is_not_charged(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, end: str
) -> None:
    """With a single attempt it would be dead: it runs again when the row is free; others go on meanwhile."""
    jobs, begun, go_on = Jobs(), threading.Event(), threading.Event()
    attempts: list[int] = []

    @jobs.handler(queue="q", claim="lease", retry=ONCE, timeout_seconds=1)
    def write(ctx: Context, name: str) -> Snooze | Discard | None:
        ctx.session.add(Effect(name=name))
        ctx.session.flush()
        if name != "held":
            return None
        attempts.append(ctx.job.attempt)
        begun.set()
        assert go_on.wait(30)
        return {"snooze": Snooze(timedelta(0)), "discard": Discard("no more")}.get(end if len(attempts) == 1 else "")

    with sessions.begin() as session:
        session.add_job(write, name="held")
    with start_relay(jobs, QUICKLY) as running:
        assert begun.wait(30)
        with row_held(engine, "held"):
            go_on.set()
            with sessions.begin() as session:
                session.add_job(write, name="behind")
            # Its slot is free again, and that row is not.
            wait_until(lambda: ledger(engine) == {"behind": 1}, "the job behind it")
        wait_until(lambda: waiting(engine) == 0, "its end")
    assert ledger(engine) == {"behind": 1, "held": 1}
    assert attempts == [1, 1]
    assert dead_letters(engine) == []
    assert [event.dead_letter for event in running.of(JobCrashed)] == [False]
    assert len(running.of(JobDone)) == 2


@pytest.mark.large
def test_a_job_whose_row_is_held_time_after_time_is_never_buried(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Each time it ended well. A suspect whose relay died twice runs alone, and a crash of such a run would bury it."""
    jobs, begun, go_on = Jobs(), threading.Semaphore(0), threading.Semaphore(0)
    crashes: list[int] = []

    @jobs.handler(queue="q", claim="lease", timeout_seconds=1)
    def write(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        ctx.session.flush()
        crashes.append(ctx.job.crashes)
        begun.release()
        assert go_on.acquire(timeout=PATIENCE)

    with sessions.begin() as session:
        session.add_job(write, name="held")
    config = replace(QUICKLY, max_crashes=1)
    with start_relay(jobs, config) as running:
        for times in range(1, 6):
            assert begun.acquire(timeout=PATIENCE)
            with row_held(engine, "held"):
                go_on.release()
                wait_until(lambda: waits_for_a_row(engine), "its slot to wait for the row")
                wait_until(lambda: not waits_for_a_row(engine), "its slot to give up")
            wait_until(lambda times=times: len(running.of(JobCrashed)) == times, "the relay to have it back")
        go_on.release()
        wait_until(lambda: waiting(engine) == 0, "its end")
    assert ledger(engine) == {"held": 1}
    assert crashes == [0] * 6
    assert dead_letters(engine) == []


def test_the_row_of_a_job_that_wrote_nothing_holds_no_slot_up(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is removed together with others: these are at once, and it is when the row is free, without another run.

    No statement waits for the row up to its deadline, and fails, which a line of the log would say.
    """
    jobs, begun, go_on = Jobs(), threading.Event(), threading.Event()
    ran: list[str] = []

    @jobs.handler(queue="q", claim="lease", retry=ONCE)
    def call(ctx: Context, name: str) -> None:
        ran.append(name)
        if name == "held":
            begun.set()
            assert go_on.wait(PATIENCE)

    with sessions.begin() as session:
        session.add_jobs([call.job(name=name) for name in ("before", "held", "after")])
    with start_relay(jobs, QUICKLY) as running:
        assert begun.wait(PATIENCE)
        with row_held(engine, "held"):
            go_on.set()
            with sessions.begin() as session:
                session.add_job(call, name="behind")
            wait_until(lambda: "behind" in ran, "the only slot to go on")
            wait_until(lambda: waiting(engine) == 1, "the others to be removed")
        wait_until(lambda: waiting(engine) == 0, "its end")
    assert sorted(ran) == ["after", "before", "behind", "held"]
    assert not running.of(JobCrashed)
    assert dead_letters(engine) == []
    assert len(running.of(JobDone)) == 4
    assert [record.message for record in caplog.records if "the outcome of a job" in record.message] == []


def waits_for_a_row(engine: Engine) -> bool:
    """Whether any session does."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with engine.connect() as connection:
        return connection.execute(text(query)).scalar_one() > 0


def test_a_lease_that_no_slot_runs_again_and_again_is_buried(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """However it comes about, an orphan of the living relay is bounded as the jobs of dead ones are."""
    jobs, entered, leave = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="q", claim="lease")
    def write(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        entered.set()
        assert leave.wait(30)

    with sessions.begin() as session:
        session.add_jobs(write.job(name=name) for name in ("runs", "orphan", "orphan for the last time"))
    with start_relay(jobs, QUICKLY) as running:
        assert entered.wait(30)
        with engine.begin() as connection:
            orphaned = text(
                "UPDATE outboxq.job SET state = 'leased', lease_owner = relay.id, attempt = 1, "
                "crashes = CASE WHEN args->>'name' = 'orphan' THEN 2 ELSE 3 END FROM outboxq.relay AS relay "
                "WHERE args->>'name' <> 'runs'"
            )
            assert connection.execute(orphaned).rowcount == 2
        wait_until(lambda: len(running.of(JobCrashed)) == 2, "both to be taken back")
        leave.set()
        wait_until(lambda: waiting(engine) == 0, "the others")
    assert ledger(engine) == {"runs": 1, "orphan": 1}
    assert dead_letters(engine) == [("orphan for the last time", 0, "crashed 3 of 3 times while it ran alone")]
