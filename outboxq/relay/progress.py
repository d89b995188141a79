"""The progress writer: it writes handlers' notes of their progress, on its own connection.

A handler's transaction shows nothing before its COMMIT, so notes are written separately. A handler never waits for
them, and its job does not depend on them: memory holds the newest note of each job, and all new notes are written in
one transaction, once a second at most. So memory does not grow while the database is unavailable.
"""

import logging
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID

from outboxq.database.closing import finish
from outboxq.database.driver import DriverConnection, run_on_libpq
from outboxq.database.errors import sqlstate_of
from outboxq.job import Job
from outboxq.statements.progress import SETTINGS, ProgressNote, write_progress
from outboxq.statements.transaction import BEGIN

logger = logging.getLogger("outboxq.relay")

# The shortest time between two writes, and how long the connection stays open without notes to write.
_WRITE_SECONDS, _IDLE_SECONDS = 1.0, 10.0
_STOP_SECONDS = 5.0
# Errors that another try cannot solve.
_ADVICE = {
    "42501": "the role may not: run what `outboxq roles --sql` prints",
    "42P01": "the table progress is missing: run `outboxq migrate`",
    "3F000": "the table progress is missing: run `outboxq migrate`",
}


@dataclass(eq=False)
class ProgressWriter:
    """Writes the notes of a relay's handlers. Its thread starts with the first note.

    Args:
        connect: Opens a connection outside a transaction; a transaction pooler will do.
        relay: The relay's id, which is stored with each note.
    """

    connect: Callable[[], DriverConnection]
    schema: str
    relay: UUID
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _notes: dict[UUID, ProgressNote] = field(default_factory=dict, init=False)
    # The jobs whose rows may be in the table, and those whose rows are to be deleted.
    _written: set[UUID] = field(default_factory=set, init=False)
    _ended: set[UUID] = field(default_factory=set, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _connection: "DriverConnection | None" = field(default=None, init=False)
    _stopping: bool = field(default=False, init=False)
    _is_refused: bool = field(default=False, init=False)

    def note(self, job: Job, fraction: float, note: str) -> None:
        """Keep a note of a job's progress in memory until it is written. A newer note of the same job replaces it."""
        with self._changed:
            if self._is_refused or self._stopping:
                return
            self._notes[job.id] = ProgressNote(job.id, job.attempt, fraction, note)
            self._ended.discard(job.id)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="outboxq-progress", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    # The process may not be able to start threads: the next note tries again.
                    logger.debug("the thread that writes progress cannot start")
                else:
                    self._thread = thread
            self._changed.notify_all()

    def clear(self, job_ids: Collection[UUID]) -> None:
        """Drop unwritten notes of jobs whose handler has ended; make the thread delete their written ones."""
        with self._changed:
            for job_id in job_ids:
                self._notes.pop(job_id, None)
                if job_id in self._written:
                    self._ended.add(job_id)
            self._changed.notify_all()

    def stop(self) -> None:
        """Drop unwritten notes, delete the written ones that are left, and end the thread, waiting for 5 s at most."""
        with self._changed:
            self._stopping = True
            self._notes.clear()
            self._ended |= self._written
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while self._await_work():
            try:
                self._write()
            except Exception as error:  # noqa: BLE001  # reported; progress is a note, and jobs go on without it
                self._disconnect()
                self._report(error)
                if self._stopping:
                    break
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, _WRITE_SECONDS)
        self._disconnect()

    def _await_work(self) -> bool:
        """Wait for notes to write or delete, and return True; return False if the relay stops and there are none."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._notes or self._ended or self._stopping, _IDLE_SECONDS):
                self._disconnect()
            return bool(self._notes or self._ended)

    def _write(self) -> None:
        with self._changed:
            notes, ended = dict(self._notes), set(self._ended)
            # Before it is sent, because the answer may be lost.
            self._written |= notes.keys()
        if self._connection is None:
            self._connection = self.connect()
        written = write_progress(self.schema, self.relay, list(notes.values()), ended)
        run_on_libpq(self._connection.pgconn, f"{BEGIN}; {SETTINGS}{written}; COMMIT")
        with self._changed:
            self._notes = {job_id: note for job_id, note in self._notes.items() if notes.get(job_id) is not note}
            self._ended -= ended
            # Jobs with a newer note have a row, or will have one.
            self._written -= ended - self._notes.keys()

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                finish(self._connection)
            self._connection = None

    def _report(self, error: Exception) -> None:
        """Warn and accept no more notes if the table, or the right to write it, is missing; only log other errors."""
        sqlstate = sqlstate_of(error)
        if sqlstate not in _ADVICE:
            logger.debug("progress could not be written", extra={"error_type": type(error).__name__})
            return
        with self._changed:
            self._is_refused = True
            for kept in (self._notes, self._ended, self._written):
                kept.clear()
        logger.warning(
            "the progress of handlers is not shown, and their jobs run without: %s",
            _ADVICE[sqlstate],
            extra={"outboxq_sqlstate": sqlstate},
        )
