"""The connection on which results are waited for: the engine says how it is opened, and its pool has no part in it."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import AssertionPool, AsyncAdaptedQueuePool, NullPool, Pool, QueuePool, StaticPool

from outboxq import OutboxSession
from outboxq.postgres import Database
from tests.support.results import keeping_jobs, limited, listening, waiting
from tests.support.waiting import PATIENCE

Drain = Callable[..., list[Any]]
Sessions = sessionmaker[OutboxSession]
FULL = {"pool_size": 1, "max_overflow": 0}
# Less than the time for which a pool without a free connection is waited for.
SECONDS = 10.0


@pytest.fixture(autouse=True)
def _without_lingering() -> Iterator[None]:
    with limited(linger_seconds=0.1):
        yield


@pytest.fixture
def handle(sessions: Sessions, drain: Drain) -> Any:
    """Of a job that is done."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    drain(jobs)
    return handle


@pytest.mark.parametrize("pool_timeout", [0.1, 30.0])
def test_a_caller_that_holds_the_whole_pool_gets_its_result(
    outboxq_database: Database, handle: Any, pool_timeout: float
) -> None:
    """As a session has it that reads on after its commit: the wait takes no connection of the engine's."""
    full = create_engine(outboxq_database.url, pool_timeout=pool_timeout, **FULL)
    with full.connect():
        assert handle.result(full, timeout=SECONDS)["name"] == "x"
        assert full.pool.checkedout() == 1
    full.dispose()


@pytest.mark.parametrize("pool_timeout", [0.1, 30.0])
def test_a_task_that_holds_the_whole_pool_gets_its_result(
    outboxq_database: Database, handle: Any, pool_timeout: float
) -> None:
    """The same in an event loop."""

    async def wait() -> Any:
        full = create_async_engine(outboxq_database.url, pool_timeout=pool_timeout, **FULL)
        async with full.connect():
            value = await handle.result(full, timeout=SECONDS)
            assert full.pool.checkedout() == 1
        await full.dispose()
        return value

    assert asyncio.run(wait())["name"] == "x"


def test_a_job_that_ends_while_the_pool_is_held_wakes_its_wait(
    outboxq_database: Database, engine: Engine, sessions: Sessions, drain: Drain
) -> None:
    """On the connection beside the pool, which is not returned to it."""
    jobs, work = keeping_jobs()
    with sessions.begin() as session:
        handle = session.add_job(work, name="x")
    full = create_engine(outboxq_database.url, **FULL)
    with full.connect(), waiting(lambda: handle.result(full, timeout=SECONDS)) as result:
        assert len(listening(engine)) == 1
        drain(jobs)
        assert result() == {"name": "x", "pages": 3}
    full.dispose()


def _named(url: str, name: str) -> dict[str, Any]:
    """What an engine needs to connect to the database by a creator that names its connections."""
    dsn = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    return {"creator": lambda: psycopg.connect(dsn, application_name=name)}


@pytest.mark.first_and_last
@pytest.mark.parametrize("poolclass", [AssertionPool, NullPool, QueuePool, StaticPool])
@pytest.mark.parametrize("is_created", [False, True], ids=["url", "creator"])
def test_the_connection_is_opened_as_the_engine_opens_its_own(
    outboxq_database: Database, handle: Any, poolclass: type[Pool], is_created: bool
) -> None:
    """By its creator or its `do_connect` listeners, then by those of `connect`; its own connection is left alone."""
    options = _named(outboxq_database.url, "named") if is_created else {}
    there = create_engine(outboxq_database.url, poolclass=poolclass, **options)
    seen = _listened(there)
    with there.connect() as held:
        before = held.execute(text("SELECT pg_backend_pid()")).scalar_one()
        seen.clear()
        assert handle.result(there, timeout=SECONDS)["name"] == "x"
        assert seen == (["named"] if is_created else ["do_connect", "token"])
        assert held.execute(text("SELECT pg_backend_pid()")).scalar_one() == before
    there.dispose()


def _listened(engine: Engine) -> list[str]:
    """Listen as users do: with a token for each connection, and a look at what was opened."""
    seen: list[str] = []

    @event.listens_for(engine, "do_connect")
    def name_it(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
        seen.append("do_connect")
        parameters["application_name"] = "token"

    @event.listens_for(engine, "connect")
    def read_it(connection: Any, _record: Any) -> None:
        driver = getattr(connection, "driver_connection", connection)
        seen.append(driver.info.parameter_status("application_name"))

    return seen


@pytest.mark.first_and_last
@pytest.mark.parametrize("poolclass", [AsyncAdaptedQueuePool, NullPool, StaticPool])
def test_an_async_engine_opens_it_in_the_same_way(
    outboxq_database: Database, handle: Any, poolclass: type[Pool]
) -> None:
    """With the listeners of its sync engine."""

    async def wait() -> tuple[Any, list[str]]:
        there = create_async_engine(outboxq_database.url, poolclass=poolclass)
        seen = _listened(there.sync_engine)
        async with there.connect() as held:
            seen.clear()
            value = await handle.result(there, timeout=PATIENCE)
            await held.execute(text("SELECT 1"))
        await there.dispose()
        return value, seen

    value, seen = asyncio.run(wait())
    assert value["name"] == "x"
    assert seen == ["do_connect", "token"]
