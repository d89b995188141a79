"""The state of one call of a handler, which its context and the relay share: its cancellation and its progress."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from outboxq.handlers.progress import ProgressNotes
from outboxq.job import Job


@dataclass(slots=True, eq=False)
class HandlerCall:
    """One call of a handler, or of the handlers of several jobs in one transaction; can be cancelled until it ends.

    Attributes:
        jobs: The jobs that it runs.
        lock: Held while the relay ends or cancels the call, so that these exclude each other; consecutive calls may
            share one lock.
        notes: Receives the handler's progress; None if progress is not recorded.
        has_noted: True if the handler has reported progress.
        is_cancelled: True if one of the jobs was cancelled, so that the handler should end. Read without a lock.
        is_over: True if the handler has ended, and the connection belongs to the relay again.
        goes_on: True if a cancellation of a job only sets `is_cancelled`, because the handler's work cannot be undone.
    """

    jobs: Sequence[Job]
    lock: threading.Lock
    notes: ProgressNotes | None = None
    has_noted: bool = False
    is_cancelled: bool = False
    is_over: bool = False
    goes_on: bool = False

    def note(self, job: Job, fraction: float, note: str) -> None:
        """Pass the progress of one of the jobs to `notes`, to be written soon. Does nothing if `notes` is None."""
        if self.notes is None:
            return
        self.has_noted = True
        self.notes.note(job, fraction, note)
        if self.is_over:
            # The caller is a thread or a task that outlives the handler.
            self.notes.clear((job.id,))

    @contextmanager
    def while_running(self) -> Iterator[bool]:
        """Yield True if the call has not ended, and keep the relay from ending it during the block."""
        with self.lock:
            yield not self.is_over
