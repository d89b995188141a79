"""The doctor's statements for schedules that do not add their jobs.

They read the table of schedules, which is small; no locks.
"""

from typing import Any

from sqlalchemy import Select, TextClause, select, text

from outboxq.statements.builtin import pg
from outboxq.statements.doctor.sessions import qualified
from outboxq.tables import Instant, schedule

MAX_SCHEDULES = 1_000
# The most of the newest dead letters of each queue with a schedule.
MAX_DEAD = 1_000
# As JSON, because tables before step 15 have no such column.
_IS_DISABLED = "coalesce(paused_at = (pg_catalog.to_jsonb(schedule) ->> 'disabled_at'::text)::timestamptz, false)"


def late_schedules(schema: str, older_than_seconds: float) -> TextClause:
    """Select schedules that are overdue by more than `older_than_seconds`, the most overdue first.

    Index: schedule_next, its start.
    """
    return text(
        f"""\
SELECT name, kind, queue, extract(epoch FROM pg_catalog.statement_timestamp() - next_at)::float8 AS late_seconds
FROM {qualified(schema, "schedule")} WHERE paused_at IS NULL
  AND next_at < pg_catalog.statement_timestamp() - pg_catalog.make_interval(secs => :older_than_seconds)
ORDER BY next_at LIMIT :most"""
    ).bindparams(older_than_seconds=older_than_seconds, most=MAX_SCHEDULES)


def paused_schedules(schema: str, older_than_seconds: float) -> TextClause:
    """Select schedules that were paused over `older_than_seconds` ago, and all disabled ones with their owners.

    A disabled schedule is one that its owner's code no longer declares.
    """
    return text(
        f"""\
SELECT name, kind, queue, extract(epoch FROM pg_catalog.statement_timestamp() - paused_at)::float8 AS paused_seconds,
  CASE WHEN {_IS_DISABLED} THEN pg_catalog.to_jsonb(schedule) ->> 'owner'::text END AS owner
FROM {qualified(schema, "schedule")} AS schedule
WHERE {_IS_DISABLED}
  OR paused_at < pg_catalog.statement_timestamp() - pg_catalog.make_interval(secs => :older_than_seconds)
ORDER BY paused_at LIMIT :most"""
    ).bindparams(older_than_seconds=older_than_seconds, most=MAX_SCHEDULES)


def coming_schedules() -> Select[Any]:
    """Select schedules that are due in the future, the latest first, to find those whose due time is too late.

    Such a time was computed while the database's clock was ahead. The column `now` is the database's time, read by this
    query: never earlier than the state of the rows that it returns.
    """
    named = (schedule.c[name] for name in ("name", "kind", "queue", "cron", "time_zone", "next_at", "last_at"))
    return (
        select(*named, pg.clock_timestamp(type_=Instant()).label("now"))
        .where(schedule.c.paused_at.is_(None), schedule.c.next_at > pg.statement_timestamp())
        .order_by(schedule.c.next_at.desc())
        .limit(MAX_SCHEDULES)
    )


def all_schedules(schema: str) -> TextClause:
    """Select the schedules, with the kind and the queue of the jobs that each adds, to compare them with a registry.

    The column `declared` is true if an application's code declares the schedule and the schedule is not disabled.
    """
    return text(
        f"SELECT name, kind, queue, declared AND NOT {_IS_DISABLED} AS declared "
        f"FROM {qualified(schema, 'schedule')} AS schedule ORDER BY name LIMIT :most"
    ).bindparams(most=MAX_SCHEDULES)


def dead_letters_of_schedules(schema: str) -> TextClause:
    """Count, for each schedule, the dead letters that it added among the newest 1,000 of its queue.

    Schedules without any are left out. Index: dead_job_queue, 1,000 entries of each queue.
    """
    schedule, dead = qualified(schema, "schedule"), qualified(schema, "dead_job")
    return text(
        f"""\
SELECT schedule.name, schedule.kind, schedule.queue, dead.jobs
FROM (SELECT DISTINCT queue FROM {schedule}) AS queues
CROSS JOIN LATERAL (
  SELECT newest.headers ->> 'outboxq.schedule'::text AS name, pg_catalog.count(*) AS jobs
  FROM (SELECT headers FROM {dead} WHERE queue = queues.queue ORDER BY died_at DESC LIMIT :most_dead) AS newest
  GROUP BY 1
) AS dead
JOIN {schedule} AS schedule ON schedule.name = dead.name AND schedule.queue = queues.queue
ORDER BY schedule.name LIMIT :most"""
    ).bindparams(most_dead=MAX_DEAD, most=MAX_SCHEDULES)
