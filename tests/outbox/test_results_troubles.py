"""Waits for results when something is wrong: event loops that end, statements that fail, limits that are reached."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.pq.abc import PGconn
from sqlalchemy import Engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, wait_for_result
from outboxq.database.driver import run_on_libpq, run_script
from outboxq.errors import ConfigError, ResultNotFound, ResultTimeout
from outboxq.outbox import result_listener
from outboxq.outbox.result_listener import ResultListener
from outboxq.outbox.results import listeners
from outboxq.postgres import Database
from outboxq.statements.results import result_channel, tell_waiters
from tests.support.results import keeping_jobs, limited, listening, waiting
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Any]]
Sessions = sessionmaker[OutboxSession]
# What a wait that missed its job runs into.
MISSED_SECONDS = 10.0


@pytest.fixture
def handle(sessions: Sessions) -> Any:
    """Of a job that waits."""
    _, work = keeping_jobs()
    with sessions.begin() as session:
        return session.add_job(work, name="x")


@pytest.fixture
def threads() -> Callable[[], int]:
    """How many threads listen for results, besides those of before."""
    before = set(threading.enumerate())
    return lambda: sum(each.name == "outboxq-results" for each in set(threading.enumerate()) - before)


@pytest.mark.wide
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_event_loops_share_a_thread_and_a_connection(
    outboxq_database: Database, engine: Engine, handle: Any, drain: Drain, threads: Callable[[], int], driver: str
) -> None:
    """As a sync view has it that calls asyncio.run(); and the last loop is served as well as the first."""
    there = create_async_engine(make_url(outboxq_database.url).set(drivername=f"postgresql+{driver}"))
    for _ in range(5):
        with pytest.raises(ResultTimeout):
            asyncio.run(handle.result(there, timeout=0.3))
    assert len(listening(engine)) == 1
    assert threads() == 1
    drain(keeping_jobs()[0])
    assert asyncio.run(handle.result(there, timeout=PATIENCE))["name"] == "x"
    assert threads() == 1


def test_a_connection_that_is_lost_is_opened_by_the_loop_of_a_wait_that_goes_on(
    outboxq_database: Database, engine: Engine, handle: Any, drain: Drain
) -> None:
    """The one that opened it first is closed."""
    there = create_async_engine(outboxq_database.url)
    with pytest.raises(ResultTimeout):
        asyncio.run(handle.result(there, timeout=0.3))
    with waiting(lambda: asyncio.run(handle.result(there, timeout=PATIENCE))) as result:
        (pid,) = listening(engine)
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid, 60000)"), {"pid": pid})
        drain(keeping_jobs()[0])
        assert result() == {"name": "x", "pages": 3}


@pytest.mark.parametrize(("is_closed", "timeout"), [(True, PATIENCE * 10), (False, 1.0)])
def test_a_wait_whose_loop_stopped_ends_all_the_same(
    outboxq_database: Database,
    engine: Engine,
    handle: Any,
    threads: Callable[[], int],
    is_closed: bool,
    timeout: float,
) -> None:
    """By its loop if that is closed, by its time if not: thread, connection and flags do not stay."""
    there = create_async_engine(make_url(outboxq_database.url).set(drivername="postgresql+asyncpg"))
    loop = asyncio.new_event_loop()

    async def wait_a_while() -> "asyncio.Task[object]":
        task = asyncio.create_task(handle.result(there, timeout=timeout))
        await asyncio.to_thread(wait_until, lambda: listening(engine), "the flags")
        return task

    with limited(look_seconds=0.1, linger_seconds=0.1):
        task = loop.run_until_complete(wait_a_while())
    try:
        if is_closed:
            loop.close()
        wait_until(lambda: not listening(engine), "the connection to be closed")
        wait_until(lambda: threads() == 0, "the thread to end")
        assert not task.done()
    finally:
        if not is_closed:
            with pytest.raises(ResultTimeout):
                loop.run_until_complete(task)
            loop.close()


def test_a_wait_whose_loop_was_closed_keeps_no_thread_while_the_server_is_away(threads: Callable[[], int]) -> None:
    """Nothing gives such a wait up, and no look finds it abandoned."""
    nowhere = create_async_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    loop = asyncio.new_event_loop()

    async def wait_a_while() -> "asyncio.Task[object]":
        task = asyncio.create_task(wait_for_result(nowhere, uuid4(), timeout=PATIENCE * 10, schema="outboxq"))
        await asyncio.to_thread(wait_until, lambda: threads() == 1, "the thread")
        return task

    task = loop.run_until_complete(wait_a_while())
    loop.close()
    wait_until(lambda: threads() == 0, "the thread to end")
    assert not task.done()


def test_a_wait_that_comes_while_the_thread_ends_is_served(
    engine: Engine, handle: Any, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the thread goes on, or the wait gets another one."""
    drain(keeping_jobs()[0])
    values: list[Any] = []
    late = threading.Thread(target=lambda: values.append(handle.result(engine, timeout=MISSED_SECONDS)))
    end_unless_requested = ResultListener.end_unless_requested

    def end_late(listener: ResultListener) -> None:
        if not late.ident:
            late.start()
            wait_until(lambda: listener._requests, "the request")
        end_unless_requested(listener)

    monkeypatch.setattr(ResultListener, "end_unless_requested", end_late)
    with limited(linger_seconds=0.0):
        handle.result(engine, timeout=PATIENCE)
        wait_until(lambda: late.ident, "the end")
        late.join(PATIENCE)
    assert [value["name"] for value in values] == ["x"]


