"""Cancellations of jobs that run, and what became of them.

A request is a row. The relay that runs the job ends it and deletes the request in the transaction that ends the job; so
a request that is gone, together with its job, says that the job was cancelled, and one that is left behind that it came
to its end by itself.
"""

from collections.abc import Sequence
from typing import Any, LiteralString
from uuid import UUID

from psycopg import sql
from sqlalchemy import Delete, Executable, Select, Uuid, case, delete, exists, func, literal, or_, select
from sqlalchemy.dialects.postgresql import ARRAY, insert

from outboxq.statements.builtin import count, unnest
from outboxq.statements.jobs import listed, running_transactions, xmax
from outboxq.statements.paging import page_outcome, pick_page
from outboxq.statements.render import render
from outboxq.tables import StoredText, cancel_request, dead_job, job

# The reason of a job that was cancelled into the dead letters.
CANCELLED = "cancelled"
# States of jobs that wait: under a lease a job runs, or its relay is dead.
WAITING = ("ready", "scheduled", "suspect", "grouped", "group_waiting", "group_suspect")
LEASED = ("leased", "group_leased")


def request(ids: Sequence[UUID], outcome: str) -> Executable:
    """Ask for an end of those of these jobs that are there; returns their ids.

    Index: both primary keys. Locks: the requests, new or old; a relay that ends a job at this moment is waited for.
    """
    there = select(job.c.id, literal(outcome, StoredText())).where(job.c.id.in_(ids)).order_by(job.c.id)
    asked = insert(cancel_request).from_select(["job_id", "outcome"], there)
    return asked.on_conflict_do_update(
        index_elements=[cancel_request.c.job_id], set_={"outcome": asked.excluded.outcome}
    ).returning(cancel_request.c.job_id)


def take_request(job_id: UUID) -> Executable:
    """Take a job's request, in the transaction that ends the job; returns the outcome that was asked for, or no row.

    Index: the primary key. Locks: the row, which operators and the pruner hold for a moment at most.
    """
    return delete(cancel_request).where(cancel_request.c.job_id == job_id).returning(cancel_request.c.outcome)


def drop_requests(ids: Sequence[UUID]) -> Delete:
    """Take back the requests for these jobs. Index: the primary key; locks: the rows."""
    return delete(cancel_request).where(cancel_request.c.job_id.in_(ids))


def cancel_waiting(ids: Sequence[UUID], *, leased: bool = False) -> Executable:
    """Delete those of these jobs that wait; a row for each that is there, whether it was locked and whether it is gone.

    Index, locks and bound are those of `pick_page`.

    Args:
        leased: Also those under a lease, whose handlers go on, and whose results are refused.
    """
    conditions = [job.c.id.in_(ids)]
    page, picked = pick_page(job, conditions, None, len(ids))
    waits = job.c.state.in_((*WAITING, *LEASED) if leased else WAITING)
    gone = delete(job).where(job.c.id == picked.c.id, waits).returning(job.c.id).cte("cancelled")
    return page_outcome(page, picked, gone)


_BURY: LiteralString = """\
WITH picked AS MATERIALIZED (
  SELECT job.id FROM {job} AS job WHERE job.id = ANY ({ids}::uuid[]) AND job.state = ANY ({waiting})
  ORDER BY job.id FOR UPDATE OF job SKIP LOCKED
), gone AS (
  DELETE FROM {job} AS job WHERE job.id = ANY (ARRAY(SELECT id FROM picked)) RETURNING job.*
), dead AS (
  INSERT INTO {dead} (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, unique_key, group_key,
    errors, reason, created_at, batch_id)
  SELECT CASE WHEN EXISTS (SELECT FROM {dead} AS earlier WHERE earlier.id = job.id)
      THEN pg_catalog.gen_random_uuid() ELSE job.id END,
    job.queue, job.kind, job.args, job.headers, job.priority, job.attempt, job.max_attempts, job.crashes,
    job.unique_key, job.group_key, job.errors, {reason}, job.created_at, job.batch_id
  FROM gone AS job
)
SELECT id FROM gone"""


def bury_waiting(schema: str, ids: Sequence[UUID], *, leased: bool = False) -> str:
    """Make dead letters of those of these jobs that wait, or with `leased` are under a lease; returns their ids.

    Index: the primary keys. Locks: the jobs, skipping those that another transaction has; at most as many as `ids`.
    """
    return render(
        schema,
        _BURY,
        ids=[str(job_id) for job_id in ids],
        waiting=sql.SQL("{}::text[]").format(sql.Literal([*WAITING, *(LEASED if leased else ())])),
        reason=CANCELLED,
    )


def progress(ids: Sequence[UUID]) -> Executable:
    """How far the cancellation of each of these jobs has come, a row each: its id and a state, in one snapshot.

    `running`: a transaction or a lease has it; `waiting`: it waits, and its next claim ends it; `cancelled`: job and
    request are gone; `dead`: it is a dead letter; `over`: it came to its end by itself. Index: the primary keys.
    """
    wanted = unnest(literal(list(ids), ARRAY(Uuid()))).table_valued("id", name="wanted").render_derived()
    runs = or_(listed.c.state.in_(LEASED), xmax.in_(running_transactions()))
    found = select(case((runs, "running"), else_="waiting")).where(listed.c.id == wanted.c.id).scalar_subquery()
    asked = exists().where(cancel_request.c.job_id == wanted.c.id)
    is_dead = exists().where(dead_job.c.id == wanted.c.id)
    state = func.coalesce(found, case((is_dead, "dead"), (asked, "over"), else_="cancelled"))
    return select(wanted.c.id, state.label("state"))


def sharing(job_id: UUID) -> Select[Any]:
    """How many jobs the transaction that runs a job has claimed, it included: 0 if none runs it now.

    Reads the table once; no locks.
    """
    its = select(xmax).where(listed.c.id == job_id, xmax.in_(running_transactions())).scalar_subquery()
    return select(count()).select_from(listed).where(xmax == its)


def terminate(schema: str, job_id: UUID) -> str:
    """End the backend whose transaction runs a job; a row with its pid and whether it was told, none if none runs it.

    In one statement: the same backend runs another job a moment later. A transaction that runs a job has deleted its
    row, so that its id is the row's `xmax`. Index: the primary key; no locks.
    """
    return render(
        schema,
        "SELECT activity.pid, pg_catalog.pg_terminate_backend(activity.pid) FROM {job} AS job "
        "JOIN pg_catalog.pg_stat_activity AS activity ON activity.backend_xid = job.xmax WHERE job.id = {id}",
        id=job_id,
    )
