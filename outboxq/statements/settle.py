"""Settling: put a claimed job back into its queue, or among the dead letters, in the transaction of its handler's rows.

In transaction mode no statement waits for a lock: the claim has deleted the job's row in the same transaction. Under a
lease the row still exists, and is changed only if it has the claim's token. The statement may wait for a relay that
takes the job back, or for an operator's command; after that there is another token, or no row.
"""

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Delete,
    Insert,
    Select,
    Text,
    Update,
    and_,
    case,
    cast,
    delete,
    exists,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

from outboxq.job import Job, with_added_order
from outboxq.statements.builtin import pg
from outboxq.statements.numbers import MOST_COUNTED, MOST_TOKEN, next_token
from outboxq.statements.park import PARKED_UNTIL
from outboxq.tables import dead_job, job, queue

# The columns that are written back as they were claimed.
_KEPT = (
    "id", "queue", "kind", "args", "headers", "priority", "max_attempts", "crashes", "unique_key", "group_key",
    "created_at", "batch_id",
)  # fmt: skip
_NEXT_TOKEN: ColumnElement[int] = literal_column(next_token("lease_token"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBack:
    """A claimed job that goes back to its queue, to be claimed again; made from a handler's outcome.

    Args:
        job: The job as it was claimed.
        attempt: The number of attempts to store: with this one, if it counts.
        record: The error of this attempt as JSON text, without its time.
        delay: The time until the job is due; None if it is ready at once.
        passes: True if later jobs of its group do not wait for it.
        parks: True if no handler here knows its kind: it is due after a time that grows with the number of such claims.
    """

    job: Job
    attempt: int
    record: str | None = None
    delay: timedelta | None = None
    passes: bool = False
    parks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bury:
    """A claimed job that becomes a dead letter; made from a handler's outcome.

    Args:
        job: The job as it was claimed.
        reason: The reason that operators see.
        record: The error of its last attempt as JSON text, without its time.
    """

    job: Job
    reason: str
    record: str | None = None


class _InsertInPlace(Insert):
    """An INSERT that gives a job its former `seq` (its place in the queue), although the column is generated."""

    inherit_cache = True


@compiles(_InsertInPlace)
def _compile_in_place(statement: _InsertInPlace, compiler: SQLCompiler, **options: Any) -> str:
    text: str = compiler.visit_insert(statement, **options)  # type: ignore[no-untyped-call]  # SQLAlchemy left it untyped
    return text.replace(") VALUES (", ") OVERRIDING SYSTEM VALUE VALUES (", 1)


def put_back(
    claimed: Job, *, attempt: int, errors: "str | ColumnElement[str]", delay: timedelta | None, passes: bool = False
) -> Insert | Update:
    """Return SQL that puts a claimed job back into its queue, due after `delay`, or ready at once if `delay` is None.

    It is an INSERT in transaction mode, where the claim has deleted the row, and under a lease an UPDATE. The job gets
    a new `seq`, so it comes after all waiting jobs of its priority. A job of a group keeps its `seq`, and later jobs of
    the group wait until it is due; with `passes`, or if the queue lets several jobs of a group run at a time, they do
    not wait. `parked`, the number of claims by relays that did not know its kind, is set to 0.
    """
    schedule = _schedule(claimed, delay, passes)
    return _write(claimed, {"parked": 0, "attempt": attempt, "errors": errors, **schedule})


def _random_token() -> int:
    return secrets.randbelow(MOST_TOKEN) + 1


def _schedule(claimed: Job, delay: timedelta | None, passes: bool) -> dict[str, object]:
    ran: dict[str, object] = {}
    if claimed.lease_token is None and claimed.unique_key is not None:
        # A new token shows that the job ran, even if its attempt was not counted.
        ran["lease_token"] = _random_token()
    if delay is None:
        return {**ran, "state": "ready" if claimed.group_key is None else "grouped"}
    later: ColumnElement[Any] = pg.clock_timestamp() + literal(delay)
    if claimed.expires_at is not None:
        # It is dropped at its expiry: a later due time would keep its group, its callback batch and a waiting caller
        # waiting without need.
        later = func.least(later, literal(claimed.expires_at))
    if claimed.group_key is None:
        return {**ran, "state": "scheduled", "run_at": later}
    several = select(queue.c.max_per_group).where(queue.c.name == claimed.queue).scalar_subquery() > 1
    blocks = case((several, literal_column("'group_waiting'")), else_=literal_column("'grouped'"))
    return {**ran, "state": "group_waiting" if passes else blocks, "run_at": later}


def put_back_until(claimed: Job, run_at: datetime) -> Insert | Update:
    """Return SQL that puts a job back until `run_at`, because another job of its coalescing key has the present period.

    Only one job of a key runs in each period of `every`. The attempt is not counted. Under a lease, the job's content
    is also written, which may be that of a newer job. The token of the job shows that it waits for another attempt, so
    that a run of its key merges it even before it is due.
    """
    waits: dict[str, object] = {
        "state": "scheduled",
        "run_at": run_at,
        "parked": claimed.parked,
        "attempt": claimed.attempt - 1,
        "errors": claimed.errors,
    }
    if claimed.lease_token is None:
        return _write(claimed, {**waits, "lease_token": _random_token()})
    newest = {name: getattr(claimed, name) for name in ("args", "max_attempts", "created_at")}
    return _write(claimed, {**waits, **newest})


def put_back_parked(claimed: Job) -> Insert | Update:
    """Return SQL that puts a job back, without counting the attempt, because no handler here knows its kind.

    It is due after 5 s; if this has happened before, after up to 5 min (`PARKED_UNTIL`).
    """
    later: ColumnElement[object] = literal_column(PARKED_UNTIL.replace("parked", str(claimed.parked)))
    parked = min(claimed.parked + 1, MOST_COUNTED)
    # In a group the job holds up later ones, because only its handler knows if they may pass it.
    state = "scheduled" if claimed.group_key is None else "grouped"
    changed = {"parked": parked, "errors": claimed.errors, "attempt": claimed.attempt - 1, "state": state}
    return _write(claimed, {**changed, "run_at": later})


def remove(claimed: Job) -> Delete:
    """Return SQL that deletes the row of a job, if the job is still under the lease with which it was claimed.

    Index: the primary key. If another transaction has locked the row (a relay that takes the job back, or an operator's
    command), it waits, and does not delete a row that was changed.
    """
    return delete(job).where(job.c.id == claimed.id, job.c.lease_token == claimed.lease_token)


def unchanged(claimed: Job) -> Select[tuple[UUID]]:
    """Select the id of a claimed job, if its row is still as it was claimed; no row if it was removed or put back.

    After a lost connection, a row shows that the job was not settled. Index: the primary key; no locks.
    """
    if claimed.lease_token is not None:
        # Every lease has a new token.
        return select(job.c.id).where(job.c.id == claimed.id, job.c.lease_token == claimed.lease_token)
    same = select(job.c.id).where(job.c.id == claimed.id, job.c.seq == claimed.seq)
    # Every way of putting a job back gives it a new seq. A grouped job keeps its seq, but gets a new run_at, later than
    # that with which it was claimed.
    return same if claimed.group_key is None else same.where(job.c.run_at == claimed.run_at)


def _write(claimed: Job, changed: dict[str, object]) -> Insert | Update:
    in_group = claimed.group_key is not None
    if claimed.lease_token is None:
        expiry = {} if claimed.expires_at is None else {"expires_at": claimed.expires_at}
        if in_group:
            return _InsertInPlace(job).values(**_kept(claimed, in_place=True), **expiry, **changed, seq=claimed.seq)
        return insert(job).values(**_kept(claimed), **expiry, **changed)
    # `crashes` undoes the crash that the claim of a suspect counted. A new token invalidates the old one.
    fenced = update(job).where(job.c.id == claimed.id, job.c.lease_token == claimed.lease_token)
    released: dict[str, object] = {"lease_owner": None, "lease_token": _NEXT_TOKEN}
    if not in_group:
        released["seq"] = literal_column("DEFAULT")
        if claimed.unique_key is not None:
            released["headers"] = with_added_order(claimed.headers, claimed.seq)
    return fenced.values(**changed, **released, crashes=claimed.crashes)


def insert_dead(claimed: Job, *, reason: str, errors: "str | ColumnElement[str]") -> Insert:
    """Return SQL that adds the job to the dead letters; an earlier one with the same id, queue and kind is overwritten.

    Without that, the insert of a job that died again would always fail, and the job would hold up its queue. If a dead
    letter with this id has another queue or kind, it must not be overwritten, and the new one gets another id.
    """
    # No other dead letter of this id can be added now: a job is inserted only after the previous one left the table.
    is_other = or_(dead_job.c.queue != claimed.queue, dead_job.c.kind != claimed.kind)
    is_taken = exists().where(dead_job.c.id == claimed.id, is_other)
    own_id = case((is_taken, pg.gen_random_uuid()), else_=literal(claimed.id, dead_job.c.id.type))
    values = _kept(claimed) | {"id": own_id, "attempt": claimed.attempt, "errors": errors, "reason": reason}
    statement = postgresql_insert(dead_job).values(**values)
    changed = {name: statement.excluded[name] for name in values if name != "id"}
    return statement.on_conflict_do_update(
        index_elements=[dead_job.c.id], set_={**changed, "died_at": pg.clock_timestamp()}
    )


def postpone(claimed: Job, delay: timedelta, *, passes: bool = False) -> Insert | Update:
    """Return SQL that postpones by `delay` a job that blocks its queue, without counting the attempt.

    A leased job loses its lease. A waiting job is changed only if no other transaction has locked it; its errors and
    arguments are not written.

    Args:
        passes: True if later jobs of its group do not wait for it.
    """
    later = _schedule(claimed, delay, passes)
    if claimed.lease_token is not None:
        return _write(claimed, {**later, "attempt": claimed.attempt - 1})
    waits = and_(job.c.id == claimed.id, job.c.state.not_in(("leased", "group_leased")))
    free = select(job.c.id).where(waits).with_for_update(skip_locked=True).scalar_subquery()
    return update(job).where(job.c.id == free).values(**later)


def errors_with(kept: str, record: str) -> "ColumnElement[str]":
    """Return an SQL expression for a job's errors: the JSON list `kept` plus one record, with the database's time."""
    stamped = cast(literal(record, Text), JSONB).op("||")(pg.jsonb_build_object("at", pg.clock_timestamp()))
    return cast(literal(kept, Text), JSONB).op("||")(pg.jsonb_build_array(stamped))


def _kept(claimed: Job, *, in_place: bool = False) -> dict[str, object]:
    """Return the columns of a claimed job that are written back as they were claimed, with their values.

    Unless `in_place`, the job's next row gets a new `seq`: then the headers of a job with a coalescing key get its
    former number in the order of adding.
    """
    kept: dict[str, object] = {name: getattr(claimed, name) for name in _KEPT}
    if claimed.unique_key is not None and not in_place:
        kept["headers"] = with_added_order(claimed.headers, claimed.seq)
    return kept
