"""Unique jobs are added if no job of their kind and key waits, runs or retries: by producers, handlers, operators."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import (
    AsyncOutboxSession,
    Backoff,
    Context,
    JobHandle,
    Jobs,
    OutboxSession,
    RelayConfig,
    Snooze,
    Unique,
    add_jobs,
    external,
)
from outboxq.admin.dead_letters import DeadFilter, count_matching, retry_page
from outboxq.admin.roles import roles_sql
from outboxq.database.driver import Script
from outboxq.errors import AddedNotKnown, EnqueueError, SchemaError
from outboxq.events import JobDied, JobDone, JobRetried
from outboxq.execution.claim import ClaimRequest
from outboxq.outbox.stored_job import dump, load
from outboxq.postgres import Database
from outboxq.relay.maintenance.pruner import _delete_keys
from outboxq.testing import drain as drain_session
from tests.conftest import StartRelay
from tests.support import app
from tests.support.waiting import wait_until
from tests.unique_jobs.under_kills import run

HOUR = timedelta(hours=1)
NIGHTLY = external("nightly", queue="reports")
QUICK = Backoff(max_attempts=3, first_seconds=0.0, jitter=0.0)

Sessions = sessionmaker[OutboxSession]


def waiting(engine: Engine) -> list[str]:
    """The ids of all jobs, in the order of their insertion."""
    with engine.connect() as connection:
        return [str(row[0]) for row in connection.execute(text("SELECT id FROM outboxq.job ORDER BY seq"))]


def add(sessions: Sessions, key: str, **options: object) -> JobHandle:
    with sessions.begin() as session:
        return session.add_job(NIGHTLY.options(unique=Unique(key, **options)))


def finish_all(engine: Engine) -> None:
    """End all jobs, as their COMMIT would."""
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outboxq.job"))


@contextmanager
def begun(sessions: Sessions, key: str) -> Iterator[tuple[OutboxSession, JobHandle]]:
    """A producer that has added a job of this key, and is not committed; rolled back at the end."""
    with sessions() as session:
        handle = session.add_job(NIGHTLY.options(unique=key))
        session.flush()
        yield session, handle


def waits_for_a_lock(engine: Engine) -> Callable[[], bool]:
    query = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )

    def waits() -> bool:
        with engine.connect() as connection:
            return bool(connection.execute(query).scalar_one())

    return waits


# What producers see.


def test_the_first_job_of_a_key_is_added_and_the_second_is_told(sessions: Sessions, engine: Engine) -> None:
    """The handle says whether, and which job has the key; a job without a key is always added."""
    first = add(sessions, "tenant-7")
    with sessions.begin() as session:
        second, other = (session.add_job(NIGHTLY.options(unique=key)) for key in ("tenant-7", "tenant-8"))
        plain = session.add_job(NIGHTLY)
    assert (first.added, first.existing_id) == (True, None)
    assert (second.added, second.existing_id) == (False, first.id)
    assert (other.added, plain.added, plain.existing_id) == (True, True, None)
    # Those with a key behind the others of their flush.
    assert waiting(engine) == [str(handle.id) for handle in (first, plain, other)]


def test_of_two_jobs_of_a_key_in_one_flush_the_first_is_added(sessions: Sessions, engine: Engine) -> None:
    """Jobs are inserted in the order in which they were added, whatever that of their keys is."""
    with sessions.begin() as session:
        handles = add_jobs(session, [NIGHTLY.options(unique=key).job(n=n) for n, key in enumerate("cabac")])
    assert [handle.added for handle in handles] == [True, True, True, False, False]
    assert [handle.existing_id for handle in handles[3:]] == [handles[1].id, handles[0].id]
    assert waiting(engine) == [str(handle.id) for handle in handles[:3]]


def test_one_job_object_added_twice_is_two_adds(sessions: Sessions) -> None:
    """Each has a handle of its own."""
    new = NIGHTLY.options(unique="a").job()
    with sessions.begin() as session:
        one, two = add_jobs(session, [new, new])
    assert (one.added, two.added) == (True, False)


def test_whether_a_job_was_added_is_not_known_before_the_flush(sessions: Sessions) -> None:
    """The error says what to do; True or False would be a guess."""
    with sessions.begin() as session:
        handle = session.add_job(NIGHTLY.options(unique="a"))
        with pytest.raises(AddedNotKnown, match=r"call session\.flush\(\) first, or ask after its COMMIT"):
            _ = handle.added
        with pytest.raises(AddedNotKnown):
            _ = handle.existing_id
        session.flush()
        assert handle.added


def test_keys_are_those_of_a_kind(sessions: Sessions) -> None:
    """Two kinds with one key do not meet, also if kind and key run together to the same text."""
    with sessions.begin() as session:
        handles = [
            session.add_job(external(kind, queue="q").options(unique=key))
            for kind, key in (("a", "bc"), ("ab", "c"), ("a", "c"))
        ]
    assert [handle.added for handle in handles] == [True] * 3


@pytest.mark.large
def test_many_keys_in_one_flush_are_several_statements(sessions: Sessions, engine: Engine) -> None:
    """2,500 keys, every second of them taken, and some twice."""
    with sessions.begin() as session:
        before = add_jobs(session, [NIGHTLY.options(unique=f"k{n}").job() for n in range(0, 2_500, 2)])
    with sessions.begin() as session:
        keys = [*range(2_500), *range(100)]
        handles = add_jobs(session, [NIGHTLY.options(unique=f"k{n}").job() for n in keys])
    assert [handle.added for handle in handles] == [n % 2 == 1 for n in range(2_500)] + [False] * 100
    assert [handle.existing_id for handle in handles[0:2_500:2]] == [handle.id for handle in before]
    assert [handle.existing_id for handle in handles[2_501::2]] == [handle.id for handle in handles[1:100:2]]
    assert len(waiting(engine)) == 2_500


def test_a_rollback_to_a_savepoint_gives_the_key_back(sessions: Sessions, engine: Engine) -> None:
    """As it does the row."""
    with sessions.begin() as session:
        with session.begin_nested() as nested:
            session.add_job(NIGHTLY.options(unique="a"))
            session.flush()
            nested.rollback()
        again = session.add_job(NIGHTLY.options(unique="a"))
    assert again.added
    assert waiting(engine) == [str(again.id)]


def test_keys_may_be_made_of_rows_that_are_not_flushed_yet(sessions: Sessions, engine: Engine) -> None:
    """The job is inserted right after the row, with a key that has the row's primary key."""
    jobs = Jobs()

    @jobs.handler(queue="reports", unique=lambda account: f"account-{account.id}")
    def report(ctx: Context, account: app.Account) -> None: ...

    with sessions.begin() as session:
        account = app.Account(balance=0)
        session.add(account)
        one, two = session.add_job(report, account), session.add_job(report, account)
        session.flush()
        expected = f"account-{account.id}"
    assert (one.added, two.added, two.existing_id) == (True, False, one.id)
    assert keys(engine) == {expected}


