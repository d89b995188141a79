"""The claims of a slot's queues: a statement for each sort of jobs, by the limits that the relay read last."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from outboxq.execution.claim import AnyScript
from outboxq.queue_limits import QueueLimits
from outboxq.relay.state import RelayState
from outboxq.statements.claim import ClaimStatements, Sort
from outboxq.statements.group_claim import GroupScript


@dataclass(frozen=True, slots=True)
class ClaimsOfQueue:
    """The claims of one queue.

    Attributes:
        scripts: The claim of each sort of jobs, in the mode of the queue.
        alike: For each sort, the claims that take jobs the same way.
        limits: The limits that the claims keep.
        by_one: The sorts of which a claim takes one job: those that run by themselves, and all if the queue's limit
            counts leased jobs.
        timeout_seconds: The longest deadline of the queue's handlers.
        batch_size: The most jobs that a claim takes.
    """

    scripts: Mapping[Sort, AnyScript]
    alike: Mapping[Sort, tuple[AnyScript, ...]]
    limits: QueueLimits
    by_one: Collection[Sort]
    timeout_seconds: float | None
    batch_size: int


@dataclass(eq=False, slots=True)
class QueueClaims:
    """The claims of the queues of one slot."""

    state: RelayState
    _made: dict[str, ClaimsOfQueue] = field(default_factory=dict)
    # By queue, the limits of all queues at the time when its claims were made; each query replaces them whole.
    _seen: dict[str, Mapping[str, QueueLimits]] = field(default_factory=dict)

    def of(self, queue: str) -> ClaimsOfQueue:
        """The claims of a queue, made again if its limits have changed."""
        seen = self.state.flow.limits
        if self._seen.get(queue) is not seen:
            limits, made = self.state.flow.limits_of(queue), self._made.get(queue)
            if made is None or made.limits != limits:
                self._made[queue] = _make(self.state, queue, limits)
            self._seen[queue] = seen
        return self._made[queue]


def _make(state: RelayState, queue: str, limits: QueueLimits) -> ClaimsOfQueue:
    schema, owner, registry, most = state.config.schema, state.lease.owner, state.registry, limits.running
    is_leased = registry.claims[queue] == "lease"
    of = ClaimStatements(schema, queue, owner, most=most, counts_leases=is_leased)
    group = GroupScript(schema, queue, owner if is_leased else None, most, is_leased, per_group=limits.per_group or 1)
    ready, due = (of.lease_ready, of.lease_due) if is_leased else (of.ready, of.due)
    scripts: dict[Sort, AnyScript] = {
        Sort.READY: ready,
        Sort.DUE: due,
        Sort.GROUPED: group,
        Sort.SUSPECT: of.lease_suspect,
        Sort.GROUP_SUSPECT: replace(group, owner=owner, suspects=True),
    }
    alike: dict[Sort, tuple[AnyScript, ...]] = dict.fromkeys(Sort, ())
    alike |= {Sort.READY: (ready, due), Sort.DUE: (ready, due), Sort.GROUPED: (group,)}
    return ClaimsOfQueue(
        scripts,
        alike,
        limits,
        tuple(Sort) if is_leased and most is not None else (Sort.SUSPECT, Sort.GROUP_SUSPECT),
        registry.timeout_seconds(queue),
        registry.batch_size(queue, state.config.batch_size),
    )
