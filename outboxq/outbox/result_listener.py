"""The listener for results: one connection and one thread in a process, for all its waits for jobs of a database.

For each such job the connection holds an advisory lock, the job's flag: the transaction that ends the job notifies only
if the flag is held. The order is: first take the flags, then query, then wait. The query sees a job that ended before
it. A job that ends after its flag was taken notifies with its COMMIT. A flag is refused only while a transaction that
ends the job, or many jobs, is at its COMMIT: then it is tried again, and a query follows that COMMIT. That transaction
may wait for another session's lock. So jobs without their flags are queried too: an ended job is reported, and any
other is queried again soon, since its end may not notify.

At most 500 flags are held at once; further jobs are queried every second. Flags shared by several jobs would be bounded
too, but transactions that end jobs of one flag at the same time would refuse it to each other, and notify without need.
"""

from dataclasses import dataclass
from functools import partial

import psycopg
from psycopg.pq.abc import PGconn
from sqlalchemy.exc import DBAPIError

from outboxq.clock import clock
from outboxq.database.driver import DriverConnection, run_on_libpq
from outboxq.database.errors import (
    INSUFFICIENT_PRIVILEGE,
    describe_error,
    explain_missing_tables,
    is_refused,
    sqlstate_of,
)
from outboxq.database.notifications import ListeningThread
from outboxq.errors import ConfigError
from outboxq.fault_points import fault_point
from outboxq.outbox.result_wait import Ending, Wait
from outboxq.statements import results as statements
from outboxq.statements.wake import listen_on

# A job whose flag was refused is queried, and the flag tried again, after this pause, which doubles. Through a pooler,
# which loses flags and notifications, all jobs are queried in this way.
_RETRY_FIRST_SECONDS, _RETRY_CAP_SECONDS = 0.01, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLimits:
    """Intervals of the queries for results, and the time for which an idle connection is kept.

    Args:
        look_seconds: The interval between queries for all waited-for jobs, which also find a job whose end has sent no
            notification.
        poll_most_seconds: The longest pause between two queries through a pooler, which drops LISTEN.
        most_flags: The most flags (advisory locks, one for each job) that are held at once, because all sessions of the
            server share the table of locks. Further jobs are queried every `poll_most_seconds`, until there is room for
            their flags.
        linger_seconds: How long the connection stays open without any wait.
    """

    look_seconds: float = 5.0
    poll_most_seconds: float = 1.0
    most_flags: int = 500
    linger_seconds: float = 10.0


