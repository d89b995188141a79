"""Results of jobs, waited for by their producers: how each end is told, and which waits are refused."""

import asyncio
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outboxq import (
    AsyncOutboxSession,
    Context,
    Jobs,
    OutboxSession,
    RelayConfig,
    Unique,
    cancel,
    external,
    wait_for_result,
)
from outboxq.errors import (
    ConfigError,
    JobNotDone,
    PayloadError,
    ResultNotFound,
    ResultTimeout,
    SchemaError,
    WaitRefused,
)
from outboxq.events import JobCancelled
from outboxq.postgres import Database
from outboxq.tables import LATEST_VERSION
from tests.conftest import StartRelay
from tests.support.pgbouncer import pgbouncer
from tests.support.results import KEEP, Report, keeping_jobs, limited, only_woken, told, waiting
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Any]]
Sessions = sessionmaker[OutboxSession]
CLAIMS = pytest.mark.parametrize("claim", ["transaction", "lease"])


@CLAIMS
def test_the_value_of_the_handler_comes_back(
    engine: Engine, sessions: Sessions, start_relay: StartRelay, claim: str
) -> None:
    """In JSON's own types, or in the type that is asked for; of a handler that wrote rows, or none."""
    jobs, work = keeping_jobs(claim)
    with start_relay(jobs), only_woken():
        for name, value in (("writes", {"name": "writes", "pages": 3}), ("nothing", None)):
            with sessions.begin() as session:
                handle = session.add_job(work, name=name)
            assert handle.result(engine, timeout=PATIENCE) == value
            assert wait_for_result(engine, handle.id, timeout=timedelta(seconds=PATIENCE)) == value
        with sessions.begin() as session:
            handle = session.add_job(work, name="idle")
        assert handle.result(engine, timeout=PATIENCE, returns=Report) == Report("idle", 3)
    with pytest.raises(PayloadError, match="does not fit its type"):
        handle.result(engine, returns=int)


@pytest.mark.first_and_last
@CLAIMS
@pytest.mark.parametrize("batch_size", [1, 10])
def test_each_end_without_a_result_is_told_at_once(
    engine: Engine, sessions: Sessions, drain: Drain, claim: str, batch_size: int
) -> None:
    """Dead, by its own word or by its attempts; discarded; expired: by a notification, and not by a later look."""
    jobs, work = keeping_jobs(claim)
    with sessions.begin() as session:
        handles = {name: session.add_job(work, name=name) for name in ("dies", "fails", "discards")}
        handles["expires"] = session.add_job(work.options(expires=timedelta(seconds=60)), name="late")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET expires_at = now() - interval '1 s' WHERE expires_at > now()"))
    errors: dict[str, JobNotDone] = {}

    def wait(name: str) -> None:
        with pytest.raises(JobNotDone) as raised:
            handles[name].result(engine, timeout=PATIENCE)
        errors[name] = raised.value

    with only_woken(), waiting(lambda: wait("dies")):
        others = [threading.Thread(target=wait, args=(name,)) for name in handles if name != "dies"]
        for thread in others:
            thread.start()
        drain(jobs, batch_size=batch_size)
        for thread in others:
            thread.join(PATIENCE)
    assert {name: error.outcome for name, error in errors.items()} == {
        "dies": "dead", "fails": "dead", "discards": "discarded", "expires": "expired",
    }  # fmt: skip
    assert errors["dies"].reason == "beyond help"
    assert "gave up after 3 of 3 attempts" in str(errors["fails"])
    assert errors["expires"].job_id == handles["expires"].id


@pytest.mark.parametrize("outcome", ["discard", "dead"])
def test_a_job_that_is_cancelled_while_it_waits_ends_the_wait(engine: Engine, sessions: Sessions, outcome: Any) -> None:
    """With the COMMIT of the cancellation."""
    _, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    with only_woken(), waiting(lambda: handle.result(engine, timeout=PATIENCE)) as result:
        with sessions.begin() as session:
            assert cancel(session, handle, outcome) == "cancelled"
        with pytest.raises(ResultNotFound if outcome == "discard" else JobNotDone):
            result()


