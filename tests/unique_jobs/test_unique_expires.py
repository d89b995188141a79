"""Unique jobs that expire: a key is free once the job that has it will not run any more."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, JobHandle, Jobs, OutboxSession, RelayConfig, Unique, external, schedules
from outboxq.admin.dead_letters import DeadFilter, count_matching, retry_page
from outboxq.admin.queues import pause, resume
from outboxq.events import JobDone, JobExpired
from outboxq.execution import families
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.support.ledger import rows
from tests.support.waiting import wait_until

HOUR = timedelta(hours=1)
NIGHTLY = external("nightly", queue="reports")

Sessions = sessionmaker[OutboxSession]


def add(sessions: Sessions, **options: object) -> JobHandle:
    with sessions.begin() as session:
        return session.add_job(NIGHTLY.options(**{"unique": "a", "expires": HOUR, **options}))


def let_expire(engine: Engine) -> None:
    """The expiry of all jobs that are there has passed."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET expires_at = clock_timestamp() - interval '1 second'"))


@contextmanager
def claimed(engine: Engine, end: str = "rollback") -> Iterator[Connection]:
    """All jobs as a relay in transaction mode has them that began before they expired."""
    with engine.connect() as connection:
        connection.execute(text("DELETE FROM outboxq.job"))
        yield connection
        getattr(connection, end)()


def test_an_expired_job_that_waits_has_no_key(sessions: Sessions, engine: Engine, start_relay: StartRelay) -> None:
    """The one that was added instead runs, and the expired one is dropped."""
    jobs = Jobs()

    @jobs.handler(queue="reports")
    def nightly(ctx: Context) -> None: ...

    expired = add(sessions)
    assert add(sessions).existing_id == expired.id
    let_expire(engine)
    second, third = add(sessions), add(sessions)
    assert (second.added, third.added, third.existing_id) == (True, False, second.id)
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as relay:
        wait_until(lambda: relay.of(JobDone) and relay.of(JobExpired), "both jobs to be over")
    assert [event.job.id for event in relay.of(JobDone)] == [second.id]
    assert [event.job.id for event in relay.of(JobExpired)] == [expired.id]


def test_a_period_keeps_the_key_of_an_expired_job(sessions: Sessions, engine: Engine) -> None:
    """It counts from the add, whatever becomes of the job."""
    add(sessions, unique=Unique("a", for_=2 * HOUR))
    let_expire(engine)
    assert not add(sessions).added


def test_a_job_that_began_before_it_expired_has_its_key(sessions: Sessions, engine: Engine) -> None:
    """In transaction mode another transaction has deleted its row, whose rollback lets it wait again."""
    first = add(sessions)
    let_expire(engine)
    with claimed(engine):
        assert add(sessions).existing_id == first.id
    assert add(sessions).added


def test_a_job_that_was_claimed_in_a_savepoint_has_its_key(sessions: Sessions, engine: Engine) -> None:
    """As a drained test's is."""
    first = add(sessions)
    let_expire(engine)
    with engine.connect() as connection, connection.begin_nested():
        connection.execute(text("DELETE FROM outboxq.job"))
        assert add(sessions).existing_id == first.id


@pytest.mark.parametrize("state", ["leased", "group_leased"])
def test_a_job_under_a_lease_has_its_key(sessions: Sessions, engine: Engine, state: str) -> None:
    """Its handler began before it expired."""
    first = add(sessions, group="g")
    let_expire(engine)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outboxq.job SET state = '{state}', lease_owner = gen_random_uuid()"))
    assert add(sessions).existing_id == first.id


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_lock_that_is_over_keeps_no_key(sessions: Sessions, engine: Engine, end: str) -> None:
    """A row remembers who locked it last, committed or not."""
    add(sessions)
    let_expire(engine)
    with engine.connect() as connection:
        connection.execute(text("SELECT FROM outboxq.job FOR UPDATE"))
        assert not add(sessions).added
        getattr(connection, end)()
    assert add(sessions).added


def test_an_old_snapshot_does_not_miss_a_claim(outboxq_database: Database, sessions: Sessions, engine: Engine) -> None:
    """At REPEATABLE READ the job's row is one that waits, though it was leased since."""
    first = add(sessions)
    let_expire(engine)
    repeatable = create_engine(outboxq_database.url, isolation_level="REPEATABLE READ")
    with OutboxSession(repeatable) as session:
        session.execute(text("SELECT 1 FROM outboxq.job"))
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid()"))
        handle = session.add_job(NIGHTLY.options(unique="a"))
        session.flush()
        assert handle.existing_id == first.id
    repeatable.dispose()


def test_of_two_producers_one_takes_the_key_over(sessions: Sessions, engine: Engine) -> None:
    """The second one waits for the first, and learns whose the key is."""
    add(sessions)
    let_expire(engine)
    waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with sessions() as session, ThreadPoolExecutor(1) as pool:
        first = session.add_job(NIGHTLY.options(unique="a", expires=HOUR))
        session.flush()
        adding = pool.submit(add, sessions)
        wait_until(lambda: rows(engine, waiting), "the second producer to wait")
        session.commit()
        second = adding.result(60)
    assert (first.added, second.added, second.existing_id) == (True, False, first.id)


