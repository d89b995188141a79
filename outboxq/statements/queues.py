"""Statements for queues: their names, pauses and limits. The claim checks `paused_at` by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Executable,
    FromClause,
    Select,
    and_,
    cast,
    literal_column,
    or_,
    select,
    union,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from outboxq.statements.builtin import pg
from outboxq.tables import Real, dead_job, job, queue

LIMITS = (
    queue.c.max_running,
    queue.c.max_per_group,
    queue.c.rate_jobs,
    queue.c.rate_seconds,
    queue.c.rate_burst,
)


def known_queues() -> Executable:
    """Select every queue with a setting, a job or a dead letter: its name, since when it is paused, and its settings.

    `is_used` is true if the queue has a job or a dead letter.

    Indexes: job_ready, job_scheduled, job_suspect, job_group_state, job_group and dead_job_queue, one probe per
    distinct queue each ("Loose indexscan" in the PostgreSQL wiki); job_leased is read once. No locks.
    """
    walks = [_walk(job, job.c.state == state, state) for state in ("ready", "scheduled", "suspect", "group_waiting")]
    walks.append(_walk(job, and_(job.c.group_key.is_not(None), job.c.state != "group_waiting"), "group"))
    leased = select(job.c.queue).where(job.c.state == "leased")
    used = union(*walks, _walk(dead_job, None, "dead"), leased).cte("used")
    names = union(select(used.c[0]), select(queue.c.name)).subquery("names")
    name = names.c[0]
    # As JSON, because tables before step 11 have no such column.
    settings = queue.alias("settings")
    kept = cast(literal_column("pg_catalog.to_jsonb(settings) ->> 'keep_dead_seconds'::text"), Real())
    limits = (settings.c[column.name].label(column.name.removeprefix("max_")) for column in LIMITS)
    return (
        select(
            name.label("name"),
            settings.c.paused_at,
            *limits,
            kept.label("keep_dead_seconds"),
            used.c[0].is_not(None).label("is_used"),
        )
        .select_from(names.outerjoin(settings, settings.c.name == name).outerjoin(used, used.c[0] == name))
        .where(name.is_not(None))
        .order_by(name)
    )


def pause(names: Sequence[str]) -> ReturningInsert[Any]:
    """Return SQL that pauses queues: a row (the name) for each that it has paused; already paused ones are left out.

    A queue without a row of settings gets one. Index: the primary key. Locks: the settings' rows, in the order of
    `names`; claims only read them.
    """
    row = insert(queue).values([{"name": name, "paused_at": pg.clock_timestamp()} for name in names])
    return row.on_conflict_do_update(
        index_elements=[queue.c.name],
        set_={"paused_at": row.excluded.paused_at},
        where=queue.c.paused_at.is_(None),
    ).returning(queue.c.name)


def set_values(names: Sequence[str], given: Mapping[str, object]) -> ReturningInsert[Any]:
    """Return SQL that sets these columns of queues' settings: a row (the name) for each queue whose settings changed.

    A queue without a row of settings gets one. Index: the primary key. Locks: the settings' rows, in the order of
    `names`; claims only read them.
    """
    row = insert(queue).values([{"name": name, **given} for name in names])
    changed = or_(*(queue.c[column].is_distinct_from(row.excluded[column]) for column in given))
    return row.on_conflict_do_update(
        index_elements=[queue.c.name], set_={column: row.excluded[column] for column in given}, where=changed
    ).returning(queue.c.name)


def resume(names: Sequence[str]) -> ReturningUpdate[Any]:
    """Return SQL that resumes queues: a row (the name) for each that it has resumed; others were not paused.

    Index: the primary key. Locks: the settings' rows.
    """
    return (
        update(queue)
        .where(queue.c.name.in_(names), queue.c.paused_at.is_not(None))
        .values(paused_at=None)
        .returning(queue.c.name)
    )


def _walk(rows: FromClause, condition: ColumnElement[bool] | None, name: str) -> Select[tuple[str]]:
    """Return a query of the distinct queues in an index whose first column is the queue: one probe for each."""
    conditions = [] if condition is None else [condition]
    first = select(pg.min(rows.c.queue).label("queue")).where(*conditions)
    walk = first.cte(f"{name}_queues", recursive=True)
    following = select(pg.min(rows.c.queue)).where(*conditions, rows.c.queue > walk.c.queue).scalar_subquery()
    walk = walk.union_all(select(following).where(walk.c.queue.is_not(None)))
    return select(walk.c.queue)
