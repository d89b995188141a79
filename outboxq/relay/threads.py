"""Threads whose start is bounded in time."""

import _thread
import threading
from collections.abc import Callable

# A new thread is up within microseconds, unless the whole process pauses.
_UP_SECONDS = 30.0


class BoundedStart(threading.Thread):
    """A daemon thread whose `start` waits 30 s at most for it to run; that of `threading.Thread` may wait forever.

    If memory runs out, a new thread may die before it reports that it runs. The relay's own thread, which enforces
    deadlines and ends the relay, starts such threads: if it waited forever, the process would neither work nor end.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._is_up = threading.Event()

    def start(self) -> None:
        """Start the thread, and wait until it runs.

        Raises:
            RuntimeError: the thread did not start within 30 s.
        """
        # A plain thread, because no code waits for this inner one.
        _thread.start_new_thread(super().start, ())
        if not self._is_up.wait(_UP_SECONDS):
            raise RuntimeError(f"the thread {self.name!r} did not come up within {_UP_SECONDS:g} s")

    def run(self) -> None:
        self._is_up.set()
        super().run()
