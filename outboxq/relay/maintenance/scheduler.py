"""The scheduler: adds the jobs of schedules that are due, in any relay, without a leader.

One transaction locks the rows that are due, adds their jobs, and writes their next times. The lock keeps two relays
from one row, and the next time keeps the second from what the first has fired: so each time is fired once, whichever
relay dies. If the answer to COMMIT is lost, either both the jobs and the next time are stored, or neither is, and then
the row is still due; only the event is not sent.

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
# For when another relay is firing what is due, or the database does not answer.
_PAUSE_SECONDS = 1.0
# A schedule that could not be fired is left alone for so long, so that it delays no other.
_REFUSED_SECONDS = 60.0
_STOP_SECONDS = 5.0
# The connection is closed if nothing is due within this time.
_REST_SECONDS = 5.0

Work: TypeAlias = Callable[[Connection], "Tick"]


@dataclass(slots=True)
class Tick:
    """The result of a transaction: the jobs added, the number of schedules taken, the seconds until the next is due."""

    fired: list[ScheduleFired] = field(default_factory=list)
    taken: int = 0
    seconds: float = math.inf


@dataclass(eq=False)
class Scheduler:
    """Fires schedules that are due.

    Args:
        transact: Runs a function in a transaction on its own connection, and commits at its end.
        rest: Closes that connection, until it is needed again.
        emit: Called for each job that was added, after the COMMIT.
        stopping: Set when the relay stops: nothing more is fired.
        until_empty: True if the relay drains: it fires only what is due at its start, so that it ends.
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
        # The names of schedules that could not be fired, and the times until which they are left alone.
        self._refused: dict[str, float] = {}
        self._warned: set[str] = set()

    def expect(self, seconds: float) -> None:
        """Record in how many seconds the next schedule is due. Starts the thread if there is one."""
        with self._changed:
            self._due_at = time.monotonic() + seconds
            is_needed = seconds < math.inf and not self.until_empty and not self.stopping.is_set()
            if self._thread is None and is_needed:
                self._thread = threading.Thread(target=self._run, name="outboxq-scheduler", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread, after the transaction that is under way."""
        self.stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def fire_all_due(self) -> None:
        """Fire everything that is due, in the caller's thread: a drain may be the only relay."""
        while not self.stopping.is_set() and self._tick() <= 0:
            pass
        self._rest()

    def _run(self) -> None:
        while not self.stopping.is_set():
            with self._changed:
                pause = self._due_at - time.monotonic()
                if pause > 0 and not self.stopping.is_set() and not (self._is_open and pause > _REST_SECONDS):
                    # Once: each change of the time notifies.
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
        """Fire up to ten schedules; returns the seconds until the next check, 0 for at once."""
        self._is_open = True
        try:
            tick = self.transact(self._fire_due)
        except Exception as error:  # noqa: BLE001  # whatever it is, the relay's work does not depend on it
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
                # A savepoint: a job that cannot be added undoes no other schedule's.
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
        """Warn once of each kind of error; an outage is reported by the slots."""
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
    """Return True if the schedule is to blame for an error, and not the connection or the tables."""
    # A held unique key of one schedule's job must not delay other schedules.
    return (
        sqlstate_of(error) in (LOCK_NOT_AVAILABLE, DEADLOCK)
        or is_of_a_row(error)
        or not isinstance(error, DBAPIError | OSError)
    )


def _describe(error: Exception) -> str:
    """The text for operators: never a value of a row."""
    return str(error) if isinstance(error, OutboxqError) else describe(error)


def _fire(connection: Connection, row: Row[tuple[object, ...]]) -> list[ScheduleFired]:
    """Add the jobs of a schedule that is due, and move it on, in the transaction that has locked it."""
    stored = StoredSchedule.of(row)
    now: datetime = row.now
    fires = due_times(stored, now)
    jobs = stored.jobs_at(fires)
    if jobs:
        insert_all(connection, jobs, wakes="by queue")
    last = fires[-1] if fires else None
    # With missed="all" times over the bound are still due, and follow in the next transaction.
    behind = last if last is not None and stored.schedule.missed == "all" else now
    connection.execute(statements.advance(row.name, stored.cron.after(behind), last))
    return [_event(stored, new, due, now) for new, due in zip(jobs.values(), fires, strict=True)]


def _event(stored: StoredSchedule, new: NewJob, due: datetime, now: datetime) -> ScheduleFired:
    added = not isinstance(new, UniqueJob) or bool(new.answer.added)
    at, late_seconds = stored.cron.local(due), (now - due).total_seconds()
    return ScheduleFired(stored.schedule.name, new.kind, new.queue, at, late_seconds, added)


def due_times(stored: StoredSchedule, now: datetime) -> list[datetime]:
    """The times up to `now` that get a job, of those when a schedule was due."""
    first, cron = stored.schedule.next_at, stored.cron
    if stored.schedule.missed == "all":
        return cron.due_times(first, now, MOST_JOBS)
    newest = cron.newest(first, now)
    return [] if stored.schedule.missed == "skip" and now - newest > GRACE else [newest]