def test_jobs_with_other_options_may_be_unique_too(sessions: Sessions, engine: Engine) -> None:
    """Group, time and expiry are written as ever."""
    kind = NIGHTLY.options(headers={"trace": "t"}, priority=3)
    with sessions.begin() as session:
        session.add_job(kind.options(unique="a", group="g", expires=HOUR))
        session.add_job(kind.options(unique="b", delay=HOUR))
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT state, group_key, expires_at IS NULL, run_at > now(), headers, priority "
                "FROM outboxq.job ORDER BY seq"
            )
        ).all()
    headers = {"trace": "t", "outboxq.unique": "a"}, {"trace": "t", "outboxq.unique": "b"}
    assert [tuple(row) for row in rows] == [
        ("grouped", "g", False, False, headers[0], 3),
        ("scheduled", None, True, True, headers[1], 3),
    ]


def test_jobs_that_were_stored_and_are_inserted_by_a_schedule_are_unique_too(
    sessions: Sessions, engine: Engine
) -> None:
    """Every way of inserting a job takes its key."""
    from outboxq.outbox.insert import insert_all

    first = add(sessions, "a")
    stored = dump(NIGHTLY.options(unique="a").job())
    with engine.begin() as connection:
        insert_all(connection, {"0" * 31 + "7": load(stored)}, wakes="by queue")
    assert waiting(engine) == [str(first.id)]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_each_driver_is_told(outboxq_database: Database, driver: str) -> None:
    """The same statement by all of them."""
    engine = create_engine(make_url(outboxq_database.url).set(drivername=f"postgresql+{driver}"))
    first, second = (add(sessionmaker(engine, class_=OutboxSession), 'k"\\', for_=HOUR) for _ in range(2))
    engine.dispose()
    assert (first.added, second.added, second.existing_id) == (True, False, first.id)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_each_async_driver_is_told(outboxq_database: Database, driver: str) -> None:
    """The same statement by all of them."""

    async def run() -> list[JobHandle]:
        engine = create_async_engine(make_url(outboxq_database.url).set(drivername=f"postgresql+{driver}"))
        handles: list[JobHandle] = []
        for _ in range(2):
            async with AsyncOutboxSession(engine) as session, session.begin():
                handles.append(session.add_job(NIGHTLY.options(unique=Unique('k"\\', for_=HOUR))))
        await engine.dispose()
        return handles

    first, second = asyncio.run(run())
    assert (first.added, second.added, second.existing_id) == (True, False, first.id)


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_key_is_taken_for_as_long_as_its_job_lives(sessions: Sessions, start_relay: StartRelay, claim: str) -> None:
    """While it runs, is retried and snoozed; free once it is done."""
    jobs, attempts = Jobs(), list[int]()
    begin, go = threading.Event(), threading.Event()

    @jobs.handler(queue="reports", claim=claim, retry=QUICK)
    def nightly(ctx: Context) -> Snooze | None:
        attempts.append(ctx.job.attempt)
        begin.set()
        assert go.wait(60)
        go.clear()
        if len(attempts) == 1:
            raise ValueError("again")
        return Snooze(timedelta(0)) if len(attempts) == 2 else None

    first = add(sessions, "a")
    with start_relay(jobs, RelayConfig(slots_per_queue=1, poll_seconds=0.05)) as relay:
        for _ in range(3):
            assert begin.wait(60)
            begin.clear()
            second = add(sessions, "a")
            assert (second.added, second.existing_id) == (False, first.id)
            go.set()
        wait_until(lambda: relay.of(JobDone), "the job to be done")
    assert attempts == [1, 2, 2]
    assert add(sessions, "a").added


