"""The listener for results: one connection and one thread in a process, for all that wait there for jobs of a database.

First the flags, then the look, then the wait. A job that ends before the look is seen by it. One that ends later finds
the flags raised, and notifies with its COMMIT; so does one that ends between the two. A flag is refused only while a
transaction that ends the job is at its COMMIT: it is tried again, and the look is later than that COMMIT.

It works on libpq below psycopg, as the relay's listener does, for callers in threads and in event loops alike.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from uuid import UUID

import psycopg
from psycopg.pq.abc import PGconn
from sqlalchemy.exc import DBAPIError

from outboxq.database.driver import DriverConnection, run_on_libpq, wait_readable
from outboxq.database.errors import (
    INSUFFICIENT_PRIVILEGE,
    explain_missing_tables,
    is_database_unavailable,
    is_refused,
    sqlstate_of,
)
from outboxq.errors import ConfigError
from outboxq.fault_points import fault_point
from outboxq.statements import results as statements
from outboxq.statements.wake import listen_on

# The step of the migrations that brings the table of finished jobs.
_STEP = 11
# A flag that was refused is tried again after this pause, which doubles.
_RETRY_FIRST_SECONDS, _RETRY_CAP_SECONDS = 0.005, 0.1
_RECONNECT_FIRST_SECONDS, _RECONNECT_CAP_SECONDS = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a job that is over.

    Attributes:
        outcome: As in `done_job`; or `dead`, or `gone` if no row tells.
        result: What its handler returned, as JSON text, if that is kept.
        reason: That of a dead letter.
    """

    outcome: str
    result: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLimits:
    """How often results are looked for, and how long a connection is kept for nothing.

    Args:
        look_seconds: Between looks at all jobs that are waited for: an end that nothing notified of is found by then.
        poll_first_seconds, poll_most_seconds: The same behind a pooler, which loses notifications; each pause is twice
            the one before.
        linger_seconds: How long the connection stays when no job is waited for.
    """

    look_seconds: float = 5.0
    poll_first_seconds: float = 0.01
    poll_most_seconds: float = 1.0
    linger_seconds: float = 10.0


