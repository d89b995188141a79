"""The scheduler: adds the jobs of schedules that are due, in any relay, without a leader.

One transaction locks the due rows, adds their jobs, and writes their next times. The lock keeps two relays from firing
the same row, and the new time keeps the second from repeating the first: so each time is fired once, whichever relay
dies. If the answer to COMMIT is lost, either both the jobs and the next time are stored, or neither is, and the row is
still due; only the event is lost.

The heartbeat of the relay's lease reads when the next schedule is due. Without schedules there is no thread and no
extra statement.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeAlias

from sqlalchemy import Connection
from sqlalchemy.engine import Row
from sqlalchemy.exc import DBAPIError

from outboxq.admin.schedules import StoredSchedule, seconds_to_next
from outboxq.database.errors import DEADLOCK, LOCK_NOT_AVAILABLE, sqlstate_of
from outboxq.emitter import Emitter
from outboxq.errors import OutboxqError
from outboxq.events import ScheduleFired
from outboxq.execution.aside import describe, is_of_a_row
from outboxq.new_job import NewJob, UniqueJob
from outboxq.outbox.insert import insert_all
from outboxq.relay.maintenance.task import refusal_of
from outboxq.statements import schedules as statements

logger = logging.getLogger("outboxq.scheduler")

# missed="skip" skips a time that is later than this.
GRACE = timedelta(seconds=60)
# The most schedules that one transaction locks, and the most jobs that it adds of one with missed="all".
MOST_SCHEDULES, MOST_JOBS = 10, 1_000
# The pause when another relay is firing due schedules, or the database does not answer.
_PAUSE_SECONDS = 1.0
# A schedule that could not be fired is skipped for this long, so that it does not delay others.
_REFUSED_SECONDS = 60.0
_STOP_SECONDS = 5.0
# The connection is closed if nothing is due within this time.
_REST_SECONDS = 5.0

Work: TypeAlias = Callable[[Connection], "Tick"]


@dataclass(slots=True)
class Tick:
    """The result of one transaction of the scheduler.

    Attributes:
        fired: An event for each job that was added.
        taken: The number of due schedules that were locked; those whose jobs could not be added count too.
        seconds: The seconds until the next schedule is due.
    """

    fired: list[ScheduleFired] = field(default_factory=list)
    taken: int = 0
    seconds: float = math.inf


@dataclass(eq=False)
class Scheduler:
    """Fires schedules that are due: adds their jobs, and writes when they are due next.

    Args:
        transact: Runs a function in a transaction on the scheduler's own connection, and commits when it returns.
        rest: Closes that connection until it is needed again.
        emit: Called with an event for each job that was added, after the COMMIT.
        stopping: Set when the relay stops: no more schedules are fired.
        until_empty: True if the relay drains: it fires only schedules that are due at its start, so that it ends.
    """

    transact: Callable[[Work], Tick]
    rest: Callable[[], None]
    emit: Emitter
    stopping: threading.Event
    until_empty: bool

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._due_at = math.inf
        self._thread: threading.Thread | None = None
        # True if the connection may be open.
        self._is_open = False
        # The names of schedules that could not be fired, with the times until which they are skipped.
        self._refused: dict[str, float] = {}
        self._warned: set[str] = set()

    def expect(self, seconds: float) -> None:
        """Set the next check for due schedules to `seconds` from now; start the thread when it is first needed."""
        with self._changed:
            self._due_at = time.monotonic() + seconds
            is_needed = seconds < math.inf and not self.until_empty and not self.stopping.is_set()
            if self._thread is None and is_needed:
                self._thread = threading.Thread(target=self._run, name="outboxq-scheduler", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread, after the transaction that it is executing."""
        self.stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def fire_all_due(self) -> None:
        """Fire all due schedules in the caller's thread, at the start of a drain: perhaps no other relay runs."""
        while not self.stopping.is_set() and self._tick() <= 0:
            pass
        self._rest()

    def _run(self) -> None:
        while not self.stopping.is_set():
            with self._changed:
                pause = self._due_at - time.monotonic()
                if pause > 0 and not self.stopping.is_set() and not (self._is_open and pause > _REST_SECONDS):
                    # Only once, because each change of the time notifies.
                    self._changed.wait(min(pause, threading.TIMEOUT_MAX))
                    continue
            if pause > 0:
                self._rest()
            elif not self.stopping.is_set():
                self._fire_all()
        self._rest()

    def _fire_all(self) -> None:
        seconds = self._tick()
        while seconds <= 0 and not self.stopping.is_set():
            seconds = self._tick()
        with self._changed:
            self._due_at = time.monotonic() + seconds

    def _tick(self) -> float:
        """Fire up to ten due schedules in one transaction; return the seconds until the next call (0: at once)."""
        self._is_open = True
        try:
            tick = self.transact(self._fire_due)
        except Exception as error:  # noqa: BLE001  # reported; due schedules are fired after the pause
            self._report(error)
            return _PAUSE_SECONDS
        for event in tick.fired:
            self.emit(event)
        if tick.seconds > 0:
            return tick.seconds
        return 0.0 if tick.taken else _PAUSE_SECONDS

    def _fire_due(self, connection: Connection) -> Tick:
        now = time.monotonic()
        self._refused = {name: until for name, until in self._refused.items() if until > now}
        tick = Tick()
        # A producer's open transaction may hold the unique key of a job: the other schedules do not wait for it.
        connection.execute(statements.WAIT_SHORTLY)
        for row in connection.execute(statements.lock_due(MOST_SCHEDULES, self._refused)).all():
            try:
                # In a savepoint, so that a job that cannot be added does not undo other schedules.
                with connection.begin_nested():
                    tick.fired += _fire(connection, row)
            except Exception as error:
                if not _is_its_own(error):
                    raise
                self._refuse(row.name, error)
            tick.taken += 1
        tick.seconds = seconds_to_next(connection, self._refused)
        return tick

    def _refuse(self, name: str, error: Exception) -> None:
        self._refused[name] = time.monotonic() + _REFUSED_SECONDS
        logger.error(
            "schedule %r could not be fired, and is tried again in a minute: %s",
            name,
            _describe(error),
            extra={"outboxq_schedule": name},
        )

    def _report(self, error: Exception) -> None:
        """Log a warning of an error, once for each error text. Outages are logged by the slots and not here."""
        reason = _describe(error)
        if refusal_of(error) is None and isinstance(error, DBAPIError | OSError):
            logger.debug("the scheduler's connection failed", extra={"error_type": type(error).__name__})
        elif reason not in self._warned:
            self._warned.add(reason)
            logger.warning("schedules could not be fired, and are tried again: %s", reason)

    def _rest(self) -> None:
        self._is_open = False
        with suppress(Exception):
            self.rest()


