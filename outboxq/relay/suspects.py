"""Suspects: jobs that ran when their relay died, and may have caused that. One slot of a process at a time runs them.

A dispatcher runs several suspects together if each of them was there for only one death of a relay. A dispatcher has
many calls, and most of the calls did not cause the death.
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
    """The queues known to have suspects (jobs that ran when their relay died), and the turn to run them.

    Only one slot or dispatcher per process, the holder, has the turn, so that a job that kills the process does not
    harm other suspects.
    """

    def __init__(self) -> None:
        self.queues: set[str] = set()
        # The queues that have suspects in groups.
        self.groups: set[str] = set()
        self._holder: object | None = None
        self._taken_at = 0.0
        self._lock = threading.Lock()

    def wait_in(self, queues: Iterable[str]) -> bool:
        """Return True if one of these queues is known to have suspects (jobs that ran when their relay died)."""
        return not (self.queues.isdisjoint(queues) and self.groups.isdisjoint(queues))

    def record_poll(self, rows: Iterable[tuple[object, ...]]) -> None:
        """Record in which queues the poll `poll_queues` has found suspects (jobs that ran when their relay died)."""
        for name, _, _, suspected, _, group_suspected in rows:
            if suspected:
                self.queues.add(str(name))
            if group_suspected:
                self.groups.add(str(name))

    def known_in(self, queues: Iterable[str]) -> list[str]:
        """Return those of these queues that are known to have suspects (jobs that ran when their relay died)."""
        return [name for name in queues if name in self.queues or name in self.groups]

    def round(
        self,
        holder: object,
        queues: Iterable[str],
        is_held: Callable[[str], bool],
        has_lease: Callable[[], bool],
        claims: Callable[[str, Sort], Generator[_Asked, None, bool]],
    ) -> Iterator[_Asked]:
        """Yield the claims by which a slot takes suspects (jobs that ran when their relay died) from these queues.

        For each queue the slot takes the turn to run suspects, sends the claims, and gives the turn up. A queue is left
        out if another slot or dispatcher has the turn.

        Args:
            holder: The object by which the turn's holder is recorded: the slot's planner.
            is_held: Returns True if no slot may claim from a queue now, because of its limit or rate.
            has_lease: Returns True if the relay holds its lease, without which no suspect may run.
            claims: Yields the claims of one sort of a queue's jobs; returns True if no such job is left.
        """
        for name in self.known_in(queues):
            if is_held(name) or not self.take_turn(holder):
                continue
            try:
                if not has_lease():
                    continue
                for known, sort in ((self.queues, Sort.SUSPECT), (self.groups, Sort.GROUP_SUSPECT)):
                    # A suspect without room may still be there, even if the hold of its queue has ended.
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
        """Yield the claims by which a dispatcher takes suspects from these queues; it has the turn to run them already.

        Suspects are jobs that ran when their relay died.

        Args:
            is_held: Returns True if no slot may claim from a queue now, because of its limit or rate.
            claims: Yields the claims of one sort of a queue's jobs; returns True if no such job is left.
        """
        for name in self.known_in(queues):
            for known, sorts in (
                (self.queues, (Sort.COMPANY, Sort.SUSPECT)),
                (self.groups, (Sort.GROUP_COMPANY, Sort.GROUP_SUSPECT)),
            ):
                # A suspect without room may still be there, even if the hold of its queue has ended.
                has_none = name in known
                for sort in sorts:
                    if has_none and not is_held(name):
                        has_none = yield from claims(name, sort)
                if has_none and not is_held(name):
                    known.discard(name)

    def record_refusal(self, queue: str, error: BaseException) -> None:
        """Log that a suspect (a job that ran when its relay died) could not be claimed.

        The suspect is not lost: the next beat of the relay's lease finds its queue again.
        """
        logger.warning("suspects of queue %r could not be claimed: %s", queue, describe_refusal(error))

    def take_turn(self, holder: object) -> bool:
        """Take the turn to run suspects (jobs that ran when their relay died) for `holder`, if it is free.

        Returns True if `holder` has the turn now. Never waits.
        """
        with self._lock:
            if self._holder is None:
                self._holder, self._taken_at = holder, time.monotonic()
            return self._holder is holder

    def renew(self, holder: object) -> None:
        """If `holder` has the turn to run suspects, begin to count its time again (see `taken_seconds`)."""
        with self._lock:
            if self._holder is holder:
                self._taken_at = time.monotonic()

    def taken_seconds(self) -> float | None:
        """Return for how many seconds a slot or dispatcher has had the turn to run suspects; None if none has it."""
        with self._lock:
            return None if self._holder is None else time.monotonic() - self._taken_at

    def end_turn(self, holder: object) -> None:
        """End the turn to run suspects, if `holder` has it, so that another slot or dispatcher may take it."""
        with self._lock:
            if self._holder is holder:
                self._holder = None
