"""Finished jobs: writing their rows, in the transaction in which they are over, and reading them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, LiteralString, NamedTuple
from uuid import UUID

from sqlalchemy import ColumnElement, FromClause, Select, Text, TextClause, cast, insert, literal, select, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, array
from sqlalchemy.sql.dml import ReturningInsert

from outboxq.job import OWN_HEADERS
from outboxq.statements.doctor.sessions import qualified
from outboxq.statements.enqueue import array_text, text_array
from outboxq.statements.paging import matching
from outboxq.statements.render import quote_identifier, quote_literal, render
from outboxq.tables import done_job, job

OUTCOMES = ("done", "discarded", "cancelled", "expired")
SUMMARY_COLUMNS = ("id", "queue", "kind", "outcome", "attempt", "created_at", "claimed_at", "finished_at", "seconds")
DETAIL_COLUMNS = ("relay", "expires_at", "stands_for", "args", "headers", "result")


class KeptJob(NamedTuple):
    """The row of a job that is over.

    Attributes:
        seconds: How long its handler ran.
        args, headers, result: JSON text, of kinds that keep them.
        stands_for: The jobs that its run took along, as it was coalesced with them; None without any.
        keep_seconds: For how long the row stands.
    """

    id: UUID
    queue: str
    kind: str
    outcome: str
    attempt: int
    created_at: datetime
    claimed_at: datetime | None
    seconds: float
    args: str | None
    headers: str | None
    result: str | None
    stands_for: tuple[UUID, ...] | None
    keep_seconds: float


# The columns that a job gives values for: their types, and how a value is written.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "id": ("uuid", attrgetter("hex")),
    "queue": ("text", str),
    "kind": ("text", str),
    "outcome": ("text", str),
    "attempt": ("int", str),
    "created_at": ("timestamptz", datetime.isoformat),
    "claimed_at": ("timestamptz", datetime.isoformat),
    "seconds": ("float8", repr),
    "args": ("text", str),
    "headers": ("text", str),
    "result": ("text", str),
    "stands_for": ("text", lambda ids: array_text(map(str, ids))),
    "keep_seconds": ("float8", repr),
}
_INSERT: LiteralString = """\
INSERT INTO {done} AS earlier (id, queue, kind, outcome, attempt, created_at, claimed_at, seconds, relay, args, headers,
  result, stands_for, expires_at)
SELECT kept.id, {queue}, {kind}, {outcome}, {attempt}, {created_at}, {claimed_at}, {seconds}, {owner},
  {args}::jsonb, {headers}::jsonb, {result}::jsonb, {stands_for}::uuid[],
  pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => {keep_seconds})
FROM ROWS FROM ({arrays}) AS kept ({names})"""
# Behind what `keep_jobs` makes. It costs as much again as half of the rows, and so is left out until an id is there.
GIVING_WAY: LiteralString = """
ON CONFLICT (id) DO UPDATE SET outcome = excluded.outcome, attempt = excluded.attempt,
  created_at = excluded.created_at, claimed_at = excluded.claimed_at, finished_at = excluded.finished_at,
  seconds = excluded.seconds, relay = excluded.relay, args = excluded.args, headers = excluded.headers,
  result = excluded.result, stands_for = excluded.stands_for, expires_at = excluded.expires_at
  WHERE earlier.queue = excluded.queue AND earlier.kind = excluded.kind"""


def keep_jobs(schema: str, kept: Sequence[KeptJob], relay: UUID | None, *, gone: bool = False) -> str:
    """Write the rows of jobs that are over, in the transaction that removes them.

    Fails (23505) if a row of one of the ids is there: a producer chose the id twice. With `GIVING_WAY` behind it, that
    row gives way if it is of the same queue and kind, and stays if it is of others. No other transaction writes a row
    of these ids: it would have to remove the same job. Index: the primary key.

    Args:
        gone: As a part of a statement with a CTE `gone`: only the jobs whose ids that has.
    """
    values, arrays = {}, {}
    for (name, (type_name, write)), column in zip(_COLUMNS.items(), zip(*kept, strict=True), strict=True):
        first = column[0]
        # What the jobs have in common, as most of a claim's do, is sent once: an element costs as much as a job's rest.
        if name != "id" and column.count(first) == len(column):
            values[name] = _literal(None if first is None else write(first), type_name)
        else:
            values[name] = f"kept.{name}"
            arrays[name] = f"pg_catalog.unnest({_array(column, type_name, write)})"
    only: LiteralString = "\nJOIN gone ON gone.id = kept.id" if gone else ""
    return (_INSERT + only).format(
        done=quote_identifier(schema, "done_job"),
        owner=_literal(None if relay is None else relay.hex, "uuid"),
        arrays=", ".join(arrays.values()),
        names=", ".join(arrays),
        **values,
    )


def _literal(value: str | None, type_name: str) -> str:
    # Only texts may hold a quote or a backslash.
    quoted = "NULL" if value is None else quote_literal(value) if type_name == "text" else f"'{value}'"
    return f"{quoted}::{type_name}"


def _array(column: Sequence[Any], type_name: str, write: Callable[[Any], str]) -> str:
    texts = [None if value is None else write(value) for value in column]
    if type_name == "text":
        return f"{quote_literal(text_array(texts))}::text[]"
    return f"'{array_text('NULL' if each is None else each for each in texts)}'::{type_name}[]"


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
    added.
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
    headers = cast(done_job.c.headers, JSONB).op("-")(own)
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
