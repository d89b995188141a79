"""The claims of a slot's queues: the statement for each sort of jobs, and the place where the next claim starts.

A deleted job's index entry stays until vacuum removes it, and while an old snapshot is open vacuum removes nothing. To
skip these entries, a claim starts after the last job that its slot claimed (this place is the cursor). Jobs that were
committed late, were put back or have a higher priority come before the cursor. A sweep finds such jobs: a claim from
the queue's start, which one slot of a relay at a time makes.
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

# While claims continue, each queue is claimed from its start at least this often.
SWEEP_SECONDS = 1.0
# Sweeps that take longer than other claims, because they walk over dead entries (0.1 s and more past a million), may
# take this share of the time. The pauses between them stay within these bounds.
_SHARE = 0.05
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 30.0
# The weight of the newest claim in the average length of claims.
_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class ClaimsOfQueue:
    """The SQL of the claims of one queue, and their settings. `QueueClaims` makes this object, and `Planner` reads it.

    Attributes:
        scripts: The claim for each sort of jobs (ready, due, grouped, suspect), in the mode of the queue.
        alike: For each sort, claims of similar jobs. If a job cannot be claimed, these claims show if its own row is
            the cause.
        limits: The limits that the claims enforce.
        by_one: The sorts whose jobs run alone, so that a claim takes one job.
        timeout_seconds: The longest deadline of the queue's handlers; None if one of them has no deadline.
        batch_size: The most jobs that a claim takes in transaction mode.
        window: The most jobs that a claim takes in lease mode, if one call runs them all, in one slot; None if each job
            needs a slot.
    """

    scripts: Mapping[Sort, AnyScript]
    alike: Mapping[Sort, tuple[AnyScript, ...]]
    limits: QueueLimits
    by_one: Collection[Sort]
    timeout_seconds: float | None
    batch_size: int
    window: int | None

    def most(self, sort: Sort, free: int) -> int:
        """Return the most jobs of a claim: a batch, or in lease mode a window, or one for each of the `free` slots."""
        if not self.scripts[sort].leased:
            return self.batch_size
        # A suspect runs alone, or with few others, so that another crash affects few.
        return free if self.window is None or sort.is_suspect else self.window


@dataclass(eq=False, slots=True)
class QueueClaims:
    """The claims of one slot's queues, with the limits that the relay read last."""

    config: RelayConfig
    registry: Registry
    lease: RelayLease
    flow: FlowSettings
    _made: dict[str, ClaimsOfQueue] = field(default_factory=dict)
    # By queue, the limits object at the time when its claims were made; each query replaces that object.
    _seen: dict[str, Mapping[str, QueueLimits]] = field(default_factory=dict)

    def of(self, queue: str) -> ClaimsOfQueue:
        """Return the claims of a queue, which are made at the first call, and again when its limits have changed."""
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
            registry.window(queue) if is_leased else None,
        )


class Sweep:
    """The time of a queue's next sweep: a claim from the queue's start, which finds jobs that other claims pass over.

    Other claims of a slot start after the last job that it claimed. Jobs that came late, were put back or have a higher
    priority are before that place. A relay's slots share this object, so that one slot sweeps at a time.
    """

    def __init__(self) -> None:
        self.due_at = 0.0
        self._pause_seconds = 0.0
        self._usual_seconds: float | None = None
        self._lock = threading.Lock()

    def take_turn(self) -> bool:
        """Return True if a sweep is due and the caller is to make it.

        Then no other slot does so for a second or longer.
        """
        now = time.monotonic()
        with self._lock:
            if now < self.due_at:
                return False
            # No other slot sweeps during this sweep.
            self.due_at = now + max(SWEEP_SECONDS, self._pause_seconds)
            return True

    def record(self, seconds: float, *, swept: bool) -> None:
        """Record how long a claim took.

        The longer a sweep takes compared with other claims, the later the next sweep is due: sweeps may take only a
        small share of the time.

        Args:
            seconds: The duration of the claim.
            swept: True if the claim was a sweep (began at the queue's start).
        """
        usual = seconds if self._usual_seconds is None else self._usual_seconds
        if swept:
            self._pause_seconds = min(max((seconds - usual) / _SHARE, _LEAST_SECONDS), _MOST_SECONDS)
            with self._lock:
                self.due_at = time.monotonic() + self._pause_seconds
        else:
            self._usual_seconds = usual + (seconds - usual) * _WEIGHT