def test_a_look_that_is_cancelled_is_taken_again(engine: Engine, handle: Any, drain: Drain) -> None:
    """By pg_cancel_backend() of a careless administrator: the wait goes on."""
    drain(keeping_jobs()[0])
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(handle.result(engine, timeout=PATIENCE)))
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE outboxq.done_job"))
        thread.start()
        (pid,) = wait_until(lambda: _blocked(engine), "a look that waits")
        connection.execute(text("SELECT pg_cancel_backend(:pid)"), {"pid": pid})
        wait_until(lambda: _blocked(engine) not in ([], [pid]), "another look")
    thread.join(PATIENCE)
    assert values == [{"name": "x", "pages": 3}]


def _blocked(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(
            connection.execute(
                text("SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'outboxq.done_job'::regclass")
            ).scalars()
        )


def test_a_time_limit_of_the_role_is_told_when_the_time_is_over(
    outboxq_database: Database, engine: Engine, handle: Any, drain: Drain
) -> None:
    """Each look of it fails; the next one may not."""
    drain(keeping_jobs()[0])
    url = make_url(outboxq_database.url).update_query_dict({"options": "-c lock_timeout=20"})
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE outboxq.done_job"))
        with pytest.raises(ResultTimeout, match=r"could not be asked: LockNotAvailable \(55P03\)"):
            handle.result(url, timeout=0.5)
    assert handle.result(url, timeout=PATIENCE)["name"] == "x"


def test_each_wait_has_an_error_of_its_own(
    outboxq_database: Database, handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that waiting cannot mend: a shared exception would gather the tracebacks of all."""
    connecting, errors = threading.Barrier(2), list[ConfigError]()

    def refuse(*_: Any, **__: Any) -> Any:
        connecting.wait(PATIENCE)
        connecting.wait(PATIENCE)
        raise psycopg.ProgrammingError("no such option")

    def wait() -> None:
        with pytest.raises(ConfigError) as raised:
            handle.result(outboxq_database.url, timeout=PATIENCE)
        errors.append(raised.value)

    monkeypatch.setattr(psycopg, "connect", refuse)
    waits = [threading.Thread(target=wait) for _ in range(2)]
    waits[0].start()
    connecting.wait(PATIENCE)
    waits[1].start()
    wait_until(lambda: _added(outboxq_database.url), "the second wait")
    connecting.wait(PATIENCE)
    for thread in waits:
        thread.join(PATIENCE)
    first, second = errors
    assert first is not second
    assert isinstance(first.__cause__, psycopg.ProgrammingError)


def _added(url: str) -> bool:
    """Whether a wait is there that the thread of this listener has not taken yet."""
    listener = listeners._listeners.get((url, "outboxq"))
    return listener is not None and bool(listener._requests)


def test_flags_beyond_the_cap_are_not_raised_and_their_jobs_are_looked_at(
    engine: Engine, sessions: Sessions, drain: Drain
) -> None:
    """They are in a table that all sessions of a server share; each wait ends, with a flag or without."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handles = [session.add_job(work, name=str(number)) for number in range(12)]
    values: list[Any] = []
    waits = [
        threading.Thread(target=lambda handle=handle: values.append(handle.result(engine, timeout=PATIENCE)["name"]))
        for handle in handles
    ]
    with limited(look_seconds=3600.0, poll_most_seconds=0.1, most_flags=4, linger_seconds=0.1):
        for thread in waits:
            thread.start()
        wait_until(lambda: _flags(engine) == 5, "the flags that there is room for")
        threading.Event().wait(0.5)
        assert _flags(engine) == 5
        drain(jobs)
        for thread in waits:
            thread.join(PATIENCE)
    assert sorted(values, key=int) == [str(number) for number in range(12)]


def test_a_flag_that_is_free_again_is_given_to_a_job_beyond_the_cap(
    engine: Engine, sessions: Sessions, drain: Drain
) -> None:
    """Which is woken from then on."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handles = [session.add_job(work, name=name) for name in ("first", "second")]
    with (
        limited(look_seconds=3600.0, poll_most_seconds=0.1, most_flags=1, linger_seconds=0.1),
        waiting(lambda: handles[0].result(engine, timeout=0.5)) as first,
        waiting(lambda: handles[1].result(engine, timeout=PATIENCE)) as second,
    ):
        assert _is_flagged(engine, handles[0])
        with pytest.raises(ResultTimeout):
            first()
        wait_until(lambda: _is_flagged(engine, handles[1]), "the flag")
        drain(jobs)
        assert second() == {"name": "second", "pages": 3}


def _is_flagged(engine: Engine, handle: Any) -> bool:
    with engine.connect() as connection:
        return connection.execute(
            text(
                "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' "
                "AND objid = hashtext(:id)::oid)"
            ),
            {"id": str(handle.id)},
        ).scalar_one()


def _flags(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(
            text(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' "
                "AND classid = hashtext('outboxq_outboxq result')::oid"
            )
        ).scalar_one()


def test_a_thread_that_does_not_start_is_not_waited_for(
    engine: Engine, handle: Any, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call says so, and the next one starts another."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            handle.result(engine, timeout=1.0)
    drain(keeping_jobs()[0])
    assert handle.result(engine, timeout=PATIENCE)["name"] == "x"


def test_a_notification_of_anything_is_passed_over(engine: Engine, handle: Any, drain: Drain) -> None:
    """Any role may send one: the connection stays."""
    with limited(look_seconds=3600.0), waiting(lambda: handle.result(engine, timeout=PATIENCE)) as result:
        before = listening(engine)
        with engine.begin() as connection:
            for payload in ("hello", "'", "0" * 33):
                connection.execute(
                    text("SELECT pg_notify(:channel, :payload)"),
                    {"channel": result_channel("outboxq"), "payload": payload},
                )
        drain(keeping_jobs()[0])
        assert result() == {"name": "x", "pages": 3}
        assert listening(engine) == before


def test_waits_that_come_and_go_do_not_put_off_the_look_at_all(engine: Engine, handle: Any) -> None:
    """Nothing tells of a row that is deleted by hand; each other wait has a look of its own job alone."""
    with limited(look_seconds=0.5), waiting(lambda: handle.result(engine, timeout=PATIENCE)) as result:
        is_over = threading.Event()

        def come_and_go() -> None:
            while not is_over.is_set():
                with pytest.raises(ResultNotFound):
                    wait_for_result(engine, uuid4(), timeout=PATIENCE)

        thread = threading.Thread(target=come_and_go)
        thread.start()
        try:
            with engine.begin() as connection:
                connection.execute(text("DELETE FROM outboxq.job"))
            with pytest.raises(ResultNotFound):
                result()
        finally:
            is_over.set()
            thread.join(PATIENCE)


@contextmanager
def _telling_many(engine: Engine) -> Iterator[None]:
    """Within the block, a transaction that ended many jobs has tried the flag of all waits, and is not over."""
    with engine.begin() as connection:
        run_script(connection, tell_waiters("outboxq", [uuid4() for _ in range(65)]))
        yield


def test_a_job_that_is_done_is_told_while_the_flag_of_all_waits_is_refused(
    engine: Engine, handle: Any, drain: Drain
) -> None:
    """A transaction that ends many jobs, and waits for a lock meanwhile, hides none that were over before."""
    drain(keeping_jobs()[0])
    with limited(look_seconds=3600.0, linger_seconds=0.1), _telling_many(engine):
        assert handle.result(engine, timeout=MISSED_SECONDS)["name"] == "x"


@pytest.mark.parametrize("most_flags", [0, 500], ids=["beyond", "flagged"])
def test_a_job_that_ends_while_the_flag_of_all_waits_is_refused_is_told(
    engine: Engine, handle: Any, drain: Drain, most_flags: int
) -> None:
    """Within a few looks, as no notification is sure to tell of it."""
    limits = {"look_seconds": 3600.0, "poll_most_seconds": 0.1, "linger_seconds": 0.1, "most_flags": most_flags}
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(handle.result(engine, timeout=MISSED_SECONDS)))
    with limited(**limits), _telling_many(engine):
        thread.start()
        _see_looks(engine)
        with engine.begin() as connection:
            # By hand, so that nothing is told.
            connection.execute(text("DELETE FROM outboxq.job"))
            connection.execute(_DONE, {"id": handle.id})
        thread.join(PATIENCE)
        assert values == [7]


def test_a_job_whose_own_flag_is_refused_is_looked_at_too(engine: Engine, handle: Any, drain: Drain) -> None:
    """Two jobs may have the same flag by their hash: the transaction of the other one may take its time."""
    drain(keeping_jobs()[0])
    with limited(look_seconds=3600.0, linger_seconds=0.1), engine.begin() as ending:
        run_script(ending, tell_waiters("outboxq", [handle.id]))
        assert handle.result(engine, timeout=MISSED_SECONDS)["name"] == "x"


def test_jobs_whose_flag_is_refused_are_looked_at_with_pauses(
    engine: Engine, handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which grow to a tenth of a second."""
    looks: list[str] = []

    def count(connection: PGconn, script: str) -> list[tuple[str | None, ...]]:
        looks.extend([script] if "waiting.found" in script else [])
        return run_on_libpq(connection, script)

    monkeypatch.setattr(result_listener, "run_on_libpq", count)
    with limited(look_seconds=3600.0, poll_most_seconds=3600.0, linger_seconds=0.1), _telling_many(engine):
        with pytest.raises(ResultTimeout):
            handle.result(engine, timeout=1.0)
        wait_until(lambda: not listening(engine), "the connection to be closed")
    assert 1 < len(looks) < 20


def test_a_wait_has_its_flag_once_the_flag_of_all_waits_is_free(engine: Engine, handle: Any, drain: Drain) -> None:
    """Looks without a flag end then, and a notification wakes it."""
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(handle.result(engine, timeout=MISSED_SECONDS)))
    with limited(look_seconds=3600.0, linger_seconds=0.1):
        with _telling_many(engine):
            thread.start()
            _see_looks(engine)
        wait_until(lambda: _flags(engine) == 2, "both flags")
        drain(keeping_jobs()[0])
        thread.join(PATIENCE)
    assert [value["name"] for value in values] == ["x"]


_DONE = text(
    "INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, seconds, result, expires_at) "
    "VALUES (:id, 'default', 'work', 'done', 1, now(), 0, '7', now() + interval '1 day')"
)


def _see_looks(engine: Engine) -> None:
    """Wait until a listener has sent a few strings, of which at least one was a look."""
    seen = set[object]()
    sent = text(
        "SELECT query_start FROM pg_stat_activity WHERE datname = current_database() "
        "AND query ~ 'advisory_lock_shared|waiting.found' AND pid <> pg_backend_pid()"
    )

    def see() -> bool:
        with engine.connect() as connection:
            seen.update(connection.execute(sent).scalars())
        return len(seen) > 3

    wait_until(see, "looks of a listener")
