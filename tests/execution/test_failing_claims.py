"""Claims that fail or are cancelled: what they did not get is not lost, marked or blamed, and nothing else waits."""

import threading
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.events import ClaimsFailed, DatabaseLost, Event, JobDone, JobsClaimed, JobsSuspected
from outboxq.execution.batch_state import Ended
from outboxq.execution.claim import ClaimRequest
from outboxq.postgres import Database
from outboxq.relay.planner import Planner
from tests.conftest import StartRelay
from tests.support import app
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]

# Rows of jobs are deleted by nothing but claims. Theirs take so long as their kind says.
SLOW_CLAIMS = """
CREATE FUNCTION hesitate() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN IF OLD.headers ? 'hesitate' THEN PERFORM pg_sleep((OLD.headers->>'hesitate')::float); END IF; RETURN OLD; END$$;
CREATE TRIGGER hesitate BEFORE DELETE ON outboxq.job FOR EACH ROW EXECUTE FUNCTION hesitate();
"""


def run(engine: Engine, *statements: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def hesitating(seconds: float, condition: str = "true") -> str:
    return f'UPDATE outboxq.job SET headers = \'{{"hesitate": "{seconds}"}}\' WHERE {condition}'


def enqueue(sessions: sessionmaker[OutboxSession], *names: str) -> None:
    with sessions.begin() as session:
        session.add_jobs(app.record.job(name=name) for name in names)


def limit_statements(engine: Engine) -> None:
    """To one second, for sessions that begin from now on."""
    with engine.connect() as connection:
        name = connection.exec_driver_sql("SELECT current_database()").scalar_one()
    run(engine, f'ALTER DATABASE "{name}" SET statement_timeout = 1000')


def done(events: list[Event]) -> list[tuple[int, int]]:
    return [(event.job.attempt, event.job.crashes) for event in events if isinstance(event, JobDone)]


@pytest.mark.parametrize("drains", [True, False])
def test_suspects_that_cannot_be_claimed_keep_no_other_job_waiting(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, drain: Drain, drains: bool
) -> None:
    """Whatever is wrong with a suspect's row, the ready jobs of its queue run; a drain ends."""
    enqueue(sessions, "suspected", "ready")
    run(
        engine,
        "UPDATE outboxq.job SET state = 'suspect' WHERE args->>'name' = 'suspected'",
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no crash is counted'; END$$",
        "CREATE TRIGGER refuse BEFORE UPDATE ON outboxq.job FOR EACH ROW WHEN (NEW.crashes > OLD.crashes) "
        "EXECUTE FUNCTION refuse()",
    )
    if drains:
        assert done(drain(slots_per_queue=1)) == [(1, 0)]
        return
    with start_relay(config=RelayConfig(slots_per_queue=1, poll_seconds=0.1)) as running:
        wait_until(lambda: running.of(JobDone), "the ready job")
        enqueue(sessions, "later")
        wait_until(lambda: len(running.of(JobDone)) == 2, "the job that came later")
        run(engine, "DROP TRIGGER refuse ON outboxq.job")
        wait_until(lambda: len(running.of(JobDone)) == 3, "the suspect")


@pytest.mark.large
@pytest.mark.parametrize("timeout_seconds", [None, 30.0])
def test_claims_are_not_under_the_time_out_of_the_role(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, timeout_seconds: float | None
) -> None:
    """A claim that takes longer takes its jobs; the handlers have their own deadline, or else the role's."""
    jobs, seen = Jobs(), []

    @jobs.handler(queue="ledger", timeout_seconds=timeout_seconds)
    def look(ctx: Context) -> None:
        seen.append(ctx.session.scalar(text("SHOW statement_timeout")))

    with sessions.begin() as session:
        session.add_job(look)
        session.add_job(look.options(delay=timedelta(0)))
    run(engine, SLOW_CLAIMS, hesitating(1.5))
    limit_statements(engine)
    events = drain(jobs, slots_per_queue=1)
    assert done(events) == [(1, 0)] * 2
    assert not [event for event in events if isinstance(event, JobsSuspected)]
    assert seen == ["1s" if timeout_seconds is None else "30s"] * 2


@pytest.mark.large
def test_claims_of_a_lease_are_not_under_the_time_out_of_the_role(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The first one takes longer than the role's statements may, and takes its job."""
    jobs = Jobs()

    @jobs.handler(queue="lease", claim="lease", retry=Backoff(max_attempts=1))
    def work(ctx: Context) -> None:
        del ctx

    with sessions.begin() as session:
        session.add_job(work)
    run(
        engine,
        "CREATE SEQUENCE claims",
        "CREATE FUNCTION hesitate() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN "
        "IF nextval('claims') = 1 THEN PERFORM pg_sleep(1.5); END IF; RETURN NEW; END$$",
        "CREATE TRIGGER hesitate BEFORE UPDATE ON outboxq.job FOR EACH ROW WHEN (NEW.state = 'leased') "
        "EXECUTE FUNCTION hesitate()",
    )
    limit_statements(engine)
    assert done(drain(jobs, slots_per_queue=1)) == [(1, 0)]
    with engine.connect() as connection:
        # No rollback takes a number of a sequence back.
        assert connection.exec_driver_sql("SELECT last_value FROM claims").scalar_one() == 1


@pytest.mark.large
def test_unknown_kinds_are_parked_under_no_time_out_of_the_role(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """As the claim that met them: a long queue of them would be walked in vain for ever."""
    enqueue(sessions, "first", "second")
    run(
        engine,
        "UPDATE outboxq.job SET kind = 'unknown'",
        "CREATE FUNCTION hesitate() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(1.5); RETURN NEW; "
        "END$$",
        "CREATE TRIGGER hesitate BEFORE UPDATE ON outboxq.job FOR EACH ROW WHEN (NEW.parked > 0) "
        "EXECUTE FUNCTION hesitate()",
    )
    limit_statements(engine)
    drain(slots_per_queue=1)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT array_agg(parked) FROM outboxq.job").scalar_one() == [1, 1]


CLAIMING = """\
SELECT pid, query, query_start FROM pg_stat_activity
WHERE datname = current_database() AND wait_event = 'PgSleep'"""


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many jobs each claim was that was cancelled by itself."""
    found: list[int] = []
    record = Planner.record

    def note(planner: Planner, request: ClaimRequest, ended: Ended) -> None:
        if ended.was_too_large:
            found.append(request.limit)
        record(planner, request, ended)

    monkeypatch.setattr(Planner, "record", note)
    return found


def cancel_claim(engine: Engine) -> None:
    """Wait for a claim that hesitates and cancel it."""

    def find() -> tuple[int, str, datetime] | None:
        with engine.connect() as connection:
            row = connection.exec_driver_sql(CLAIMING).first()
            return None if row is None else (row[0], row[1], row[2])

    pid, query, begun = wait_until(find, "a claim that hesitates")
    run(engine, f"SELECT pg_cancel_backend({pid})")
    # For a moment it is still there, and would be taken for the next one.
    wait_until(lambda: find() != (pid, query, begun), "the claim to be cancelled")


@pytest.mark.parametrize("behind_commit", [False, True])
def test_a_cancelled_claim_is_no_death_and_no_outage(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    limits: list[int],
    behind_commit: bool,
) -> None:
    """Its jobs never ran: they are no suspects and run as they would have; the next claim asks for half as many."""
    if behind_commit:
        enqueue(sessions, *(f"before {number}" for number in range(8)))
    enqueue(sessions, *(f"job {number}" for number in range(8)))
    run(engine, SLOW_CLAIMS, hesitating(60, "args->>'name' LIKE 'job%%'"))
    with start_relay(config=RelayConfig(slots_per_queue=1, batch_size=8)) as running:
        cancel_claim(engine)
        if behind_commit:
            # It came with a COMMIT; by itself it is tried as it was.
            cancel_claim(engine)
        cancel_claim(engine)
        run(engine, "DROP TRIGGER hesitate ON outboxq.job")
        wait_until(lambda: len(running.of(JobDone)) == (16 if behind_commit else 8), "all jobs")
    assert limits == [8, 4]
    assert set(done(running.events)) == {(1, 0)}
    assert not running.of(JobsSuspected)
    assert not running.of(DatabaseLost)


def test_claims_that_fail_are_told_to_hooks_that_ask_for_them(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Beside those that take jobs, and those that find none: with what the slot has to say next."""
    jobs, told = Jobs(), list[Event]()
    jobs.on(JobsClaimed, ClaimsFailed)(told.append)
    jobs.include(app.jobs)
    enqueue(sessions, "first")
    run(engine, SLOW_CLAIMS, hesitating(60))
    relay = Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1))
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        cancel_claim(engine)
        run(engine, "DROP TRIGGER hesitate ON outboxq.job")
        wait_until(lambda: [event for event in told if isinstance(event, JobsClaimed)], "the claim after it")
    finally:
        relay.stop()
        thread.join(60)
    failed = [event for event in told if isinstance(event, ClaimsFailed)]
    assert [(event.queue, event.count) for event in failed] == [("ledger", 1)]


def test_a_cancelled_claim_of_a_lease_asks_for_less(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, limits: list[int]
) -> None:
    """The same under a lease, for half as many jobs as there are slots: no attempt counts, and nothing is an outage."""
    jobs = Jobs()

    @jobs.handler(queue="lease", claim="lease", retry=Backoff(max_attempts=1))
    def work(ctx: Context, name: str) -> None:
        del ctx, name

    with sessions.begin() as session:
        session.add_jobs(work.job(name=str(number)) for number in range(12))
    run(
        engine,
        "CREATE FUNCTION hesitate() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(60); RETURN NEW; "
        "END$$",
        "CREATE TRIGGER hesitate BEFORE UPDATE ON outboxq.job FOR EACH ROW EXECUTE FUNCTION hesitate()",
    )
    with start_relay(jobs, RelayConfig(slots_per_queue=8)) as running:
        cancel_claim(engine)
        cancel_claim(engine)
        run(engine, "DROP TRIGGER hesitate ON outboxq.job")
        wait_until(lambda: len(running.of(JobDone)) == 12, "all jobs")
    assert done(running.events) == [(1, 0)] * 12
    assert not running.of(DatabaseLost)
    assert limits == [4, 2]
