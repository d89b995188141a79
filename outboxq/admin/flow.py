"""Lists of what holds jobs back on purpose, for operators: limits of queues, blocked groups, and paused kinds."""

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
    """A queue with at least one limit; None for a limit that the queue does not have.

    Attributes:
        running: How many jobs of the queue may run at a time.
        per_group: How many jobs of one group may run at a time.
        rate: How many jobs may begin in a unit of time, such as `100/min`.
        burst: How many jobs may begin at once, after a time with fewer jobs than the rate allows.
        set_by: `operator`, if an operator has set one of the limits, else `application`.
    """

    queue: str
    running: int | None
    per_group: int | None
    rate: str | None
    burst: int | None
    set_by: str


@dataclass(frozen=True, slots=True)
class BlockedGroup:
    """A group, whose jobs run in order, with a first job that waits for a later time, so that all others wait too.

    Attributes:
        id: The id of the group's first job, which also has the `kind` and the `attempt`.
        jobs: How many jobs of the group wait for the first job; counted up to 1,000.
        parked: How often relays put the first job off, because they do not know its kind or the kind is paused.
        due_in_seconds: The time until the first job runs again.
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
    """A kind that is paused in a queue, and the time since which it is paused."""

    queue: str
    kind: str
    paused_at: datetime


def list_limits(connection: Connection) -> list[LimitedQueue]:
    """Return the queues that have limits, with the limits that operators have set, otherwise the applications' own.

    An application's limits are known while a relay of the application is alive.
    """
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
    """Return the groups whose first job waits for a later time; the group in which the most jobs wait comes first."""
    rows = connection.execute(blocked_groups(mapped_schema(connection)))
    return [
        BlockedGroup(row.queue, UUID(row.id), row.kind, row.attempt, row.parked, row.jobs, row.due_in_seconds)
        for row in rows
    ]


def list_paused_kinds(connection: Connection) -> list[PausedSince]:
    """Return the paused kinds, ordered by queue and name.

    The jobs of these kinds are not counted, because that would read the whole table.
    """
    return [PausedSince(*row) for row in connection.execute(kinds.paused_names())]
