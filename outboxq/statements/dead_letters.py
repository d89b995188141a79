"""Dead letters: list, retry and discard them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    DateTime,
    Executable,
    FromClause,
    Select,
    and_,
    case,
    delete,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    true,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import JSONB, insert

from outboxq.statements.added import headers_with_order
from outboxq.statements.builtin import pg
from outboxq.statements.paging import count_kinds, matching, page_outcome, pick_page
from outboxq.statements.unique import key_is_free, stored_key, take_for_dead
from outboxq.tables import JOB_CHECKS, StoredText, dead_job, job


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """A filter for dead letters; without any value, it matches all of them.

    `reason` is any part of the reason, upper or lower case. `error` is the type of the last error; for a dead letter
    without an error it is the reason up to its first colon, as `dead_groups` counts them. `died_before` lets a command
    that changes page after page leave out jobs that die while it runs.
    """

    queue: str | None = None
    kind: str | None = None
    reason: str | None = None
    ids: tuple[UUID, ...] | None = None
    died_before: datetime | None = None
    error: str | None = None

    def conditions(self, dead: FromClause = dead_job) -> list[ColumnElement[bool]]:
        """Return the filter as conditions on `dead`: the table `dead_job`, or a subquery of it."""
        found = matching(dead, queue=self.queue, kind=self.kind)
        if self.reason is not None:
            # strpos and not LIKE: the text is data, without wildcards.
            found.append(pg.strpos(pg.lower(_shown_reason(dead)), pg.lower(self.reason)) > 0)
        if self.ids is not None:
            found.append(dead.c.id.in_(self.ids))
        if self.died_before is not None:
            found.append(dead.c.died_at <= self.died_before)
        if self.error is not None:
            errors = type_coerce(dead.c.errors, JSONB())
            last = pg.jsonb_extract_path_text(errors, "-1", "type", type_=StoredText())
            # Without an error, only the part before the colon counts, as in the groups: guesses at the remaining text
            # find nothing.
            found.append(func.coalesce(last, pg.split_part(dead.c.reason, ":", 1)) == self.error)
        return found


def _shown_reason(dead: FromClause = dead_job) -> ColumnElement[str]:
    """Return the SQL expression of a dead letter's reason as lists show it.

    It is the stored reason. If that ends with the type of the last error, the error's message is added.
    """
    errors, reason = type_coerce(dead.c.errors, JSONB()), dead.c.reason
    kind, message = (pg.jsonb_extract_path_text(errors, "-1", name, type_=StoredText()) for name in ("type", "message"))
    colon = literal(": ", StoredText())
    ending = pg.concat(colon, kind, type_=StoredText())
    is_cut = pg.right(reason, pg.length(ending), type_=StoredText()) == ending
    return case((and_(is_cut, message != ""), pg.concat(reason, colon, message, type_=StoredText())), else_=reason)


def summary_columns(dead: FromClause = dead_job) -> list[ColumnElement[Any]]:
    """Return the columns of a dead letter in lists: `SUMMARY_COLUMNS`, with the reason completed by `_shown_reason`."""
    return [_shown_reason(dead).label(name) if name == "reason" else dead.c[name] for name in SUMMARY_COLUMNS]


SUMMARY_COLUMNS = ("id", "queue", "kind", "reason", "attempt", "max_attempts", "crashes", "created_at", "died_at")
DETAIL_COLUMNS = ("priority", "unique_key", "group_key", "args", "headers", "errors")

_KEY = stored_key(dead_job.c.kind, dead_job.c.headers)

# The columns that a dead letter keeps when it is retried; its attempts and crashes start from 0.
_KEPT = (
    "id", "queue", "kind", "headers", "priority", "max_attempts", "unique_key", "group_key", "created_at", "batch_id",
)  # fmt: skip


# A dead letter without a recorded order died before the waiting jobs were added.
_HEADERS: ColumnElement[str] = literal_column(headers_with_order("dead_job", "0"), dead_job.c.headers.type)

# In the same order as the index over all queues.
DIED = dead_job.c.died_at.op("AT TIME ZONE", return_type=DateTime())(literal_column("'UTC'"))


def select_dead(wanted: DeadFilter, stretch: Sequence[ColumnElement[bool]], *, limit: int) -> Select[Any]:
    """Select the dead letters of one part of the table that match `wanted`, the latest first.

    `stretch`: the part of the table, as conditions from `stretches`. Index: dead_job_queue (queue, died_at) backwards
    if a queue is given, else dead_job_died. No locks.
    """
    return (
        select(*summary_columns())
        .where(*wanted.conditions(), *stretch)
        .order_by(DIED.desc() if wanted.queue is None else dead_job.c.died_at.desc())
        .limit(limit)
    )


def select_dead_letter(job_id: UUID) -> Executable:
    """Select one dead letter with all its columns. Index: the primary key; no locks; one row."""
    return select(*summary_columns(), *(dead_job.c[name] for name in DETAIL_COLUMNS)).where(dead_job.c.id == job_id)


def select_ids(wanted: DeadFilter, stretch: Sequence[ColumnElement[bool]], *, limit: int) -> Select[tuple[UUID]]:
    """Select the first ids, in order, of the dead letters of one part of the table that match `wanted`.

    `stretch`: the part of the table, as conditions from `stretches`. Index: the primary key; no locks.
    """
    return select(dead_job.c.id).where(*wanted.conditions(), *stretch).order_by(dead_job.c.id).limit(limit)


def select_some(wanted: DeadFilter, stretch: Sequence[ColumnElement[bool]], *, limit: int) -> Select[tuple[UUID]]:
    """Select up to `limit` ids of the dead letters of one part of the table that match `wanted`, in no order.

    `stretch`: the part of the table, as conditions from `stretches_of_blocks`; only its blocks are read. With an order,
    the planner would use an index instead. No locks.
    """
    return select(dead_job.c.id).where(*wanted.conditions(), *stretch).limit(limit)


def retry_page(wanted: DeadFilter, *, after: UUID | None, limit: int, args: str | None = None) -> Executable:
    """Return SQL that turns the next page of matching dead letters into waiting jobs, with new `args` if given.

    Dead letters that another transaction has locked are skipped. It is one statement, so that a job is always in
    exactly one of both tables. A dead letter stays in three cases: a job has its id (a producer chose the id twice); it
    violates a check of `job`, such as a length; or a living job has its unique key. Of several dead letters with one
    key the first is retried. Index, locks and bound are those of `pick_page`, and of `take_for_dead`.
    """
    page, picked = pick_page(dead_job, wanted.conditions(), after, limit)
    taken, blocked = take_for_dead(picked, _can_be_jobs())
    moved = ("args", "errors", *_KEPT)
    # A job of a group waits for its turn: as a ready job it would run at the same time as the others.
    state = case((dead_job.c.group_key.is_(None), literal_column("'ready'")), else_=literal_column("'grouped'"))
    has_no_key = _KEY.is_(None)
    has_its_key = dead_job.c.id.in_(select(taken.c.job_id))
    given = dead_job.c.args if args is None else literal(args, dead_job.c.args.type)
    kept = [_HEADERS if name == "headers" else dead_job.c[name] for name in moved[1:]]
    rows = select(given, *kept, state).where(
        dead_job.c.id == picked.c.id, *_can_be_jobs(), or_(has_no_key, has_its_key)
    )
    added = insert(job).from_select([*moved, "state"], rows, include_defaults=False)
    again = added.on_conflict_do_nothing(index_elements=[job.c.id]).returning(job.c.id).cte("again")
    moved_away = delete(dead_job).where(dead_job.c.id == again.c.id).returning(dead_job.c.id).cte("moved_away")
    return page_outcome(page, picked, moved_away, blocked)


def count_matching(
    wanted: DeadFilter, stretch: Sequence[ColumnElement[bool]], *, to_retry: bool, most: int | None
) -> Executable:
    """Count the dead letters of one part of the table that match `wanted`, by queue and kind.

    With `to_retry`, dead letters that `retry_page` would refuse are left out. With `most`, only the first `most` that
    match are counted. `stretch`: the part of the table, as conditions from `stretches`; its blocks are read. Indexes
    for `to_retry`: the primary keys of `job` and of `unique_key`, a probe for each match, or a walk through the first.
    No locks.
    """
    retried = (*_can_be_jobs(), key_is_free(_KEY)) if to_retry else ()
    return count_kinds(dead_job, [*wanted.conditions(), *stretch, *retried], most)


def _can_be_jobs() -> tuple[ColumnElement[bool], ...]:
    there = exists().where(job.c.id == dead_job.c.id)
    fits: ColumnElement[bool] = func.coalesce(literal_column(f"({JOB_CHECKS})"), true())
    return ~there, fits


def discard_page(wanted: DeadFilter, *, after: UUID | None, limit: int) -> Executable:
    """Return SQL that deletes the next page of matching dead letters, except those that another transaction has locked.

    Index, locks and bound are those of `pick_page`.
    """
    page, picked = pick_page(dead_job, wanted.conditions(), after, limit)
    discarded = delete(dead_job).where(dead_job.c.id == picked.c.id).returning(dead_job.c.id).cte("discarded")
    return page_outcome(page, picked, discarded)
