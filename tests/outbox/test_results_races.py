"""Waits for results at their worst moments: each end of a job meets each step of a wait, and none is missed.

No listener looks by itself here: what no notification and no new connection tells is not found, and the test fails.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession
from outboxq.database.driver import run_script
from outboxq.errors import JobNotDone
from outboxq.outbox.results import listeners
from outboxq.postgres import Database
from outboxq.statements.results import tell_waiters
from tests.conftest import StartRelay
from tests.support.app import Child
from tests.support.results import KEEP, end_listener, keeping_jobs, listening, once_at, only_woken, told, waiting
from tests.support.together import together
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Any]]
Sessions = sessionmaker[OutboxSession]
# What a wait that missed its job runs into.
MISSED_SECONDS = 10.0


@pytest.fixture(autouse=True)
def _only_woken() -> Iterator[None]:
    with only_woken():
        yield


@pytest.mark.first_and_last
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("point", ["before-look", "after-look"])
def test_a_job_that_ends_between_two_steps_of_a_wait_is_not_missed(
    engine: Engine, sessions: Sessions, drain: Drain, claim: str, point: str
) -> None:
    """Between the flag and the look the look sees it; between the look and the wait the flag has it notify."""
    jobs, work = keeping_jobs(claim)
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    with once_at(point, lambda: drain(jobs)):
        assert handle.result(engine, timeout=MISSED_SECONDS)["name"] == "x"


def test_a_job_that_ended_before_is_found_by_the_first_look(engine: Engine, sessions: Sessions, drain: Drain) -> None:
    """Nothing notifies of it any more; also if the listener has just looked at another job."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handles = [session.add_job(work, name=name) for name in ("x", "y")]
    drain(jobs)
    for handle in handles:
        assert handle.result(engine, timeout=MISSED_SECONDS)["pages"] == 3


def test_a_wait_that_meets_a_commit_on_its_way_looks_behind_it(
    outboxq_database: Database, engine: Engine, sessions: Sessions
) -> None:
    """The transaction found no flag, and tells nothing; the wait is refused its flag, and looks when it has it."""
    _, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    looked, values = threading.Event(), []
    thread = threading.Thread(target=lambda: values.append(handle.result(engine, timeout=MISSED_SECONDS)))
    with told(outboxq_database) as heard, once_at("after-look", looked.set):
        with engine.begin() as ending:
            run_script(ending, tell_waiters("outboxq", [handle.id]))
            ending.execute(text("DELETE FROM outboxq.job"))
            ending.execute(_DONE, {"id": handle.id})
            thread.start()
            assert looked.wait(PATIENCE)
            assert values == []
        thread.join(PATIENCE)
        assert heard() == []
    assert values == [7]


_DONE = text(
    "INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, seconds, result, expires_at) "
    "VALUES (:id, 'default', 'work', 'done', 1, now(), 0, '7', now() + interval '1 day')"
)


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_connection_that_is_lost_is_made_anew_and_looks(
    engine: Engine, sessions: Sessions, drain: Drain, claim: str
) -> None:
    """The job ends while nothing listens: its notification goes nowhere, and the new connection's look finds it."""
    jobs, work = keeping_jobs(claim)
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")

    def lose_and_end() -> None:
        end_listener(engine)
        drain(jobs)

    with once_at("after-look", lose_and_end):
        assert handle.result(engine, timeout=PATIENCE)["name"] == "x"


def test_a_server_that_takes_no_connection_for_a_while_is_waited_for(
    outboxq_database: Database, engine: Engine, sessions: Sessions, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener tries again until one is given."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    drain(jobs)
    refused: list[int] = []
    connect = psycopg.connect

    def refuse(*arguments: Any, **options: Any) -> Any:
        if len(refused) < 3:
            refused.append(1)
            raise psycopg.OperationalError("connection refused: Connection refused")
        return connect(*arguments, **options)

    monkeypatch.setattr(psycopg, "connect", refuse)
    assert handle.result(outboxq_database.url, timeout=PATIENCE)["name"] == "x"
    assert len(refused) == 3


def test_many_waits_for_one_job_share_a_connection_and_all_end(
    engine: Engine, sessions: Sessions, drain: Drain
) -> None:
    """A hundred callers, one backend of theirs, one notification."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    values: list[object] = []
    with waiting(lambda: handle.result(engine, timeout=PATIENCE)) as result:
        threads = [
            threading.Thread(target=lambda: values.append(handle.result(engine, timeout=PATIENCE))) for _ in range(99)
        ]
        for thread in threads:
            thread.start()
        assert len(listening(engine)) == 1
        drain(jobs)
        for thread in threads:
            thread.join(PATIENCE)
        assert values == [result()] * 99


@pytest.mark.large
def test_a_hundred_waits_cost_other_jobs_nothing(
    outboxq_database: Database, engine: Engine, sessions: Sessions, drain: Drain
) -> None:
    """While a hundred jobs are waited for, the ends of others notify of nothing; then each wait hears of its own."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        waited = [session.add_job(work.options(delay=KEEP), name=str(number)) for number in range(100)]
        others = [session.add_job(work, name="other") for _ in range(30)]
    values: dict[int, object] = {}

    def wait(number: int) -> None:
        values[number] = waited[number].result(engine, timeout=PATIENCE)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(100)]
    with told(outboxq_database) as heard:
        for thread in threads:
            thread.start()
        wait_until(lambda: _flags(engine) == 101, "the flags of all waits")
        assert len(listening(engine)) == 1
        drain(jobs)
        assert heard() == []
        assert all(each.result(engine, timeout=PATIENCE) for each in others)
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.job SET state = 'ready', run_at = now()"))
        drain(jobs)
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(heard()) == sorted(str(each.id) for each in waited)
    assert {number: value["name"] for number, value in values.items()} == {n: str(n) for n in range(100)}


