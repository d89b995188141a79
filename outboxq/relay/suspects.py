"""Suspects: jobs that ran when their relay died. They run under the lease, in one slot of a process at a time.

A dispatcher runs several whose relay died once together: most of a relay's calls are innocent of its death.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

from outboxq.database.errors import describe_refusal
from outboxq.statements.claim import Sort

logger = logging.getLogger("outboxq.relay")

_Asked = TypeVar("_Asked")


class QuarantineTurns:
    """The queues that are known to have suspects, and the slot or dispatcher that may run some.

    One at a time per process: what kills the process harms no other's suspects.
    """

    def __init__(self) -> None:
        self.queues: set[str] = set()
        # The queues that have suspects in groups.
        self.groups: set[str] = set()
        self._holder: object | None = None
        self._taken_at = 0.0
        self._lock = threading.Lock()

    def wait_in(self, queues: Iterable[str]) -> bool:
        """Return True if one of these queues is known to have suspects."""
        return not (self.queues.isdisjoint(queues) and self.groups.isdisjoint(queues))

    def record_poll(self, rows: Iterable[tuple[object, ...]]) -> None:
        """Record the suspects that a poll (`poll_queues`) has found."""
        for name, _, _, suspected, _, group_suspected in rows:
            if suspected:
                self.queues.add(str(name))
            if group_suspected:
                self.groups.add(str(name))

    def known_in(self, queues: Iterable[str]) -> list[str]:
        """The queues, of these, that are known to have suspects."""
        return [name for name in queues if name in self.queues or name in self.groups]

    def round(
        self,
        holder: object,
        queues: Iterable[str],
        is_held: Callable[[str], bool],
        has_lease: Callable[[], bool],
        claims: Callable[[str, Sort], Generator[_Asked, None, bool]],
    ) -> Iterator[_Asked]:
        """The claims of suspects in these queues, for a slot, if it may run one now.

        Args:
            claims: Yields the claims of a sort of jobs; returns True if nothing waits.
        """
        for name in self.known_in(queues):
            if is_held(name) or not self.take_turn(holder):
                continue
            try:
                if not has_lease():
                    continue
                for known, sort in ((self.queues, Sort.SUSPECT), (self.groups, Sort.GROUP_SUSPECT)):
                    # A suspect that found no room may still be there, also if the hold of its queue has ended.
                    if name in known and (yield from claims(name, sort)) and not is_held(name):
                        known.discard(name)
            finally:
                self.end_turn(holder)

    def claims(
        self,
        queues: Iterable[str],
        is_held: Callable[[str], bool],
        claims: Callable[[str, Sort], Generator[_Asked, None, bool]],
    ) -> Iterator[_Asked]:
        """The claims of suspects in these queues in lease mode, for a dispatcher that has the turn to run some.

        Args:
            claims: As in `round`.
        """
        for name in self.known_in(queues):
            for known, sorts in (
                (self.queues, (Sort.COMPANY, Sort.SUSPECT)),
                (self.groups, (Sort.GROUP_COMPANY, Sort.GROUP_SUSPECT)),
            ):
                # A suspect that found no room may still be there, also if the hold of its queue has ended.
                has_none = name in known
                for sort in sorts:
                    if has_none and not is_held(name):
                        has_none = yield from claims(name, sort)
                if has_none and not is_held(name):
                    known.discard(name)

    def record_refusal(self, queue: str, error: BaseException) -> None:
        """Log that a queue's suspects could not be claimed; the lease's next beat finds them again."""
        logger.warning("suspects of queue %r could not be claimed: %s", queue, describe_refusal(error))

    def take_turn(self, holder: object) -> bool:
        """Return True if `holder` may run suspects now; never waits."""
        with self._lock:
            if self._holder is None:
                self._holder, self._taken_at = holder, time.monotonic()
            return self._holder is holder

    def renew(self, holder: object) -> None:
        """Begin the time of the turn again."""
        with self._lock:
            if self._holder is holder:
                self._taken_at = time.monotonic()

    def taken_seconds(self) -> float | None:
        """The time since which a slot or a dispatcher may run suspects; None if none does."""
        with self._lock:
            return None if self._holder is None else time.monotonic() - self._taken_at

    def end_turn(self, holder: object) -> None:
        """Give up the turn: another slot or dispatcher may run suspects."""
        with self._lock:
            if self._holder is holder:
                self._holder = None
