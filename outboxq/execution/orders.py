"""Orders: what operators want of jobs that are claimed, as far as their relay knows."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from uuid import UUID


@dataclass(slots=True, eq=False)
class Orders:
    """What operators want; replaced by the relay whenever it has looked, and read by its slots without a lock.

    Attributes:
        cancelled: Jobs for which a cancellation stood when the relay last looked. Whether it still does is asked in the
            transaction that ends the job.
        paused: Kinds, each with its queue, that are not to be run.
    """

    cancelled: set[UUID] = field(default_factory=set)
    paused: AbstractSet[tuple[str, str]] = frozenset()

    def forget(self, job_id: UUID) -> None:
        """Record that a job's cancellation does not stand any more."""
        self.cancelled.discard(job_id)

    def known_kinds(self, queue: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these kinds that are not paused in a queue."""
        return tuple(kind for kind in kinds if (queue, kind) not in self.paused) if self.paused else kinds