def test_a_dead_letter_has_no_key(sessions: Sessions, start_relay: StartRelay) -> None:
    """Another job may be added beside it."""
    jobs = Jobs()

    @jobs.handler(queue="reports", retry=Backoff(max_attempts=1))
    def nightly(ctx: Context) -> None:
        raise ValueError("no luck")

    add(sessions, "a")
    with start_relay(jobs) as relay:
        wait_until(lambda: relay.of(JobDied), "the job to die")
    assert add(sessions, "a").added


def test_a_period_keeps_the_key_of_a_job_that_is_done(sessions: Sessions, engine: Engine) -> None:
    """Not within the hour, done or not; after it, and not before the job is done, the key is free."""
    first = add(sessions, "a", for_=HOUR)
    finish_all(engine)
    second = add(sessions, "a", for_=HOUR)
    assert (second.added, second.existing_id) == (False, first.id)
    let_periods_pass(engine)
    third = add(sessions, "a", for_=HOUR)
    assert third.added
    let_periods_pass(engine)
    assert not add(sessions, "a").added
    finish_all(engine)
    # Taken without a period now.
    assert add(sessions, "a").added
    finish_all(engine)
    assert add(sessions, "a").added


def let_periods_pass(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.unique_key SET kept_until = kept_until - interval '1 hour'"))


# Races of producers.


def test_a_producer_waits_for_another_one_that_adds_the_key(sessions: Sessions, engine: Engine) -> None:
    """Only its COMMIT or its rollback decides: neither is a job added twice, nor lost."""
    for outcome in ("commit", "rollback"):
        with begun(sessions, outcome) as (session, first), ThreadPoolExecutor(1) as pool:
            adding = pool.submit(add, sessions, outcome)
            wait_until(waits_for_a_lock(engine), "the second producer to wait for the first")
            getattr(session, outcome)()
            second = adding.result(60)
        assert second.added == (outcome == "rollback")
        assert second.existing_id == (first.id if outcome == "commit" else None)
    assert len(waiting(engine)) == 2


def test_a_key_that_was_taken_over_meanwhile_is_not_taken_again(sessions: Sessions, engine: Engine) -> None:
    """The second producer has seen that the key was free, before the first one took it: it must not steal it."""
    add(sessions, "a")
    finish_all(engine)
    with begun(sessions, "a") as (session, first), ThreadPoolExecutor(1) as pool:
        adding = pool.submit(add, sessions, "a")
        wait_until(waits_for_a_lock(engine), "the second producer to wait for the first")
        session.commit()
        second = adding.result(60)
    assert (second.added, second.existing_id) == (False, first.id)
    assert waiting(engine) == [str(first.id)]


def test_two_flushes_with_the_same_keys_in_other_orders_do_not_deadlock(sessions: Sessions, engine: Engine) -> None:
    """Each takes its keys in the order of their bytes, whatever the order in which the jobs were added."""
    with begun(sessions, "m") as (session, _), ThreadPoolExecutor(2) as pool:

        def add_all(keys: str) -> list[bool]:
            with sessions.begin() as other:
                return [handle.added for handle in _add_each(other, keys)]

        one = pool.submit(add_all, "amz")
        wait_until(lambda: len(lock_waits(engine)) == 1, "the second producer to wait for the first")
        # In the order of its adds it would take "z", and then wait for "a", whose holder wants "z".
        two = pool.submit(add_all, "za")
        wait_until(lambda: len(lock_waits(engine)) == 2, "the third one to wait, too")
        session.rollback()
        assert one.result(60) == [True, True, True]
        assert two.result(60) == [False, False]


def _add_each(session: OutboxSession, keys: str) -> list[JobHandle]:
    handles = add_jobs(session, [NIGHTLY.options(unique=key).job() for key in keys])
    session.flush()
    return handles


def lock_waits(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        query = text("SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")
        return list(connection.execute(query).scalars())


def test_repeatable_read_refuses_what_it_cannot_see(outboxq_database: Database, sessions: Sessions) -> None:
    """A key that another transaction took since the snapshot: 40001, and the transaction is to be repeated."""
    engine = create_engine(outboxq_database.url, isolation_level="REPEATABLE READ")
    with OutboxSession(engine) as session:
        session.execute(text("SELECT 1 FROM outboxq.job"))
        add(sessions, "a")
        session.add_job(NIGHTLY.options(unique="a"))
        with pytest.raises(OperationalError, match="could not serialize access"):
            session.flush()
    engine.dispose()


# Handlers that add unique jobs.


@pytest.fixture
def impatient(outboxq_database: Database) -> Iterator[Sessions]:
    """Makes sessions that wait for no lock for longer than 50 ms."""
    engine = create_engine(outboxq_database.url, connect_args={"options": "-c lock_timeout=50"})
    yield sessionmaker(engine, class_=OutboxSession)
    engine.dispose()


class Adder:
    """Handlers of one queue that add a job of a key, and then wait until they are let go."""

    def __init__(self, claim: str, **options: object) -> None:
        self.jobs = Jobs()
        self.begun, self.go = threading.Event(), threading.Event()
        self.handles: list[JobHandle] = []

        @self.jobs.handler(queue="adders", claim=claim, retry=QUICK, **options)
        def adder(ctx: Context, key: str, fails: int = 0) -> None:
            self.handles.append(ctx.session.add_job(NIGHTLY.options(unique=key)))
            ctx.session.flush()
            self.begun.set()
            assert self.go.wait(60)
            if ctx.job.attempt <= fails:
                raise ValueError("no luck")

        self.kind = adder


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_adds_of_a_key_do_not_wait_for_a_handler_of_it(
    sessions: Sessions, impatient: Sessions, start_relay: StartRelay, engine: Engine, claim: str
) -> None:
    """100 adds of the key of a job that runs: none is added, none waits for a lock for 50 ms."""
    jobs, begun_event, go = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="reports", claim=claim)
    def nightly(ctx: Context) -> None:
        ctx.session.execute(text("SELECT 1"))
        # Its own successor, of the same key: not before it is committed.
        ctx.session.add_job(NIGHTLY.options(unique="a", delay=HOUR))
        ctx.session.flush()
        begun_event.set()
        assert go.wait(60)

    first = add(sessions, "a")
    with start_relay(jobs) as relay:
        assert begun_event.wait(60)
        taken = [add(impatient, "a") for _ in range(100)]
        go.set()
        wait_until(lambda: relay.of(JobDone), "the job to be done")
    assert {(handle.added, handle.existing_id) for handle in taken} == {(False, first.id)}
    # The successor has the key now.
    assert not add(sessions, "a").added


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_adds_of_a_key_do_not_wait_for_a_handler_that_adds_it(
    sessions: Sessions, impatient: Sessions, start_relay: StartRelay, engine: Engine, claim: str
) -> None:
    """A handler takes its keys when it is committed: a producer that comes while it runs has the key."""
    adder = Adder(claim)
    with sessions.begin() as session:
        session.add_job(adder.kind, "a")
    with start_relay(adder.jobs) as relay:
        assert adder.begun.wait(60)
        with pytest.raises(AddedNotKnown, match="in a handler, unique jobs are added when its transaction is"):
            _ = adder.handles[0].added
        taken = [add(impatient, "a") for _ in range(100)]
        adder.go.set()
        wait_until(lambda: relay.of(JobDone), "the job to be done")
    assert [handle.added for handle in taken] == [True] + [False] * 99
    first = taken[0]
    assert (adder.handles[0].added, adder.handles[0].existing_id) == (False, first.id)
    assert waiting(engine) == [str(first.id)]


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_claim_that_fails_behind_commit_hides_no_answer(
    sessions: Sessions, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, claim: str
) -> None:
    """The answer to COMMIT says it, and the failure behind it takes nothing of that away."""
    add_to = ClaimRequest.add_to

    def failing(request: ClaimRequest, script: Script, *, begins: bool = False) -> None:
        if begins:
            script.add("claim", "BEGIN", "SELECT 1 / 0")
        else:
            add_to(request, script)

    monkeypatch.setattr(ClaimRequest, "add_to", failing)
    adder = Adder(claim)
    adder.go.set()
    with sessions.begin() as session:
        session.add_jobs(adder.kind.job(key) for key in "ab")
    with start_relay(adder.jobs, RelayConfig(slots_per_queue=1, batch_size=1)) as relay:
        wait_until(lambda: len(relay.of(JobDone)) == 2, "the jobs to be done")
    assert [handle.added for handle in adder.handles] == [True, True]


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_failed_attempt_adds_nothing(sessions: Sessions, start_relay: StartRelay, engine: Engine, claim: str) -> None:
    """The second attempt adds the job, and it alone takes the key."""
    adder = Adder(claim)
    adder.go.set()
    with sessions.begin() as session:
        session.add_job(adder.kind, "a", fails=1)
    with start_relay(adder.jobs, RelayConfig(poll_seconds=0.05)) as relay:
        wait_until(lambda: relay.of(JobDone), "the job to be done")
        assert len(relay.of(JobRetried)) == 1
    failed, added = adder.handles
    with pytest.raises(AddedNotKnown):
        _ = failed.added
    assert added.added
    assert waiting(engine) == [str(added.id)]


@pytest.mark.parametrize("options", [{}, {"batchable": True}], ids=["alone", "batchable"])
def test_handlers_that_share_a_transaction_add_a_key_once(
    sessions: Sessions, start_relay: StartRelay, engine: Engine, options: dict[str, bool]
) -> None:
    """The first of them, of those that are done; savepoints that a handler rolled back count for nothing."""
    jobs, handles = Jobs(), list[JobHandle]()

    @jobs.handler(queue="adders", retry=Backoff(max_attempts=1), **options)
    def adder(ctx: Context, key: str, fails: bool) -> None:
        with ctx.session.begin_nested() as nested:
            ctx.session.add_job(NIGHTLY.options(unique="undone"))
            ctx.session.flush()
            nested.rollback()
        handles.append(ctx.session.add_job(NIGHTLY.options(unique=key)))
        if fails:
            raise ValueError("no luck")

    with sessions.begin() as session:
        add_jobs(
            session, [adder.job(key, fails) for key, fails in (("b", True), ("a", False), ("b", False), ("b", False))]
        )
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=10)) as relay:
        wait_until(lambda: len(relay.of(JobDone)) == 3, "the jobs to be done")
    with engine.connect() as connection:
        keys = list(
            connection.execute(text("SELECT headers->>'outboxq.unique' FROM outboxq.job ORDER BY seq")).scalars()
        )
        held = set(connection.execute(text("SELECT key FROM outboxq.unique_key")).scalars())
    assert sorted(keys) == ["a", "b"]
    assert held == {"nightly\x1fa", "nightly\x1fb"}
    assert [handle.added for handle in handles[-3:]] == [True, True, False]
    assert handles[-1].existing_id == handles[-2].id


