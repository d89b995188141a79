"""Enqueue: many jobs by one INSERT, whose parameters are text: an array for a column, or one value for all jobs.

The same for every driver, and with no right but INSERT. Text costs the interpreter least, and PostgreSQL parses each
array once.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
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

from outboxq.new_job import JobEnvelope, NewJob
from outboxq.statements.builtin import pg, unnest
from outboxq.tables import job

# PostgreSQL takes an array parameter of up to 1 GB. Ours has 512 MB if each job is 256 KiB of quotes, all escaped.
JOBS_PER_INSERT = 1_000

_MICROSECOND = timedelta(microseconds=1)
# The columns that differ from job to job.
_OWN: Mapping[str, TypeEngine[Any]] = {
    "id": Uuid(),
    # Cast to jsonb row by row: as jsonb, numbers take several times their text, and no array holds more than 1 GB.
    "args": Text(),
}
# The columns that jobs of one envelope have in common.
_COMMON: Mapping[str, TypeEngine[Any]] = {
    "queue": Text(),
    "kind": Text(),
    "headers": JSONB(),
    "priority": SmallInteger(),
    "max_attempts": SmallInteger(),
    "run_at": DateTime(timezone=True),
    "delay": Interval(),
}


def insert_jobs(jobs: Mapping[str, NewJob]) -> tuple[Insert, dict[str, str | None]]:
    """Insert jobs by their ids in hex, in their order. Locks nothing but the new rows; one index entry each.

    The database's clock decides when a delayed job is due, so that no producer's clock can be wrong.

    Returns:
        The statement and its parameters.
    """
    own = {"id": _array(jobs), "args": _quoted_array([new.args for new in jobs.values()])}
    envelopes = [new.envelope for new in jobs.values()]
    texts = {envelope: _common_texts(envelope) for envelope in set(envelopes)}
    if len(texts) == 1:
        return _INSERT_ALIKE, {**own, **texts[envelopes[0]]}
    elements = {envelope: [_element(text) for text in each.values()] for envelope, each in texts.items()}
    columns = zip(*(elements[envelope] for envelope in envelopes), strict=True)
    return _INSERT_MIXED, {**own, **dict(zip(_COMMON, map(_array, columns), strict=True))}


def _insert(arrays: Mapping[str, TypeEngine[Any]], values: Mapping[str, TypeEngine[Any]]) -> Insert:
    parameters = [cast(bindparam(name, type_=Text()), ARRAY(kind)) for name, kind in arrays.items()]
    rows = unnest(*parameters).table_valued(*(column(name, kind) for name, kind in arrays.items()))
    given: dict[str, ColumnElement[Any]] = {
        **{name: cast(bindparam(name, type_=Text()), kind) for name, kind in values.items()},
        **dict(rows.render_derived().c),
    }
    now = pg.clock_timestamp()
    state = case(
        (and_(given["run_at"].is_(None), given["delay"].is_(None)), literal_column("'ready'")),
        else_=literal_column("'scheduled'"),
    )
    columns = {
        **{name: given[name] for name in ("id", "queue", "kind", "headers", "priority", "max_attempts")},
        "args": cast(given["args"], JSONB()),
        "state": state,
        "run_at": func.coalesce(given["run_at"], now + given["delay"], now),
    }
    return insert(job).from_select(list(columns), select(*columns.values())).inline()


_INSERT_ALIKE = _insert(_OWN, _COMMON)
_INSERT_MIXED = _insert({**_OWN, **_COMMON}, {})


def _common_texts(envelope: JobEnvelope) -> dict[str, str | None]:
    """The envelope's values as text, in the order of `_COMMON`."""
    return {
        "queue": envelope.queue,
        "kind": envelope.kind,
        "headers": envelope.headers,
        "priority": str(envelope.priority),
        "max_attempts": None if envelope.max_attempts is None else str(envelope.max_attempts),
        "run_at": None if envelope.run_at is None else envelope.run_at.astimezone(UTC).isoformat(),
        # Never in days: a day has 23 or 25 hours when the clocks of the session's time zone change.
        "delay": f"{envelope.delay // _MICROSECOND} microseconds" if envelope.delay else None,
    }


def _array(elements: Iterable[str]) -> str:
    return "{" + ",".join(elements) + "}"


def _element(item: str | None) -> str:
    return "NULL" if item is None else f'"{_escape(item)}"'


def _quoted_array(items: Iterable[str]) -> str:
    # Joined by NUL and escaped in one go. No item holds a NUL: JSON escapes it.
    return '{"' + _escape("\0".join(items)).replace("\0", '","') + '"}'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
