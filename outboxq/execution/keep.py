"""Keep: the rows of finished jobs, of kinds that keep them. They are written in the transaction that removes the jobs.

So a row is there if and only if the effect of its job is: in transaction mode it goes along in the string of COMMIT,
under a lease in the statement that removes the job. Those who wait for the result of a job are told in the same string.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from outboxq.events import Event, JobCancelled, JobDied, JobDiscarded, JobDone, JobExpired
from outboxq.handlers.keeping import Keeping
from outboxq.handlers.resolved import Registry
from outboxq.statements.done import KeptJob, keep_jobs
from outboxq.statements.results import tell_waiters

_OUTCOMES: Mapping[type, str] = {
    JobDone: "done",
    JobDiscarded: "discarded",
    JobCancelled: "cancelled",
    JobExpired: "expired",
}
_NO_OTHERS: Mapping[UUID, tuple[UUID, ...]] = {}


@dataclass(frozen=True, slots=True)
class Keeper:
    """What a relay keeps of finished jobs, by kind and alias; without kinds, nothing."""

    kinds: Mapping[str, Keeping] = field(default_factory=dict)
    relay: UUID | None = None

    @classmethod
    def of(cls, registry: Registry, relay: UUID | None = None) -> "Keeper":
        """The keeper of a registry's handlers."""
        kinds = {kind: handler.keeping for kind, handler in registry.handlers.items() if handler.keeping is not None}
        return cls(kinds, relay)

    def kept(self, events: Iterable[Event], others: Mapping[UUID, tuple[UUID, ...]] = _NO_OTHERS) -> list[KeptJob]:
        """The rows of the jobs that are over by these events, of kinds that keep them.

        Args:
            others: The jobs that runs have taken along, by the id of the job that ran.
        """
        if not self.kinds:
            return []
        return [row for event in events if (row := self._row(event, others)) is not None]

    def statement(
        self, schema: str, events: Iterable[Event], others: Mapping[UUID, tuple[UUID, ...]] = _NO_OTHERS
    ) -> str:
        """The statement that writes these rows, and tells those who wait for results; empty if there is nothing of it.

        For the transaction that removes the jobs, late: what it tries of waiters is held until COMMIT.
        """
        if not self.kinds:
            return ""
        events = tuple(events)
        rows, ended = self.kept(events, others), self.ended(events, others)
        keeping = keep_jobs(schema, rows, self.relay) if rows else ""
        return tell_waiters(schema, ended, beside=keeping) if ended else keeping

    def ended(self, events: Iterable[Event], others: Mapping[UUID, tuple[UUID, ...]] = _NO_OTHERS) -> list[UUID]:
        """The jobs that are over by these events, in whatever way, of kinds whose results can be waited for."""
        if not self.kinds:
            return []
        found: list[UUID] = []
        for event in events:
            if isinstance(event, JobDone | JobDiscarded | JobCancelled | JobExpired | JobDied):
                keeping = self.kinds.get(event.job.kind)
                if keeping is not None and keeping.result:
                    found += (event.job.id, *others.get(event.job.id, ()))
        return found

    def _row(self, event: Event, others: Mapping[UUID, tuple[UUID, ...]]) -> KeptJob | None:
        if not isinstance(event, JobDone | JobDiscarded | JobCancelled | JobExpired):
            return None
        job = event.job
        keeping = self.kinds.get(job.kind)
        if keeping is None:
            return None
        return KeptJob(
            job.id,
            job.queue,
            job.kind,
            _OUTCOMES[type(event)],
            job.attempt,
            job.created_at,
            job.claimed_at,
            event.seconds,
            job.args if keeping.args else None,
            job.headers if keeping.args else None,
            event.result if isinstance(event, JobDone) else None,
            others.get(job.id, ()),
            keeping.seconds,
        )
