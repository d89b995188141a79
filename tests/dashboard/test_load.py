"""What many requests at once take from the application, and what they do not."""

import asyncio
import time
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq.dashboard import Role, create_app, databases
from outboxq.dashboard.databases import Database, Way
from outboxq.dashboard.errors import Refused
from outboxq.database.driver import driver_connection
from outboxq.doctor import run_checks
from outboxq.postgres import Database as Server
from tests.support.dashboard import ORIGIN, as_user, stage_dashboard


@pytest.mark.wide
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_pages_take_four_connections_at_once(is_async: bool, engine: Engine, outboxq_database: Server) -> None:
    """Of a pool that is the application's, whichever engine it has."""
    make: Any = create_async_engine if is_async else create_engine
    given = make(outboxq_database.url, use_native_hstore=False, pool_size=5, max_overflow=20)
    sync = given.sync_engine if is_async else given
    out = list[int]()
    event.listen(sync, "checkout", lambda *_: out.append(sync.pool.checkedout()))
    login: Any = as_user(Role.READER)
    app = create_app({"orders": given}, auth=login)
    stage_dashboard(engine)

    async def run() -> set[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ORIGIN, timeout=None) as client:
            answers = await asyncio.gather(*(client.get("/orders/queues") for _ in range(20)))
        if is_async:
            await given.dispose()
        return {each.status_code for each in answers}

    assert asyncio.run(run()) == {200}
    sync.dispose()
    assert max(out) <= 4


def test_what_would_wait_for_long_is_refused() -> None:
    """Four are looked at, fifty wait, and more are told to come again."""
    database = Database("shop", create_engine("postgresql+psycopg://127.0.0.1:1/shop"), "outboxq")

    def work(_: Way) -> None:
        time.sleep(0.02)

    async def run() -> list[object]:
        return await asyncio.gather(*(database.run(work) for _ in range(60)), return_exceptions=True)

    found = asyncio.run(run())
    assert [type(each) for each in found if each is not None] == [Refused] * 6


def test_the_doctor_looks_once_a_minute_and_leaves_connections_as_they_were(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ask for its page; the application's connections go on to prepare their statements."""
    stage_dashboard(engine)
    looks = list[object]()

    def look(*given: Any, **named: Any) -> Any:
        looks.append(given)
        return run_checks(*given, **named)

    monkeypatch.setattr(databases, "run_checks", look)
    login: Any = as_user(Role.READER)
    app = create_app({"orders": engine}, auth=login)

    async def run() -> set[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ORIGIN, timeout=None) as client:
            answers = await asyncio.gather(*(client.get("/orders/doctor") for _ in range(6)))
            return {each.status_code for each in answers}

    assert asyncio.run(run()) == {200}
    assert len(looks) == 1
    with engine.connect() as one, engine.connect() as other, engine.connect() as third:
        thresholds = [driver_connection(each).prepare_threshold for each in (one, other, third)]
    assert thresholds == [5, 5, 5]
