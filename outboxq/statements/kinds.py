"""Kinds that are paused in a queue: relays put their jobs off, as they do with kinds that they do not know."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Executable, Select, delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningDelete, ReturningInsert

from outboxq.statements.builtin import count, pg
from outboxq.statements.paging import matching, page_outcome, pick_page
from outboxq.tables import job, paused_kind


def pause(queue: str, kinds: Sequence[str]) -> ReturningInsert[Any]:
    """Pause kinds of a queue; returns those that were not paused before.

    Index: the primary key. Locks: the rows, in the order of `kinds`; relays only read them.
    """
    rows = insert(paused_kind).values([{"queue": queue, "kind": kind} for kind in kinds])
    return rows.on_conflict_do_nothing().returning(paused_kind.c.kind)


def resume(queue: str, kinds: Sequence[str]) -> ReturningDelete[Any]:
    """Resume kinds of a queue; returns those that were paused. Index: the primary key. Locks: the rows."""
    return (
        delete(paused_kind)
        .where(paused_kind.c.queue == queue, paused_kind.c.kind.in_(kinds))
        .returning(paused_kind.c.kind)
    )


def paused_kinds() -> Select[Any]:
    """The kinds that are paused: queue, kind, since when, and how many of their jobs wait or run.

    Reads the table of jobs once, if any kind is paused; no locks.
    """
    jobs = (
        select(count())
        .select_from(job)
        .where(job.c.queue == paused_kind.c.queue, job.c.kind == paused_kind.c.kind)
        .scalar_subquery()
    )
    return select(paused_kind, jobs.label("jobs")).order_by(paused_kind.c.queue, paused_kind.c.kind)


def paused_names() -> Executable:
    """The kinds that are paused: queue, kind and since when. Reads the small table `paused_kind`; no locks."""
    columns = (paused_kind.c.queue, paused_kind.c.kind, paused_kind.c.paused_at)
    return select(*columns).order_by(paused_kind.c.queue, paused_kind.c.kind)


def bring_back_page(queue: str, kinds: Sequence[str], ids: Sequence[UUID]) -> Executable:
    """Let those of these jobs that are of these kinds, and were put off, run now.

    Index and locks are those of `pick_page`.
    """
    page, picked = pick_page(job, [job.c.id.in_(ids), *_put_off(queue, kinds)], None, len(ids))
    back = (
        update(job)
        .where(job.c.id == picked.c.id)
        .values(run_at=pg.clock_timestamp(), parked=0)
        .returning(job.c.id)
        .cte("back")
    )
    return page_outcome(page, picked, back)


def put_off_ids(queue: str, kinds: Sequence[str], *, after: UUID | None, limit: int) -> Select[Any]:
    """The ids of the next jobs of these kinds that were put off. Index: the primary key, from `after`; no locks."""
    start = [] if after is None else [job.c.id > after]
    return select(job.c.id).where(*_put_off(queue, kinds), *start).order_by(job.c.id).limit(limit)


def _put_off(queue: str, kinds: Sequence[str]) -> list[ColumnElement[bool]]:
    # A job of a group that was put off keeps its place in the group.
    is_put_off = (job.c.kind.in_(kinds), job.c.state.in_(("scheduled", "grouped")), job.c.parked > 0)
    return [*matching(job, queue=queue), *is_put_off]