class ResultListener:
    """Waits for the ends of jobs, and holds the flags of those that are waited for.

    Args:
        connect: Opens a connection outside of a transaction.
        on_end: Called with the listener when its thread ends, because no job was waited for any more.
    """

    def __init__(
        self,
        connect: Callable[[], DriverConnection],
        schema: str,
        limits: ResultLimits,
        on_end: "Callable[[ResultListener], None]",
    ) -> None:
        self._connect = connect
        self._schema = schema
        self._limits = limits
        self._on_end = on_end
        self._lock = threading.Lock()
        self._new: list[tuple[UUID, Future[Ending]]] = []
        self._has_ended = False
        # Why the last connection failed; None once it answered again.
        self.trouble: Exception | None = None
        # Of the thread alone: who waits for each job, what is to be looked at, the flags that are up.
        self._waits: dict[UUID, list[Future[Ending]]] = {}
        self._due: set[UUID] = set()
        self._flags: set[str] = set()
        self._hears = True
        self._retry_seconds = _RETRY_FIRST_SECONDS
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS
        self._poll_seconds = limits.poll_first_seconds
        self._look_at = 0.0
        self._idle_since = time.monotonic()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="outboxq-results", daemon=True)

    def start(self) -> None:
        """Start the thread; it connects by itself, and again after every loss."""
        self._thread.start()

    def wait_for(self, job_id: UUID) -> "Future[Ending] | None":
        """The end of a job, in the future; None if the thread has ended: then make another listener."""
        future = Future[Ending]()
        with self._lock:
            if self._has_ended:
                return None
            self._new.append((job_id, future))
            self._wake_thread()
        return future

    def forget(self, future: "Future[Ending]") -> None:
        """Wait no longer. Returns at once."""
        if future.cancel():
            with self._lock:
                if not self._has_ended:
                    self._wake_thread()

    def _wake_thread(self) -> None:
        # If the socket is full, the thread is being woken already.
        with contextlib.suppress(BlockingIOError):
            self._wake_writer.send(b"!")

    def _run(self) -> None:
        try:
            while self._await_waiters():
                self._connect_and_serve()
        finally:
            with self._lock:
                self._has_ended = True
                self._wake_reader.close()
                self._wake_writer.close()
            self._on_end(self)

    def _await_waiters(self) -> bool:
        """Wait until a job is waited for; False if none was for a while, and from now on none can be."""
        while True:
            self._take_requests()
            if self._waits:
                return True
            with self._lock:
                if self._idle_seconds_left() <= 0 and not self._new:
                    self._has_ended = True
                    return False
            wait_readable([self._wake_reader], max(0.0, self._idle_seconds_left()))

    def _idle_seconds_left(self) -> float:
        return self._idle_since + self._limits.linger_seconds - time.monotonic()

    def _connect_and_serve(self) -> None:
        try:
            connection = self._connect()
        except Exception as error:  # noqa: BLE001  # users' engines raise what they like
            self._meet(error)
            return
        try:
            self._serve(connection.pgconn)
        except Exception as error:  # noqa: BLE001  # a thread that ends would leave its callers waiting
            self._meet(error)
        finally:
            # psycopg's own close() may be a coroutine; below it there is nothing to wait for.
            connection.pgconn.finish()
            self._flags.clear()

    def _meet(self, error: Exception) -> None:
        """After an error: raise to all callers what waiting cannot mend; else wait a moment, to connect anew."""
        self.trouble = error
        original: object = error.orig if isinstance(error, DBAPIError) else error
        is_final = isinstance(original, ConfigError | psycopg.ProgrammingError) or is_refused(error)
        if is_final or not is_database_unavailable(error):
            self._take_requests()
            failed, self._waits = self._waits, {}
            for future in (each for futures in failed.values() for each in futures):
                if future.set_running_or_notify_cancel():
                    future.set_exception(_explained(error))
            self._note_idle()
            return
        time.sleep(self._reconnect_seconds)
        self._reconnect_seconds = min(self._reconnect_seconds * 2, _RECONNECT_CAP_SECONDS)

    def _serve(self, connection: PGconn) -> None:
        self._hears = self._listen(connection)
        self._due = set(self._waits)
        while self._waits or self._idle_seconds_left() > 0:
            self._look(connection)
            self._drop_flags(connection)
            # Before the wait: a notification may have come in with an answer.
            connection.consume_input()
            self._hear(connection)
            wait_readable([self._wake_reader, connection.socket], self._patience())
            self._take_requests()
            if time.monotonic() >= self._look_at:
                self._due |= self._waits.keys()

    def _listen(self, connection: PGconn) -> bool:
        """Listen, unless the connection leads to a pooler: that names another backend than the one at work."""
        rows = run_on_libpq(connection, "SET client_encoding TO 'UTF8'; SELECT pg_catalog.pg_backend_pid()")
        if rows[0][0] != str(connection.backend_pid):
            return False
        run_on_libpq(connection, listen_on(statements.result_channel(self._schema)))
        return True

    def _look(self, connection: PGconn) -> None:
        """Look at the jobs that are due, as far as their flags are up; those that are over are told to who waits."""
        if not self._due:
            return
        looked = self._flagged(connection) if self._hears else set(self._due)
        if looked:
            fault_point("before-look")
            rows = run_on_libpq(connection, statements.look_at_jobs(self._schema, looked))
            fault_point("after-look")
            self._due -= looked
            for row in rows:
                self._read(*row)
        self.trouble, self._reconnect_seconds = None, _RECONNECT_FIRST_SECONDS
        self._set_next_look()

    def _set_next_look(self) -> None:
        if self._hears:
            self._look_at = time.monotonic() + self._limits.look_seconds
        else:
            self._look_at = time.monotonic() + self._poll_seconds
            self._poll_seconds = min(self._poll_seconds * 2, self._limits.poll_most_seconds)

    def _flagged(self, connection: PGconn) -> set[UUID]:
        """Raise the flags of the jobs that are due; those whose flags are up."""
        missing = {statements.ALL_JOBS, *map(str, self._due)} - self._flags
        if missing:
            rows = run_on_libpq(connection, statements.try_result_flags(self._schema, missing))
            self._flags |= {str(name) for name, is_held in rows if is_held == "t"}
        flagged = {job_id for job_id in self._due if str(job_id) in self._flags}
        is_whole = statements.ALL_JOBS in self._flags and flagged == self._due
        self._retry_seconds = _RETRY_FIRST_SECONDS if is_whole else min(self._retry_seconds * 2, _RETRY_CAP_SECONDS)
        return flagged if statements.ALL_JOBS in self._flags else set()

    def _drop_flags(self, connection: PGconn) -> None:
        dropped = self._flags - {statements.ALL_JOBS, *map(str, self._waits)}
        if dropped:
            self._flags -= dropped
            run_on_libpq(connection, statements.drop_result_flags(self._schema, dropped))

    def _read(self, job_id: str | None, *found: str | None) -> None:
        """Tell those who wait for a job what a look has found, if the job is over."""
        is_there, outcome, result, reason = found
        if is_there is not None:
            return
        if outcome is not None:
            ending = Ending(outcome, result)
        else:
            ending = Ending("gone") if reason is None else Ending("dead", reason=reason)
        for future in self._waits.pop(UUID(job_id), ()):
            if future.set_running_or_notify_cancel():
                future.set_result(ending)
        self._note_idle()

    def _hear(self, connection: PGconn) -> None:
        while notification := connection.notifies():
            name = notification.extra.decode()
            called = set(self._waits) if name == statements.ALL_JOBS else {UUID(name)}
            self._due |= called & self._waits.keys()

    def _patience(self) -> float:
        """For how long to wait for a notification or a request: not at all if one has come with an answer."""
        if self._due:
            refused = {statements.ALL_JOBS, *map(str, self._due)} - self._flags
            return self._retry_seconds if self._hears and refused else 0.0
        return max(0.0, self._look_at - time.monotonic()) if self._waits else max(0.0, self._idle_seconds_left())

    def _take_requests(self) -> None:
        """Take the new waits, and leave those out that were given up."""
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        with self._lock:
            new, self._new = self._new, []
        for job_id, future in new:
            self._waits.setdefault(job_id, []).append(future)
            self._due.add(job_id)
            self._poll_seconds = self._limits.poll_first_seconds
        self._waits = {
            job_id: kept
            for job_id, futures in self._waits.items()
            if (kept := [future for future in futures if not future.cancelled()])
        }
        self._due &= self._waits.keys()
        if self._waits:
            self._idle_since = time.monotonic()

    def _note_idle(self) -> None:
        self._idle_since = time.monotonic()


def _explained(error: Exception) -> Exception:
    missing = explain_missing_tables(error, _STEP)
    if missing is not None:
        return missing
    if sqlstate_of(error) == INSUFFICIENT_PRIVILEGE:
        return ConfigError(
            "this role may not look for results: it needs SELECT on the tables job, done_job and dead_job, as the role "
            "outboxq_reader has it"
        )
    return error