class Start:
    """The place in a queue where a slot's next claim of one sort of jobs starts.

    In this base class it is always the queue's start; subclasses move it with each claim.
    """

    def place(self) -> Cursor | str | None:
        """Return the place after which the next claim starts; None for the start of the queue."""
        return None

    def record(self, claimed: Claimed) -> None:
        """Move the place, by the jobs or groups that a claim took or read. This base class does nothing."""

    def is_at_end(self) -> bool:
        """Return True if no job of this sort waits in the queue; to be called after a claim that found none.

        False if jobs may wait before the place where that claim started, so that another claim is needed.
        """
        return True

    def bringing_back(self) -> str | None:
        """Return a statement to send before the next claim, or None.

        The statement moves due jobs of groups, if later jobs have passed them, to the ends of their groups. This base
        class returns None.
        """
        return None


class QueueCursor(Start):
    """The place where one slot's claims start among the ready jobs of a queue: after the last job that it claimed."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._cursor: Cursor | None = None
        # True if the last claim was a sweep.
        self._has_swept = False

    def place(self) -> Cursor | None:
        """Return the place of the last job that the slot claimed; None for the start of the queue.

        Also returns None if a sweep (a claim from the queue's start) is due that no other slot makes. This slot then
        makes it.
        """
        # Even without a cursor, because a claim from the start sweeps for all slots.
        if time.monotonic() >= self._sweep.due_at and self._sweep.take_turn():
            self._cursor = None
        return self._cursor

    def record(self, claimed: Claimed) -> None:
        """Move the place to the last job that the claim took, or to the queue's start if no more may wait after it."""
        jobs, request = claimed.jobs, claimed.request
        if claimed.is_full:
            return
        self._cursor, self._has_swept = None, request.cursor is None
        if jobs:
            self._sweep.record(time.monotonic() - request.asked_at, swept=self._has_swept)
            if claimed.may_leave_more(len(jobs) + claimed.moved):
                self._cursor = Cursor(jobs[-1].priority, jobs[-1].seq)

    def is_at_end(self) -> bool:
        """Return True if the last claim started at the start of the queue, so that no job can wait before it."""
        return self._has_swept


class GroupCursor(Start):
    """The group after which a slot's next claim of grouped jobs starts, and where its round of all groups began.

    A claim reads the groups in the order of their keys, and takes jobs from groups that may run another job now. The
    next claim continues where it ended, so that every group has its turn. Keys are compared by their bytes, as in
    PostgreSQL's collation "C".

    Args:
        found: Called with the queue after each claim that took jobs.
    """

    def __init__(self, schema: str, queue: str, found: Callable[[str], None]) -> None:
        self._schema = schema
        self._queue = queue
        self._found = found
        # Random, so that slots and processes begin with different groups.
        self._after = chr(random.randint(33, 126))
        # The start of a round without a job, and True if the round has ended.
        self._round_from: str | None = None
        self._has_round_ended = False
        self._is_back_due = False

    def place(self) -> str:
        """Return the key of the group after which the next claim starts: the last that a claim took from, or read."""
        return self._after

    def record(self, claimed: Claimed) -> None:
        """Move the place to the last group from which the claim took jobs or, if these were too few, that it read."""
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
        """Return True if all groups were read since a claim last took a job.

        Then the next claim begins a new round of the groups.
        """
        if self._has_round_ended and not self._is_back_due:
            self._round_from = None
            return True
        return False

    def bringing_back(self) -> str | None:
        """Return a statement that moves due jobs, which later jobs have passed, to the ends of their groups.

        None if no claim since the last call of this method saw such jobs.
        """
        is_due, self._is_back_due = self._is_back_due, False
        return bring_back(self._schema, self._queue) if is_due else None


def cursors_of(
    queue: str, schema: str, sweeps: MutableMapping[str, Sweep], poller: SharedPoller
) -> Mapping[Sort, Start]:
    """Make the places where a slot's next claims from one queue start, one for each sort of jobs."""
    cursors = dict.fromkeys(Sort, Start())
    cursors[Sort.READY] = QueueCursor(sweeps.setdefault(queue, Sweep()))
    cursors[Sort.GROUPED] = GroupCursor(schema, queue, poller.record_groups)
    return cursors


def _is_between(first: str, key: str, last: str) -> bool:
    """Return True if a walk over sorted keys, from after `first` to `last`, reaches `key`.

    After the largest key the walk goes on with the smallest.
    """
    start, place, end = first.encode(), key.encode(), last.encode()
    return start < place <= end if start < end else place > start or place <= end
