"""Queries that only the metrics exporter sends, for its gauges, and not operators or the doctor.

They read small tables, and catalogs.
"""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Executable,
    Interval,
    TextClause,
    cast,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import array

from outboxq.statements.builtin import count, pg, seconds
from outboxq.statements.doctor.sessions import schema_name
from outboxq.statements.history import BUCKETS, OUTCOMES
from outboxq.tables import Instant, Real, batch, relay_status, schedule, stat

_NOW: ColumnElement[datetime] = pg.statement_timestamp(type_=Instant())
_MINUTE: ColumnElement[timedelta] = literal_column("interval '1 minute'", Interval())
_ORIGIN: ColumnElement[datetime] = literal_column("timestamptz '2000-01-01 00:00:00+00'", Instant())


def relays(limit: int) -> Executable:
    """Select the relays that wrote their state within a day: state, slots, queues, and the seconds since that write.

    Reads the small table `relay_status`.
    """
    silent = seconds(_NOW - relay_status.c.seen_at).label("silent_seconds")
    return select(relay_status.c.state, relay_status.c.slots, relay_status.c.queues, silent).limit(limit)


def schedule_times(limit: int) -> Executable:
    """Select the schedules: seconds since each was due (negative before), its last fire time, and true if paused.

    The schedule that is longest overdue comes first. Reads the table, which is small.
    """
    return (
        select(
            schedule.c.name,
            schedule.c.paused_at.is_not(None).label("is_paused"),
            seconds(_NOW - schedule.c.next_at).label("late_seconds"),
            seconds(schedule.c.last_at).label("last_at"),
        )
        .order_by(schedule.c.next_at)
        .limit(limit)
    )


def open_batches(most: int) -> Executable:
    """Count the open callback batches, up to `most`. Reads as many rows."""
    some = select(literal_column("1")).select_from(batch).limit(most).subquery("some")
    return select(count()).select_from(some)


def oldest_batch() -> Executable:
    """Select the age in seconds of the oldest open callback batch.

    Index: the primary key, whose ids are in time order.
    """
    return select(seconds(_NOW - batch.c.created_at)).order_by(batch.c.id).limit(1)


def relation_sizes(schema: str) -> TextClause:
    """Select the tables and indexes of the schema, and the bytes of each, without TOAST. Catalogs."""
    return text(
        """\
SELECT class.relname::text AS relation, pg_catalog.pg_relation_size(class.oid) AS bytes
FROM pg_catalog.pg_class AS class JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
WHERE namespace.nspname = :schema AND class.relkind IN ('r', 'i') ORDER BY 1"""
    ).bindparams(schema_name(schema))


def minute(minutes_ago: int) -> Executable:
    """Select the beginning of the minute that is `minutes_ago` before the present one, by the database's clock."""
    before: ColumnElement[timedelta] = literal_column(f"interval '{minutes_ago:d} minutes'", Interval())
    return select(pg.date_bin(_MINUTE, _NOW - before, _ORIGIN, type_=Instant()))


def sum_minutes(since: datetime, before: datetime | None) -> Executable:
    """Select the sums of jobs' outcomes in the minutes from `since` on, up to `before`, by queue and kind.

    Index: the primary key of `stat`, from `since` on.
    """
    conditions = [stat.c.grain == 60, stat.c.at >= since]
    if before is not None:
        conditions.append(stat.c.at < before)
    return (
        select(
            stat.c.queue,
            stat.c.kind,
            *(_sum(stat.c[name]).label(name) for name in OUTCOMES),
            *(pg.sum(stat.c[name], type_=Real()).label(name) for name in ("wait_seconds", "run_seconds")),
            *(_sums(name) for name in ("wait", "run")),
        )
        .where(*conditions)
        .group_by(stat.c.queue, stat.c.kind)
        .order_by(stat.c.queue, stat.c.kind)
    )


def _sums(name: str) -> ColumnElement[Any]:
    places = [_sum(stat.c[name][place]) for place in range(1, BUCKETS + 1)]
    return cast(array(places), ARRAY(BigInteger)).label(name)


def _sum(column: ColumnElement[Any]) -> ColumnElement[int]:
    return cast(pg.sum(column), BigInteger)
