"""The listener for results: one connection and one thread in a process, for all that wait there for jobs of a database.

First the flags, then the look, then the wait. A job that ends before the look is seen by it. One that ends later finds
the flags raised, and notifies with its COMMIT; so does one that ends between the two. A flag is refused only while a
transaction that ends the job, or many jobs, is at its COMMIT: it is tried again, and a look is later than that COMMIT.
That transaction may wait for a lock of others. So jobs are looked at without their flags too: what is over is told, and
what is not is looked at again soon, since its end may notify nothing.

At most 500 flags are up at once; jobs beyond are looked at every second. Flags that several jobs share would be bounded
too, but transactions that end jobs of one flag at the same time would refuse it to each other, and notify for nothing.

It works on libpq below psycopg, as the relay's listener does, for callers in threads and in event loops alike.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from uuid import UUID

import psycopg
from psycopg.pq.abc import PGconn
from sqlalchemy.exc import DBAPIError

from outboxq.clock import clock
from outboxq.database.closing import finish
from outboxq.database.driver import DriverConnection, run_on_libpq, wait_readable
from outboxq.database.errors import (
    INSUFFICIENT_PRIVILEGE,
    describe_error,
    explain_missing_tables,
    is_refused,
    sqlstate_of,
)
from outboxq.errors import ConfigError
from outboxq.fault_points import fault_point
from outboxq.outbox.result_wait import Ending, Wait
from outboxq.statements import results as statements
from outboxq.statements.wake import listen_on

# A job whose flag was refused is looked at, and the flag tried again, after this pause, which doubles.
_RETRY_FIRST_SECONDS, _RETRY_CAP_SECONDS = 0.005, 0.1
_RECONNECT_FIRST_SECONDS, _RECONNECT_CAP_SECONDS = 0.05, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLimits:
    """How often results are looked for, and how long a connection is kept for nothing.

    Args:
        look_seconds: Between looks at all jobs that are waited for: an end that nothing notified of is found by then.
        poll_first_seconds, poll_most_seconds: The same behind a pooler, which loses notifications; each pause is twice
            the one before.
        most_flags: The jobs whose flags are up at once, as flags are in a table of the server's that all sessions
            share. Those beyond are looked at every `poll_most_seconds`, until there is room for their flags.
        linger_seconds: How long the connection stays when no job is waited for.
    """

    look_seconds: float = 5.0
    poll_first_seconds: float = 0.01
    poll_most_seconds: float = 1.0
    most_flags: int = 500
    linger_seconds: float = 10.0


class ResultListener:
    """Waits for the ends of jobs, and holds the flags of those that are waited for.

    Args:
        on_end: Called with the listener when its thread ends, because no job was waited for any more.
    """

    def __init__(self, schema: str, limits: ResultLimits, on_end: "Callable[[ResultListener], None]") -> None:
        self._schema = schema
        self._limits = limits
        self._on_end = on_end
        self._lock = threading.Lock()
        self._new: list[Wait] = []
        self._given_up: list[Wait] = []
        self._has_ended = False
        # Why the last connection failed; None once it answered again.
        self.trouble: Exception | None = None
        # Of the thread alone: the waits for each job, what is to be looked at, and what of it was refused its flag.
        self._waits: dict[UUID, set[Wait]] = {}
        self._due: set[UUID] = set()
        self._refused: set[UUID] = set()
        # The flags that are up; the jobs for which there was no room, and those that no wait is left for.
        self._flags: set[str] = set()
        self._beyond: set[UUID] = set()
        self._left: set[UUID] = set()
        self._hears = True
        self._retry_seconds = _RETRY_FIRST_SECONDS
        self._reconnect_seconds = _RECONNECT_FIRST_SECONDS
        self._poll_seconds = limits.poll_first_seconds
        self._look_at = self._poll_at = self._unflagged_at = 0.0
        self._idle_since = clock()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="outboxq-results", daemon=True)

    def start(self) -> None:
        """Start the thread; it connects by itself, and again after every loss."""
        try:
            self._thread.start()
        except BaseException:
            self._end()
            raise

    def add(self, wait: Wait) -> bool:
        """Wait for the end of a job; False if the thread has ended: then make another listener."""
        with self._lock:
            if self._has_ended:
                return False
            self._new.append(wait)
            self._wake_thread()
        return True

    def forget(self, wait: Wait) -> None:
        """Wait no longer. Returns at once."""
        if wait.future.cancel():
            with self._lock:
                if not self._has_ended:
                    self._given_up.append(wait)
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
            self._end()
            self._on_end(self)

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
            self._wake_reader.close()
            self._wake_writer.close()

    def _await_waiters(self) -> bool:
        """Wait until a job is waited for; False if none was for a while, and from now on none can be."""
        while True:
            self._take_requests()
            self._leave_abandoned()
            if self._waits:
                return True
            with self._lock:
                if self._idle_seconds_left() <= 0 and not self._new:
                    self._has_ended = True
                    return False
            wait_readable([self._wake_reader], max(0.0, self._idle_seconds_left()))

    def _idle_seconds_left(self) -> float:
        return self._idle_since + self._limits.linger_seconds - clock()

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
            finish(connection)
            for of_connection in (self._flags, self._beyond, self._refused, self._left):
                of_connection.clear()

    def _connect(self) -> DriverConnection:
        """Connect as any wait says, since all of them name the same place; preferably one whose loop runs."""
        waits = [wait for waits in self._waits.values() for wait in waits]
        return next((wait for wait in waits if wait.can_connect()), waits[0]).connect()

    def _meet(self, error: Exception) -> None:
        """After an error: raise to all callers what waiting cannot mend; else wait a moment, to connect anew.

        A statement that was cancelled, or a lock that was not had in time, may do better at the next attempt.
        """
        self.trouble = error
        original: object = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(original, ConfigError | psycopg.ProgrammingError) or is_refused(error):
            self._take_requests()
            failed, self._waits = self._waits, {}
            for wait in (each for waits in failed.values() for each in waits):
                if wait.future.set_running_or_notify_cancel():
                    wait.future.set_exception(_explained(error))
            self._note_idle()
            return
        time.sleep(self._reconnect_seconds)
        self._reconnect_seconds = min(self._reconnect_seconds * 2, _RECONNECT_CAP_SECONDS)

    def _serve(self, connection: PGconn) -> None:
        self._hears = self._listen(connection)
        self._set_looks()
        self._due = set(self._waits)
        while self._waits or self._idle_seconds_left() > 0:
            self._look(connection)
            self._drop_flags(connection)
            # Before the wait: a notification may have come in with an answer.
            connection.consume_input()
            self._hear(connection)
            wait_readable([self._wake_reader, connection.socket], self._patience())
            self._take_requests()
            self._note_due()

    def _listen(self, connection: PGconn) -> bool:
        """Listen, unless the connection leads to a pooler: that names another backend than the one at work."""
        rows = run_on_libpq(connection, "SET client_encoding TO 'UTF8'; SELECT pg_catalog.pg_backend_pid()")
        if rows[0][0] != str(connection.backend_pid):
            return False
        run_on_libpq(connection, listen_on(statements.result_channel(self._schema)))
        return True

    def _look(self, connection: PGconn) -> None:
        """Look at the jobs that are due, and tell the waits of what is over.

        Those whose flags are refused stay due, and are looked at without them after a pause.
        """
        if not self._due:
            return
        if (unflagged := self._refused & self._due) and clock() >= self._unflagged_at:
            self._tell(run_on_libpq(connection, statements.look_at_jobs(self._schema, unflagged)))
            # Other waits that begin or end meanwhile wake the thread, and need not have all of these looked at.
            self._unflagged_at = clock() + self._retry_seconds
        looked = self._flagged(connection) if self._hears else set(self._due)
        if looked:
            fault_point("before-look")
            rows = run_on_libpq(connection, statements.look_at_jobs(self._schema, looked))
            fault_point("after-look")
            self._due -= looked
            self._tell(rows)
        self._refused = set(self._due)
        self.trouble, self._reconnect_seconds = None, _RECONNECT_FIRST_SECONDS

    def _flagged(self, connection: PGconn) -> set[UUID]:
        """Raise the flags of the jobs that are due, as far as there is room.

        Returns:
            The jobs for which one look is enough: an end behind it is notified of, or the job is beyond, and polled.
        """
        # The flag of all jobs is the first.
        missing = sorted({statements.ALL_JOBS, *map(str, self._due)} - self._flags)
        room = 1 + self._limits.most_flags - len(self._flags)
        if asked := missing[:room]:
            rows = run_on_libpq(connection, statements.try_result_flags(self._schema, asked))
            self._flags |= {str(name) for name, is_held in rows if is_held == "t"}
        self._beyond -= self._due
        self._beyond.update(map(UUID, missing[room:]))
        flagged = {job_id for job_id in self._due if job_id in self._beyond or str(job_id) in self._flags}
        is_whole = statements.ALL_JOBS in self._flags and flagged == self._due
        self._retry_seconds = _RETRY_FIRST_SECONDS if is_whole else min(self._retry_seconds * 2, _RETRY_CAP_SECONDS)
        return flagged if statements.ALL_JOBS in self._flags else flagged & self._beyond

    def _drop_flags(self, connection: PGconn) -> None:
        dropped = {str(job_id) for job_id in self._left if job_id not in self._waits} & self._flags
        self._left.clear()
        if dropped:
            self._flags -= dropped
            run_on_libpq(connection, statements.drop_result_flags(self._schema, dropped))

    def _tell(self, rows: list[tuple[str | None, ...]]) -> None:
        for row in rows:
            self._read(*row)

    def _read(self, job_id: str | None, *found: str | None) -> None:
        """Tell the waits for a job what a look has found, if the job is over."""
        is_there, outcome, result, reason = found
        if is_there is not None:
            return
        if outcome is not None:
            ending = Ending(outcome, result)
        else:
            ending = Ending("gone") if reason is None else Ending("dead", reason=reason)
        for wait in self._leave_job(UUID(job_id)):
            if wait.future.set_running_or_notify_cancel():
                wait.future.set_result(ending)
        self._note_idle()

    def _hear(self, connection: PGconn) -> None:
        while notification := connection.notifies():
            name = notification.extra.decode(errors="replace")
            if name == statements.ALL_JOBS:
                self._due.update(self._waits)
                continue
            # Any role may notify, and of anything.
            with contextlib.suppress(ValueError):
                job_id = UUID(name)
                if job_id in self._waits:
                    self._due.add(job_id)

    def _patience(self) -> float:
        """For how long to wait for a notification or a request: not at all if one has come with an answer."""
        if self._due:
            return self._retry_seconds if self._due <= self._refused else 0.0
        if not self._waits:
            return max(0.0, self._idle_seconds_left())
        return max(0.0, (min(self._look_at, self._poll_at) if self._polled else self._look_at) - clock())

    @property
    def _polled(self) -> Collection[UUID]:
        """The jobs whose ends no notification tells."""
        return self._beyond if self._hears else self._waits

    def _set_looks(self) -> None:
        now, limits = clock(), self._limits
        self._poll_seconds = limits.poll_most_seconds if self._hears else limits.poll_first_seconds
        self._look_at, self._poll_at = now + limits.look_seconds, now + self._poll_seconds

    def _note_due(self) -> None:
        """Have jobs looked at whose time has come. Other looks in between do not put it off."""
        now = clock()
        if now >= self._look_at:
            self._leave_abandoned()
            self._due.update(self._waits)
            self._look_at = now + self._limits.look_seconds
        if self._polled and now >= self._poll_at:
            self._due.update(self._polled)
            self._poll_at = now + self._poll_seconds
            self._poll_seconds = min(self._poll_seconds * 2, self._limits.poll_most_seconds)

    def _take_requests(self) -> None:
        """Take the new waits, and leave those out that were given up."""
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        with self._lock:
            new, self._new = self._new, []
            given_up, self._given_up = self._given_up, []
        for wait in new:
            self._waits.setdefault(wait.job_id, set()).add(wait)
            self._due.add(wait.job_id)
        if new and not self._hears:
            self._poll_seconds = self._limits.poll_first_seconds
            self._poll_at = min(self._poll_at, clock() + self._poll_seconds)
        for wait in given_up:
            self._leave(wait)
        if self._waits:
            self._idle_since = clock()

    def _leave_abandoned(self) -> None:
        """Leave the waits that are past their time: those of event loops that were closed are given up by no one."""
        now = clock()
        for wait in [wait for waits in self._waits.values() for wait in waits if wait.is_abandoned(now)]:
            self._leave(wait)

    def _leave(self, wait: Wait) -> None:
        waits = self._waits.get(wait.job_id, set())
        waits.discard(wait)
        if not waits:
            self._leave_job(wait.job_id)

    def _leave_job(self, job_id: UUID) -> set[Wait]:
        """Forget a job, and return its waits."""
        self._due.discard(job_id)
        self._beyond.discard(job_id)
        self._left.add(job_id)
        return self._waits.pop(job_id, set())

    def _note_idle(self) -> None:
        self._idle_since = clock()


def _explained(error: Exception) -> Exception:
    """What one caller is told: an exception of its own, as each adds its traceback."""
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
        f"results cannot be waited for at this database: {describe_error(error)}; the error behind this one has the "
        "words of the server or the driver"
    )