@CLAIMS
def test_a_job_that_is_cancelled_while_it_runs_ends_the_wait(
    engine: Engine, sessions: Sessions, start_relay: StartRelay, claim: str
) -> None:
    """By its relay."""
    jobs, entered = Jobs(), threading.Event()

    @jobs.handler(claim=claim, keep=KEEP, keep_result=True)
    def work(ctx: Context) -> None:
        entered.set()
        deadline = time.monotonic() + PATIENCE
        while not ctx.cancelled and time.monotonic() < deadline:
            threading.Event().wait(0.01)

    with sessions.begin() as session:
        handle = session.add_job(work)
    with only_woken(), waiting(lambda: handle.result(engine, timeout=PATIENCE)) as result, start_relay(jobs):
        assert entered.wait(PATIENCE)
        with sessions.begin() as session:
            assert cancel(session, handle) == "requested"
        with pytest.raises(JobNotDone) as raised:
            result()
    assert raised.value.outcome == "cancelled"


@pytest.fixture
def prepared_transactions_allowed(engine: Engine) -> None:
    with engine.connect() as connection:
        if connection.execute(text("SHOW max_prepared_transactions")).scalar_one() == "0":
            pytest.skip("this server has max_prepared_transactions = 0")


@pytest.mark.first_and_last
@pytest.mark.usefixtures("prepared_transactions_allowed")
@pytest.mark.parametrize("outcome", ["discard", "dead"])
@pytest.mark.parametrize("by", ["session", "connection"])
def test_a_job_that_is_waited_for_can_be_cancelled_in_two_phases(
    outboxq_database: Database, engine: Engine, sessions: Sessions, by: str, outcome: Any
) -> None:
    """PREPARE TRANSACTION refuses a transaction that has notified, so nothing is; a later look ends the wait."""
    _, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    with (
        told(outboxq_database) as heard,
        limited(look_seconds=0.1, linger_seconds=0.1),
        waiting(lambda: handle.result(engine, timeout=PATIENCE)) as result,
    ):
        if by == "session":
            # In a savepoint too.
            with Session(engine, twophase=True) as session, session.begin(), session.begin_nested():
                assert cancel(session, handle, outcome) == "cancelled"
        else:
            with engine.connect() as connection, connection.begin_twophase() as transaction:
                assert cancel(connection, handle, outcome) == "cancelled"
                transaction.prepare()
                transaction.commit()
        with pytest.raises(ResultNotFound if outcome == "discard" else JobNotDone):
            result()
        assert heard() == []


@CLAIMS
@pytest.mark.usefixtures("prepared_transactions_allowed")
def test_a_job_that_runs_can_be_cancelled_in_two_phases(
    engine: Engine, sessions: Sessions, start_relay: StartRelay, claim: str
) -> None:
    """Its relay is not notified, and finds the request with its next beat."""
    jobs, entered = Jobs(), threading.Event()

    @jobs.handler(claim=claim)
    def work(ctx: Context) -> None:
        entered.set()
        deadline = time.monotonic() + PATIENCE
        while not ctx.cancelled and time.monotonic() < deadline:
            threading.Event().wait(0.01)

    with sessions.begin() as session:
        handle = session.add_job(work)
    with start_relay(jobs, RelayConfig(lease_seconds=1)) as relay:
        assert entered.wait(PATIENCE)
        with Session(engine, twophase=True) as session, session.begin():
            assert cancel(session, handle) == "requested"
        wait_until(lambda: relay.of(JobCancelled), "the end of the job")


def test_a_wait_inside_of_the_transaction_that_adds_the_job_is_refused(engine: Engine, sessions: Sessions) -> None:
    """Also in and behind a savepoint of it, flushed or not: the job is not committed before the block ends."""
    _, work = keeping_jobs()

    def refused(handle: Any) -> None:
        for wait in (handle.result, lambda engine: wait_for_result(engine, handle)):
            with pytest.raises(WaitRefused, match="still open"):
                wait(engine)

    with sessions() as session:
        plain = session.add_job(work, name="x")
        refused(plain)
        session.flush()
        refused(plain)
        with session.begin_nested():
            inner = session.add_job(work, name="y")
            refused(inner)
            with session.begin_nested():
                innermost = session.add_job(work, name="z")
                refused(innermost)
        refused(inner)
        with session.begin_nested() as savepoint:
            lost = session.add_job(work, name="lost")
            savepoint.rollback()
        refused(lost)
        session.commit()
        # The session goes on, in another transaction.
        session.execute(text("SELECT 1"))
        for handle in (plain, inner, innermost):
            with pytest.raises(ResultTimeout):
                handle.result(engine, timeout=0.2)
        with pytest.raises(ResultNotFound, match="rolled back"):
            lost.result(engine, timeout=PATIENCE)