def test_handlers_of_two_relays_that_add_the_same_keys_do_not_deadlock(
    sessions: Sessions, start_relay: StartRelay, engine: Engine
) -> None:
    """Their keys are taken in one order at COMMIT, whatever the order in which the handlers added them."""
    jobs, together = Jobs(), threading.Barrier(2, timeout=60)

    @jobs.handler(queue="adders")
    def adder(ctx: Context, keys: str) -> None:
        for key in keys:
            ctx.session.add_job(NIGHTLY.options(unique=key))
            ctx.session.flush()
        together.wait()

    with sessions.begin() as session:
        add_jobs(session, [adder.job(keys) for _ in range(10) for keys in ("abcdefgh", "hgfedcba")])
    with start_relay(jobs, RelayConfig(slots_per_queue=2, batch_size=1)) as relay:
        wait_until(lambda: len(relay.of(JobDone)) == 20, "the jobs to be done")
        assert relay.of(JobRetried) == []
    assert len(waiting(engine)) == 8


def test_a_handler_does_not_take_a_key_that_was_taken_over_meanwhile(
    sessions: Sessions, start_relay: StartRelay, engine: Engine
) -> None:
    """Its COMMIT has seen that the key was free, before a producer took it: it must not steal it."""
    add(sessions, "a")
    finish_all(engine)
    adder = Adder("transaction")
    adder.go.set()
    with begun(sessions, "a") as (session, first), start_relay(adder.jobs) as relay:
        with sessions.begin() as other:
            other.add_job(adder.kind, "a")
        wait_until(waits_for_a_lock(engine), "the COMMIT to wait for the producer")
        session.commit()
        wait_until(lambda: relay.of(JobDone), "the job to be done")
    assert not adder.handles[0].added
    assert waiting(engine) == [str(first.id)]


