"""What the claims of a slot took: counted when they are answered, and told with the slot's next events."""

import time
from collections import Counter
from collections.abc import Iterable

from sqlalchemy import Connection

from outboxq.emitter import Emitter
from outboxq.events import ClaimsEmpty, ClaimsFailed, JobsClaimed
from outboxq.execution.claim import Claimed, ClaimRequest, claim


class ClaimTally:
    """The claims of one slot since they were last told. Nothing is counted if no hook is told of it."""

    def __init__(self, emit: Emitter) -> None:
        self._is_heard = any(map(emit.wants, (JobsClaimed, ClaimsEmpty, ClaimsFailed)))
        self._began_at = 0.0
        self._claimed: list[JobsClaimed] = []
        self._empty: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def begin(self) -> None:
        """Record that a claim is about to be sent, perhaps with a COMMIT."""
        if self._is_heard:
            self._began_at = time.perf_counter()

    def record(self, claimed: Claimed) -> None:
        """Count a claim that was answered just now."""
        if not self._is_heard:
            return
        queue = claimed.request.queue
        if claimed.jobs:
            self._claimed.append(JobsClaimed(queue, len(claimed.jobs), time.perf_counter() - self._began_at))
        else:
            self._empty[queue] += 1

    def claim(self, connection: Connection, request: ClaimRequest) -> Claimed:
        """Send a claim by itself, and count it if it is answered with an error, or not at all."""
        try:
            return claim(connection, request)
        except BaseException:
            if self._is_heard:
                self._failed[request.queue] += 1
            raise

    def take(self) -> Iterable[JobsClaimed | ClaimsEmpty | ClaimsFailed]:
        """The events of what was counted, once."""
        if not self._is_heard:
            return ()
        claimed, empty, failed = self._claimed, self._empty, self._failed
        if not (claimed or empty or failed):
            return ()
        self._claimed, self._empty, self._failed = [], Counter(), Counter()
        return (
            *claimed,
            *(ClaimsEmpty(queue, count) for queue, count in empty.items()),
            *(ClaimsFailed(queue, count) for queue, count in failed.items()),
        )
