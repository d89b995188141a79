"""Enqueue: inserts many jobs by one statement with parameters as text: for each column an array, or one value for all.

It is the same for every driver, and needs only the right INSERT. Texts cost the interpreter least, and PostgreSQL
parses each array once.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    DateTime,
    Insert,
    Interval,
    SmallInteger,
    TableValuedAlias,
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

from outboxq.new_job import JobEnvelope, JobKeys, NewJob
from outboxq.statements.builtin import pg, unnest
from outboxq.tables import job

# PostgreSQL accepts an array parameter of up to 1 GB. These have 512 MB if each job is 256 KiB of quotes, all escaped.
JOBS_PER_INSERT = 1_000

_MICROSECOND = timedelta(microseconds=1)
# The columns that differ from job to job.
_OWN: Mapping[str, TypeEngine[Any]] = {
    "id": Uuid(),
    # Cast to jsonb row by row: as jsonb, numbers take several times the size of their text, and no array holds more
    # than 1 GB.
    "args": Text(),
}
# The same for jobs with keys.
_OWN_KEYS: Mapping[str, TypeEngine[Any]] = {"unique_key": Text(), "group_key": Text(), "batch_id": Uuid()}
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
# The same for jobs with keys or an expiry.
_COMMON_FLOW: Mapping[str, TypeEngine[Any]] = {"every": Interval(), "expires": Interval()}
_NO_KEYS = JobKeys()


def insert_jobs(jobs: Mapping[str, NewJob]) -> tuple[Insert, dict[str, str | None]]:
    """Return the INSERT of these jobs, which are given by their ids in hex, in the given order.

    Locks only the new rows; one index entry each. The database's clock decides when a delayed job is due, so that no
    producer's clock can be wrong.

    Returns:
        The statement and its parameters.
    """
    new = list(jobs.values())
    distinct = {each.envelope for each in new}
    # A list: for plain jobs, all of which are checked, it takes half the time of a generator.
    flows = bool([each for each in new if each.keys is not None or each.envelope.every or each.envelope.expires])
    if len(distinct) > 1:
        return (_FLOW_MIXED if flows else _INSERT_MIXED), {**arrays_of(jobs, flows=flows)}
    (envelope,) = distinct
    common = _common_texts(envelope, flows=flows)
    return (_FLOW_ALIKE if flows else _INSERT_ALIKE), {**_own_arrays(jobs, flows=flows), **common}


def arrays_of(jobs: Mapping[str, NewJob], *, flows: bool = True) -> dict[str, str]:
    """Return the parameters of the jobs, by the names in `ARRAYS`: for each column the text of an array.

    Without `flows`, the parameters for keys, periods (`every`) and expiry are left out.
    """
    elements = {
        envelope: [_element(text) for text in _common_texts(envelope, flows=flows).values()]
        for envelope in {each.envelope for each in jobs.values()}
    }
    columns = zip(*(elements[each.envelope] for each in jobs.values()), strict=True)
    names = [*_COMMON, *_COMMON_FLOW] if flows else [*_COMMON]
    return {**_own_arrays(jobs, flows=flows), **dict(zip(names, map(array_text, columns), strict=True))}


def text_array(items: Sequence[str | None]) -> str:
    """Return the text of a PostgreSQL array of these texts. Equal texts, which are frequent, are escaped once."""
    elements = {item: _element(item) for item in set(items)}
    return array_text(map(elements.__getitem__, items))


def _own_arrays(jobs: Mapping[str, NewJob], *, flows: bool) -> dict[str, str]:
    """Return the parameters (texts of arrays) for columns whose values differ from job to job: id and arguments.

    With `flows` also those of the jobs' keys: coalescing key, group and callback batch.
    """
    own = {"id": array_text(jobs), "args": _quoted_array([each.args for each in jobs.values()])}
    if not flows:
        return own
    keys = [_keys_of(each) for each in jobs.values()]
    return own | {
        "unique_key": array_text(_element(each.coalesce) for each in keys),
        "group_key": array_text(_element(each.group) for each in keys),
        "batch_id": array_text(_element(each.batch) for each in keys),
    }


def _keys_of(new: NewJob) -> JobKeys:
    assert not callable(new.keys), "a job is complete when it is inserted"
    return new.keys or _NO_KEYS


def _insert(arrays: Mapping[str, TypeEngine[Any]], values: Mapping[str, TypeEngine[Any]]) -> Insert:
    given: dict[str, ColumnElement[Any]] = {
        **{name: cast(bindparam(name, type_=Text()), kind) for name, kind in values.items()},
        **dict(rows_of(arrays).c),
    }
    columns = job_columns(given)
    return insert(job).from_select(list(columns), select(*columns.values())).inline()


def rows_of(arrays: Mapping[str, TypeEngine[Any]], place: str | None = None) -> TableValuedAlias:
    """Return a table expression with a row for each job: the elements of array parameters, side by side.

    `arrays`: the parameters' names, with the types of their elements. If `place` names a column, that column numbers
    the rows.
    """
    parameters = [cast(bindparam(name, type_=Text()), ARRAY(kind)) for name, kind in arrays.items()]
    columns = (column(name, kind) for name, kind in arrays.items())
    return unnest(*parameters).table_valued(*columns, with_ordinality=place).render_derived()


def job_columns(given: Mapping[str, ColumnElement[Any]]) -> dict[str, ColumnElement[Any]]:
    """Return the columns of a new row of `job`, computed from the given parameters."""
    now = pg.clock_timestamp()
    state = case(
        (and_(given["run_at"].is_(None), given["delay"].is_(None)), literal_column("'ready'")),
        else_=literal_column("'scheduled'"),
    )
    columns: dict[str, ColumnElement[Any]] = {
        **{name: given[name] for name in ("id", "queue", "kind", "headers", "priority", "max_attempts")},
        "args": cast(given["args"], JSONB()),
        "state": state,
        "run_at": func.coalesce(given["run_at"], now + given["delay"], now),
    }
    if "every" in given:
        columns |= _flow_columns(given, state)
    return columns


def _flow_columns(given: Mapping[str, ColumnElement[Any]], state: ColumnElement[str]) -> dict[str, ColumnElement[Any]]:
    """Return the columns that a job with keys, a period (`every`) or an expiry needs, and its state and due time."""
    now = pg.clock_timestamp()
    # The next boundary on a clock that all producers share, so that each window has one run, after its last job.
    boundary = pg.date_bin(given["every"], now, literal_column("timestamptz 'epoch'")) + given["every"]
    return {
        **{name: given[name] for name in _OWN_KEYS},
        "state": case(
            (given["group_key"].is_not(None), literal_column("'grouped'")),
            (given["every"].is_not(None), literal_column("'scheduled'")),
            else_=state,
        ),
        "run_at": func.coalesce(boundary, given["run_at"], now + given["delay"], now),
        "expires_at": now + given["expires"],
    }


_INSERT_ALIKE = _insert(_OWN, _COMMON)
_INSERT_MIXED = _insert({**_OWN, **_COMMON}, {})
_FLOW_ALIKE = _insert({**_OWN, **_OWN_KEYS}, {**_COMMON, **_COMMON_FLOW})
# All columns that may differ from job to job.
ARRAYS: Mapping[str, TypeEngine[Any]] = {**_OWN, **_OWN_KEYS, **_COMMON, **_COMMON_FLOW}
_FLOW_MIXED = _insert(ARRAYS, {})


def _common_texts(envelope: JobEnvelope, *, flows: bool) -> dict[str, str | None]:
    """Return the values that all jobs of an envelope have in common, as text, by their names in `_COMMON`.

    With `flows` also those in `_COMMON_FLOW`: the period `every` and the expiry.
    """
    texts = {
        "queue": envelope.queue,
        "kind": envelope.kind,
        "headers": envelope.headers,
        "priority": str(envelope.priority),
        "max_attempts": None if envelope.max_attempts is None else str(envelope.max_attempts),
        "run_at": None if envelope.run_at is None else envelope.run_at.astimezone(UTC).isoformat(),
        "delay": interval_text(envelope.delay),
    }
    return (
        texts | {"every": interval_text(envelope.every), "expires": interval_text(envelope.expires)} if flows else texts
    )


def interval_text(given: timedelta | None) -> str | None:
    """Return a duration as the text of an SQL interval; None if `given` is None or zero."""
    # Never in days, because a day has 23 or 25 hours when the session's time zone changes its clocks.
    return f"{given // _MICROSECOND} microseconds" if given else None


def array_text(elements: Iterable[str]) -> str:
    """Return the text of a PostgreSQL array, from the texts of its elements, quoted already if they need it."""
    return "{" + ",".join(elements) + "}"


def _element(item: str | None) -> str:
    return "NULL" if item is None else f'"{_escape(item)}"'


def _quoted_array(items: Iterable[str]) -> str:
    # Joined by NUL and escaped at once. No item contains a NUL, because JSON escapes it.
    return '{"' + _escape("\0".join(items)).replace("\0", '","') + '"}'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
