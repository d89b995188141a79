"""A slot: one connection that claims and runs one batch at a time, and sleeps where nothing waits.

`Slot` is the part both worlds share, on a sync `Connection`; `serve_in_thread` and `serve_in_loop` are the thin loops.
"""

import asyncio
import concurrent.futures
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.batch import BatchReport, Progress, charge, end_transaction, resolve, run_batch
from outboxq.claim import park_unknown
from outboxq.driver import is_lost, run_script, sqlstate_of
from outboxq.events import (
    BatchRolledBack,
    DatabaseBack,
    DatabaseLost,
    Emitter,
    JobDied,
    JobDone,
    JobRetried,
    JobsParked,
)
from outboxq.execute import Abandoned, AsyncInvoker, ConnectionLost, Invoker, SyncInvoker, Work
from outboxq.guard import Guard
from outboxq.handlers import Flavour, Registry
from outboxq.listener import Listener, Sleeper
from outboxq.statements.claim import ClaimStatements
from outboxq.statements.listen import next_due_seconds
from outboxq.tables import SCHEMA

logger = logging.getLogger("outboxq.relay")

FIRST_PAUSE_SECONDS = 0.01
# Without the sleep flag nobody promises to wake us: look again at least this often.
UNFLAGGED_PAUSE_SECONDS = 1.0
_RECONNECT_FIRST_SECONDS = 0.1
_RECONNECT_CAP_SECONDS = 10.0

# force_custom_plan: a claim prepared while its queue was empty, an idle relay's normal state, would sort whatever
# arrives later.
# DateStyle: psycopg reads ISO alone, whatever the database's default.
SESSION_SETTINGS = "SET plan_cache_mode = force_custom_plan; SET datestyle = 'ISO'"


def connection_options(engine: Engine | AsyncEngine, schema: str) -> dict[str, Any]:
    """READ COMMITTED, and this installation's tables for whatever a slot or a handler writes through SQLAlchemy."""
    options: dict[str, Any] = {"isolation_level": "READ COMMITTED"}
    mapped: dict[str | None, str | None] = engine.get_execution_options().get("schema_translate_map") or {}
    if mapped.get(SCHEMA, SCHEMA) != schema:
        options["schema_translate_map"] = {**mapped, SCHEMA: schema}
    return options


@dataclass(slots=True)
class Tally:
    """What a relay has done so far. Slots add under the lock."""

    claimed: int = 0
    done: int = 0
    failed: int = 0
    died: int = 0

    def add(self, report: BatchReport) -> None:
        """Count the events of one committed batch."""
        self.claimed += report.claimed
        self.done += sum(isinstance(event, JobDone) for event in report.events)
        self.failed += sum(isinstance(event, JobRetried | JobDied) for event in report.events)
        self.died += sum(isinstance(event, JobDied) for event in report.events)


@dataclass(slots=True, eq=False)
class Shared:
    """What all slots of a relay share."""

    registry: Registry
    state: object
    schema: str
    batch_size: int
    poll_seconds: float
    until_empty: bool
    emit: Emitter
    listener: Listener | None
    stopping: threading.Event
    abandoned: threading.Event
    tally: Tally
    lock: threading.Lock