class ResultListener(ListeningThread):
    """A thread that waits for jobs to end, and passes the outcome of each to the callers that wait for it.

    It holds an advisory lock for each job, its flag: the transaction that ends a job notifies only if its flag is held.

    Args:
        wait: The first wait. After `linger_seconds` without any wait, the thread ends.
    """

    def __init__(self, schema: str, limits: ResultLimits, wait: Wait) -> None:
        # By the job's id as text.
        self._waits: dict[str, set[Wait]] = {str(wait.job_id): {wait}}
        # A plain function and no method: a listener that refers to itself would outlive its thread.
        super().__init__("outboxq-results", partial(_connect, self._waits))
        self._schema = schema
        self._limits = limits
        # The error of the last connection; None after the database has answered again.
        self.trouble: Exception | None = None
        # The jobs to be queried, those whose flags were refused, and the flags that are up.
        self._due: set[str] = set()
        self._refused: set[str] = set()
        self._flags: set[str] = set()
        self._hears = True
        self._retry_seconds = _RETRY_FIRST_SECONDS
        self._look_at = self._poll_at = self._retry_at = 0.0
        self._idle_since = clock()

    def add(self, wait: Wait) -> bool:
        """Add a wait for a job's end; return False if the thread has ended: then make another listener."""
        return self.send(partial(self._add, wait))

    def forget(self, wait: Wait) -> None:
        """Drop a wait that its caller no longer needs. Returns at once."""
        if wait.future.cancel():
            self.send(partial(self._leave, wait))

    def is_needed(self) -> bool:
        self.take_requests(None)
        self._leave_abandoned()
        if not self._waits:
            # Without a connection, lingering is useless.
            self.end_unless_requested()
        return bool(self._waits)

    def failed(self, error: Exception) -> None:
        """Record the error; if another connection cannot help, raise it in all waiting callers.

        After a cancelled statement, or a lock that was not free in time, the next connection may succeed; not after a
        refused login.
        """
        self.trouble = error
        original: object = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(original, ConfigError | psycopg.ProgrammingError) or is_refused(error):
            self.take_requests(None)
            waits = _all(self._waits)
            self._waits.clear()
            for wait in waits:
                if wait.future.set_running_or_notify_cancel():
                    wait.future.set_exception(_explained(error))

    def listen(self, connection: PGconn) -> None:
        """LISTEN, unless the connection leads to a pooler; then jobs are queried at intervals instead.

        A pooler shows by the backend's pid: it differs from the pid that the connection has received.
        """
        rows = run_on_libpq(connection, "SET client_encoding TO 'UTF8'; SELECT pg_catalog.pg_backend_pid()")
        self._hears = rows[0][0] == str(connection.backend_pid)
        if self._hears:
            run_on_libpq(connection, listen_on(statements.result_channel(self._schema)))
        now, limits = clock(), self._limits
        self._look_at, self._poll_at = now + limits.look_seconds, now + limits.poll_most_seconds
        self._flags, self._refused, self._retry_seconds = set(), set(), _RETRY_FIRST_SECONDS
        self._due = set(self._waits)

    def work(self, connection: PGconn) -> float:
        self._note_due()
        if self._due:
            self._look(connection)
        self._drop_flags(connection)
        if not self._waits:
            linger_seconds = self._idle_since + self._limits.linger_seconds - clock()
            if linger_seconds <= 0:
                self.end_unless_requested()
            return max(0.0, linger_seconds)
        # The flag that represents all jobs is one more.
        are_flagged = len(self._flags) > len(self._waits)
        wake_at = self._look_at if are_flagged else min(self._look_at, self._poll_at)
        return max(0.0, (min(wake_at, self._retry_at) if self._refused else wake_at) - clock())

    def hear(self, text: str) -> None:
        # Any role may notify, with any text.
        self._due.update(self._waits if text == statements.ALL_JOBS else self._waits.keys() & {text})

    def _note_due(self) -> None:
        """Mark the jobs whose next regular query is due. Other queries in between do not delay the regular ones."""
        now = clock()
        if self._waits:
            self._idle_since = now
        if now >= self._look_at:
            self._leave_abandoned()
            self._due.update(self._waits)
            self._look_at = now + self._limits.look_seconds
        if now >= self._poll_at:
            # The jobs whose flags had no room.
            self._due.update(self._waits.keys() - self._flags)
            self._poll_at = now + self._limits.poll_most_seconds
        if now >= self._retry_at:
            self._due |= self._refused
            self._refused = set()
            self._retry_at = now + self._retry_seconds

    def _look(self, connection: PGconn) -> None:
        """Query the due jobs, and end the waits for those that have ended.

        A job whose flag (advisory lock) is refused is queried too, and again after a pause, as its end may not notify.
        """
        looked, self._due = self._due, set()
        flagged = self._flagged(connection, looked) if self._hears else set[str]()
        fault_point("before-look")
        rows = run_on_libpq(connection, statements.look_at_jobs(self._schema, looked))
        fault_point("after-look")
        self._refused |= looked - flagged
        cap = _RETRY_CAP_SECONDS if self._hears else self._limits.poll_most_seconds
        self._retry_seconds = min(self._retry_seconds * 2, cap) if self._refused else _RETRY_FIRST_SECONDS
        self._tell(rows)
        self.trouble = None

    def _flagged(self, connection: PGconn, jobs: set[str]) -> set[str]:
        """Take the flags of jobs, the advisory locks that make their ends notify, up to `most_flags`.

        Returns:
            The jobs for which one query is enough: either their end notifies, or there is no room and they are polled.
        """
        # The flag of all jobs is the first.
        missing = sorted({statements.ALL_JOBS, *jobs} - self._flags)
        room = 1 + self._limits.most_flags - len(self._flags)
        if asked := missing[:room]:
            rows = run_on_libpq(connection, statements.try_result_flags(self._schema, asked))
            self._flags |= {str(name) for name, is_held in rows if is_held == "t"}
        beyond = jobs & set(missing[room:])
        return jobs & self._flags | beyond if statements.ALL_JOBS in self._flags else beyond

    def _drop_flags(self, connection: PGconn) -> None:
        dropped = self._flags - self._waits.keys() - {statements.ALL_JOBS}
        if dropped:
            self._flags -= dropped
            run_on_libpq(connection, statements.drop_result_flags(self._schema, dropped))

    def _tell(self, rows: list[tuple[str | None, ...]]) -> None:
        """End the waits for the jobs that a query found to have ended."""
        for job_id, is_there, outcome, result, reason in rows:
            if is_there is not None:
                continue
            if outcome is not None:
                ending = Ending(outcome, result)
            else:
                ending = Ending("gone") if reason is None else Ending("dead", reason=reason)
            for wait in self._leave_job(str(job_id)):
                if wait.future.set_running_or_notify_cancel():
                    wait.future.set_result(ending)

    def _add(self, wait: Wait, _connection: PGconn | None) -> None:
        job_id = str(wait.job_id)
        self._waits.setdefault(job_id, set()).add(wait)
        self._due.add(job_id)
        if not self._hears:
            self._retry_seconds = _RETRY_FIRST_SECONDS
            self._retry_at = min(self._retry_at, clock() + _RETRY_FIRST_SECONDS)

    def _leave(self, wait: Wait, _connection: PGconn | None = None) -> None:
        job_id = str(wait.job_id)
        waits = self._waits.get(job_id, set())
        waits.discard(wait)
        if not waits:
            self._leave_job(job_id)

    def _leave_job(self, job_id: str) -> set[Wait]:
        """Remove a job from the listener, and return the waits for it."""
        self._due.discard(job_id)
        self._refused.discard(job_id)
        return self._waits.pop(job_id, set())

    def _leave_abandoned(self) -> None:
        """Drop waits whose time has passed: callers in closed event loops cannot drop them."""
        now = clock()
        for wait in _all(self._waits):
            if wait.is_abandoned(now):
                self._leave(wait)


def _all(waits: dict[str, set[Wait]]) -> list[Wait]:
    return [wait for each in waits.values() for wait in each]


def _connect(waits: dict[str, set[Wait]]) -> DriverConnection:
    """Open a connection by the `connect` of one of the waits, preferably one whose event loop runs.

    The functions of all waits connect to the same database.
    """
    every = _all(waits)
    return next((wait for wait in every if wait.can_connect()), every[0]).connect()


def _explained(error: Exception) -> Exception:
    """Return a new exception with advice for one waiting caller; each needs its own, as it adds its traceback."""
    told = explain_missing_tables(error) or ConfigError(_advice(error))
    told.__cause__ = error
    return told


def _advice(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    if sqlstate_of(error) == INSUFFICIENT_PRIVILEGE:
        return (
            "this role may not look for results: it needs SELECT on the tables job, done_job and dead_job, as the role "
            "outboxq_reader has it"
        )
    return (
        f"results cannot be waited for at this database: {describe_error(error)}; the cause of this error has the "
        "words of the server or the driver"
    )
