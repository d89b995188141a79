"""Finished rows: the table `done_job`, in which jobs of kinds with `keep=` leave a row when they end.

The row is written in the transaction that ends the job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
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
from outboxq.statements.enqueue import text_array
from outboxq.statements.paging import matching
from outboxq.statements.render import named, quote_identifier, quote_literal, render
from outboxq.tables import done_job, job

OUTCOMES = ("done", "discarded", "cancelled", "expired")
SUMMARY_COLUMNS = ("id", "queue", "kind", "outcome", "attempt", "created_at", "claimed_at", "finished_at", "seconds")
DETAIL_COLUMNS = ("relay", "expires_at", "stands_for", "args", "headers", "result")


class FinishedColumns(NamedTuple):
    """The values of finished rows (of the table `done_job`) by columns; a relay makes them for `insert_finished`.

    A sequence has a value for each job, in the same order, or is empty. Times are in seconds since 1970.

    Attributes:
        queue, claimed_at: The queue and the time of the claim, a single value for all jobs.
        queues, claims_at: The queue and the time of the claim of each job, if the jobs belong to several claims.
        id, kind, attempt, created_at: Values of each job.
        outcome: One of `OUTCOMES` for each job.
        seconds: The handler's run time in seconds.
        args, headers, result: JSON text, for kinds that store them.
        stands_for: The ids of the jobs merged into the run, as the text of an array.
        keep_seconds: The time in seconds until the row expires.
    """

    queue: str
    claimed_at: float | None
    id: Sequence[UUID]
    kind: Sequence[str]
    outcome: Sequence[str]
    attempt: Sequence[int]
    created_at: Sequence[float]
    seconds: Sequence[float]
    args: Sequence[str | None]
    headers: Sequence[str | None]
    result: Sequence[str | None]
    stands_for: Sequence[str | None]
    keep_seconds: Sequence[float]
    queues: Sequence[str] = ()
    claims_at: Sequence[float | None] = ()


# The types of the arrays, in the order of `FinishedColumns`, and of the values before and after them.
_TYPES: Mapping[str, str] = {
    "id": "uuid",
    "kind": "text",
    "outcome": "text",
    "attempt": "int",
    "created_at": "float8",
    "seconds": "float8",
    "args": "jsonb",
    "headers": "jsonb",
    "result": "jsonb",
    "stands_for": "text",
    "keep_seconds": "float8",
    "queue_of_job": "text",
    "job_claimed_at": "float8",
}
_BEFORE, _AFTER = ("text", "float8"), "uuid"
_INSERT: LiteralString = """\
INSERT INTO {done} AS earlier (id, queue, kind, outcome, attempt, created_at,
  claimed_at, seconds, args, headers, result, stands_for,
  expires_at, relay)
SELECT finished.id, coalesce(queue_of_job, {queue}), kind, outcome, attempt, pg_catalog.to_timestamp(created_at),
  pg_catalog.to_timestamp(coalesce(job_claimed_at, {claimed_at}::float8)), seconds, args, headers, result,
  stands_for::uuid[],
  pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => keep_seconds), {relay}::uuid