class Hasty:
    """Jobs of one queue that add a job of the key `a`, for a relay that waits for no lock for longer than 50 ms.

    Without a time-out of its own a handler leaves its COMMIT that of the relay's connections.
    """

    def __init__(self, claim: str, on_call: Callable[[int], None]) -> None:
        self.jobs, self.attempts = Jobs(), list[int]()

        @self.jobs.handler(queue="adders", claim=claim, retry=QUICK, timeout_seconds=None)
        def hasty(ctx: Context) -> None:
            self.attempts.append(ctx.job.attempt)
            on_call(len(self.attempts))
            ctx.session.add_job(NIGHTLY.options(unique="a"))

        self.kind = hasty


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_lock_timeout_of_a_key_at_commit_counts_no_attempt(
    sessions: Sessions, impatient: Sessions, start_relay: StartRelay, claim: str
) -> None:
    """Another transaction has the key for longer than the COMMIT waits: the job has not failed, and runs again."""
    with begun(sessions, "a") as (session, _):
        hasty = Hasty(claim, lambda call: session.rollback() if call == 3 else None)
        with sessions.begin() as other:
            other.add_job(hasty.kind)
        with start_relay(hasty.jobs, engine=impatient.kw["bind"]) as relay:
            wait_until(lambda: relay.of(JobDone), "the job to be done")
    assert (hasty.attempts, relay.of(JobRetried)) == ([1, 1, 1], [])