class Slot:
    """The claims of one slot, and its pauses."""

    def __init__(self, shared: Shared, flavour: Flavour, queues: tuple[str, ...], wake: Callable[[], None]) -> None:
        self.shared = shared
        self.flavour: Flavour = flavour
        self.queues = queues
        self.sleeper = Sleeper(queues, wake)
        self.running = 0
        self._statements = {name: ClaimStatements(shared.schema, name) for name in queues}
        self._progress: Progress | None = None
        self._lost_with: UUID | None = None
        self._due_first = dict.fromkeys(queues, False)
        self._asleep = False
        self._alone_for = 0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._lost_since: float | None = None
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS

    def prepare(self, connection: Connection, invoker: Invoker) -> Work:
        """Set the connection up for claiming."""
        with connection.begin():
            run_script(connection, SESSION_SETTINGS)
        if self._lost_since is not None:
            self.shared.emit(DatabaseBack(_now() - self._lost_since))
            self._lost_since = None
        shared = self.shared
        work = Work(shared.registry, shared.state, invoker, Guard(connection), shared.schema, shared.abandoned.is_set)
        report = self._settle_doubt(connection, work, ConnectionLost("the connection was lost while the job ran"))
        if report is not None:
            self._tell(report)
        return work

    def work_once(self, connection: Connection, work: Work) -> bool:
        """Claim and run one batch from the first queue that has one; False where nothing waits."""
        for name in self.queues:
            for script in self._scripts(name):
                report = self._run(connection, name, script, work)
                if report is not None:
                    self._after(connection, name, report, work)
                    return True
        return False

    def _scripts(self, name: str) -> tuple[Callable[[int], str], ...]:
        # Alternating, so that neither a backlog of ready jobs nor one of due jobs starves the other.
        statements = self._statements[name]
        self._due_first[name] = not self._due_first[name]
        return (statements.due, statements.ready) if self._due_first[name] else (statements.ready, statements.due)

    def _run(self, connection: Connection, name: str, script: Callable[[int], str], work: Work) -> BatchReport | None:
        limit = 1 if self._alone_for else self.shared.batch_size
        try:
            report = run_batch(connection, script(limit), limit, work, self._started)
        except Abandoned:
            raise
        except (psycopg.Error, SQLAlchemyError) as error:
            if is_lost(connection) or self._progress is None:
                raise
            self.shared.emit(BatchRolledBack(name, self.running, describe_error(error)))
            end_transaction(connection)
            report = self._settle_doubt(connection, work, error)
            if report is None:
                raise
        self._progress = None
        return report

    def _started(self, progress: Progress) -> None:
        self._progress = progress
        self.running = len(progress.batch.jobs)
        self._pause_seconds = FIRST_PAUSE_SECONDS
        if self._asleep and self.shared.listener is not None:
            self._asleep = False
            self.shared.listener.wake_up(self.sleeper)

    def _settle_doubt(self, connection: Connection, work: Work, error: BaseException) -> BatchReport | None:
        """What became of the batch that ended in `error`; None where it waits again as it was."""
        progress = self._progress
        if progress is None:
            return None
        report = resolve(connection, progress)
        self._progress = None
        if report is not None:
            return report
        # Nobody's fault could be found while they shared a transaction: the next ones run alone.
        self._alone_for = self.shared.batch_size
        job = progress.lone_job
        if job is None:
            return None
        # A connection may be lost for any reason, once. The second time in a row the job itself is the reason.
        if isinstance(error, ConnectionLost) and self._lost_with != job.id:
            self._lost_with = job.id
            return None
        return charge(connection, job, error, work)

    def _after(self, connection: Connection, name: str, report: BatchReport, work: Work) -> None:
        self.running = 0
        self._lost_with = None
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS
        self._alone_for = max(0, self._alone_for - report.claimed)
        parked = 0
        if report.parked:
            with connection.begin():
                parked = park_unknown(connection, self.shared.schema, name, work.registry.known_kinds(self.flavour))
        self._tell(report, parked)

    def _tell(self, report: BatchReport, parked: int = 0) -> None:
        with self.shared.lock:
            self.shared.tally.add(report)
        for event in report.events:
            self.shared.emit(replace(event, count=event.count + parked) if isinstance(event, JobsParked) else event)

    def fall_asleep(self) -> "concurrent.futures.Future[bool] | None":
        """Ask for the sleep flags; None where this relay does not listen."""
        if self.shared.listener is None:
            return None
        self._asleep = True
        return self.shared.listener.fall_asleep(self.sleeper)

    def pause_seconds(self, connection: Connection, *, flagged: bool) -> float:
        """How long to sleep: up to the next scheduled job, and growing up to the poll interval."""
        growing = min(self._pause_seconds, UNFLAGGED_PAUSE_SECONDS, self.shared.poll_seconds)
        self._pause_seconds = min(self._pause_seconds * 2, self.shared.poll_seconds)
        with connection.begin():
            next_due = run_script(connection, next_due_seconds(self.shared.schema, self.queues))[0].rows[0][0]
        pause = (self.shared.poll_seconds if flagged else growing) * random.uniform(0.8, 1.0)
        if not isinstance(next_due, float):
            return pause
        # Due, and yet not claimed: its queue is paused, or another transaction runs it. Not a reason to spin.
        return min(pause, next_due if next_due > 0 else growing)

    def lost(self, error: BaseException) -> float:
        """Report a lost or refused connection; returns how long to wait before the next try."""
        self.running = 0
        pause = self._reconnect_seconds * random.uniform(0.5, 1.0)
        self._reconnect_seconds = min(self._reconnect_seconds * 2, _RECONNECT_CAP_SECONDS)
        if is_outage(error):
            self._lost_since = self._lost_since or _now()
            self.shared.emit(DatabaseLost(describe_error(error), pause))
        return pause


