"""Jobs held back by intent: limits of queues, groups that wait for their first job, kinds that are paused."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin.queues import list_queues, read_declared_limits
from outboxq.queue_limits import QueueLimits, limits_in_force
from outboxq.statements import kinds
from outboxq.statements.doctor.work import blocked_groups
from outboxq.tables import mapped_schema


@dataclass(frozen=True, slots=True)
class LimitedQueue:
    """A queue with a limit.

    Attributes:
        running: How many jobs may run at a time; `per_group`, of one group; `rate`, how many may begin in a time.
        set_by: `operator`, if an operator has set one of them, else `application`.
    """

    queue: str
    running: int | None
    per_group: int | None
    rate: str | None
    burst: int | None
    set_by: str


@dataclass(frozen=True, slots=True)
class BlockedGroup:
    """The first job of a group, which others wait for.

    Attributes:
        jobs: How many wait for it; 1,000 for more.
        parked: How often it was put off because no relay knows its kind, or the kind is paused.
        due_in_seconds: When it runs again.
    """

    queue: str
    id: UUID
    kind: str
    attempt: int
    parked: int
    jobs: int
    due_in_seconds: float


@dataclass(frozen=True, slots=True)
class PausedSince:
    """A kind that is paused in a queue."""

    queue: str
    kind: str
    paused_at: datetime


def list_limits(connection: Connection) -> list[LimitedQueue]:
    """The queues with limits that hold: as operators have set them, else as living relays' applications declare."""
    given = {each.queue: each.limits for each in list_queues(connection)}
    found = limits_in_force(given, read_declared_limits(connection))
    nothing = QueueLimits()
    return [
        _limited(name, limits, "operator" if given.get(name, nothing) != nothing else "application")
        for name, limits in sorted(found.items())
        if limits != nothing
    ]


def _limited(queue: str, limits: QueueLimits, set_by: str) -> LimitedQueue:
    rate = None if limits.rate is None else str(limits.rate)
    return LimitedQueue(queue, limits.running, limits.per_group, rate, limits.rate_burst, set_by)


def list_blocked_groups(connection: Connection) -> list[BlockedGroup]:
    """The jobs that hold up their groups, those that most others wait for first."""
    rows = connection.execute(blocked_groups(mapped_schema(connection)))
    return [
        BlockedGroup(row.queue, UUID(row.id), row.kind, row.attempt, row.parked, row.jobs, row.due_in_seconds)
        for row in rows
    ]


def list_paused_kinds(connection: Connection) -> list[PausedSince]:
    """The kinds that are paused, by queue and name; without counts of their jobs, which take a walk over the table."""
    return [PausedSince(*row) for row in connection.execute(kinds.paused_names())]
