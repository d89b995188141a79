"""The call of a running handler, as its context and the relay see it: its cancellation and its progress."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from outboxq.handlers.progress import ProgressNotes
from outboxq.job import Job


@dataclass(slots=True, eq=False)
class HandlerCall:
    """One call of a handler, or of the handlers of a shared run, which may be cancelled until it ends.

    Attributes:
        jobs: The jobs that it runs.
        lock: Held while the call is ended or cancelled; calls that come one after the other may share it.
        notes: Receives its progress, and has some if `has_noted`; None if nothing does.
        is_cancelled: One of the jobs was cancelled: the handler should end. Read without a lock.
        is_over: The handler has ended, and what it left on the connection is the relay's.
    """

    jobs: Sequence[Job]
    lock: threading.Lock
    notes: ProgressNotes | None = None
    has_noted: bool = False
    is_cancelled: bool = False
    is_over: bool = False

    def note(self, job: Job, fraction: float, note: str) -> None:
        """Record how far one of the jobs is. Never waits."""
        if self.notes is None:
            return
        self.has_noted = True
        self.notes.note(job, fraction, note)
        if self.is_over:
            # A thread or a task that outlives the handler reports this.
            self.notes.clear((job.id,))

    @contextmanager
    def while_running(self) -> Iterator[bool]:
        """Yield True if the handler has not ended, and keep it from ending within the block."""
        with self.lock:
            yield not self.is_over
