"""What waits: looking at jobs, finding who runs them, and cancelling.

A job that runs in transaction mode has been deleted by a transaction that is still open: its row stays visible, and
its `xmax` is the transaction of the relay's backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Executable,
    Float,
    FromClause,
    Select,
    cast,
    column,
    delete,
    extract,
    func,
    literal_column,
    or_,
    select,
    table,
)
from sqlalchemy.types import UserDefinedType

from outboxq.statements.paging import page_outcome, pick_page
from outboxq.tables import job


class Xid(UserDefinedType[str]):
    """A 32-bit transaction id, as in the system column `xmax`."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "xid"


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs are meant; without a value everywhere, all of them.

    `created_before` keeps a command that takes several pages from chasing producers.
    """

    queue: str | None = None
    kind: str | None = None
    state: str | None = None
    ids: tuple[UUID, ...] | None = None
    created_before: datetime | None = None

    def conditions(self, jobs: FromClause = job) -> list[ColumnElement[bool]]:
        """The filter as conditions on the table `job`, or an alias of it."""
        found: list[ColumnElement[bool]] = []
        if self.queue is not None:
            found.append(jobs.c.queue == self.queue)
        if self.kind is not None:
            found.append(jobs.c.kind == self.kind)
        if self.state is not None:
            found.append(jobs.c.state == self.state)
        if self.ids is not None:
            found.append(jobs.c.id.in_(self.ids))
        if self.created_before is not None:
            found.append(jobs.c.created_at <= self.created_before)
        return found


_activity = table(
    "pg_stat_activity", column("pid"), column("backend_xid", Xid()), column("xact_start"), schema="pg_catalog"
)
# The table's alias, because a system column cannot be a column of the mapped table.
listed = job.alias("listed")
xmax: ColumnElement[str] = literal_column("listed.xmax", Xid())

SUMMARY_COLUMNS = (
    "id", "queue", "kind", "state", "priority", "attempt", "max_attempts", "crashes", "parked", "run_at", "created_at",
)  # fmt: skip
DETAIL_COLUMNS = ("unique_key", "group_key", "args", "headers", "errors")


def select_jobs(wanted: JobFilter, *, running: bool, limit: int) -> Executable:
    """The oldest jobs that match, with the backend that runs each.

    Index: the primary key, in order, up to `limit` rows; few matches, and `running`, read the table once. No locks.
    """
    join = listed.outerjoin(_activity, _activity.c.backend_xid == xmax)
    runs = [or_(_activity.c.pid.is_not(None), listed.c.state == "leased")] if running else []
    return (
        select(*(listed.c[name] for name in SUMMARY_COLUMNS), *_runner())
        .select_from(join)
        .where(*wanted.conditions(listed), *runs)
        .order_by(listed.c.id)
        .limit(limit)
    )


def select_job(job_id: UUID) -> Executable:
    """One job with everything that is stored of it. Index: the primary key; no locks; one row."""
    return (
        select(*(listed.c[name] for name in (*SUMMARY_COLUMNS, *DETAIL_COLUMNS)), *_runner())
        .select_from(listed.outerjoin(_activity, _activity.c.backend_xid == xmax))
        .where(listed.c.id == job_id)
    )


def cancel_page(wanted: JobFilter, *, after: UUID | None, limit: int) -> Executable:
    """Delete the next page of jobs that match and that nobody holds. See `pick_page` for index, locks and bound."""
    page, picked = pick_page(job, wanted.conditions(), after, limit)
    cancelled = delete(job).where(job.c.id == picked.c.id).returning(job.c.id).cte("cancelled")
    return page_outcome(page, cancelled)


def running_transactions() -> Select[Any]:
    """The transactions that are open and have written, to be compared with an `xmax`. One row per backend; no locks."""
    return select(_activity.c.backend_xid).where(_activity.c.backend_xid.is_not(None))


def _runner() -> Sequence[ColumnElement[Any]]:
    # xact_start is hidden from roles that may not read it (pg_read_all_stats); the pid is not.
    seconds = extract("epoch", func.clock_timestamp() - _activity.c.xact_start)
    return _activity.c.pid, cast(seconds, Float(53)).label("running_seconds")