FROM (SELECT {arrays}) AS finished"""
# Within IS TRUE, so that the planner makes no join of it: without statistics it would read all of `gone` for each row.
_OF_GONE: LiteralString = "\nWHERE (finished.id IN (SELECT gone.id FROM gone)) IS TRUE"
# This takes a fifth of the INSERT's time, so the prepared one omits it.
_GIVING_WAY: LiteralString = """
ON CONFLICT (id) DO UPDATE SET outcome = excluded.outcome, attempt = excluded.attempt,
  created_at = excluded.created_at, claimed_at = excluded.claimed_at, finished_at = excluded.finished_at,
  seconds = excluded.seconds, relay = excluded.relay, args = excluded.args, headers = excluded.headers,
  result = excluded.result, stands_for = excluded.stands_for, expires_at = excluded.expires_at
  WHERE earlier.queue = excluded.queue AND earlier.kind = excluded.kind"""


class PreparedInsert(NamedTuple):
    """The INSERT into `done_job`, the table of finished jobs, as a prepared statement: its name and its PREPARE."""

    name: str
    definition: str


def insert_finished(schema: str, finished: FinishedColumns, relay: UUID | None, *, gone: bool = False) -> str:
    """Return SQL that inserts finished rows; send it in the transaction that removes the jobs.

    If a row with the id of a job exists, because a producer chose the id twice, that row is overwritten if it has the
    same queue and kind; otherwise it stays. Index: the primary key. The insert waits for a transaction that is just
    deleting that row.

    Args:
        gone: True in a statement with a CTE `gone`: only jobs whose ids are in it get a row.
    """
    return _insert(schema, *_literals(finished, relay)) + (_OF_GONE if gone else "") + _GIVING_WAY


@cache
def prepared_insert(schema: str) -> PreparedInsert:
    """Return a prepared statement that inserts finished rows like `insert_finished`, with one plan for any jobs.

    It takes less time than `insert_finished`, but fails (23505) if a row with the id of one of the jobs exists.
    """
    types = [*_BEFORE, *(f"{type_name}[]" for type_name in _TYPES.values()), _AFTER]
    numbers = [f"${number}" for number in range(1, len(types) + 1)]
    return PreparedInsert(*named(_insert(schema, *numbers), ", ".join(types)))


def execute_insert(schema: str, finished: FinishedColumns, relay: UUID | None) -> str:
    """Return the EXECUTE statement that inserts the rows of finished jobs into the table `done_job`.

    Args:
        finished: The rows, by column.
        relay: The id of the relay that ran the jobs, for the rows; None if it is not known.
    """
    return f"EXECUTE {prepared_insert(schema).name} ({', '.join(_literals(finished, relay))})"


def _insert(schema: str, *values: str) -> str:
    queue, claimed_at, *arrays, relay = values
    columns = zip(_TYPES.items(), arrays, strict=True)
    return _INSERT.format(
        done=quote_identifier(schema, "done_job"),
        queue=queue,
        claimed_at=claimed_at,
        # An array that is shorter than the others, such as an empty one, is padded with NULL.
        arrays=", ".join(
            f"pg_catalog.unnest({array}::{type_name}[]) AS {name}" for (name, type_name), array in columns
        ),
        relay=relay,
    )


def _literals(finished: FinishedColumns, relay: UUID | None) -> list[str]:
    queue, claimed_at, *columns = finished
    arrays = [_array(type_name, column) for type_name, column in zip(_TYPES.values(), columns, strict=True)]
    before = quote_literal(queue), "NULL" if claimed_at is None else repr(claimed_at)
    return [*before, *arrays, "NULL" if relay is None else f"'{relay}'"]


def _array(type_name: str, column: Sequence[Any]) -> str:
    if type_name in ("text", "jsonb"):
        return quote_literal(text_array(column))
    # JSON writes numbers, ids and times as an array does, and null is read as NULL.
    return f"'{{{msgspec.json.encode(column)[1:-1].decode()}}}'"


_MAY_USE: LiteralString = """\
SELECT coalesce(pg_catalog.bool_and(pg_catalog.has_table_privilege(pg_catalog.to_regclass({name}), wanted)), false)
FROM pg_catalog.unnest({rights}::text[]) AS given (wanted)"""


def may_write(schema: str) -> str:
    """Select one row: true if the table `done_job` exists, and this role may write it. No locks."""
    return render(schema, _MAY_USE, name=quote_identifier(schema, "done_job"), rights=["SELECT", "INSERT", "UPDATE"])


def may_read(schema: str) -> TextClause:
    """Select one row: true if the table `done_job` exists, and this role may read it. No locks.

    With parameters, for any driver; `may_write` is text for psycopg.
    """
    return text(
        "SELECT coalesce("
        "pg_catalog.has_table_privilege(pg_catalog.to_regclass(CAST(:name AS text))::oid, 'SELECT'), false)"
    ).bindparams(name=quote_identifier(schema, "done_job"))


@dataclass(frozen=True, slots=True)
class DoneFilter:
    """A filter for finished rows; without any value, it matches all of them.

    `since`: only jobs that ended at that time or later.
    """

    queue: str | None = None
    kind: str | None = None
    outcome: str | None = None
    since: datetime | None = None

    def conditions(self, done: FromClause = done_job) -> list[ColumnElement[bool]]:
        """Return the filter as conditions on `done`: the table `done_job`, or a subquery of it."""
        found = matching(done, queue=self.queue, kind=self.kind, outcome=self.outcome)
        if self.since is not None:
            found.append(done.c.finished_at >= self.since)
        return found


def has_done_jobs(schema: str) -> TextClause:
    """Select one row: 1 if the table `done_job` exists, else 0; step 11 of the migrations makes it. No locks."""
    name = quote_identifier(schema, "done_job")
    return text("SELECT pg_catalog.count(pg_catalog.to_regclass(:name))").bindparams(name=name)


def select_done(wanted: DoneFilter, stretch: Sequence[ColumnElement[bool]], *, limit: int) -> Select[Any]:
    """Select the finished rows of one part of the table that match `wanted`, the latest job first. No locks.

    `stretch`: the part of the table, as conditions from `stretches`. Index: the primary key, backwards, up to the first
    `limit` that match. Ids are in the order of adding, by the producers' clocks.
    """
    return (
        select(*(done_job.c[name] for name in SUMMARY_COLUMNS))
        .where(*wanted.conditions(), *stretch)
        .order_by(done_job.c.id.desc())
        .limit(limit)
    )


def select_finished(job_id: UUID) -> Select[Any]:
    """Select one finished row with all its columns. Index: the primary key; no locks; one row."""
    return select(*(done_job.c[name] for name in (*SUMMARY_COLUMNS, *DETAIL_COLUMNS))).where(done_job.c.id == job_id)


def select_outcome(job_id: UUID) -> Select[Any]:
    """Select one word, the outcome of a job (one of `OUTCOMES`); no row if the job has no finished row.

    Index: the primary key; no locks.
    """
    return select(done_job.c.outcome).where(done_job.c.id == job_id)


def find_finished(job_id: UUID) -> Select[Any]:
    """Select id, kind, queue, outcome, attempt and result of a finished job, if `jobs.find_job` found nothing.

    Index: the primary key; no locks; one row.
    """
    columns = ("id", "kind", "queue", "outcome", "attempt", "result")
    return select(*(done_job.c[name] for name in columns)).where(done_job.c.id == job_id)


def add_again(job_id: UUID, new_id: UUID) -> ReturningInsert[Any]:
    """Return SQL that adds a new job with a finished one's kind, queue, arguments and headers.

    Headers of outboxq itself are left out. It returns the new id; no row if the finished row is gone. Index: the
    primary key of `done_job`. Waits for no lock: the id is new.
    """
    own = cast(array(sorted(OWN_HEADERS)), ARRAY(Text))
    stored = cast(done_job.c.headers, JSONB)
    # Headers that users' SQL omitted, or that are no object, count as none.
    headers = case(
        (pg.jsonb_typeof(stored) == literal_column("'object'::text"), stored.op("-")(own)),
        else_=literal_column("'{}'::jsonb"),
    )
    new = select(literal(new_id, done_job.c.id.type), done_job.c.queue, done_job.c.kind, done_job.c.args, headers)
    columns = ["id", "queue", "kind", "args", "headers"]
    added = insert(job).from_select(columns, new.where(done_job.c.id == job_id), include_defaults=False)
    return added.returning(job.c.id)


def finished_facts(schema: str, job_id: UUID) -> TextClause:
    """Select the facts of a finished job that `explain` shows. Index: the primary key; one row."""
    return text(
        "SELECT queue, kind, outcome, attempt, seconds, relay, pg_catalog.cardinality(stands_for) AS stands_for, "
        "extract(epoch FROM pg_catalog.statement_timestamp() - finished_at)::float8 AS finished_seconds "
        f"FROM {qualified(schema, 'done_job')} WHERE id = CAST(:job_id AS uuid)"
    ).bindparams(job_id=str(job_id))
