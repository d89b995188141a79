"""Jobs that wait or run: list them, find the backends that run them, and cancel them.

A job that runs in transaction mode was deleted by a transaction that is still open: its row stays visible, and its
`xmax` is the transaction of the relay's backend. So in addition to the states in the table, operators see `running`
(such a transaction has deleted the row), `due` (scheduled, and its time has come) and `orphaned` (leased to a dead
relay, and not taken back yet).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Executable,
    FromClause,
    Select,
    Subquery,
    Text,
    Uuid,
    and_,
    any_,
    case,
    cast,
    column,
    delete,
    false,
    func,
    literal,
    literal_column,
    not_,
    null,
    or_,
    select,
    table,
    type_coerce,
    union_all,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import UserDefinedType

from outboxq.statements.builtin import count, pg, seconds
from outboxq.statements.paging import count_kinds, matching, page_outcome, pick_page
from outboxq.tables import StoredText, dead_job, job, relay


class Xid(UserDefinedType[str]):
    """The SQL type of a 32-bit transaction id, as in the system column `xmax`."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "xid"


@dataclass(frozen=True, slots=True)
class JobFilter:
    """A filter for jobs; without any value, it matches all of them.

    `state` is one of `STATES`. `created_before` lets a command that changes page after page leave out newer jobs.
    """

    queue: str | None = None
    kind: str | None = None
    state: str | None = None
    ids: tuple[UUID, ...] | None = None
    group: str | None = None
    created_before: datetime | None = None

    def conditions(self, jobs: FromClause = job) -> list[ColumnElement[bool]]:
        """Return the filter as conditions on `jobs`: the table `job`, or an alias of it."""
        found = matching(jobs, queue=self.queue, kind=self.kind, group_key=self.group)
        if self.state is not None:
            found.append(_in_state(jobs, self.state))
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


def _xmax(jobs: FromClause) -> ColumnElement[str]:
    return literal_column(f"{jobs.name}.xmax", Xid())  # type: ignore[attr-defined]  # a table or an alias has a name


xmax = _xmax(listed)


def running_transactions() -> Select[Any]:
    """Select the ids of open transactions that have written, to compare them with jobs' `xmax`.

    One row per backend; no locks.
    """
    return select(_activity.c.backend_xid).where(_activity.c.backend_xid.is_not(None))


STATES = ("ready", "grouped", "running", "scheduled", "due", "leased", "orphaned", "suspect")
# The stored states of these states that grouped jobs may have; a job that holds up its group until its time is
# scheduled.
_STORED = {
    "scheduled": ("scheduled", "group_waiting", "grouped"),
    "due": ("scheduled", "group_waiting"),
    "leased": ("leased", "group_leased"),
    "orphaned": ("leased", "group_leased"),
    "suspect": ("suspect", "group_suspect"),
}


def _in_state(jobs: FromClause, state: str) -> ColumnElement[bool]:
    """Return the condition that a job is in `state`, one of `STATES`.

    For a state other than `running`, the condition is also true for jobs that a transaction runs: their rows still have
    the state in which they waited.
    """
    if state == "running":
        return _xmax(jobs).in_(running_transactions())
    stored = jobs.c.state.in_(_STORED[state]) if state in _STORED else jobs.c.state == state
    if state in ("scheduled", "due", "grouped"):
        is_due = jobs.c.run_at <= pg.statement_timestamp()
        return and_(stored, not_(is_due) if state == "scheduled" else is_due)
    if state in ("leased", "orphaned"):
        # No EXISTS, because it would run again for each row.
        alive = select(relay.c.id).where(relay.c.alive_until > pg.statement_timestamp())
        is_alive = func.coalesce(jobs.c.lease_owner.in_(alive), false())
        return and_(stored, is_alive if state == "leased" else not_(is_alive))
    return stored


state = case(
    *(
        (_in_state(listed, name), literal(name, StoredText()))
        for name in ("running", "due", "scheduled", "orphaned", "leased", "suspect")
    ),
    else_=listed.c.state,
).label("state")
_with_runners = listed.outerjoin(_activity, _activity.c.backend_xid == xmax)

SUMMARY_COLUMNS = (
    "id", "queue", "kind", "state", "priority", "attempt", "max_attempts", "crashes", "parked", "run_at", "created_at",
    "expires_at",
)  # fmt: skip
DETAIL_COLUMNS = ("unique_key", "group_key", "args", "headers", "errors")
_WALKED = ("id", "queue", "kind", "state", "group_key", "created_at", "run_at", "lease_owner", "args")