def serve_in_thread(slot: Slot, engine: Engine, bell: threading.Event) -> None:
    """The loop of a slot with sync handlers."""
    stopping = slot.shared.stopping
    while not stopping.is_set():
        try:
            options = connection_options(engine, slot.shared.schema)
            with engine.connect().execution_options(**options) as connection, _not_returned(connection):
                work = slot.prepare(connection, SyncInvoker())
                while not stopping.is_set():
                    if not slot.work_once(connection, work) and _rest_in_thread(slot, connection, work, bell):
                        return
        except Abandoned:
            return
        except (psycopg.Error, SQLAlchemyError, ConnectionLost, OSError) as error:
            stopping.wait(slot.lost(error))


@contextmanager
def _not_returned(connection: Connection) -> Iterator[None]:
    """The slot's session settings must not leak into the pool of the user's engine: close the connection instead."""
    try:
        yield
    finally:
        connection.invalidate()


def _rest_in_thread(slot: Slot, connection: Connection, work: Work, bell: threading.Event) -> bool:
    """Sleep until woken; True where the slot is finished because it only drains."""
    if slot.shared.until_empty:
        return True
    bell.clear()
    flagged = False
    request = slot.fall_asleep()
    if request is not None:
        try:
            flagged = request.result(timeout=UNFLAGGED_PAUSE_SECONDS)
        except concurrent.futures.TimeoutError:
            flagged = False
        # What was committed before the flag was up is visible now; what comes after it rings the bell.
        if slot.work_once(connection, work):
            return False
    pause = slot.pause_seconds(connection, flagged=flagged)
    if not slot.shared.stopping.is_set():
        bell.wait(pause)
    return False


async def serve_in_loop(slot: Slot, engine: AsyncEngine, bell: asyncio.Event) -> None:
    """The loop of a slot with async handlers."""
    stopping = slot.shared.stopping
    while not stopping.is_set():
        try:
            async with engine.connect() as connection:
                await connection.execution_options(**connection_options(engine, slot.shared.schema))
                try:
                    work = await connection.run_sync(slot.prepare, AsyncInvoker(connection))
                    while not stopping.is_set():
                        if not await connection.run_sync(slot.work_once, work) and await _rest_in_loop(
                            slot, connection.run_sync, work, bell
                        ):
                            return
                finally:
                    # As in `_not_returned`.
                    await connection.invalidate()
        except Abandoned:
            return
        except (psycopg.Error, SQLAlchemyError, ConnectionLost, OSError) as error:
            # The listener, which lost its connection too, has rung: without this the slot would spin.
            bell.clear()
            pause = slot.lost(error)
            if not stopping.is_set():
                await _wait(bell, pause)


async def _rest_in_loop(slot: Slot, run_sync: Callable[..., Awaitable[Any]], work: Work, bell: asyncio.Event) -> bool:
    """As `_rest_in_thread`."""
    if slot.shared.until_empty:
        return True
    bell.clear()
    flagged = False
    request = slot.fall_asleep()
    if request is not None:
        try:
            flagged = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(request)), UNFLAGGED_PAUSE_SECONDS)
        except TimeoutError:
            flagged = False
        if await run_sync(slot.work_once, work):
            return False
    pause = await run_sync(_pause, slot, flagged)
    if not slot.shared.stopping.is_set():
        await _wait(bell, pause)
    return False


def _pause(connection: Connection, slot: Slot, flagged: bool) -> float:
    return slot.pause_seconds(connection, flagged=flagged)


async def _wait(bell: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(bell.wait(), seconds)
    except TimeoutError:
        return


def is_outage(error: BaseException) -> bool:
    """Whether the server is gone, going, starting or full, and not merely at odds with a statement."""
    sqlstate = sqlstate_of(error)
    return sqlstate is None or sqlstate[:2] in ("08", "53", "57")


def describe_error(error: BaseException) -> str:
    """The type and SQLSTATE of an error: driver texts may hold a host, a user or a value."""
    original: object = error.orig if isinstance(error, DBAPIError) else error
    sqlstate = sqlstate_of(error)
    return f"{type(original).__name__}{f' ({sqlstate})' if sqlstate else ''}"


def _now() -> float:
    return time.monotonic()
