"""Threads whose start is bounded in time."""

import _thread
import threading
from collections.abc import Callable

# A new thread is up within microseconds, unless the whole process pauses.
_UP_SECONDS = 30.0


class BoundedStart(threading.Thread):
    """A daemon thread whose `start` waits for it to come up, but not forever as `threading.Thread.start` does.

    Without memory the new thread may die before it reports. In the relay's own thread, which enforces deadlines and
    ends the relay, an endless wait would leave a process that neither works nor ends.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._is_up = threading.Event()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: it did not come up within 30 s.
        """
        # Bare: nothing waits for this inner thread.
        _thread.start_new_thread(super().start, ())
        if not self._is_up.wait(_UP_SECONDS):
            raise RuntimeError(f"the thread {self.name!r} did not come up within {_UP_SECONDS:g} s")

    def run(self) -> None:
        self._is_up.set()
        super().run()