@pytest.mark.large
@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_key_that_is_held_for_good_is_a_failed_attempt(
    sessions: Sessions, impatient: Sessions, start_relay: StartRelay, claim: str
) -> None:
    """After five repetitions for free, as after a deadlock: a job does not run again and again unseen."""
    hasty = Hasty(claim, lambda call: None)
    with begun(sessions, "a"):
        with sessions.begin() as other:
            other.add_job(hasty.kind)
        with start_relay(hasty.jobs, engine=impatient.kw["bind"]) as relay:
            wait_until(lambda: relay.of(JobDied), "the job to be dead")
    assert hasty.attempts == [1] * 6 + [2] * 6 + [3] * 6


def test_the_users_own_session_on_the_handlers_connection_waits_for_commit_too(
    sessions: Sessions, start_relay: StartRelay, engine: Engine
) -> None:
    """Keys are taken by connection, not by session."""
    jobs, handles = Jobs(), list[JobHandle]()

    @jobs.handler(queue="adders")
    def adder(ctx: Context) -> None:
        with OutboxSession(ctx.session.connection(), join_transaction_mode="create_savepoint") as own:
            handles.append(own.add_job(NIGHTLY.options(unique="a")))
            own.commit()
        with pytest.raises(AddedNotKnown):
            _ = handles[0].added

    with sessions.begin() as session:
        session.add_job(adder)
    with start_relay(jobs) as relay:
        wait_until(lambda: relay.of(JobDone), "the job to be done")
    assert handles[0].added
    assert waiting(engine) == [str(handles[0].id)]


