"""Schedules that an application makes, changes and removes in its own transactions, such as one for each tenant.

Every function takes a session or a connection, sync or async, and works in its transaction: a rollback undoes it. With
an async session or connection, await the result. A relay sees a new schedule within its next heartbeat
(`heartbeat_seconds`, five seconds by default).

    schedules.put(session, "report-7", report.job(tenant=7), cron="30 2 * * *", time_zone="Europe/Berlin")
"""

from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, overload

from outboxq.admin import schedules as admin
from outboxq.admin.schedules import FIRE_TIME, Missed, NewSchedule, Schedule
from outboxq.cron import cron_of, of_schedule
from outboxq.database.answers import AsyncTarget, SyncTarget, run_on
from outboxq.new_job import NewJob
from outboxq.outbox.handle import JobHandle

__all__ = ["FIRE_TIME", "Missed", "Schedule", "list_schedules", "pause", "put", "remove", "resume", "run_now"]


@overload
def put(
    connection: SyncTarget,
    name: str,
    job: NewJob,
    *,
    cron: str | None = None,
    every: timedelta | None = None,
    time_zone: str = "UTC",
    missed: Missed = "one",
    jitter: timedelta = timedelta(0),
) -> Schedule: ...


@overload
def put(
    connection: AsyncTarget,
    name: str,
    job: NewJob,
    *,
    cron: str | None = None,
    every: timedelta | None = None,
    time_zone: str = "UTC",
    missed: Missed = "one",
    jitter: timedelta = timedelta(0),
) -> Coroutine[Any, Any, Schedule]: ...


def put(
    connection: SyncTarget | AsyncTarget,
    name: str,
    job: NewJob,
    *,
    cron: str | None = None,
    every: timedelta | None = None,
    time_zone: str = "UTC",
    missed: Missed = "one",
    jitter: timedelta = timedelta(0),
) -> Schedule | Coroutine[Any, Any, Schedule]:
    """Make a schedule, or change the one of this name.

    A paused schedule stays paused. Its next due time changes only if `cron`, `every` or `time_zone` does, or if it is
    too late, because the database's clock was ahead when the time was computed.

    Args:
        name: 1 to 255 bytes.
        job: The job to add when it is due, made by `kind.job(...)`. An argument `FIRE_TIME` is replaced by the time
            that the job is due, in the schedule's time zone.
        cron: Five fields (minute, hour, day of month, month, day of week), or `@hourly`, `@daily`, `@weekly`,
            `@monthly`, `@yearly`.
        every: In place of `cron`, an interval of whole seconds, from a second to 365 days: due at its multiples since
            1970 in UTC, so that a change of the clocks moves none.
        time_zone: The time zone of the cron text, such as "Europe/Berlin".
        missed: How to treat times at which no relay ran. "one": one job for all of them, with the newest as its
            time. "all": a job for each. "skip": no job for a time that is more than a minute past.
        jitter: Each job runs later by a random time of up to this much, 24 hours at most, and less than `every`.

    Raises:
        ArgumentError: an argument is invalid, or the job has a `run_at`.
        InvalidKey: the name is empty, over 255 bytes, or cannot be stored.
        ScheduleDeclared: an application's code declares this schedule: change it there.
    """
    with of_schedule(name):
        due = cron_of(cron, every, time_zone)
    new = NewSchedule(name=name, job=job, cron=due, missed=missed, jitter=jitter)
    return run_on(connection, lambda it: admin.put(it, new), "schedules.put(...)")


@overload
def remove(connection: SyncTarget, *names: str) -> tuple[str, ...]: ...


@overload
def remove(connection: AsyncTarget, *names: str) -> Coroutine[Any, Any, tuple[str, ...]]: ...


def remove(connection: SyncTarget | AsyncTarget, *names: str) -> tuple[str, ...] | Coroutine[Any, Any, tuple[str, ...]]:
    """Delete schedules; the jobs that they added stay. Returns the names that existed, and so were deleted.

    A schedule that an application's code declares comes back when its relay starts again.
    """
    return run_on(connection, lambda it: admin.remove(it, names), "schedules.remove(...)")


@overload
def pause(connection: SyncTarget, *names: str) -> tuple[str, ...]: ...


@overload
def pause(connection: AsyncTarget, *names: str) -> Coroutine[Any, Any, tuple[str, ...]]: ...


def pause(connection: SyncTarget | AsyncTarget, *names: str) -> tuple[str, ...] | Coroutine[Any, Any, tuple[str, ...]]:
    """Keep schedules from adding jobs, until they are resumed.

    Returns the names that this call has paused; names that do not exist, or were paused already, are left out.
    """
    return run_on(connection, lambda it: admin.pause(it, names), "schedules.pause(...)")


@overload
def resume(connection: SyncTarget, *names: str) -> tuple[str, ...]: ...


@overload
def resume(connection: AsyncTarget, *names: str) -> Coroutine[Any, Any, tuple[str, ...]]: ...


def resume(connection: SyncTarget | AsyncTarget, *names: str) -> tuple[str, ...] | Coroutine[Any, Any, tuple[str, ...]]:
    """End the pause of schedules, from their next time on: times that passed while they were paused are skipped.

    Returns the names whose pause this call has ended; names that do not exist, or were not paused, are left out.
    """
    return run_on(connection, lambda it: admin.resume(it, names), "schedules.resume(...)")


@overload
def run_now(connection: SyncTarget, name: str) -> JobHandle: ...


@overload
def run_now(connection: AsyncTarget, name: str) -> Coroutine[Any, Any, JobHandle]: ...


def run_now(connection: SyncTarget | AsyncTarget, name: str) -> JobHandle | Coroutine[Any, Any, JobHandle]:
    """Add a schedule's job once more, now, even if the schedule is paused; its next time stays as it is.

    Raises:
        ScheduleNotFound: no schedule has this name.
    """
    return run_on(connection, lambda it: admin.run_now(it, name), "schedules.run_now(...)")


@overload
def list_schedules(
    connection: SyncTarget, *, queue: str | None = None, kind: str | None = None, limit: int | None = None
) -> list[Schedule]: ...


@overload
def list_schedules(
    connection: AsyncTarget, *, queue: str | None = None, kind: str | None = None, limit: int | None = None
) -> Coroutine[Any, Any, list[Schedule]]: ...


def list_schedules(
    connection: SyncTarget | AsyncTarget, *, queue: str | None = None, kind: str | None = None, limit: int | None = None
) -> list[Schedule] | Coroutine[Any, Any, list[Schedule]]:
    """Return the schedules of this queue or kind, or all, sorted by name; `limit` of them at most."""
    return run_on(
        connection,
        lambda it: admin.list_schedules(it, queue=queue, kind=kind, limit=limit),
        "schedules.list_schedules(...)",
    )
