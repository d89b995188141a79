"""Live pages: pages that follow the database while browsers have them open.

One task for each database reads and renders its open pages at intervals. A page is made once for all its users, so it
contains nothing of a single user.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
from starlette.responses import StreamingResponse
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from outboxq.dashboard.databases import FINDINGS_SECONDS, Database
from outboxq.dashboard.errors import EXPECTED, Refused, answer_to
from outboxq.dashboard.parameters import read_parameters
from outboxq.dashboard.route import Route, Screen
from outboxq.dashboard.segments import names_in
from outboxq.dashboard.view import look_at

if TYPE_CHECKING:
    from outboxq.dashboard.answering import Dashboard

logger = logging.getLogger("outboxq.dashboard")

# A stream ends after this time, and the browser connects again, so that its user is checked again.
STREAM_SECONDS = 600.0
_BEAT_SECONDS = 15.0
_MOST_STREAMS, _MOST_PAGES = 500, 50
_MOST_STREAMS_OF_USER, _MOST_PAGES_OF_USER = 10, 5


@dataclass(frozen=True, slots=True)
class Watched:
    """A live page that browsers have open: a screen with its parameters.

    Attributes:
        asked: The parameters, as an object of the screen's dataclass.
        path: The page's path below the database's path.
    """

    screen: Screen
    asked: Any
    path: str


@dataclass(eq=False, slots=True)
class Follower:
    """A browser that has a live page open. Its queue holds one event, so a slow browser gets only the latest version.

    Attributes:
        user: The name of the browser's user.
        inbox: The queue with the next event to send.
        was_told: True once an event was put into the queue. Before that, the page is sent even if unchanged.
    """

    user: str
    inbox: "asyncio.Queue[str]" = field(default_factory=lambda: asyncio.Queue(1))
    was_told: bool = False


class Stream(StreamingResponse):
    """The response that streams the events of a live page to a browser.

    The response ends after some ten minutes (`STREAM_SECONDS`) even if the browser does not read. However it ends, it
    calls the function `leave`, which removes the browser from the page's followers.
    """

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events to the browser, as an ASGI application."""
        try:
            with anyio.move_on_after(STREAM_SECONDS + 2 * _BEAT_SECONDS):
                await super().__call__(scope, receive, send)
        finally:
            self._leave()


def find_watched(routes: Sequence[Route], page: str, query: Mapping[str, str]) -> Watched | None:
    """Return the live page with this path and query; None if there is no live page at the path.

    Args:
        page: The path below the database's; `overview` for the overview, whose own path is empty.

    Raises:
        BadRequest: an invalid parameter.
    """
    path = "" if page == "overview" else page
    for screen in routes:
        if not isinstance(screen, Screen) or not screen.live:
            continue
        found = compile_path(screen.path)[0].match(path)
        if found is not None:
            try:
                names = names_in(found.groupdict())
            except ValueError:
                return None
            return Watched(screen, read_parameters(screen.takes, {**query, **names}), path)
    return None


class Poller:
    """Reads a database's live pages at intervals while browsers have them open, and sends changes to the browsers."""

    def __init__(self, dashboard: "Dashboard", database: Database) -> None:
        self._dashboard = dashboard
        self._database = database
        self._watching: dict[Watched, set[Follower]] = {}
        self._last: dict[Watched, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._doctor_at = 0.0

    def stream(self, watched: Watched, user: str) -> "Stream":
        """Add a browser of a user to the followers of a page, and return the response that streams the page's events.

        The browser is removed when the response has ended.

        Raises:
            Refused: too many pages are followed already, by all users or by this one.
        """
        pages = [{each.user for each in followers} for page, followers in self._watching.items() if page != watched]
        streams = [each.user for followers in self._watching.values() for each in followers]
        mine = [users for users in pages if user in users]
        if len(streams) >= _MOST_STREAMS or len(pages) >= _MOST_PAGES:
            raise Refused(503, "Too many pages are open: this one is not live.")
        if streams.count(user) >= _MOST_STREAMS_OF_USER or len(mine) >= _MOST_PAGES_OF_USER:
            raise Refused(429, "You have many live pages open: this one is not live.")
        follower = Follower(user)
        self._watching.setdefault(watched, set()).add(follower)
        return Stream(self._events(follower), lambda: self._leave(watched, follower))

    async def _events(self, follower: Follower) -> AsyncIterator[str]:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll(), name="outboxq-dashboard-poller")
        ends_at = time.monotonic() + STREAM_SECONDS
        yield f"retry: {int(self._dashboard.settings.live_seconds * 1000)}\n\n"
        while time.monotonic() < ends_at:
            try:
                yield await asyncio.wait_for(follower.inbox.get(), _BEAT_SECONDS)
            except TimeoutError:
                yield ": still here\n\n"

    def _leave(self, watched: Watched, follower: Follower) -> None:
        followers = self._watching.get(watched, set())
        followers.discard(follower)
        if not followers:
            self._watching.pop(watched, None)
            self._last.pop(watched, None)

    async def _poll(self) -> None:
        while self._watching:
            for watched in list(self._watching):
                await self._look(watched)
            await self._ask_doctor()
            await asyncio.sleep(self._dashboard.settings.live_seconds)

    async def _ask_doctor(self) -> None:
        """Run the doctor at most once a minute, because the overview shows its findings; ignore expected errors."""
        if time.monotonic() < self._doctor_at:
            return
        self._doctor_at = time.monotonic() + FINDINGS_SECONDS
        with contextlib.suppress(*EXPECTED):
            await self._database.examine()

    async def _look(self, watched: Watched) -> None:
        try:
            event = await self._made(watched)
        except EXPECTED as error:
            event = _event("trouble", answer_to(error).text)
        except Exception:
            logger.exception("a page could not be made: path=%s", watched.screen.path)
            return
        # An unchanged page is sent only to new followers.
        is_new = self._last.get(watched) != event
        followers = self._watching.get(watched, set())
        if followers:
            self._last[watched] = event
        for each in followers:
            if is_new or not each.was_told:
                with contextlib.suppress(asyncio.QueueEmpty):
                    each.inbox.get_nowait()
                each.inbox.put_nowait(event)
                each.was_told = True

    async def _made(self, watched: Watched) -> str:
        segment = self._database.segment
        desk = self._dashboard.desks[segment]
        view, look = await self._database.run(
            lambda way: look_at(way, desk, lambda look: watched.screen.show(look, watched.asked))
        )
        fragments = self._dashboard.renderer.fragments(f"/{segment}/{watched.path}", segment, view, look)
        return "".join(_event(name, text) for name, text in fragments.items())


def _event(name: str, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines}\n"