def select_jobs(wanted: JobFilter, stretch: Sequence[ColumnElement[bool]], *, running: bool, limit: int) -> Executable:
    """Select the oldest jobs that match `wanted`: summary columns, the backend that runs each, and `seq` last.

    The order is by the millisecond in the id, and within a millisecond by `seq`, which has no index over all queues. So
    the query also reads the other matches of the last one's millisecond. Index: the primary
    key, in order. No locks.

    Args:
        stretch: Conditions from `stretches`, which limit the query to one part of the table.
        running: True for only jobs that run or are leased.
    """
    first = _matching(wanted, listed, running=running).where(*stretch).order_by(listed.c.id).limit(limit).cte("first")
    last = select(first.c.id).order_by(first.c.id.desc()).limit(1).scalar_subquery()
    rest = _matching(wanted, listed, running=running).where(
        listed.c.id > last, listed.c.id <= _end_of_millisecond(last)
    )
    seen = union_all(select(first.c.id), rest).cte("seen").prefix_with("MATERIALIZED")
    return (
        select(*_shown(SUMMARY_COLUMNS), *_runner(), listed.c.seq)
        .select_from(_with_runners)
        .where(listed.c.id == any_(func.array(select(seen.c.id).scalar_subquery())))
        .order_by(_millisecond(listed.c.id), listed.c.seq)
        .limit(limit)
    )


def newest_jobs(
    wanted: JobFilter, *, contains: Sequence[str], args_bytes: int, before: UUID | None, limit: int, depth: int
) -> Executable:
    """Select the newest jobs that match, among the `depth` highest ids below `before`, with the backend that runs each.

    Args:
        contains: JSON texts of objects: the arguments must contain one of them; empty for any arguments.
        args_bytes: The length of the longest arguments to return; longer ones are NULL.

    Index: the primary key, backwards from `before`, up to `depth` rows or the first `limit` that match; then by id.
    """
    walked = _walk_of_jobs(before, depth)
    conditions = wanted.conditions(walked)
    if wanted.state not in (None, "running"):
        conditions.append(~_in_state(walked, "running"))
    if contains:
        args = type_coerce(walked.c.args, JSONB())
        conditions.append(
            or_(*(args.op("@>", is_comparison=True)(cast(literal(each, Text()), JSONB())) for each in contains))
        )
    first = select(walked.c.id).where(*conditions).order_by(walked.c.id.desc()).limit(limit)
    seen = first.cte("seen").prefix_with("MATERIALIZED")
    return (
        select(*_shown(SUMMARY_COLUMNS), *_runner(), _short_args(args_bytes))
        .select_from(_with_runners)
        .where(listed.c.id == any_(func.array(select(seen.c.id).scalar_subquery())))
        .order_by(listed.c.id.desc())
    )


def _short_args(most_bytes: int) -> ColumnElement[Any]:
    is_short = pg.octet_length(cast(listed.c.args, Text())) <= most_bytes
    return case((is_short, listed.c.args)) if most_bytes else null()


def next_jobs(queue: str, *, limit: int) -> Executable:
    """Select the ready jobs of a queue, in the order of claims. Index: job_ready, from its start; `limit` rows."""
    first = (
        select(job.c.id)
        .where(job.c.queue == queue, job.c.state == literal_column("'ready'"))
        .order_by(literal_column("(-priority)"), job.c.seq)
        .limit(limit)
    )
    return _jobs_of(first).order_by(literal_column("(-listed.priority)"), listed.c.seq)


def next_scheduled(queue: str, *, limit: int) -> Executable:
    """Select the jobs of a queue that wait for their time, the next first. Index: job_scheduled, from its start."""
    first = (
        select(job.c.id)
        .where(job.c.queue == queue, job.c.state == literal_column("'scheduled'"))
        .order_by(job.c.run_at)
        .limit(limit)
    )
    return _jobs_of(first).order_by(listed.c.run_at)


def oldest_of_blocks(wanted: JobFilter, stretch: Sequence[ColumnElement[bool]], *, limit: int) -> Executable:
    """Select ids and `seq` of the oldest jobs of one part of the table that match, in the order of `select_jobs`.

    `stretch`: the part of the table, as conditions from `stretches_of_blocks`. Its blocks are read and then sorted,
    because the planner might otherwise walk through an index. No locks.
    """
    found = _matching(wanted, job).add_columns(job.c.seq).where(*stretch).cte("found").prefix_with("MATERIALIZED")
    return select(found.c.id, found.c.seq).order_by(_millisecond(found.c.id), found.c.seq).limit(limit)


def select_ids(wanted: JobFilter, stretch: Sequence[ColumnElement[bool]], *, limit: int) -> Select[tuple[UUID]]:
    """Select the first ids, in order, of the jobs of one part of the table that match `wanted`.

    `stretch`: the part of the table, as conditions from `stretches`. Index: the primary key; no locks.
    """
    return select(job.c.id).where(*wanted.conditions(), *stretch).order_by(job.c.id).limit(limit)


def select_some(wanted: JobFilter, stretch: Sequence[ColumnElement[bool]], *, limit: int) -> Select[tuple[UUID]]:
    """Select up to `limit` ids of the jobs of one part of the table that match `wanted`, in no order.

    `stretch`: the part of the table, as conditions from `stretches_of_blocks`; only its blocks are read. With an order,
    the planner would use an index instead. No locks.
    """
    return select(job.c.id).where(*wanted.conditions(), *stretch).limit(limit)


