"""The watch: what happens to a handler that does not end within its deadline, or within the time to drain.

In this order: its statement is cancelled (an async handler is cancelled by its own loop); its backend is terminated, so
that no late write can land, the attempt is recorded, and its slot is replaced; if its thread or the event loop is still
not free a little later, the relay ends, so that the process is replaced.
"""

import asyncio
import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.batch import BatchReport, Progress
from outboxq.engines import Engines
from outboxq.errors import HandlerTimedOut, RelayStuck
from outboxq.execute import ConnectionLost, SyncInvoker
from outboxq.failure import Failed, describe_failure
from outboxq.recover import cut_off, end_other_transaction
from outboxq.serve import connection_options
from outboxq.slot import Slot

logger = logging.getLogger("outboxq.relay")

# A cancelled statement, or a cancelled coroutine, has so long to end in order.
CUT_AFTER_SECONDS = 2.0
# What was cut off has so long to notice.
FREE_AFTER_SECONDS = 10.0
_RESOLVE_SECONDS = 10.0


class Runner(Protocol):
    """A slot on its thread or in its task."""

    slot: Slot

    def is_alive(self) -> bool: ...

    def join(self, timeout_seconds: float) -> None: ...

    def abandon(self) -> None: ...

    def stands_at(self) -> int | None:
        """The thread in which its handler runs."""
        ...


class Watch:
    """Looks at the runners of a relay, from the relay's own thread.

    Args:
        replace: Starts another runner in the place of one that was cut off.
        stuck: Ends the relay.
    """

    def __init__(
        self,
        engines: Engines,
        schema: str,
        loop: Callable[[], asyncio.AbstractEventLoop | None],
        replace: Callable[[Runner], None],
        stuck: Callable[[BaseException], None],
    ) -> None:
        self._engines = engines
        self._schema = schema
        self._loop = loop
        self._replace = replace
        self._stuck = stuck
        self._cancelled: dict[Runner, tuple[Progress, int]] = {}
        self._cut: list[tuple[Runner, float]] = []

    def look(self, runners: list[Runner]) -> None:
        """Act on whoever is past a deadline."""
        now = time.monotonic()
        for runner in list(runners):
            progress = runner.slot.progress
            deadline = None if progress is None else progress.deadline
            if progress is not None and deadline is not None and now >= deadline:
                self._act(runner, progress, now - deadline)
        self._cut = [(runner, until) for runner, until in self._cut if runner.is_alive()]
        if any(now > until for _, until in self._cut):
            self._cut.clear()
            self._stuck(RelayStuck("a handler could not be freed within its deadline: this process must be replaced"))

    def interrupt(self, runner: Runner) -> int:
        """Take a job from a slot that a stopping relay does not wait for any longer; how many jobs wait again."""
        progress = runner.slot.progress
        if progress is None or not progress.seize():
            # Its COMMIT is under way: let it be answered.
            runner.join(_RESOLVE_SECONDS)
            return 0
        self._end(runner, progress, None)
        return len(progress.jobs)

    def _act(self, runner: Runner, progress: Progress, late_seconds: float) -> None:
        this = (progress, progress.position)
        if self._cancelled.get(runner) != this:
            self._cancelled[runner] = this
            # An async handler is cancelled by its own loop, and its driver cancels what it waits for.
            if runner.slot.flavour == "sync":
                self._on_connection(lambda connection: end_other_transaction(connection, progress, terminate=False))
        elif late_seconds >= CUT_AFTER_SECONDS and progress.seize():
            failed = _timed_out(runner, progress)
            self._end(runner, progress, failed)
            self._cut.append((runner, time.monotonic() + FREE_AFTER_SECONDS))
            self._replace(runner)

    def _end(self, runner: Runner, progress: Progress, failed: Failed | None) -> None:
        slot = runner.slot
        slot.shared.suspects.end_turn(slot)

        def cut(connection: Connection) -> BatchReport:
            end_other_transaction(connection, progress, terminate=True)
            deadline = time.monotonic() + _RESOLVE_SECONDS
            while True:
                try:
                    return cut_off(connection, progress, slot.work_on(connection, SyncInvoker()), failed)
                except ConnectionLost:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)

        report = self._on_connection(cut)
        runner.abandon()
        if report is not None:
            slot.tell(report)

    def _on_connection(self, action: Callable[[Connection], BatchReport | None]) -> BatchReport | None:
        """Run `action` on a connection of its own; None where there is none to be had: the claim's mark stays."""
        try:
            if self._engines.sync is not None:
                options = connection_options(self._engines.sync, self._schema)
                with self._engines.sync.connect().execution_options(**options) as connection:
                    return action(connection)
            loop = self._loop()
            if loop is None:
                return None
            return asyncio.run_coroutine_threadsafe(self._on_async(action), loop).result(CUT_AFTER_SECONDS)
        except (psycopg.Error, SQLAlchemyError, ConnectionLost, OSError, TimeoutError) as error:
            logger.warning("a handler past its deadline was not settled", extra={"error_type": type(error).__name__})
            return None

    async def _on_async(self, action: Callable[[Connection], BatchReport | None]) -> BatchReport | None:
        engine = self._engines.asynchronous
        assert engine is not None
        async with engine.connect() as connection:
            await connection.execution_options(**connection_options(engine, self._schema))
            return await connection.run_sync(action)


def _timed_out(runner: Runner, progress: Progress) -> Failed:
    """The record of a handler that was cut off, with the place where it stands."""
    seconds = progress.timeout_seconds or 0.0
    thread = runner.stands_at()
    frame = None if thread is None else sys._current_frames().get(thread)  # noqa: SLF001  # documented in the library reference
    stack = [] if frame is None else traceback.extract_stack(frame)
    return describe_failure(HandlerTimedOut(seconds), progress.job, stack)