def _flags(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(
            text(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' "
                "AND classid = hashtext('outboxq_outboxq result')::oid"
            )
        ).scalar_one()


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_transaction_that_ends_many_jobs_calls_all_who_wait(
    outboxq_database: Database, engine: Engine, sessions: Sessions, drain: Drain, claim: str
) -> None:
    """It tries one flag, as the server has no lock for each of many jobs; without a wait nothing is told."""
    jobs, work = keeping_jobs(claim)
    with sessions.begin() as session:
        session.add_jobs([work.job(name="idle") for _ in range(100)])
    with told(outboxq_database) as heard:
        drain(jobs, **together(claim, 100))
        assert heard() == []
        with sessions.begin() as session:
            handles = session.add_jobs([work.job(name="idle") for _ in range(100)])
        with waiting(lambda: handles[-1].result(engine, timeout=PATIENCE)) as result:
            drain(jobs, **together(claim, 100))
            assert result() == {"name": "idle", "pages": 3}


def test_a_dead_letter_behind_a_refused_commit_is_told(engine: Engine, sessions: Sessions, drain: Drain) -> None:
    """A deferred constraint fails at COMMIT, and the attempt was the last one."""
    jobs = Jobs()

    @jobs.handler(keep=KEEP, keep_result=True)
    def work(ctx: Context) -> None:
        ctx.session.add(Child(parent_id=0))

    with sessions.begin() as session:
        handle = session.add_job(work.options(max_attempts=1))
    with waiting(lambda: handle.result(engine, timeout=PATIENCE)) as result:
        drain(jobs)
        with pytest.raises(JobNotDone, match="gave up after 1 of 1 attempts"):
            result()


def test_an_end_that_is_settled_on_a_new_connection_is_told(engine: Engine, sessions: Sessions, drain: Drain) -> None:
    """The relay's connections are lost while the handler runs under its lease: the result is there all the same."""
    jobs = Jobs()

    @jobs.handler(claim="lease", keep=KEEP, keep_result=True)
    def work(ctx: Context) -> int:
        with engine.begin() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
                    "WHERE application_name = 'outboxq relay' AND datname = current_database()"
                )
            )
        return 7

    with sessions.begin() as session:
        handle = session.add_job(work)
    with waiting(lambda: handle.result(engine, timeout=PATIENCE)) as result:
        drain(jobs)
        assert result() == 7


@pytest.mark.large
def test_a_job_that_is_charged_for_its_lost_connection_is_told(
    engine: Engine, sessions: Sessions, drain: Drain
) -> None:
    """Its handler is past its deadline and in no statement: another transaction claims it once more, and ends it."""
    jobs = Jobs()

    @jobs.handler(keep=KEEP, keep_result=True, timeout_seconds=0.5)
    def work(ctx: Context) -> None:
        ctx.session.execute(text("SELECT 1"))
        threading.Event().wait(5.0)
        ctx.session.execute(text("SELECT 1"))

    with sessions.begin() as session:
        handle = session.add_job(work.options(max_attempts=1))
    with waiting(lambda: handle.result(engine, timeout=PATIENCE)) as result:
        drain(jobs)
        with pytest.raises(JobNotDone, match="HandlerTimedOut"):
            result()


def test_a_wait_for_a_job_that_another_one_runs_for_ends_with_it(
    engine: Engine, sessions: Sessions, drain: Drain
) -> None:
    """Of coalesced jobs one has a result; those who wait for the others are told that theirs have none."""
    jobs = Jobs()

    @jobs.handler(keep=KEEP, keep_result=True, coalesce="number")
    def work(ctx: Context, number: int) -> int:
        return number

    with sessions.begin() as session:
        handles = [session.add_job(work, number=7) for _ in range(3)]
    ended: list[object] = []

    def wait(handle: Any) -> None:
        try:
            ended.append(handle.result(engine, timeout=PATIENCE))
        except Exception as error:  # noqa: BLE001  # looked at below
            ended.append(type(error).__name__)

    threads = [threading.Thread(target=wait, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    wait_until(lambda: _flags(engine) == 4, "the flags")
    drain(jobs, slots_per_queue=1)
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(ended, key=str) == [7, "ResultNotFound", "ResultNotFound"]


def test_a_running_relay_answers_one_wait_after_the_other(
    engine: Engine, sessions: Sessions, start_relay: StartRelay
) -> None:
    """As a web process has it: add, commit, wait."""
    jobs, work = keeping_jobs()
    with start_relay(jobs):
        for number in range(20):
            with sessions.begin() as session:
                handle = session.add_job(work, name=str(number))
            assert handle.result(engine, timeout=PATIENCE)["name"] == str(number)


def test_a_listener_that_nothing_waits_for_ends_with_its_connection(engine: Engine, sessions: Sessions) -> None:
    """Its thread too; the next wait starts another one."""
    _, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            handle.result(engine, timeout=0.2)
        wait_until(lambda: not listening(engine), "the connection to be closed")
        wait_until(lambda: not result_threads(), "the thread to end")
        wait_until(lambda: (engine.pool, "outboxq") not in listeners._listeners, "the engine to be let go")


def result_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "outboxq-results"]
