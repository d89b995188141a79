"""Pages that follow the database while they are open: one poller for each database, which sleeps while none is.

However many watch, a page is looked at once in an interval, and made once: it holds nothing that is one user's own.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outboxq.dashboard.databases import Database, Way
from outboxq.dashboard.errors import Refused, answer_to
from outboxq.dashboard.parameters import read_parameters
from outboxq.dashboard.route import Screen
from outboxq.dashboard.view import look_at
from outboxq.doctor import Finding, run_checks
from outboxq.errors import OutboxqError

if TYPE_CHECKING:
    from outboxq.dashboard.answering import Dashboard

logger = logging.getLogger("outboxq.dashboard")

# A stream ends after this time, and the browser comes again: then its user is asked for anew.
STREAM_SECONDS = 600.0
_BEAT_SECONDS, _DOCTOR_SECONDS = 15.0, 60.0
_MOST_STREAMS = 500


class Poller:
    """Looks at the screens of one database that are watched, and tells those who watch what has changed."""

    def __init__(self, dashboard: "Dashboard", database: Database) -> None:
        self._dashboard = dashboard
        self._database = database
        self._watching: defaultdict[Screen, set[asyncio.Queue[str]]] = defaultdict(set)
        self._last: dict[Screen, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._doctor_at = 0.0

    async def stream(self, screen: Screen) -> AsyncIterator[str]:
        """The events of a screen, from now on."""
        if sum(map(len, self._watching.values())) >= _MOST_STREAMS:
            raise Refused(503, "Too many pages are open: this one is not live.")
        # One place: a browser that does not keep up gets the latest.
        inbox: asyncio.Queue[str] = asyncio.Queue(1)
        self._watching[screen].add(inbox)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll(), name="outboxq-dashboard-poller")
        ends_at = time.monotonic() + STREAM_SECONDS
        try:
            yield f"retry: {int(self._dashboard.settings.live_seconds * 1000)}\n\n"
            while time.monotonic() < ends_at:
                try:
                    yield await asyncio.wait_for(inbox.get(), _BEAT_SECONDS)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self._watching[screen].discard(inbox)

    async def _poll(self) -> None:
        while True:
            watched = [screen for screen, inboxes in self._watching.items() if inboxes]
            if not watched:
                self._last.clear()
                return
            for screen in watched:
                await self._look(screen)
            await self._ask_doctor()
            await asyncio.sleep(self._dashboard.settings.live_seconds)

    async def _ask_doctor(self) -> None:
        """Have the findings for the overview, once a minute."""
        if time.monotonic() < self._doctor_at:
            return
        self._doctor_at = time.monotonic() + _DOCTOR_SECONDS
        with contextlib.suppress(OutboxqError, DBAPIError, PoolTimeout):
            self._database.findings = await self._database.run(examine)

    async def _look(self, screen: Screen) -> None:
        try:
            event = await self._made(screen)
        except (OutboxqError, DBAPIError, PoolTimeout) as error:
            event = _event("trouble", answer_to(error).text)
        except Exception:
            logger.exception("a page could not be made: path=%s", screen.path)
            return
        # What has not changed is not sent, but to those who have just come.
        is_new = self._last.get(screen) != event
        self._last[screen] = event
        for inbox in self._watching[screen]:
            if is_new or not getattr(inbox, "was_told", False):
                with contextlib.suppress(asyncio.QueueEmpty):
                    inbox.get_nowait()
                inbox.put_nowait(event)
                inbox.was_told = True  # type: ignore[attr-defined]  # what this inbox was given

    async def _made(self, screen: Screen) -> str:
        asked: Any = read_parameters(screen.takes, {})
        view, look = await self._database.run(
            lambda way: look_at(way, self._dashboard.payloads, lambda look: screen.show(look, asked))
        )
        segment = self._database.segment
        return _event("page", self._dashboard.renderer.fragment(f"/{segment}/{screen.path}", segment, view, look))


def examine(way: Way) -> Sequence[Finding]:
    """What the doctor finds."""
    return run_checks(way.connect, schema=way.schema, use="reader")


def _event(name: str, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines}\n"
