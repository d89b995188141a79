"""The claims of a slot's queues: the statement for each sort of jobs, and the place where the next one starts.

A deleted job's index entry stays until vacuum takes it, and with an old snapshot open vacuum takes nothing. So a claim
starts after the last job that its slot claimed. Jobs that were committed late, came back or have a higher priority are
before that place: one slot of a relay sweeps for them, by claiming from the start.
"""

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field, replace

from outboxq.config import RelayConfig
from outboxq.execution.claim import Claimed
from outboxq.handlers.resolved import Registry
from outboxq.queue_limits import QueueLimits
from outboxq.relay.flow_settings import FlowSettings
from outboxq.relay.lease import RelayLease
from outboxq.relay.poller import SharedPoller
from outboxq.statements.claim import ClaimStatements, Cursor, Sort
from outboxq.statements.group_claim import GROUPS_SEEN, AnyScript, GroupScript, Look, bring_back

# While claims go on, each queue is claimed from its start at least this often.
SWEEP_SECONDS = 1.0
# Sweeps that take longer than other claims, because they walk over dead entries (0.1 s and more past a million), may
# take this part of the time. The pauses between them stay within these bounds.
_SHARE = 0.05
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 30.0
# The weight of the newest claim in the average length of claims.
_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class ClaimsOfQueue:
    """The claims of one queue.

    Attributes:
        scripts: The claim of each sort of jobs, in the mode of the queue.
        alike: For each sort, the claims that take jobs the same way.
        limits: The limits that the claims keep.
        by_one: The sorts of which a claim takes one job: those that run by themselves.
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
    """The claims of the queues of one slot, by the limits that the relay read last."""

    config: RelayConfig
    registry: Registry
    lease: RelayLease
    flow: FlowSettings
    _made: dict[str, ClaimsOfQueue] = field(default_factory=dict)
    # By queue, the limits of all queues at the time when its claims were made; each query replaces them whole.
    _seen: dict[str, Mapping[str, QueueLimits]] = field(default_factory=dict)

    def of(self, queue: str) -> ClaimsOfQueue:
        """The claims of a queue, made again if its limits have changed."""
        seen = self.flow.limits
        if self._seen.get(queue) is not seen:
            limits, made = self.flow.limits_of(queue), self._made.get(queue)
            if made is None or made.limits != limits:
                self._made[queue] = self._make(queue, limits)
            self._seen[queue] = seen
        return self._made[queue]

    def _make(self, queue: str, limits: QueueLimits) -> ClaimsOfQueue:
        schema, owner, registry, most = self.config.schema, self.lease.owner, self.registry, limits.running
        is_leased = registry.claims[queue] == "lease"
        of = ClaimStatements(schema, queue, owner, most=most, counts_leases=is_leased)
        group = GroupScript(
            schema, queue, owner if is_leased else None, most, is_leased, per_group=limits.per_group or 1
        )
        ready, due = (of.lease_ready, of.lease_due) if is_leased else (of.ready, of.due)
        scripts: dict[Sort, AnyScript] = {
            Sort.READY: ready,
            Sort.DUE: due,
            Sort.GROUPED: group,
            Sort.SUSPECT: of.lease_suspect,
            Sort.GROUP_SUSPECT: replace(group, owner=owner, suspects=True),
        }
        if is_leased:
            scripts |= {
                Sort.SUSPECT: of.lease_suspect_alone,
                Sort.GROUP_SUSPECT: replace(group, suspects=True, in_company=False),
                Sort.COMPANY: of.lease_suspects_in_company,
                Sort.GROUP_COMPANY: replace(group, suspects=True, in_company=True),
            }
        alike: dict[Sort, tuple[AnyScript, ...]] = dict.fromkeys(Sort, ())
        alike |= {Sort.READY: (ready, due), Sort.DUE: (ready, due), Sort.GROUPED: (group,)}
        return ClaimsOfQueue(
            scripts,
            alike,
            limits,
            (Sort.SUSPECT, Sort.GROUP_SUSPECT),
            registry.timeout_seconds(queue),
            registry.batch_size(queue, self.config.batch_size),
        )


class Sweep:
    """The time when one of a relay's slots next sweeps a queue; shared by all slots."""

    def __init__(self) -> None:
        self.due_at = 0.0
        self._pause_seconds = 0.0
        self._usual_seconds: float | None = None
        self._lock = threading.Lock()

    def take_turn(self) -> bool:
        """Return True if the caller is to sweep the queue now."""
        now = time.monotonic()
        with self._lock:
            if now < self.due_at:
                return False
            # No other slot sweeps while this sweep lasts.
            self.due_at = now + max(SWEEP_SECONDS, self._pause_seconds)
            return True

    def record(self, seconds: float, *, swept: bool) -> None:
        """Record a claim's time; the less a sweep cost, the sooner the next one is due."""
        usual = seconds if self._usual_seconds is None else self._usual_seconds
        if swept:
            self._pause_seconds = min(max((seconds - usual) / _SHARE, _LEAST_SECONDS), _MOST_SECONDS)
            with self._lock:
                self.due_at = time.monotonic() + self._pause_seconds
        else:
            self._usual_seconds = usual + (seconds - usual) * _WEIGHT