def test_a_wait_behind_a_rollback_says_that_there_is_no_job(engine: Engine, sessions: Sessions) -> None:
    """At once, and in words that name the rollback."""
    _, work = keeping_jobs()
    with sessions() as session:
        handle = session.add_job(work, name="x")
        session.flush()
        session.rollback()
    with pytest.raises(ResultNotFound, match="its transaction was rolled back"):
        handle.result(engine, timeout=PATIENCE)
    with pytest.raises(ResultNotFound):
        wait_for_result(engine, uuid4(), timeout=PATIENCE)


_RENAMED = text("UPDATE outboxq.job SET id = :id WHERE id = :later")


def test_of_two_jobs_of_one_id_the_later_one_counts(engine: Engine, sessions: Sessions, drain: Drain) -> None:
    """A kept row and a dead letter stand beside each other, whichever of the two came first."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        job_id = session.add_job(work, name="x").id

    def again(name: str) -> None:
        with sessions.begin() as session:
            later = session.add_job(work, name=name)
            session.flush()
            session.execute(_RENAMED, {"id": job_id, "later": later.id})
        drain(jobs)

    drain(jobs)
    again("dies")
    with pytest.raises(JobNotDone, match="beyond help"):
        wait_for_result(engine, job_id, timeout=PATIENCE)
    again("y")
    assert wait_for_result(engine, job_id, timeout=PATIENCE)["name"] == "y"


def test_a_wait_for_what_no_kind_keeps_is_refused(engine: Engine, sessions: Sessions, drain: Drain) -> None:
    """By the handle, if the handler is here; else once the job is done."""
    jobs = Jobs()

    @jobs.handler(keep=KEEP)
    def kept(ctx: Context) -> int:
        return 7

    @jobs.handler
    def plain(ctx: Context) -> None:
        pass

    with sessions.begin() as session:
        handles = [session.add_job(kept), session.add_job(plain), session.add_job(kept.options(priority=1))]
        handles += session.add_jobs([plain.job(), kept.job()])
        elsewhere = [session.add_job(external(kind, queue="default")) for kind in ("kept", "plain")]
    for handle in handles:
        with pytest.raises(WaitRefused, match="keep_result=True"):
            handle.result(engine)
        with pytest.raises(WaitRefused):
            wait_for_result(engine, handle)
    drain(jobs)
    for handle in elsewhere:
        with pytest.raises(ResultNotFound, match="keep_result=True"):
            handle.result(engine, timeout=PATIENCE)


def test_a_unique_job_that_was_not_added_names_the_one_that_was(engine: Engine, sessions: Sessions) -> None:
    """Whose result can be waited for."""
    _, work = keeping_jobs()
    unique = work.options(unique=Unique("name"))
    with sessions.begin() as session:
        first = session.add_job(unique, name="x")
    with sessions.begin() as session:
        second = session.add_job(unique, name="x")
    with pytest.raises(WaitRefused, match=str(first.id)):
        second.result(engine)
    with pytest.raises(ResultTimeout):
        first.result(engine, timeout=0.1)


def test_a_handle_is_waited_for_in_another_process(engine: Engine, sessions: Sessions, drain: Drain) -> None:
    """It travels while its transaction is open, and knows there nothing of it."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
        travelled = pickle.loads(pickle.dumps(handle))
    assert travelled == handle
    drain(jobs)
    assert travelled.result(engine, timeout=PATIENCE)["name"] == "x"


def test_time_that_is_over_leaves_the_job_alone(engine: Engine, sessions: Sessions, drain: Drain) -> None:
    """A TimeoutError that names the job; the result is there later."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    with pytest.raises(TimeoutError, match=r"not over within 0\.05 s, and goes on") as raised:
        handle.result(engine, timeout=timedelta(seconds=0.05))
    assert isinstance(raised.value, ResultTimeout)
    assert raised.value.job_id == handle.id
    drain(jobs)
    assert handle.result(engine)["pages"] == 3


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_async_engine_is_awaited(
    outboxq_database: Database, engine: Engine, start_relay: StartRelay, driver: str
) -> None:
    """In an event loop that works on meanwhile, and in a second one after it; cancelled and late ones are left."""
    jobs, work = keeping_jobs()
    url = make_url(outboxq_database.url).set(drivername=f"postgresql+{driver}")
    there = create_async_engine(url)

    async def produce() -> Any:
        async with AsyncOutboxSession(there) as session, session.begin():
            handle = session.add_job(work, name="x")
            with pytest.raises(WaitRefused):
                await handle.result(there)
        with pytest.raises(TimeoutError):
            await handle.result(there, timeout=0.05)
        task = asyncio.create_task(handle.result(there))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with start_relay(jobs):
            several = await asyncio.gather(*(handle.result(there, timeout=PATIENCE) for _ in range(20)))
            value = await wait_for_result(there, handle.id, timeout=PATIENCE, returns=Report)
        assert several == [{"name": "x", "pages": 3}] * 20
        await there.dispose()
        return value

    for _ in range(2):
        assert asyncio.run(produce()) == Report("x", 3)


def test_other_drivers_and_urls_lead_to_results_too(
    outboxq_database: Database, sessions: Sessions, drain: Drain
) -> None:
    """By a psycopg connection to the same place."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    drain(jobs)
    psycopg2 = create_engine(make_url(outboxq_database.url).set(drivername="postgresql+psycopg2"))
    for place in (psycopg2, outboxq_database.url, make_url(outboxq_database.url)):
        assert handle.result(place, timeout=PATIENCE)["name"] == "x"
    psycopg2.dispose()