def select_waiting(ids: Sequence[UUID]) -> Executable:
    """Count those of these jobs whose stored state is ready, scheduled or grouped; a transaction may run some of them.

    Only the row of a job in these states can have a mark (`xmax`) that a rolled back claim left. If `park.clear_marks`
    has locked as many rows as this query counts, no mark is left. Index: the primary key; no locks.
    """
    waits = job.c.state.in_(("ready", "scheduled", "grouped"))
    return select(count()).select_from(job).where(job.c.id.in_(ids), waits)


def select_job(job_id: UUID) -> Executable:
    """Select one job with all its columns. Index: the primary key; no locks; one row."""
    return (
        select(*_shown((*SUMMARY_COLUMNS, *DETAIL_COLUMNS)), *_runner())
        .select_from(_with_runners)
        .where(listed.c.id == job_id)
    )


def first_of_group(queue: str, group: str) -> Executable:
    """Select the id of the first job of a group, and its due time. Index: job_group, one entry; no locks."""
    key = job.c.group_key.collate("C")
    return (
        select(job.c.id, job.c.run_at)
        .where(job.c.queue == queue, key == group, job.c.state != "group_waiting")
        .order_by(key, job.c.seq)
        .limit(1)
    )


def find_job(job_id: UUID) -> Select[Any]:
    """Select the job of this id, from the waiting and running ones or the dead letters; one row at most.

    Both tables are read at the same moment, so a job that moves between them is not missed. Index: both primary keys;
    no locks.
    """
    runs: ColumnElement[bool] = or_(listed.c.state.in_(("leased", "group_leased")), xmax.in_(running_transactions()))
    waiting = select(
        listed.c.id,
        listed.c.kind,
        listed.c.queue,
        case((runs, "running"), else_="waiting").label("state"),
        listed.c.attempt,
    ).where(listed.c.id == job_id)
    dead = select(
        dead_job.c.id, dead_job.c.kind, dead_job.c.queue, literal("dead").label("state"), dead_job.c.attempt
    ).where(dead_job.c.id == job_id)
    found = union_all(waiting, dead).subquery("found")
    return select(found).limit(1)


def count_matching(wanted: JobFilter, stretch: Sequence[ColumnElement[bool]], *, most: int | None) -> Executable:
    """Count the jobs of one part of the table that match, by queue and kind; with `most`, only the first `most`.

    `stretch`: the part of the table, as conditions from `stretches`.
    """
    return count_kinds(job, [*wanted.conditions(), *stretch], most)


def cancel_page(wanted: JobFilter, *, after: UUID | None, limit: int) -> Executable:
    """Return SQL that deletes the next page of matching jobs, except those that another transaction has locked.

    It returns the rows of `page_outcome`. Index, locks and bound are those of `pick_page`.
    """
    page, picked = pick_page(job, wanted.conditions(), after, limit)
    cancelled = delete(job).where(job.c.id == picked.c.id).returning(job.c.id).cte("cancelled")
    return page_outcome(page, picked, cancelled)


def _matching(wanted: JobFilter, jobs: FromClause, *, running: bool = False) -> Select[tuple[UUID]]:
    conditions = wanted.conditions(jobs)
    if running:
        conditions.append(or_(_in_state(jobs, "running"), _in_state(jobs, "leased")))
    if wanted.state not in (None, "running"):
        conditions.append(not_(_in_state(jobs, "running")))
    return select(jobs.c.id).where(*conditions)


def _shown(names: Iterable[str]) -> Iterator[ColumnElement[Any]]:
    return (state if name == "state" else listed.c[name] for name in names)


def _millisecond(job_id: ColumnElement[UUID]) -> ColumnElement[str]:
    # The first 48 bits, in hexadecimal: RFC 9562, section 5.7.
    return pg.left(cast(job_id, Text), 13, type_=StoredText())


def _end_of_millisecond(job_id: ColumnElement[UUID]) -> ColumnElement[UUID]:
    return cast(_millisecond(job_id) + "-ffff-ffff-ffffffffffff", Uuid)


def _runner() -> Sequence[ColumnElement[Any]]:
    # xact_start is hidden from roles without pg_read_all_stats; the pid is not.
    return _activity.c.pid, seconds(pg.clock_timestamp() - _activity.c.xact_start).label("running_seconds")


def _walk_of_jobs(before: UUID | None, depth: int) -> Subquery:
    each = job.alias("each")
    start = [] if before is None else [each.c.id < before]
    columns: list[ColumnElement[Any]] = [each.c[name] for name in _WALKED]
    walked = select(*columns, _xmax(each).label("xmax")).where(*start).order_by(each.c.id.desc()).limit(depth)
    return walked.subquery("walked")


def _jobs_of(first: Select[tuple[UUID]]) -> Select[Any]:
    seen = first.cte("seen").prefix_with("MATERIALIZED")
    return (
        select(*_shown(SUMMARY_COLUMNS), *_runner())
        .select_from(_with_runners)
        .where(listed.c.id == any_(func.array(select(seen.c.id).scalar_subquery())))
    )
