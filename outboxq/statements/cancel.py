"""Requests to cancel running jobs, and the outcomes of these requests.

A request is a row. The relay that runs the job ends the job and deletes the request in one transaction. So if both are
gone, the job was cancelled; if only the request is left, the job ended by itself. A producer may add a job of the same
id later: a request counts only for the job that existed when the request was made.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import LiteralString
from uuid import UUID

from psycopg import sql
from sqlalchemy import (
    ColumnElement,
    Delete,
    Executable,
    FromClause,
    Uuid,
    and_,
    case,
    delete,
    exists,
    func,
    literal,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from outboxq.statements.added import headers_with_order
from outboxq.statements.builtin import pg, unnest
from outboxq.statements.by_index import AS_EVERYWHERE, BY_INDEX
from outboxq.statements.jobs import listed, running_transactions, xmax
from outboxq.statements.paging import page_outcome, pick_page
from outboxq.statements.render import compose, render
from outboxq.tables import StoredText, cancel_request, dead_job, job

# The reason of a job that was cancelled into the dead letters.
CANCELLED = "cancelled"
# The states of waiting jobs: a leased job runs, or its relay is dead.
WAITING = ("ready", "scheduled", "suspect", "grouped", "group_waiting", "group_suspect")
LEASED = ("leased", "group_leased")
# True if a request is for this job and no earlier one with its id, as in `_counts`; for texts that name them `request`
# and `job`.
COUNTS: LiteralString = (
    "request.job_id = job.id AND (job.unique_key IS NOT NULL OR request.requested_at >= job.created_at)"
)


def request(ids: Sequence[UUID], outcome: str) -> Executable:
    """Return SQL that requests the cancellation of these jobs: a row (the id) for each of them that exists.

    It adds a request for each job. An existing request only gets the new `outcome`, unless its row is locked. A relay
    that is ending a job keeps the request locked until COMMIT, and this statement does not wait for that; if the relay
    rolls back, the request remains.

    Index: both primary keys. Locks: the requests that are new, or replace one for an earlier job of the same id; those
    with another outcome, skipping rows that other transactions hold.
    """
    there = (
        select(job.c.id, job.c.created_at, job.c.unique_key)
        .where(job.c.id.in_(ids))
        .cte("there")
        .prefix_with("MATERIALIZED")
    )
    standing = select(cancel_request.c.job_id, cancel_request.c.outcome).where(_counts(there)).cte("standing")
    # No request may count as too old because a clock was set back, or a producer set the time itself.
    now = func.greatest(pg.clock_timestamp(), there.c.created_at)
    wanted = select(there.c.id, literal(outcome, StoredText()), now).order_by(there.c.id)
    added = insert(cancel_request).from_select(
        ["job_id", "outcome", "requested_at"], wanted.where(there.c.id.not_in(select(standing.c.job_id)))
    )
    asked = added.on_conflict_do_update(
        index_elements=[cancel_request.c.job_id],
        set_={"outcome": added.excluded.outcome, "requested_at": added.excluded.requested_at},
    ).cte("asked")
    others = select(standing.c.job_id).where(standing.c.outcome != outcome)
    free = select(cancel_request.c.job_id).where(cancel_request.c.job_id.in_(others)).with_for_update(skip_locked=True)
    locked = free.cte("locked").prefix_with("MATERIALIZED")
    changed = update(cancel_request).where(cancel_request.c.job_id == locked.c.job_id).values(outcome=outcome)
    return select(there.c.id).add_cte(asked, changed.cte("changed"))


def take_request(job_id: UUID, created_at: datetime | None) -> Executable:
    """Return SQL that deletes a job's cancellation request, in the transaction that ends the job.

    It returns one row with the outcome that was requested, or no row without a request. A request for an earlier job of
    the same id is also deleted, and its outcome is returned as NULL. Index: the primary key. Locks: the row, which
    operators and the pruner hold for a moment at most.

    Args:
        created_at: The time when the job was added; None if a request counts whenever it was made.
    """
    taken = delete(cancel_request).where(cancel_request.c.job_id == job_id)
    if created_at is None:
        return taken.returning(cancel_request.c.outcome)
    counts = cancel_request.c.requested_at >= created_at
    return taken.returning(case((counts, cancel_request.c.outcome)).label("outcome"))


def _counts(jobs: FromClause) -> ColumnElement[bool]:
    """Return the condition that a row of `cancel_request` is for this row of `jobs`, and no earlier job of the same id.

    A job with a coalescing key takes over the `created_at` of newer jobs that it merges: any request for its id counts.
    """
    is_newer = cancel_request.c.requested_at >= jobs.c.created_at
    return and_(cancel_request.c.job_id == jobs.c.id, or_(jobs.c.unique_key.is_not(None), is_newer))


def lock_requests(ids: Sequence[UUID]) -> Executable:
    """Return SQL that locks the cancellation requests for these jobs.

    Send it before the jobs are locked: relays lock in the same order, so there is no deadlock. Index: the primary key.
    Locks: the rows; waits for a relay that is ending a job.
    """
    asked = select(cancel_request.c.job_id).where(cancel_request.c.job_id.in_(ids))
    return asked.order_by(cancel_request.c.job_id).with_for_update()


def drop_requests(ids: Sequence[UUID]) -> Delete:
    """Delete the cancellation requests for these jobs. Index: the primary key; locks: the rows."""
    return delete(cancel_request).where(cancel_request.c.job_id.in_(ids))


def drop_free_requests(ids: Sequence[UUID]) -> Delete:
    """Return SQL that deletes the cancellation requests for these jobs, which this transaction has ended.

    A request that another transaction has locked is left: that transaction may wait for this one. Index: the primary
    key.
    """
    free = select(cancel_request.c.job_id).where(cancel_request.c.job_id.in_(ids)).with_for_update(skip_locked=True)
    picked = free.cte("picked").prefix_with("MATERIALIZED")
    return delete(cancel_request).where(cancel_request.c.job_id == picked.c.job_id)


def cancel_waiting(ids: Sequence[UUID], *, leased: bool = False, asked: bool = False) -> Executable:
    """Return SQL that deletes those of these jobs that wait.

    It returns the rows of `page_outcome`, which say if each job was deleted. Index, locks and bound are those of
    `pick_page`. Unless `leased`, it locks no job that a relay has leased, because of a possible deadlock: the relay may
    have locked the job's request and wait for the job, while this transaction waits for the request.

    Args:
        leased: True to delete leased jobs too: their handlers go on, and their results are refused.
        asked: True to delete only jobs whose cancellation was requested.
    """
    conditions: list[ColumnElement[bool]] = [
        job.c.id.in_(ids),
        job.c.state.in_((*WAITING, *LEASED) if leased else WAITING),
    ]
    if asked:
        conditions.append(select(cancel_request.c.job_id).where(_counts(job)).correlate(job).exists())
    page, picked = pick_page(job, conditions, None, len(ids))
    gone = delete(job).where(job.c.id == picked.c.id).returning(job.c.id).cte("cancelled")
    return page_outcome(page, picked, gone)


_BURY: LiteralString = """\
WITH picked AS MATERIALIZED (
  SELECT job.id FROM {job} AS job WHERE job.id = ANY ({ids}::uuid[]) AND job.state = ANY ({waiting}){asked}
  ORDER BY job.id FOR UPDATE OF job SKIP LOCKED
), gone AS (
  DELETE FROM {job} AS job WHERE job.id = ANY (ARRAY(SELECT id FROM picked)) RETURNING job.*
), dead AS (
  INSERT INTO {dead} (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, unique_key, group_key,
    errors, reason, created_at, batch_id)
  SELECT CASE WHEN EXISTS (SELECT FROM {dead} AS earlier WHERE earlier.id = job.id)
      THEN pg_catalog.gen_random_uuid() ELSE job.id END,
    job.queue, job.kind, job.args, {headers}, job.priority, job.attempt, job.max_attempts, job.crashes,
    job.unique_key, job.group_key, job.errors, {reason}, job.created_at, job.batch_id
  FROM gone AS job
)
SELECT id FROM gone"""
_ASKED: LiteralString = f"""
    AND EXISTS (SELECT FROM {{cancel_request}} AS request WHERE {COUNTS})"""


def bury_waiting(schema: str, ids: Sequence[UUID], *, leased: bool = False, asked: bool = False) -> str:
    """Return SQL that turns those of these jobs that wait into dead letters: a row (the id) for each of them.

    With `leased`, leased jobs too; with `asked`, only jobs whose cancellation was requested. Index: the primary keys.
    Locks: the jobs, skipping those that another transaction has locked; at most as many as `ids`.
    """
    return render(
        schema,
        _BURY,
        ids=[str(job_id) for job_id in ids],
        waiting=sql.SQL("{}::text[]").format(sql.Literal([*WAITING, *(LEASED if leased else ())])),
        reason=CANCELLED,
        headers=sql.SQL(headers_with_order("job")),
        asked=compose(schema, _ASKED if asked else ""),
    )


def progress(ids: Sequence[UUID]) -> Executable:
    """Select the progress of each job's cancellation: a row with its id and one of five states, all of one moment.

    - `running`: a transaction or a lease has the job.
    - `waiting`: the job waits, and its next claim ends it.
    - `cancelled`: job and request are gone.
    - `dead`: the job is a dead letter.
    - `over`: the job ended by itself; a later job of its id may exist.

    Index: the primary keys.
    """
    wanted = unnest(literal(list(ids), ARRAY(Uuid()))).table_valued("id", name="wanted").render_derived()
    runs = or_(listed.c.state.in_(LEASED), xmax.in_(running_transactions()))
    is_asked = select(cancel_request.c.job_id).where(_counts(listed)).correlate(listed).exists()
    state_of = case((not_(is_asked), "over"), (runs, "running"), else_="waiting")
    found = select(state_of).where(listed.c.id == wanted.c.id).scalar_subquery()
    asked = exists().where(cancel_request.c.job_id == wanted.c.id)
    is_dead = exists().where(dead_job.c.id == wanted.c.id)
    state = func.coalesce(found, case((is_dead, "dead"), (asked, "over"), else_="cancelled"))
    return select(wanted.c.id, state.label("state"))


# The orders of claims: the condition of the jobs, and the columns of the index. A job keeps its state while a
# transaction has it.
_ORDERS: tuple[tuple[LiteralString, tuple[LiteralString, ...]], ...] = (
    ("{row}.state = 'ready'", ("(-{row}.priority)", "{row}.seq")),
    ("{row}.state = 'scheduled'", ("{row}.run_at",)),
    ("{row}.group_key IS NOT NULL AND {row}.state <> 'group_waiting'", ('{row}.group_key COLLATE "C"', "{row}.seq")),
)
_WALK: LiteralString = """\
SELECT pg_catalog.count(*) AS looked, pg_catalog.count(*) FILTER (WHERE near.xmax = its.xmax) AS found FROM (
    SELECT job.xmax FROM {job} AS job
    WHERE {it} AND job.queue = its.queue AND {eligible} AND ({columns}) {beyond} ({start}) AND job.id <> its.id
    ORDER BY {order} LIMIT {most}
  ) AS near"""
_SHARING: LiteralString = """\
WITH its AS MATERIALIZED (
  SELECT its.xmax, its.* FROM {job} AS its WHERE its.id = {id} AND its.xmax IN (
    SELECT activity.backend_xid FROM pg_catalog.pg_stat_activity AS activity WHERE activity.backend_xid IS NOT NULL)
)
SELECT coalesce(pg_catalog.sum(walk.found), 0)::bigint, coalesce(pg_catalog.bool_and(walk.looked < {most}), true)
FROM its CROSS JOIN LATERAL (
  {walks}
) AS walk"""


def sharing(schema: str, job_id: UUID, *, most: int = 10_000) -> str:
    """Return a script that counts the other jobs that run in the same transaction as a job.

    An operator who ends the job's backend ends these jobs too, and sees their number before. The script selects one
    row: the number, and true if the number is certainly exact. A claim takes jobs that follow one another in its order,
    so only `most` jobs on each side of this one are checked. Index: the primary key, then job_ready, job_scheduled or
    job_group, forwards and backwards. No locks.
    """
    walks = (_walk(schema, *order, most, backwards) for order in _ORDERS for backwards in (False, True))
    looked = render(schema, _SHARING, id=job_id, most=most, walks=sql.SQL("\n  UNION ALL\n  ").join(walks))
    return "; ".join((*BY_INDEX, "SET LOCAL jit = off", looked, *AS_EVERYWHERE, "SET LOCAL jit TO DEFAULT"))


def _walk(
    schema: str, eligible: LiteralString, columns: tuple[LiteralString, ...], most: int, backwards: bool
) -> sql.Composed:
    """Return a query that counts, among the `most` jobs next to a job, those that run in the same transaction.

    The jobs read are those after the job in an order of claims (`eligible`, `columns`), or with `backwards` those
    before it; none if the job is not in that order. The query returns one row: `looked`, the number of jobs read, and
    `found`, the number of these whose `xmax`, the id of the transaction that runs them, is the job's.
    """

    def of(row: LiteralString, text: LiteralString) -> sql.Composed:
        return sql.SQL(text).format(row=sql.SQL(row))

    ending: LiteralString = " DESC" if backwards else ""
    return compose(
        schema,
        _WALK,
        it=of("its", eligible),
        eligible=of("job", eligible),
        columns=of("job", ", ".join(columns)),
        start=of("its", ", ".join(columns)),
        beyond=sql.SQL("<" if backwards else ">="),
        order=of("job", ", ".join(column + ending for column in columns)),
        most=most,
    )


def terminate(schema: str, job_id: UUID) -> str:
    """Return SQL that ends the backend whose transaction runs a job.

    It returns one row: the backend's pid, and true if the signal was sent; no row if no transaction runs the job. It is
    one statement, because the backend may run another job a moment later. A transaction that runs a job has deleted the
    job's row, so the row's `xmax` is the transaction's id. Index: the primary key; no locks.
    """
    return render(
        schema,
        "SELECT activity.pid, pg_catalog.pg_terminate_backend(activity.pid) FROM {job} AS job "
        "JOIN pg_catalog.pg_stat_activity AS activity ON activity.backend_xid = job.xmax WHERE job.id = {id}",
        id=job_id,
    )
