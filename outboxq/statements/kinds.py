"""Pausing kinds of jobs of a queue: relays postpone jobs of paused kinds, like jobs of kinds that they do not know."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Executable, Select, delete, exists, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningDelete, ReturningInsert

from outboxq.statements.builtin import pg
from outboxq.statements.paging import count_kinds, matching, page_outcome, pick_page
from outboxq.tables import job, paused_kind


def pause(queue: str, kinds: Sequence[str]) -> ReturningInsert[Any]:
    """Return SQL that pauses kinds of a queue.

    It returns a row (the kind) for each that it has paused; already paused ones are left out. Index: the primary key.
    Locks: the rows, in the order of `kinds`; relays only read them.
    """
    rows = insert(paused_kind).values([{"queue": queue, "kind": kind} for kind in kinds])
    return rows.on_conflict_do_nothing().returning(paused_kind.c.kind)


def resume(queue: str, kinds: Sequence[str]) -> ReturningDelete[Any]:
    """Return SQL that resumes kinds of a queue: a row (the kind) for each that it has resumed; others were not paused.

    Index: the primary key. Locks: the rows.
    """
    return (
        delete(paused_kind)
        .where(paused_kind.c.queue == queue, paused_kind.c.kind.in_(kinds))
        .returning(paused_kind.c.kind)
    )


def paused_names() -> Executable:
    """Select the paused kinds: queue, kind and since when. Reads the small table `paused_kind`; no locks."""
    columns = (paused_kind.c.queue, paused_kind.c.kind, paused_kind.c.paused_at)
    return select(*columns).order_by(paused_kind.c.queue, paused_kind.c.kind)


def count_paused(stretch: Sequence[ColumnElement[bool]], *, most: int | None) -> Executable:
    """Count the jobs of paused kinds in one part of the table, by queue and kind.

    With `most`, only the first `most` of them are counted. `stretch`: the part of the table, as conditions from
    `stretches`.
    """
    is_paused = exists().where(paused_kind.c.queue == job.c.queue, paused_kind.c.kind == job.c.kind)
    return count_kinds(job, [*stretch, is_paused], most)


def bring_back_page(queue: str, kinds: Sequence[str], ids: Sequence[UUID]) -> Executable:
    """Return SQL that makes due those of these jobs that relays have postponed because their kind was paused.

    `kinds`: the kinds that were paused and are resumed now. It returns the rows of `page_outcome`. Index and locks are
    those of `pick_page`.
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


def put_off_ids(
    queue: str, kinds: Sequence[str], stretch: Sequence[ColumnElement[bool]], *, limit: int
) -> Select[tuple[UUID]]:
    """Select the first ids of jobs of these kinds that relays have postponed, in one part of the table.

    They are for `bring_back_page`, after the kinds were resumed. `stretch`: the part of the table, as conditions from
    `stretches`. Index: the primary key; no locks.
    """
    return select(job.c.id).where(*_put_off(queue, kinds), *stretch).order_by(job.c.id).limit(limit)


def _put_off(queue: str, kinds: Sequence[str]) -> list[ColumnElement[bool]]:
    # A grouped job that was put off keeps its place in the group.
    is_put_off = (job.c.kind.in_(kinds), job.c.state.in_(("scheduled", "grouped")), job.c.parked > 0)
    return [*matching(job, queue=queue), *is_put_off]
