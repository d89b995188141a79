"""Orders: the wishes of operators for claimed jobs, as far as their relay knows them."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from uuid import UUID


@dataclass(slots=True, eq=False)
class Orders:
    """The orders of operators; replaced by the relay's polls, and read by its slots without a lock.

    Attributes:
        cancelled: Jobs that had a cancellation at the relay's last poll. The transaction that ends the job checks if it
            still exists.
        paused: Kinds, each with its queue, that are not to be run.
    """

    cancelled: set[UUID] = field(default_factory=set)
    paused: AbstractSet[tuple[str, str]] = frozenset()

    def forget(self, job_id: UUID) -> None:
        """Record that a job's cancellation does not exist any more."""
        self.cancelled.discard(job_id)

    def known_kinds(self, queue: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Return the kinds that are not paused in a queue."""
        return tuple(kind for kind in kinds if (queue, kind) not in self.paused) if self.paused else kinds
