"""Pages that follow the database: what they cost, and when that ends."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, event, text

from outboxq.dashboard import DashboardApp, Role, User, create_app
from outboxq.dashboard import live as live_pages
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.live import Watched, find_watched
from tests.support.dashboard import as_user, client_of, stage_dashboard
from tests.support.http_server import serve
from tests.support.staged import numbered
from tests.support.waiting import PATIENCE

_LIVE_SECONDS = 2.0
_PATIENCE_SECONDS = 30.0


@contextlib.asynccontextmanager
async def following(client: httpx.AsyncClient, page: str, user: str = "anna") -> AsyncIterator[list[str]]:
    """A browser that follows a page; the names of its events."""
    events: list[str] = []

    async def follow() -> None:
        async with client.stream("GET", f"/orders/live/{page}", headers={"x-user": user}) as answer:
            async for line in answer.aiter_lines():
                events.extend([line] if line.startswith("event: ") else [])

    task = asyncio.create_task(follow())
    try:
        yield events
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _until(events: list[str], number: int) -> None:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while len(events) < number:  # noqa: ASYNC110  # another task appends to it
            await asyncio.sleep(0.05)


@pytest.fixture
def app(engine: Engine) -> DashboardApp:
    stage_dashboard(engine)
    return create_app(
        {"orders": engine}, auth=lambda request: User(request.headers.get("x-user", "anna")), live_seconds=_LIVE_SECONDS
    )


@pytest.mark.wide
def test_a_change_is_told_and_the_page_comes_first(app: DashboardApp, engine: Engine) -> None:
    """A browser that comes gets the page as it is, and then what has changed."""

    async def run(address: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=None) as client:
            async with following(client, "queues") as events:
                await _until(events, 1)
                with engine.begin() as connection:
                    connection.execute(
                        text("UPDATE outboxq.queue SET paused_at = clock_timestamp() WHERE name = 'accounts'")
                    )
                await _until(events, 2)
            assert set(events) == {"event: page"}

    with serve(app) as address:
        asyncio.run(run(address))


@pytest.mark.wide
def test_a_server_that_stops_waits_for_the_look_that_is_under_way(app: DashboardApp, engine: Engine) -> None:
    """A thread that went on with a connection would have it when the application closes its engine."""
    event.listen(engine, "before_cursor_execute", lambda *_: time.sleep(0.02))

    async def run(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=None) as client, following(client, "overview") as events:
            await _until(events, 1)

    with serve(app) as address:
        asyncio.run(run(address))
        # The first page was told: now the doctor looks.
        assert engine.pool.checkedout() == 1  # type: ignore[attr-defined]  # of a QueuePool
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of a QueuePool


@pytest.mark.wide
def test_fifty_watchers_cost_what_one_costs_and_none_cost_nothing(app: DashboardApp, engine: Engine) -> None:
    """However many watch, a look takes the same statements at the same pace; without any there is no look."""
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    poller = app.dashboard.pollers["orders"]
    # The doctor comes once a minute, and so into one of the counts alone.
    poller._doctor_at = math.inf
    looks: list[tuple[float, int]] = []
    made = poller._made

    async def counted(watched: Watched) -> str:
        begun, before = time.monotonic(), len(statements)
        page = await made(watched)
        looks.append((begun, len(statements) - before))
        return page

    poller._made = counted  # type: ignore[method-assign]  # counts, and does the same

    async def cost(client: httpx.AsyncClient, watchers: int) -> set[int]:
        async with contextlib.AsyncExitStack() as stack:
            watching = [
                await stack.enter_async_context(following(client, "overview", f"user {number}"))
                for number in range(watchers)
            ]
            for events in watching:
                await _until(events, 1)
            looks.clear()
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while len(looks) < 4:  # noqa: ASYNC110  # the poller appends to it
                    await asyncio.sleep(0.05)
            begun = [at for at, _ in looks]
            assert all(later - earlier >= 0.95 * _LIVE_SECONDS for earlier, later in pairwise(begun))
            return {number for _, number in looks}

    async def run(address: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=None) as client:
            one = await cost(client, 1)
            assert await cost(client, 50) == one
            assert len(one) == 1
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not (poller._task is None or poller._task.done()):  # noqa: ASYNC110  # in the server's thread
                await asyncio.sleep(0.05)
        statements.clear()
        await asyncio.sleep(1.5 * _LIVE_SECONDS)
        assert statements == []

    with serve(app) as address:
        asyncio.run(run(address))


def test_a_page_that_is_not_live_has_no_stream(app: DashboardApp) -> None:
    """Streams are those of the table of routes."""
    with serve(app) as address:
        assert httpx.get(f"{address}/orders/live/jobs", timeout=PATIENCE).status_code == 404
        assert httpx.get(f"{address}/nowhere/live/overview", timeout=PATIENCE).status_code == 404


@pytest.mark.wide
def test_a_page_with_parameters_is_followed_too(app: DashboardApp, engine: Engine) -> None:
    """A queue, a kind, a job and a change of many rows: each with its own events, in the parts that it has."""
    with engine.connect() as connection:
        (entry,) = connection.execute(text("SELECT id FROM outboxq.audit ORDER BY id LIMIT 1")).one()
    pages = {
        "queues/accounts?period=6h": {"event: page", "event: rest"},
        "kinds/credit": {"event: page"},
        f"jobs/{numbered(2)}": {"event: page"},
        f"audit/{entry}": {"event: page"},
    }

    async def run(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=None) as client:
            for page, expected in pages.items():
                shown = (await client.get(f"/orders/{page}")).text
                assert f'sse-connect="../../orders/live/{page}"' in shown.replace("&amp;", "&")
                async with following(client, page) as events:
                    await _until(events, len(expected))
                assert set(events) == expected
            assert (await client.get("/orders/live/doctor")).status_code == 404
            assert (await client.get("/orders/live/jobs/nonsense")).status_code == 400

    with serve(app) as address:
        asyncio.run(run(address))


def test_a_job_that_is_over_is_told_to_those_who_follow_it(app: DashboardApp, engine: Engine) -> None:
    """Its page becomes another one, which the event leads to; nothing fails."""

    async def run(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=None) as client:
            async with client.stream("GET", f"/orders/live/jobs/{numbered(101)}") as answer:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    async for line in answer.aiter_lines():
                        if "Load the page again" in line:
                            return
            raise AssertionError("nothing was told")

    with serve(app) as address:
        asyncio.run(run(address))


def test_a_page_is_loaded_again_by_the_browser_if_it_is_asked_to(app: DashboardApp) -> None:
    """Without a script, by a time of a short list; links keep it."""
    with client_of(app) as client:
        plain = client.get("/orders/doctor").text
        assert 'http-equiv="refresh"' not in plain
        assert 'href="?refresh=10"' in plain
        asked = client.get("/orders/kinds/credit?refresh=10&period=6h").text
        assert '<meta http-equiv="refresh" content="10">' in asked
        assert 'http-equiv="refresh"' not in client.get("/orders/doctor?refresh=1").text


def test_a_form_is_not_loaded_again_while_it_is_filled_in(engine: Engine) -> None:
    """Whatever the address says, and it offers no link to that."""
    stage_dashboard(engine)
    with client_of(create_app({"orders": engine}, auth=as_user(Role.ADMIN))) as client:
        form = client.get("/orders/queues/accounts/limits?refresh=5").text
    assert 'http-equiv="refresh"' not in form
    assert "Load again" not in form


def _follow(app: DashboardApp, page: str, user: str) -> live_pages.Stream:
    watched = find_watched(app.dashboard.routes, page, {})
    assert watched is not None
    return app.dashboard.pollers["orders"].stream(watched, user)


def test_a_user_does_not_take_live_pages_from_others(app: DashboardApp) -> None:
    """Five pages and ten streams of one user, and what is asked for counts before it is read."""
    for number in range(5):
        _follow(app, f"queues/q{number}", "eve")
    for page in ("queues/q5", "overview"):
        with pytest.raises(Refused):
            _follow(app, page, "eve")
    for _ in range(5):
        _follow(app, "queues/q0", "eve")
    with pytest.raises(Refused):
        _follow(app, "queues/q0", "eve")
    for number in range(490):
        _follow(app, "overview", f"user {number}")
    with pytest.raises(Refused):
        _follow(app, "overview", "anna")


def test_a_browser_that_does_not_read_is_let_go(app: DashboardApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream ends in time, and counts no more."""
    monkeypatch.setattr(live_pages, "STREAM_SECONDS", 0.05)
    monkeypatch.setattr(live_pages, "_BEAT_SECONDS", 0.05)

    async def forever(*_: object) -> object:
        return await asyncio.Event().wait()

    async def run() -> None:
        stream: Any = _follow(app, "overview", "eve")
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await stream(scope, forever, forever)
            await stream({**scope, "asgi": {}}, forever, forever)

    asyncio.run(run())
    assert app.dashboard.pollers["orders"]._watching == {}
