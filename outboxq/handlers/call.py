"""The call of a running handler: its cancellation, its progress and its end."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outboxq.handlers.progress import ProgressNotes
from outboxq.job import Job


class HandlerCall:
    """One call of a handler, or of the handlers of a shared run, which may be cancelled until it ends.

    Args:
        lock: Held while the call is ended or cancelled; calls that come one after the other may share it.
        notes: Receives its progress; None if nothing does.

    Attributes:
        jobs: The jobs that it runs.
        is_cancelled: One of the jobs was cancelled: the handler should end. Read without a lock.
        is_over: The handler has ended, and what it left on the connection is the relay's.
    """

    __slots__ = ("_has_noted", "_lock", "_notes", "is_cancelled", "is_over", "jobs")

    def __init__(self, jobs: Sequence[Job], lock: threading.Lock, notes: ProgressNotes | None = None) -> None:
        self.jobs = jobs
        self.is_cancelled = False
        self.is_over = False
        self._lock = lock
        self._notes = notes
        self._has_noted = False

    def note(self, job: Job, fraction: float, note: str) -> None:
        """Record how far one of the jobs is. Never waits."""
        if self._notes is None:
            return
        self._has_noted = True
        self._notes.note(job, fraction, note)
        if self.is_over:
            # A thread or a task that outlives the handler reports this.
            self._notes.clear((job.id,))

    def end(self) -> None:
        """Record that the handler has ended; waits for a cancellation that is on its way to the server.

        Statements sent from now on are the relay's own: no cancellation may hit them.
        """
        with self._lock:
            self.is_over = True
        if self._has_noted and self._notes is not None:
            self._notes.clear([job.id for job in self.jobs])

    @contextmanager
    def while_running(self) -> Iterator[bool]:
        """Yield True if the handler has not ended, and keep it from ending within the block."""
        with self._lock:
            yield not self.is_over
