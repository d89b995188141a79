"""Changes of many rows that go on in the background: two at a time, each in a thread or a greenlet of its own.

Each page of rows is committed together with its record in the audit. So if this process ends, the audit says how many
rows were changed, and this dashboard, another one, or the command line can resume the change.
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
    """A change of many rows that an action has begun, for `Runs` to run in the background.

    Attributes:
        entry: The id of the change's row in the audit.
        run: Changes all rows, page by page; called in a thread or a greenlet.
    """

    entry: UUID
    run: Callable[[Begin, OnPage], Total]


class DashboardStopped(OutboxqError):
    """Raised in a background change after its present page of rows, to end it because the dashboard is stopping.

    The change can be resumed later.
    """


class Runs:
    """The changes of many rows that run in the background of this process."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, UUID], asyncio.Task[Total]] = {}

    def has(self, database: Database, entry: UUID) -> bool:
        """Return True if the change with this row in the audit (`entry`) runs in this process."""
        return (database.segment, entry) in self._running

    async def start(self, database: Database, wanted: ToRun) -> bool:
        """Begin a change, and wait up to 15 seconds for its first page of rows.

        Return True once that page is done, and False if it takes longer; the change goes on in either case.

        Raises:
            Refused: the change runs in this process already, or two other changes do.
            OutboxqError, DBAPIError, psycopg.Error: the change failed with this error before its first page.
        """
        key = (database.segment, wanted.entry)
        if key in self._running:
            raise Refused(409, "It goes on here already.")
        if len(self._running) >= MOST_RUNS:
            raise Refused(
                409, f"{MOST_RUNS} changes of many rows go on here already: wait until one has ended, or stop one."
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
