"""Changes of many rows that go on in the background: two at a time, each in a thread or a greenlet of its own.

Each page of a change commits with its part of the audit, so if this process ends, the audit says how far it came, and
this dashboard, another one, or the command line can go on from there.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

from outboxq.admin.actions import Total
from outboxq.admin.marks import Begin
from outboxq.dashboard.databases import Database
from outboxq.dashboard.errors import EXPECTED, Refused
from outboxq.errors import OutboxqError

logger = logging.getLogger("outboxq.dashboard")

MOST_RUNS = 2
# A filter that matches few of many rows may take longer to find the first ones.
_FIRST_PAGE_SECONDS = 15.0

OnPage: TypeAlias = Callable[[Total], None]


@dataclass(frozen=True, slots=True)
class ToRun:
    """A change that is to go on in the background.

    Attributes:
        entry: Its row in the audit.
        run: Runs all of its pages; called in a thread.
    """

    entry: UUID
    run: Callable[[Begin, OnPage], Total]


class DashboardStopped(OutboxqError):
    """The dashboard ends: a change in the background ends after its page, and can be resumed."""


class Runs:
    """The changes that go on in this process."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, UUID], asyncio.Task[Total]] = {}

    def has(self, database: Database, entry: UUID) -> bool:
        """Return True if a change goes on here."""
        return (database.segment, entry) in self._running

    async def start(self, database: Database, wanted: ToRun) -> bool:
        """Begin a change, and wait for its first page, but not for long; True if that page is done.

        Raises:
            Refused: it goes on here already, or two others do.
            OutboxqError, DBAPIError, psycopg.Error: it ended with this before its first page.
        """
        key = (database.segment, wanted.entry)
        if key in self._running:
            raise Refused(409, "It goes on here already.")
        if len(self._running) >= MOST_RUNS:
            raise Refused(
                409, f"{MOST_RUNS} changes of many rows go on here already: wait until one is over, or stop one."
            )
        began = asyncio.Event()
        task = asyncio.create_task(_work(database, wanted, began), name="outboxq-dashboard-bulk")
        self._running[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        waiting = asyncio.create_task(began.wait())
        await asyncio.wait({task, waiting}, timeout=_FIRST_PAGE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done() and not began.is_set():
            await task
        return began.is_set()

    def _ended(self, key: tuple[str, UUID], task: asyncio.Task[Total]) -> None:
        del self._running[key]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, DashboardStopped):
            expected = isinstance(error, EXPECTED)
            logger.warning(
                "a change of many rows ended early: audit=%s error=%s",
                key[1],
                type(error).__name__,
                exc_info=None if expected else error,
            )


async def _work(database: Database, wanted: ToRun, began: asyncio.Event) -> Total:
    loop = asyncio.get_running_loop()
    is_over = False

    def on_page(_: Total) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(began.set)
        if is_over:
            raise DashboardStopped("the dashboard was stopped")

    try:
        return await database.run_aside(lambda way: wanted.run(way.begin_patiently, on_page))
    except asyncio.CancelledError:
        # A thread is not cancelled: it ends itself after its page.
        is_over = True
        raise