def test_a_relay_that_claims_an_expired_job_beside_the_new_one_keeps_the_new_ones_key(
    sessions: Sessions, engine: Engine, start_relay: StartRelay
) -> None:
    """The expired job is dropped, and the key is not: no key is deleted with a job."""
    jobs = Jobs()

    @jobs.handler(queue="reports")
    def nightly(ctx: Context) -> None: ...

    expired = add(sessions)
    let_expire(engine)
    second = add(sessions, delay=HOUR, expires=2 * HOUR)
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as relay:
        wait_until(lambda: relay.of(JobExpired), "the expired job to be dropped")
    assert [event.job.id for event in relay.of(JobExpired)] == [expired.id]
    assert add(sessions).existing_id == second.id


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_handler_takes_the_key_of_an_expired_job(
    sessions: Sessions, engine: Engine, start_relay: StartRelay, claim: str
) -> None:
    """Its keys are taken at its COMMIT, by the same rule."""
    jobs, added = Jobs(), list[JobHandle]()

    @jobs.handler(queue="other", claim=claim)
    def adds(ctx: Context) -> None:
        added.append(ctx.session.add_job(NIGHTLY.options(unique="a")))

    add(sessions)
    let_expire(engine)
    with sessions.begin() as session:
        session.add_job(adds)
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as relay:
        wait_until(lambda: relay.of(JobDone), "the handler")
    assert added[0].added


def test_a_dead_letter_takes_the_key_of_an_expired_job(
    sessions: Sessions, engine: Engine, start_relay: StartRelay
) -> None:
    """In the count before it, and when it is retried."""
    jobs = Jobs()

    @jobs.handler(queue="reports", retry=Backoff(max_attempts=1))
    def nightly(ctx: Context) -> None:
        raise ValueError("no luck")

    dead = add(sessions)
    with start_relay(jobs, RelayConfig(slots_per_queue=1)):
        wait_until(lambda: rows(engine, "SELECT FROM outboxq.dead_job"), "the job to die")
    add(sessions)
    with engine.begin() as connection:
        assert list(count_matching(connection, DeadFilter(), to_retry=True)) == []
        assert retry_page(connection, DeadFilter()).key_taken == (dead.id,)
    let_expire(engine)
    with engine.begin() as connection:
        assert [each.count for each in count_matching(connection, DeadFilter(), to_retry=True)] == [1]
        assert retry_page(connection, DeadFilter()).changed == (dead.id,)
    assert add(sessions).existing_id == dead.id


@pytest.mark.large
def test_a_unique_schedule_whose_jobs_expire_behind_a_paused_queue_runs_after_it(
    sessions: Sessions, engine: Engine, start_relay: StartRelay
) -> None:
    """Each fire adds a job, as the one before has expired; what has not expired runs when the queue goes on."""
    jobs, ran = Jobs(), list[int]()

    @jobs.handler(queue="reports", unique="u", expires=HOUR)
    def nightly(ctx: Context) -> None:
        ran.append(1)

    with sessions.begin() as session:
        schedules.put(session, "s", nightly.job(), cron="0 0 1 1 *")
    with engine.begin() as connection:
        pause(connection, ["reports"])
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as relay:
        for fires in (1, 2, 3):
            let_expire(engine)
            with engine.begin() as connection:
                connection.execute(text("UPDATE outboxq.schedule SET next_at = clock_timestamp()"))
            wait_until(lambda: len(rows(engine, "SELECT FROM outboxq.job")) == fires, f"fire {fires}")  # noqa: B023
        with engine.begin() as connection:
            resume(connection, ["reports"])
        wait_until(lambda: not rows(engine, "SELECT FROM outboxq.job"), "the jobs to be over")
    assert (ran, len(relay.of(JobExpired))) == ([1], 2)


def test_a_job_that_was_claimed_before_it_expired_runs_though_its_turn_comes_later(
    sessions: Sessions, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adds of its key were suppressed meanwhile: dropped, it would leave nothing that runs."""
    jobs, ran, clock = Jobs(), list[str](), families.time.monotonic

    @jobs.handler(queue="reports")
    def nightly(ctx: Context, name: str) -> None:
        ran.append(name)
        if name == "first":
            assert not add(sessions, unique="b").added
            later = SimpleNamespace(monotonic=lambda: clock() + 2 * HOUR.total_seconds())
            monkeypatch.setattr(families, "time", later)

    with sessions.begin() as session:
        session.add_job(nightly.options(unique="a", expires=HOUR), name="first")
        session.add_job(nightly.options(unique="b", expires=HOUR), name="second")
        # Unique jobs are inserted behind the others of a flush.
        session.flush()
        session.add_job(nightly.options(expires=HOUR), name="without a key")
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=3)) as relay:
        wait_until(lambda: len(relay.of(JobDone)) + len(relay.of(JobExpired)) == 3, "the jobs to be over")
    assert (ran, len(relay.of(JobExpired))) == (["first", "second"], 1)
