"""Suspects: jobs that ran when their relay died. They run one at a time per process, under the lease."""

import threading
from collections.abc import Iterable


class QuarantineTurns:
    """Which queues are known to have suspects, and which slot may run one.

    One at a time per process: a suspect that kills the process takes no other suspect with it.
    """

    def __init__(self) -> None:
        self.queues: set[str] = set()
        # Those that have suspects in groups.
        self.groups: set[str] = set()
        self._holder: object | None = None
        self._lock = threading.Lock()

    def wait_in(self, queues: Iterable[str]) -> bool:
        """Whether one of these queues is known to have suspects."""
        return not (self.queues.isdisjoint(queues) and self.groups.isdisjoint(queues))

    def record_poll(self, rows: Iterable[tuple[object, ...]]) -> None:
        """Record the suspects that a poll (`poll_queues`) has found."""
        for name, _, _, suspected, _, group_suspected in rows:
            if suspected:
                self.queues.add(str(name))
            if group_suspected:
                self.groups.add(str(name))

    def take_turn(self, holder: object) -> bool:
        """Whether `holder` may run a suspect now; never waits."""
        with self._lock:
            if self._holder is None:
                self._holder = holder
            return self._holder is holder

    def end_turn(self, holder: object) -> None:
        """Let another slot run a suspect."""
        with self._lock:
            if self._holder is holder:
                self._holder = None
