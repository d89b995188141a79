"""Pages that follow the database: what they cost, and when that ends."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, event, text

from outboxq.dashboard import User, create_app
from outboxq.dashboard import live as live_pages
from outboxq.dashboard.app import DashboardApp
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.live import find_watched
from tests.support.dashboard import stage_dashboard
from tests.support.http_server import serve

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


def test_fifty_watchers_cost_what_one_costs_and_none_cost_nothing(app: DashboardApp, engine: Engine) -> None:
    """Statements are counted over some looks with one browser, with fifty, and with none."""
    statements: list[float] = []
    event.listen(engine, "before_cursor_execute", lambda *_: statements.append(time.monotonic()))

    async def cost(client: httpx.AsyncClient, watchers: int) -> int:
        async with contextlib.AsyncExitStack() as stack:
            watching = [
                await stack.enter_async_context(following(client, "overview", f"user {number}"))
                for number in range(watchers)
            ]
            for events in watching:
                await _until(events, 1)
            statements.clear()
            await asyncio.sleep(3 * _LIVE_SECONDS)
            return len(statements)

    async def run(address: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=None) as client:
            one = await cost(client, 1)
            fifty = await cost(client, 50)
            assert 0 < fifty <= one * 1.6
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while time.monotonic() - statements[-1] < 2.5 * _LIVE_SECONDS:  # noqa: ASYNC110  # for silence
                await asyncio.sleep(0.1)

    with serve(app) as address:
        asyncio.run(run(address))


def test_a_page_that_is_not_live_has_no_stream(app: DashboardApp) -> None:
    """Streams are those of the table of routes."""
    with serve(app) as address:
        assert httpx.get(f"{address}/orders/live/jobs").status_code == 404
        assert httpx.get(f"{address}/nowhere/live/overview").status_code == 404


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
