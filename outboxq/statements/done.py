"""Finished jobs: writing their rows, in the transaction in which they are over, and reading them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import attrgetter
from typing import Any, LiteralString, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import (
    ColumnElement,
    FromClause,
    Select,
    Text,
    TextClause,
    case,
    cast,
    insert,
    literal,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, array
from sqlalchemy.sql.dml import ReturningInsert

from outboxq.job import OWN_HEADERS
from outboxq.statements.builtin import pg
from outboxq.statements.doctor.sessions import qualified
from outboxq.statements.enqueue import array_text, text_array
from outboxq.statements.paging import matching
from outboxq.statements.render import named, quote_identifier, quote_literal, render
from outboxq.tables import done_job, job

OUTCOMES = ("done", "discarded", "cancelled", "expired")
SUMMARY_COLUMNS = ("id", "queue", "kind", "outcome", "attempt", "created_at", "claimed_at", "finished_at", "seconds")
DETAIL_COLUMNS = ("relay", "expires_at", "stands_for", "args", "headers", "result")


class KeptJobs(NamedTuple):
    """The rows of jobs that are over, by columns: each has a value for each job.

    Attributes:
        seconds: How long its handler ran.
        args, headers, result: JSON text, of kinds that keep them.
        stands_for: The jobs that its run took along, as it was coalesced with them; None without any.
        keep_seconds: For how long the row stands.
    """

    id: Sequence[UUID]
    queue: Sequence[str]
    kind: Sequence[str]
    outcome: Sequence[str]
    attempt: Sequence[int]
    created_at: Sequence[datetime]
    claimed_at: Sequence[datetime | None]
    seconds: Sequence[float]
    args: Sequence[str | None]
    headers: Sequence[str | None]
    result: Sequence[str | None]
    stands_for: Sequence[tuple[UUID, ...] | None]
    keep_seconds: Sequence[float]


class _Column(NamedTuple):
    """A column of the rows: the type in which its values are sent, how one is written, and what is stored of it."""

    type_name: str
    write: Callable[[Any], str]
    stored: LiteralString = "{}"


# In the order of `KeptJobs`, whose last column is what `expires_at` is made of.
_COLUMNS: dict[str, _Column] = {
    "id": _Column("uuid", attrgetter("hex")),
    "queue": _Column("text", str),
    "kind": _Column("text", str),
    "outcome": _Column("text", str),
    "attempt": _Column("int", str),
    "created_at": _Column("timestamptz", datetime.isoformat),
    "claimed_at": _Column("timestamptz", datetime.isoformat),
    "seconds": _Column("float8", repr),
    "args": _Column("text", str, "{}::jsonb"),
    "headers": _Column("text", str, "{}::jsonb"),
    "result": _Column("text", str, "{}::jsonb"),
    "stands_for": _Column("text", lambda ids: array_text(map(str, ids)), "{}::uuid[]"),
    "expires_at": _Column("float8", repr, "pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => {})"),
    "relay": _Column("uuid", attrgetter("hex")),
}


class _Numbers(NamedTuple):
    """A column in which jobs mostly differ, and of which no value is missing: how it is sent faster than as texts.

    Attributes:
        type_name: The type in which the values are sent.
        written: What of them is written as JSON, which is quick, and which arrays of this type have in common.
        stored: What is stored of one.
    """

    type_name: str
    written: Callable[[Sequence[Any]], Sequence[object]]
    stored: LiteralString = "{}"


_EPOCH, _MICROSECOND = datetime(2000, 1, 1, tzinfo=UTC), timedelta(microseconds=1)
# As texts, times and seconds cost the server as much as all the rest of a row that is sent.
_NUMBERS: dict[str, _Numbers] = {
    "id": _Numbers("uuid", lambda ids: ids),
    "created_at": _Numbers(
        "int8",
        lambda times: [(at - _EPOCH) // _MICROSECOND for at in times],
        "timestamptz '2000-01-01 00:00:00+00' + {}::float8 * interval '1 microsecond'",
    ),
    "seconds": _Numbers("int8", lambda column: [int(each * 1e6) for each in column], "{}::float8 / '1000000'::float8"),
}
_INSERT: LiteralString = """\
INSERT INTO {done} AS earlier ({columns})
SELECT {stored} FROM (SELECT {arrays}) AS kept"""
# Two more parameters of the prepared statement: the patience of the transaction, and what sets one of its own. They are
# evaluated before the statement takes a lock. The part behind UNION ALL has no row: the executor comes to it once the
# rows of the first are stored, and has then set the patience back.
_BRIEFLY: LiteralString = (
    "pg_catalog.current_setting('lock_timeout'), pg_catalog.set_config('lock_timeout', '1s', true)"
)
_AS_LONG_AS_BEFORE: LiteralString = """
UNION ALL SELECT {nothing} WHERE pg_catalog.set_config('lock_timeout', {patience}, true) IS NULL"""
_OF_GONE: LiteralString = "\nJOIN gone ON gone.id = kept.id"
# Behind what `keep_jobs` makes. It costs as much again as half of the rows, and so is left out until an id is there.
GIVING_WAY: LiteralString = """
ON CONFLICT (id) DO UPDATE SET outcome = excluded.outcome, attempt = excluded.attempt,
  created_at = excluded.created_at, claimed_at = excluded.claimed_at, finished_at = excluded.finished_at,
  seconds = excluded.seconds, relay = excluded.relay, args = excluded.args, headers = excluded.headers,
  result = excluded.result, stands_for = excluded.stands_for, expires_at = excluded.expires_at
  WHERE earlier.queue = excluded.queue AND earlier.kind = excluded.kind"""


def keep_jobs(schema: str, kept: KeptJobs, relay: UUID | None, *, gone: bool = False) -> str:
    """Write the rows of jobs that are over, in the transaction that removes them.

    Fails (23505) if a row of one of the ids is there: a producer chose the id twice. With `GIVING_WAY` behind it, that
    row gives way if it is of the same queue and kind, and stays if it is of others. No other transaction writes a row
    of these ids: it would have to remove the same job. Index: the primary key.

    Args:
        gone: As a part of a statement with a CTE `gone`: only the jobs whose ids that has.
    """
    return rows_of_done(schema, kept, relay).text(gone=gone)


@dataclass(frozen=True, slots=True)
class DoneRows:
    """Rows of finished jobs, to be written by the statement of `keep_jobs`.

    Attributes:
        own: Literals of arrays, by the columns in which the jobs differ.
        common: Literals, by the columns in which they are alike.
    """

    schema: str
    own: Mapping[str, str]
    common: Mapping[str, str]

    def text(self, *, gone: bool = False) -> str:
        """The statement with its values."""
        own = {name: f"{array}::{_array_type(name)}" for name, array in self.own.items()}
        common = {name: f"{value}::{_COLUMNS[name].type_name}" for name, value in self.common.items()}
        return _insert(self.schema, own, common) + (_OF_GONE if gone else "")

    def prepared(self) -> "PreparedRows":
        """The same as a prepared statement, which waits for each lock for a second and no longer."""
        return _prepared(self.schema, tuple(self.own), tuple(self.common))

    def execution(self) -> str:
        """What executes the prepared statement with these values."""
        return f"EXECUTE {self.prepared().name}({', '.join((*self.own.values(), *self.common.values(), _BRIEFLY))})"


class PreparedRows(NamedTuple):
    """A prepared `keep_jobs`: its name on a connection, and its PREPARE statement."""

    name: str
    definition: str


def rows_of_done(schema: str, kept: KeptJobs, relay: UUID | None) -> DoneRows:
    """The rows of jobs that are over, which `relay` has run."""
    columns = dict(zip(_COLUMNS, kept, strict=False))
    # What the jobs have in common, as most of a claim's do, is sent once, and nothing where they have nothing.
    own = {name: column for name, column in columns.items() if name == "id" or not _is_uniform(column)}
    common = {name: column[0] for name, column in columns.items() if name not in own} | {"relay": relay}
    return DoneRows(
        schema,
        {name: _array(name, column) for name, column in own.items()},
        {name: _literal(name, value) for name, value in common.items() if value is not None},
    )


def _is_uniform(column: Sequence[object]) -> bool:
    # Where values differ, the last one mostly shows it at once.
    return column[0] == column[-1] and column.count(column[0]) == len(column)


# One for each set of columns in which jobs differ.
@lru_cache(64)
def _prepared(schema: str, own: tuple[str, ...], common: tuple[str, ...]) -> PreparedRows:
    numbered = {name: f"${number}" for number, name in enumerate(own + common, 1)}
    arrays, values = ({name: numbered[name] for name in names} for names in (own, common))
    types = [_array_type(name) for name in own] + [_COLUMNS[name].type_name for name in common]
    nothing = ", ".join(["NULL"] * len(numbered))
    patience = _AS_LONG_AS_BEFORE.format(nothing=nothing, patience=f"${len(numbered) + 1}")
    return PreparedRows(*named(_insert(schema, arrays, values) + patience, ", ".join([*types, "text", "text"])))


def _insert(schema: str, own: Mapping[str, str], common: Mapping[str, str]) -> str:
    stored = {name: (_NUMBERS.get(name) or _COLUMNS[name]).stored.format(f"kept.{name}") for name in own}
    stored |= {name: _once(_COLUMNS[name].stored, value) for name, value in common.items()}
    return _INSERT.format(
        done=quote_identifier(schema, "done_job"),
        columns=", ".join(stored),
        stored=", ".join(stored.values()),
        arrays=", ".join(f"pg_catalog.unnest({array}) AS {name}" for name, array in own.items()),
    )


def _once(stored: LiteralString, value: str) -> str:
    # In a SELECT of its own what the rows have in common is computed once.
    return value if stored == "{}" else f"(SELECT {stored.format(value)})"


def _literal(name: str, value: object) -> str:
    type_name, write, _ = _COLUMNS[name]
    # Only texts may hold a quote or a backslash.
    return quote_literal(write(value)) if type_name == "text" else f"'{write(value)}'"


def _array_type(name: str) -> str:
    return f"{(_NUMBERS.get(name) or _COLUMNS[name]).type_name}[]"


def _array(name: str, column: Sequence[Any]) -> str:
    if (numbers := _NUMBERS.get(name)) is not None:
        return f"'{{{msgspec.json.encode(numbers.written(column))[1:-1].decode()}}}'"
    type_name, write, _ = _COLUMNS[name]
    texts = [None if value is None else write(value) for value in column]
    if type_name == "text":
        return quote_literal(text_array(texts))
    return f"'{array_text([text or 'NULL' for text in texts])}'"


_MAY_USE: LiteralString = """\
SELECT coalesce(pg_catalog.bool_and(pg_catalog.has_table_privilege(pg_catalog.to_regclass({name}), wanted)), false)
FROM pg_catalog.unnest({rights}::text[]) AS given (wanted)"""


def may_write(schema: str) -> str:
    """Whether the table `done_job` is there, and this role may write it; one row. No locks."""
    return render(schema, _MAY_USE, name=quote_identifier(schema, "done_job"), rights=["SELECT", "INSERT", "UPDATE"])


def may_read(schema: str) -> TextClause:
    """Whether the table `done_job` is there, and this role may read it; one row. For any driver. No locks."""
    return text(
        "SELECT coalesce("
        "pg_catalog.has_table_privilege(pg_catalog.to_regclass(CAST(:name AS text))::oid, 'SELECT'), false)"
    ).bindparams(name=quote_identifier(schema, "done_job"))


@dataclass(frozen=True, slots=True)
class DoneFilter:
    """Which finished jobs are meant; without any value, all of them. `since`: those that ended then or later."""

    queue: str | None = None
    kind: str | None = None
    outcome: str | None = None
    since: datetime | None = None

    def conditions(self, done: FromClause = done_job) -> list[ColumnElement[bool]]:
        """The filter as conditions on the table `done_job`, or a part of it."""
        found = matching(done, queue=self.queue, kind=self.kind, outcome=self.outcome)
        if self.since is not None:
            found.append(done.c.finished_at >= self.since)
        return found


def has_done_jobs(schema: str) -> TextClause:
    """1 if the table `done_job` is there, and else 0; step 11 of the migrations makes it. No locks."""
    name = quote_identifier(schema, "done_job")
    return text("SELECT pg_catalog.count(pg_catalog.to_regclass(:name))").bindparams(name=name)


def select_done(wanted: DoneFilter, stretch: Sequence[ColumnElement[bool]], *, limit: int) -> Select[Any]:
    """The finished jobs of a stretch that match, the latest first. No locks.

    Index: the primary key, backwards, up to the first `limit` that match. Ids are in the order in which jobs were
    added, by the clocks of those who added them.
    """
    return (
        select(*(done_job.c[name] for name in SUMMARY_COLUMNS))
        .where(*wanted.conditions(), *stretch)
        .order_by(done_job.c.id.desc())
        .limit(limit)
    )


def select_finished(job_id: UUID) -> Select[Any]:
    """One finished job with everything that is stored of it. Index: the primary key; no locks; one row."""
    return select(*(done_job.c[name] for name in (*SUMMARY_COLUMNS, *DETAIL_COLUMNS))).where(done_job.c.id == job_id)


def select_outcome(job_id: UUID) -> Select[Any]:
    """How a job ended, if that is kept. Index: the primary key; no locks; one row."""
    return select(done_job.c.outcome).where(done_job.c.id == job_id)


def find_finished(job_id: UUID) -> Select[Any]:
    """A finished job as `find_job` reports it. Index: the primary key; no locks; one row."""
    columns = ("id", "kind", "queue", "outcome", "attempt", "result")
    return select(*(done_job.c[name] for name in columns)).where(done_job.c.id == job_id)


def add_again(job_id: UUID, new_id: UUID) -> ReturningInsert[Any]:
    """Add a job with the kind, the queue, the arguments and the headers of a finished one, but for our own headers.

    Returns the new id; no row if the finished job is gone.
    Index: the primary key of `done_job`. No lock is waited for: the id is new.
    """
    own = cast(array(sorted(OWN_HEADERS)), ARRAY(Text))
    stored = cast(done_job.c.headers, JSONB)
    # Headers that SQL of users has left out, or made something else than an object, are none.
    headers = case(
        (pg.jsonb_typeof(stored) == literal_column("'object'::text"), stored.op("-")(own)),
        else_=literal_column("'{}'::jsonb"),
    )
    new = select(literal(new_id, done_job.c.id.type), done_job.c.queue, done_job.c.kind, done_job.c.args, headers)
    columns = ["id", "queue", "kind", "args", "headers"]
    added = insert(job).from_select(columns, new.where(done_job.c.id == job_id), include_defaults=False)
    return added.returning(job.c.id)


def finished_facts(schema: str, job_id: UUID) -> TextClause:
    """A finished job, for an explanation. Index: the primary key; one row."""
    return text(
        "SELECT queue, kind, outcome, attempt, seconds, relay, pg_catalog.cardinality(stands_for) AS stands_for, "
        "extract(epoch FROM pg_catalog.statement_timestamp() - finished_at)::float8 AS finished_seconds "
        f"FROM {qualified(schema, 'done_job')} WHERE id = CAST(:job_id AS uuid)"
    ).bindparams(job_id=str(job_id))