def test_a_drained_test_transaction_takes_the_keys_too(sessions: Sessions) -> None:
    """What `outboxq.testing.drain` runs adds each key once, and frees those of the jobs that it ran."""
    jobs, handles = Jobs(), list[JobHandle]()

    @jobs.handler(queue="adders", unique=lambda n: "one")
    def adder(ctx: Context, n: int) -> None:
        handles.append(ctx.session.add_job(NIGHTLY.options(unique="a")))

    with sessions() as session:
        for n, added in enumerate((True, False)):
            handle = session.add_job(adder, n)
            assert drain_session(session, jobs).done == 1
            assert handle.added
            assert handles[n].added is added


# Rights and tables.


def test_a_missing_right_is_named(outboxq_database: Database, engine: Engine, sessions: Sessions) -> None:
    """By the flush, with what gives it; a producer's own rights are enough without keys."""
    role = f"producer_{engine.url.database}"
    add(sessions, "a")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'p'")
        try:
            connection.exec_driver_sql(roles_sql({"producer": role}))
            limited = create_engine(engine.url.set(username=role, password="p"))
            with pytest.raises(EnqueueError, match="state, expires_at and xmax: run what `outboxq roles"):
                add(sessionmaker(limited, class_=OutboxSession), "a")
            connection.exec_driver_sql(f"GRANT SELECT (id, state, expires_at, xmax) ON outboxq.job TO {role}")
            with pytest.raises(EnqueueError, match="takes SELECT, INSERT and UPDATE on unique_key: run what `outboxq"):
                add(sessionmaker(limited, class_=OutboxSession), "a")
            connection.exec_driver_sql(roles_sql({"unique_producer": role}))
            assert not add(sessionmaker(limited, class_=OutboxSession), "a").added
            assert add(sessionmaker(limited, class_=OutboxSession), "b").added
            limited.dispose()
        finally:
            connection.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_missing_table_is_named(engine: Engine, sessions: Sessions) -> None:
    """As for any other job."""
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE outboxq.unique_key"))
    with pytest.raises(SchemaError, match="outboxq migrate"):
        add(sessions, "a")


# Dead letters.


