"""Queues, for operators to list, pause, resume and limit.

Jobs can be added to a paused queue, but relays do not claim from it. Jobs that run already go on.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from sqlalchemy import Connection

from outboxq.admin.stats import QueueStats, collect_stats
from outboxq.database.driver import run_script
from outboxq.database.errors import missing_tables_explained
from outboxq.errors import ArgumentError
from outboxq.names import check_name
from outboxq.queue_limits import (
    MAX_KEEP_SECONDS,
    MIN_KEEP_SECONDS,
    QueueLimits,
    keep_text,
    limits_in_force,
    read_limits,
)
from outboxq.statements import queues as statements
from outboxq.statements import wake
from outboxq.statements.jobs import STATES
from outboxq.statements.relays import declared_limits, may_read_relays, served_queues
from outboxq.tables import mapped_schema

Limit: TypeAlias = Literal["running", "per_group", "rate"]

_MOST_SERVED = 10_000
_COLUMNS: Mapping[Limit, tuple[str, ...]] = {
    "running": ("max_running",),
    "per_group": ("max_per_group",),
    "rate": ("rate_jobs", "rate_seconds", "rate_burst"),
}


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue and its settings by operators.

    `paused_at`: the time since which the queue is paused; None if it is not. `keep_dead_seconds`: how long relays keep
    its dead letters; 0 for ever, None as the application declares.
    """

    queue: str
    paused_at: datetime | None
    limits: QueueLimits
    keep_dead_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class QueueCount:
    """A queue with its numbers of jobs and dead letters, and its limits, as `count_queues` returns it.

    The limits are those in force: as operators have set them, otherwise as the applications of living relays declare
    them.

    Attributes:
        jobs: The number of jobs that wait or run.
        limit: How many jobs of the queue may run at a time.
        rate: How many jobs may begin in a unit of time, such as `100/min`.
        burst: How many jobs may begin at once.
        per_group: How many jobs of one group may run at a time.
        keep_dead: How long dead letters are kept, as operators have set it.
        set_by: `operator`, if an operator has set one of the limits, otherwise `application`; None without any limit.
    """

    queue: str
    jobs: int
    dead: int
    paused_at: datetime | None
    limit: int | None = None
    rate: str | None = None
    burst: int | None = None
    per_group: int | None = None
    keep_dead: str | None = None
    set_by: str | None = None


def list_queues(connection: Connection) -> list[Queue]:
    """Return every queue that has a job or a dead letter, or has or had a setting by operators, ordered by name."""
    found = connection.execute(statements.known_queues()).all()
    limits = read_limits(found)
    return [Queue(row.name, row.paused_at, limits[row.name], row.keep_dead_seconds) for row in found]


def known_names(connection: Connection) -> set[str]:
    """Return the names of the queues in use: with a job or a dead letter, or served by a living relay.

    Commands warn of other names. A name that only has settings is left out: it may be a misspelt one.
    """
    known = {row.name for row in connection.execute(statements.known_queues()) if row.is_used}
    schema = mapped_schema(connection)
    if connection.execute(may_read_relays(schema)).scalar_one():
        known |= {str(name) for (name,) in run_script(connection, served_queues(schema, _MOST_SERVED))}
    return known


def read_declared_limits(connection: Connection) -> dict[str, QueueLimits]:
    """Return the limits that applications of living relays declare, by queue.

    Empty if this role may not read the table `relay_status`.
    """
    schema = mapped_schema(connection)
    if not connection.execute(may_read_relays(schema)).scalar_one():
        return {}
    return read_limits(connection.execute(declared_limits(schema)).all())


