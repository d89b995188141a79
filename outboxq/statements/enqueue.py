"""Enqueue: many jobs by one INSERT, whose parameters are one array a column, each written as text.

The same for every driver, and with no right but INSERT. Text arrays, because that is what costs the interpreter least;
PostgreSQL reads each of them once.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import (
    DateTime,
    Insert,
    Interval,
    SmallInteger,
    Text,
    Uuid,
    and_,
    bindparam,
    case,
    cast,
    column,
    func,
    insert,
    literal_column,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.types import TypeEngine

from outboxq.kinds import NewJob
from outboxq.tables import job

# An array parameter is read whole by PostgreSQL, which takes up to 1 GB: 512 MB where each job has 256 KiB of quotes.
JOBS_PER_INSERT = 1_000

# A job with its id and its arguments as JSON text.
Prepared = tuple[UUID, NewJob, str]

_MICROSECOND = timedelta(microseconds=1)
_ARRAYS: dict[str, TypeEngine[Any]] = {
    "id": Uuid(),
    "queue": Text(),
    "kind": Text(),
    "args": JSONB(),
    "headers": JSONB(),
    "priority": SmallInteger(),
    "max_attempts": SmallInteger(),
    "run_at": DateTime(timezone=True),
    "delay": Interval(),
}


def insert_jobs() -> Insert:
    """Jobs from the arrays of `job_arrays`, in their order. Locks nothing but the new rows; one index entry each.

    The database's clock decides when a delayed job is due, so that no producer's clock can be wrong.
    """
    arrays = [cast(bindparam(name, type_=Text()), ARRAY(kind)) for name, kind in _ARRAYS.items()]
    given = func.unnest(*arrays).table_valued(*(column(name, kind) for name, kind in _ARRAYS.items())).render_derived()
    now = func.clock_timestamp()
    values = {
        **{name: given.c[name] for name in ("id", "queue", "kind", "args", "headers", "priority", "max_attempts")},
        "state": case(
            (and_(given.c.run_at.is_(None), given.c.delay.is_(None)), literal_column("'ready'")),
            else_=literal_column("'scheduled'"),
        ),
        "run_at": func.coalesce(given.c.run_at, now + given.c.delay, now),
    }
    return insert(job).from_select(list(values), select(*values.values())).inline()


def job_arrays(jobs: Sequence[Prepared]) -> dict[str, str]:
    """The parameters of `insert_jobs`."""
    ids, new_jobs, args = zip(*jobs, strict=True)
    options = [new.options for new in new_jobs]
    return {
        "id": _plain_array([job_id.hex for job_id in ids]),
        "queue": _quoted_array([new.queue for new in new_jobs]),
        "kind": _quoted_array([new.kind for new in new_jobs]),
        "args": _quoted_array(args),
        "headers": _quoted_array([new.headers for new in new_jobs]),
        "priority": _plain_array([str(each.priority) for each in options]),
        "max_attempts": _plain_array(
            ["NULL" if each.max_attempts is None else str(each.max_attempts) for each in options]
        ),
        "run_at": _plain_array(["NULL" if each.run_at is None else _moment(each.run_at) for each in options]),
        "delay": _plain_array(["NULL" if not each.delay else _elapsed(each.delay) for each in options]),
    }


def _moment(run_at: datetime) -> str:
    return f'"{run_at.astimezone(UTC).isoformat()}"'


def _elapsed(delay: timedelta) -> str:
    # Never in days: theirs would be of 23 or 25 hours when the session's time zone changes its clocks.
    return f'"{delay // _MICROSECOND} microseconds"'


def _plain_array(items: Iterable[str]) -> str:
    return "{" + ",".join(items) + "}"


def _quoted_array(items: Iterable[str]) -> str:
    # Escaped together. No item holds a NUL: JSON escapes it, and a name may not have one.
    joined = "\0".join(items).replace("\\", "\\\\").replace('"', '\\"').replace("\0", '","')
    return '{"' + joined + '"}'