def bury(engine: Engine) -> None:
    """Make dead letters of all jobs."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "WITH gone AS (DELETE FROM outboxq.job RETURNING *) INSERT INTO outboxq.dead_job (id, queue, kind, "
                "args, headers, priority, attempt, crashes, errors, reason, created_at) SELECT id, queue, kind, args, "
                "headers, priority, attempt, crashes, errors, 'no luck', created_at FROM gone"
            )
        )


def retry_all(engine: Engine) -> tuple[list[str], list[str]]:
    """The ids that were retried, and those whose key is taken."""
    with engine.begin() as connection:
        page = retry_page(connection, DeadFilter())
    assert (page.held, page.refused) == ((), ())
    return [str(job_id) for job_id in page.changed], [str(job_id) for job_id in page.key_taken]


def test_a_dead_letter_is_retried_only_if_its_key_is_free(sessions: Sessions, engine: Engine) -> None:
    """One whose key a living job has stays, and is told apart; of two of a key the first is retried."""
    plain = NIGHTLY.job()
    dead = [add(sessions, "a")]
    with sessions.begin() as session:
        dead += add_jobs(session, [plain])
    bury(engine)
    dead += [add(sessions, "a")]
    bury(engine)
    living = add(sessions, "a")
    with engine.begin() as connection:
        assert [each.count for each in count_matching(connection, DeadFilter(), to_retry=True)] == [1]
    assert retry_all(engine) == ([str(dead[1].id)], sorted([str(dead[0].id), str(dead[2].id)]))
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": living.id})
    assert retry_all(engine) == ([str(dead[0].id)], [str(dead[2].id)])
    assert add(sessions, "a").existing_id == dead[0].id


def test_a_period_does_not_keep_a_dead_letter_from_being_retried(sessions: Sessions, engine: Engine) -> None:
    """It is about adding jobs, and goes on."""
    dead = add(sessions, "a", for_=HOUR)
    bury(engine)
    assert retry_all(engine) == ([str(dead.id)], [])
    finish_all(engine)
    assert not add(sessions, "a").added


def test_a_key_of_a_retried_dead_letter_is_not_stolen(sessions: Sessions, engine: Engine) -> None:
    """A producer has judged the key while its job was dead; since then it was retried, under the same id."""
    dead = add(sessions, "a")
    bury(engine)
    with engine.connect() as connection, ThreadPoolExecutor(1) as pool:
        retry_page(connection, DeadFilter())
        adding = pool.submit(add, sessions, "a")
        wait_until(waits_for_a_lock(engine), "the producer to wait for the operator")
        connection.commit()
        assert not adding.result(60).added
    assert waiting(engine) == [str(dead.id)]


# Pruning.


def keys(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return {
            key.partition("\x1f")[2] for key in connection.execute(text("SELECT key FROM outboxq.unique_key")).scalars()
        }


def prune(engine: Engine, after: str = "", limit: int = 1_000) -> tuple[int, int, str]:
    with engine.connect() as connection:
        return _delete_keys(connection.connection.driver_connection.pgconn, "outboxq", after, limit)  # type: ignore[union-attr]  # psycopg's


def test_keys_that_nothing_needs_are_pruned(sessions: Sessions, engine: Engine) -> None:
    """Neither those of living jobs, nor those that a period keeps; page by page."""
    for key in "abc":
        add(sessions, key)
    add(sessions, "kept", for_=HOUR)
    finish_all(engine)
    add(sessions, "b")
    assert prune(engine, limit=2) == (1, 2, "nightly\x1fb")
    assert prune(engine, "nightly\x1fb", limit=3) == (1, 2, "nightly\x1fkept")
    assert keys(engine) == {"b", "kept"}
    let_periods_pass(engine)
    prune(engine)
    assert keys(engine) == {"b"}


def test_a_key_that_a_producer_takes_over_is_not_pruned(sessions: Sessions, engine: Engine) -> None:
    """Neither waits for the other, and the producer's job keeps its key."""
    add(sessions, "a")
    finish_all(engine)
    with begun(sessions, "a") as (session, first):
        assert prune(engine)[:2] == (0, 1)
        session.commit()
    assert add(sessions, "a").existing_id == first.id


def test_a_key_that_was_taken_over_before_it_was_locked_is_not_pruned(sessions: Sessions, engine: Engine) -> None:
    """The deletion looks again, with the lock held: the look before may be older than the producer's COMMIT."""
    from outboxq.statements.unique import delete_idle_keys

    add(sessions, "a")
    with engine.begin() as connection:
        deleted = connection.exec_driver_sql(delete_idle_keys("outboxq", ["nightly\x1fa"])).scalar_one()
    assert deleted == 0


def test_a_relay_prunes_keys(sessions: Sessions, engine: Engine, start_relay: StartRelay) -> None:
    """Beside its work, with a relay's rights."""
    jobs = Jobs()

    @jobs.handler(queue="reports")
    def nightly(ctx: Context) -> None: ...

    add(sessions, "a")
    with start_relay(jobs, RelayConfig(prune_seconds=1)):
        wait_until(lambda: keys(engine) == set(), "the key to be pruned")


# Under kills.


@pytest.mark.large
@pytest.mark.parametrize("mode", ["transaction"])
def test_under_kills_no_two_jobs_of_a_key_live_and_none_is_lost(outboxq_database: Database, mode: str) -> None:
    """`python -m tests.unique_jobs.under_kills`, in short."""
    report = run(outboxq_database.url, seconds=3.0, mode=mode, seed=1, relays=2, producers=4)
    assert report.problems == 0, report
    assert report.added > 2
    assert report.suppressed > 0
    assert report.kills > 0