def count_queues(connection: Connection) -> list[QueueCount]:
    """Return every queue that has a job, a dead letter, a setting or a limit, with its numbers of jobs.

    A number over 10,000 in a state is an estimate, as in `collect_stats`.
    """
    counted = {row.queue: row for row in collect_stats(connection).queues}
    known = {each.queue: each for each in list_queues(connection)}
    given = {name: each.limits for name, each in known.items()}
    found: list[QueueCount] = []
    for name, limits in sorted(limits_in_force(given, read_declared_limits(connection)).items()):
        row, queue = counted.get(name, QueueStats(queue=name)), known.get(name, Queue(name, None, QueueLimits()))
        jobs = sum(getattr(row, state) for state in STATES)
        rate = None if limits.rate is None else str(limits.rate)
        limited = limits.running, rate, limits.rate_burst, limits.per_group
        kept = None if queue.keep_dead_seconds is None else keep_text(queue.keep_dead_seconds)
        set_by = None if limits == QueueLimits() else "application" if queue.limits == QueueLimits() else "operator"
        # The row of a queue whose settings were all taken away stays, without meaning.
        if jobs or row.dead or any(setting is not None for setting in (queue.paused_at, *limited, kept)):
            found.append(QueueCount(name, jobs, row.dead, queue.paused_at, *limited, kept, set_by))
    return found


def pause(connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
    """Keep relays from claiming from these queues, when the transaction commits; queues without jobs can be paused too.

    Returns:
        The queues that this call has paused, without those that were paused already.

    Raises:
        ArgumentError: a name that no queue can have.
    """
    changed = connection.execute(statements.pause(_checked(names))).scalars()
    return tuple(sorted(changed))


def set_limits(
    connection: Connection, names: Sequence[str], limits: QueueLimits, drop: Collection[Limit] = ()
) -> tuple[str, ...]:
    """Set limits of queues, and notify the relays, when the transaction commits.

    Args:
        limits: The new limits, made by `make_limits`; a limit that is None stays as it is.
        drop: Names of operators' limits to remove; the limits that the application declares then apply, if any.

    Returns:
        The queues whose limits have changed.

    Raises:
        ArgumentError: a name that no queue can have, or no limit to set or to remove.
    """
    given: dict[str, object] = {
        "max_running": limits.running,
        "max_per_group": limits.per_group,
        "rate_jobs": limits.rate_jobs,
        "rate_seconds": limits.rate_seconds,
        "rate_burst": limits.rate_burst,
    }
    dropped = {column for limit in drop for column in _COLUMNS[limit]}
    values = {column: value for column, value in given.items() if value is not None or column in dropped}
    if not values:
        raise ArgumentError("no limit was given to set or to take away")
    changed = connection.execute(statements.set_values(_checked(names), values)).scalars().all()
    if changed:
        run_script(connection, wake.notify(mapped_schema(connection), wake.SETTINGS))
    return tuple(sorted(changed))


def keep_dead(connection: Connection, names: Sequence[str], seconds: float | None) -> tuple[str, ...]:
    """Set the age at which relays delete dead letters of these queues; it applies when the transaction commits.

    Args:
        seconds: The age, from 60 to 315,619,200 seconds (ten years); 0 to keep dead letters for ever, even if the
            application declares a time; None to keep them as the application declares, which is for ever if it declares
            nothing.

    Returns:
        The queues whose setting has changed.

    Raises:
        ArgumentError: a name that no queue can have, or seconds out of their range.
        SchemaError: the tables are older than migration step 11.
    """
    if seconds is not None and seconds != 0 and not MIN_KEEP_SECONDS <= seconds <= MAX_KEEP_SECONDS:
        raise ArgumentError(
            f"dead letters are kept for {MIN_KEEP_SECONDS} to {MAX_KEEP_SECONDS:,} seconds, got {seconds}"
        )
    with missing_tables_explained():
        changed = connection.execute(statements.set_values(_checked(names), {"keep_dead_seconds": seconds}))
        return tuple(sorted(changed.scalars()))


def resume(connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
    """Allow relays to claim from these queues again, and wake those that sleep, when the transaction commits.

    Returns:
        The queues that this call has resumed, without those that were not paused.

    Raises:
        ArgumentError: a name that no queue can have.
    """
    changed = tuple(sorted(connection.execute(statements.resume(_checked(names))).scalars()))
    if changed:
        run_script(connection, "; ".join(wake.notify(mapped_schema(connection), name) for name in changed))
    return changed


def _checked(names: Sequence[str]) -> list[str]:
    # Sorted: two operators who change several queues lock them in the same order.
    return sorted({check_name("queue", name) for name in names})