def _is_its_own(error: Exception) -> bool:
    """Return True if a schedule itself causes an error, so that other schedules can still be fired.

    False if the cause is the connection or the tables.
    """
    # A held unique key of one schedule's job must not delay other schedules.
    return (
        sqlstate_of(error) in (LOCK_NOT_AVAILABLE, DEADLOCK)
        or is_of_a_row(error)
        or not isinstance(error, DBAPIError | OSError)
    )


def _describe(error: Exception) -> str:
    """Return the text of an error for operators, without any value of a row."""
    return str(error) if isinstance(error, OutboxqError) else describe(error)


def _fire(connection: Connection, row: Row[tuple[object, ...]]) -> list[ScheduleFired]:
    """Add the jobs of a due schedule and write its next time, in the transaction that locked it; return the events."""
    stored = StoredSchedule.of(row)
    now: datetime = row.now
    fires = due_times(stored, now)
    jobs = stored.jobs_at(fires)
    if jobs:
        insert_all(connection, jobs, wakes="by queue")
    last = fires[-1] if fires else None
    # With missed="all", times beyond the bound are still due, and are fired in the next transaction.
    behind = last if last is not None and stored.schedule.missed == "all" else now
    connection.execute(statements.advance(row.name, stored.cron.after(behind), last))
    return [_event(stored, new, due, now) for new, due in zip(jobs.values(), fires, strict=True)]


def _event(stored: StoredSchedule, new: NewJob, due: datetime, now: datetime) -> ScheduleFired:
    added = not isinstance(new, UniqueJob) or bool(new.answer.added)
    at, late_seconds = stored.cron.local(due), (now - due).total_seconds()
    return ScheduleFired(stored.schedule.name, new.kind, new.queue, at, late_seconds, added)


def due_times(stored: StoredSchedule, now: datetime) -> list[datetime]:
    """Return those due times of a schedule, up to `now`, for which a job is to be added, as its `missed` says."""
    first, cron = stored.schedule.next_at, stored.cron
    if stored.schedule.missed == "all":
        return cron.due_times(first, now, MOST_JOBS)
    newest = cron.newest(first, now)
    return [] if stored.schedule.missed == "skip" and now - newest > GRACE else [newest]