class Start:
    """The place for a sort without a cursor: the start of the queue, each time."""

    def place(self) -> Cursor | str | None:
        """The place after which the next claim starts; None for the start of the queue."""
        return None

    def record(self, claimed: Claimed) -> None:
        """Move by what a claim took, and visited."""

    def is_at_end(self) -> bool:
        """Return True if nothing waits at all, after a claim that found nothing from its place on."""
        return True

    def bringing_back(self) -> str | None:
        """The statement to send before the next claim, if the last one saw that jobs are due to come back."""
        return None


class QueueCursor(Start):
    """The place where one slot's claims start among the ready jobs of a queue."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._cursor: Cursor | None = None
        # The last claim has swept.
        self._has_swept = False

    def place(self) -> Cursor | None:
        """The place of the last job that the slot claimed, unless it is the slot's turn to sweep."""
        # Even without a cursor: a claim from the start is the sweep of all slots.
        if time.monotonic() >= self._sweep.due_at and self._sweep.take_turn():
            self._cursor = None
        return self._cursor

    def record(self, claimed: Claimed) -> None:
        """Move to the last job of a claim, or to the start if the claim was not full."""
        jobs, request = claimed.jobs, claimed.request
        if claimed.is_full:
            return
        self._cursor, self._has_swept = None, request.cursor is None
        if jobs:
            self._sweep.record(time.monotonic() - request.asked_at, swept=self._has_swept)
            if claimed.may_leave_more(len(jobs) + claimed.moved):
                self._cursor = Cursor(jobs[-1].priority, jobs[-1].seq)

    def is_at_end(self) -> bool:
        """Return True if the last claim started at the start of the queue."""
        return self._has_swept


class GroupCursor(Start):
    """The group after which a slot's next claim starts; knows if the slot visited all groups and found nothing.

    Each claim goes on at the end of the last one, so that every group has its turn. Keys are compared by their bytes,
    as in PostgreSQL's collation "C".

    Args:
        found: Called with the queue after each claim that took jobs.
    """

    def __init__(self, schema: str, queue: str, found: Callable[[str], None]) -> None:
        self._schema = schema
        self._queue = queue
        self._found = found
        # At random, so that slots and processes begin with different groups.
        self._after = chr(random.randint(33, 126))
        # The start of a round without a job, and if it has ended.
        self._round_from: str | None = None
        self._has_round_ended = False
        self._is_back_due = False

    def place(self) -> str:
        """The key of the last group that a claim took, or visited."""
        return self._after

    def record(self, claimed: Claimed) -> None:
        """Move to the last group that a claim took, or, if it did not find enough of them, visited."""
        if claimed.look is not None:
            self._move(claimed.look)
        if claimed.jobs:
            self._round_from = None
            self._found(self._queue)

    def _move(self, look: Look) -> None:
        before, is_whole = self._after, look.seen is None or look.seen < GROUPS_SEEN
        self._is_back_due |= look.is_back_due
        last = look.taken[-1] if look.seen is None and look.taken else look.last
        if last is not None:
            self._after = last
        if self._round_from is None:
            self._round_from, self._has_round_ended = before, look.seen is not None and is_whole
        else:
            passes = _is_between(before, self._round_from, self._after)
            self._has_round_ended = passes or (look.seen is not None and is_whole)

    def is_at_end(self) -> bool:
        """Return True if all groups were visited since jobs were found; then the next round begins."""
        if self._has_round_ended and not self._is_back_due:
            self._round_from = None
            return True
        return False

    def bringing_back(self) -> str | None:
        """The statement that lets jobs wait in their groups again after these passed them over, if any are due."""
        is_due, self._is_back_due = self._is_back_due, False
        return bring_back(self._schema, self._queue) if is_due else None


def cursors_of(
    queue: str, schema: str, sweeps: MutableMapping[str, Sweep], poller: SharedPoller
) -> Mapping[Sort, Start]:
    """Make the cursors of a slot in one queue, one for each sort of jobs."""
    cursors = dict.fromkeys(Sort, Start())
    cursors[Sort.READY] = QueueCursor(sweeps.setdefault(queue, Sweep()))
    cursors[Sort.GROUPED] = GroupCursor(schema, queue, poller.record_groups)
    return cursors


def _is_between(first: str, key: str, last: str) -> bool:
    """Return True if a walk in circles, from after `first` up to `last`, comes to `key`."""
    start, place, end = first.encode(), key.encode(), last.encode()
    return start < place <= end if start < end else place > start or place <= end
