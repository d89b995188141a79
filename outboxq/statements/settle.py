"""Putting a claimed job back, or among the dead letters, in the transaction that claimed it.

No lock is waited for: the claim deleted the only other row with this id, in this transaction.
"""

from datetime import timedelta
from uuid import UUID

from sqlalchemy import ColumnElement, Insert, Text, Update, cast, func, insert, literal, literal_column, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as postgresql_insert

from outboxq.job import Job
from outboxq.statements.claim import PARKED_UNTIL
from outboxq.tables import dead_job, job


def insert_again(claimed: Job, *, attempt: int, errors: "str | ColumnElement[str]", delay: timedelta | None) -> Insert:
    """The job's row once more, behind everything that waits (it draws a new `seq`); ready at once without `delay`.

    Whoever ran it knows its kind, so it is parked no more.
    """
    schedule: dict[str, object] = {"state": "ready"}
    if delay is not None:
        schedule = {"state": "scheduled", "run_at": func.clock_timestamp() + literal(delay)}
    values = _kept(claimed) | {"parked": 0}
    return insert(job).values(**values, attempt=attempt, errors=errors, **schedule)


def insert_parked(claimed: Job) -> Insert:
    """The job's row once more, for later and without an attempt counted: no handler here knows its kind."""
    later: ColumnElement[object] = literal_column(PARKED_UNTIL.replace("parked", str(claimed.parked)))
    values = _kept(claimed) | {"parked": min(claimed.parked + 1, 32_767), "errors": claimed.errors}
    return insert(job).values(**values, attempt=claimed.attempt - 1, state="scheduled", run_at=later)


def insert_dead(claimed: Job, *, reason: str, errors: "str | ColumnElement[str]") -> Insert:
    """The job as a dead letter; an earlier one of the same id, which a producer chose twice, gives way.

    Otherwise the insert would fail for ever, and the job would hold up its queue.
    """
    values = _kept(claimed) | {"attempt": claimed.attempt, "errors": errors, "reason": reason}
    del values["parked"]
    statement = postgresql_insert(dead_job).values(**values)
    changed = {name: statement.excluded[name] for name in values if name != "id"}
    return statement.on_conflict_do_update(
        index_elements=[dead_job.c.id], set_={**changed, "died_at": func.clock_timestamp()}
    )


def put_off(job_id: UUID, delay: timedelta) -> Update:
    """Move a waiting job out of the way, without reading or writing anything else of it. Waits for no lock."""
    free = select(job.c.id).where(job.c.id == job_id).with_for_update(skip_locked=True).scalar_subquery()
    return update(job).where(job.c.id == free).values(state="scheduled", run_at=func.clock_timestamp() + literal(delay))


def errors_with(kept: str, record: str) -> "ColumnElement[str]":
    """The history plus one record, stamped by the database's clock."""
    stamped = cast(literal(record, Text), JSONB).op("||")(func.jsonb_build_object("at", func.clock_timestamp()))
    return cast(literal(kept, Text), JSONB).op("||")(func.jsonb_build_array(stamped))


def _kept(claimed: Job) -> dict[str, object]:
    return {
        "id": claimed.id,
        "queue": claimed.queue,
        "kind": claimed.kind,
        "args": claimed.args,
        "headers": claimed.headers,
        "priority": claimed.priority,
        "max_attempts": claimed.max_attempts,
        "crashes": claimed.crashes,
        "parked": claimed.parked,
        "unique_key": claimed.unique_key,
        "group_key": claimed.group_key,
        "created_at": claimed.created_at,
    }