@pytest.mark.large
def test_behind_a_transaction_pooler_results_are_polled_for(
    outboxq_database: Database, sessions: Sessions, drain: Drain
) -> None:
    """It would lose the notification and the flags, so neither is relied on."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    with (
        pgbouncer(outboxq_database.url) as url,
        only_woken(),
        waiting(lambda: handle.result(url, timeout=PATIENCE)) as result,
    ):
        drain(jobs)
        assert result() == {"name": "x", "pages": 3}


def test_what_stands_in_the_way_of_all_looks_is_raised(
    outboxq_database: Database, engine: Engine, sessions: Sessions
) -> None:
    """A missing right, a table of an earlier step, a database that is not there: waiting mends none of them."""
    _, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    role = f"{outboxq_database.name}_blind"
    url = make_url(outboxq_database.url)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'p'")
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA outboxq TO {role}")
    try:
        with pytest.raises(ConfigError, match="needs SELECT on the tables job, done_job and dead_job"):
            handle.result(url.set(username=role, password="p"), timeout=PATIENCE)
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {role}")
            connection.exec_driver_sql(f"DROP ROLE {role}")
    with pytest.raises(ConfigError, match="database does not exist"):
        handle.result(url.set(database="nowhere"), timeout=PATIENCE)
    with pytest.raises(ConfigError, match="cannot be waited for") as raised:
        handle.result(url.update_query_dict({"ssl": "require"}), timeout=PATIENCE)
    assert "invalid connection option" in str(raised.value.__cause__)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.done_job RENAME TO elsewhere"))
    with pytest.raises(SchemaError, match=f"to={LATEST_VERSION}"):
        handle.result(engine, timeout=PATIENCE)


def test_a_server_that_is_away_is_named_when_the_time_is_over(outboxq_database: Database, sessions: Sessions) -> None:
    """It may come back until then."""
    _, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    with pytest.raises(ResultTimeout, match=r"could not be asked: \w+ \(Connection refused\)"):
        handle.result(make_url(outboxq_database.url).set(host="127.0.0.1", port=1), timeout=0.3)


@pytest.mark.parametrize("timeout", [0, -1, True, float("nan"), float("inf"), "5", None, timedelta(0)])
def test_a_time_that_is_none_is_refused(engine: Engine, sessions: Sessions, timeout: Any) -> None:
    """Before anything waits."""
    with pytest.raises(ConfigError, match="timeout takes a timedelta, or seconds"):
        wait_for_result(engine, uuid4(), timeout=timeout)


def test_what_is_no_engine_is_refused(engine: Engine, sessions: Sessions) -> None:
    """A session or a connection is the caller's own; a wait needs one for itself."""
    with sessions() as session, engine.connect() as connection:
        for given in (session, connection):
            with pytest.raises(ConfigError, match="an engine or a URL"):
                wait_for_result(given, uuid4())  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="at most 48 bytes"):
        wait_for_result(engine, uuid4(), schema="x" * 49)


def test_the_thread_that_listens_outlives_a_clock_that_stops_and_goes_on_elsewhere(
    engine: Engine, sessions: Sessions, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library for tests stops it: the thread has a clock of its own, and ends in order."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    with only_woken():
        with monkeypatch.context() as stopped:
            stopped.setattr(time, "monotonic", lambda: 1.7e9)
            with waiting(lambda: handle.result(engine, timeout=PATIENCE)) as result:
                drain(jobs)
                assert result() == {"name": "x", "pages": 3}
        wait_until(lambda: "outboxq-results" not in {each.name for each in threading.enumerate()}, "the thread's end")
