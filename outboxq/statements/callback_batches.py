"""Callback batches (`jobs.batch(...)`): jobs, called members, with a callback job that is added when all have ended.

Statements to open a batch, to find those that have ended, and to add their callbacks. A batch has ended when no row of
it is left in `job`: running members are visible to every other transaction, a retry is a row at each moment, and
members that a handler adds appear as that handler's job disappears. So no members are counted, and two members never
write the same row.
"""

from functools import lru_cache
from typing import Any, LiteralString
from uuid import UUID

from psycopg import sql
from sqlalchemy import (
    ColumnElement,
    Executable,
    FromClause,
    Insert,
    ScalarSelect,
    Table,
    Text,
    Uuid,
    bindparam,
    cast,
    insert,
    literal_column,
    select,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import JSONB

from outboxq.database.settings import OURS_SET
from outboxq.job import BATCH_FAILED_HEADER, BATCH_HEADER
from outboxq.statements.builtin import count
from outboxq.statements.by_index import BY_INDEX
from outboxq.statements.jobs import listed, state
from outboxq.statements.render import compose, render
from outboxq.statements.transaction import BEGIN, UNTIMED
from outboxq.tables import batch, dead_job, job

# While another relay adds a callback, its row is waited for: a moment, unless an operator's session holds it. Then the
# sweep adds it later.
SETTINGS = (
    *OURS_SET,
    "SET LOCAL lock_timeout = '5s'",
    UNTIMED,
    *BY_INDEX,
)

# The newest member first: the last one claimed usually ends last, and dead entries of earlier ones are not walked over.
# No SKIP LOCKED: a check that skipped the row may be the only one whose snapshot sees the end, if the check that holds
# the row rolls back.
_OVER: LiteralString = """\
over AS (
  DELETE FROM {batch} AS batch
  WHERE {wanted}
    AND (SELECT true FROM {job} AS member WHERE member.batch_id = batch.id ORDER BY member.seq DESC LIMIT 1) IS NULL
    AND NOT EXISTS (SELECT FROM {batch} AS nested WHERE nested.parent_id = batch.id)
  RETURNING batch.id, batch.parent_id, batch.callback
), added AS (
  INSERT INTO {job} (id, queue, kind, args, headers, priority, max_attempts, state, run_at, unique_key, group_key,
    batch_id, expires_at)
  SELECT over.id, stored.queue, stored.kind, coalesce(stored.args, '{{}}'::jsonb),
    pg_catalog.jsonb_concat(coalesce(stored.headers, '{{}}'::jsonb), pg_catalog.jsonb_build_object(
      {batch_header}::text, over.id::text,
      {failed_header}::text, (SELECT pg_catalog.count(*) FROM {dead} AS dead WHERE dead.batch_id = over.id)::text)),
    coalesce(stored.priority, '0'::smallint), stored.max_attempts,
    CASE WHEN stored."group" IS NOT NULL THEN 'grouped'
      WHEN stored.run_at IS NULL AND stored.delay_seconds IS NULL THEN 'ready' ELSE 'scheduled' END,
    coalesce(stored.run_at,
      pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => stored.delay_seconds),
      pg_catalog.clock_timestamp()),
    stored."coalesce", stored."group", over.parent_id,
    pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => stored.expires_seconds)
  FROM over CROSS JOIN LATERAL pg_catalog.jsonb_to_record(over.callback) AS stored (
    kind text, queue text, args jsonb, headers jsonb, priority smallint, max_attempts smallint, run_at timestamptz,
    delay_seconds double precision, expires_seconds double precision, "coalesce" text, "group" text)
  RETURNING id, queue, kind, headers
)"""
# Parsing and planning the whole statement takes as long as a small job. As a text in a block, it is parsed only if a
# callback batch seems to have ended; usually none has, and the condition probes one index. The statement checks again,
# with its own snapshot.
_LOOK: LiteralString = """\
DO $outboxq$
DECLARE
  oq_finished jsonb;
BEGIN
  IF {may_be_over} THEN
    EXECUTE $finish$
WITH """
_LOOK_END: LiteralString = """
SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(
  id, queue, kind, pg_catalog.jsonb_extract_path_text(headers, {failed_header}::text)::bigint)) FROM added
    $finish$ INTO oq_finished;
    PERFORM pg_catalog.set_config('outboxq.finished', coalesce(oq_finished::text, '[]'), true);
  END IF;
END
$outboxq$"""
_NONE_LEFT: LiteralString = "NOT EXISTS (SELECT FROM {job} WHERE batch_id = {id} ORDER BY seq DESC LIMIT 1)"


# Making the text costs more than the check, and a batch's members usually follow one another.
@lru_cache(64)
def finish_batches(schema: str, ids: frozenset[UUID]) -> tuple[str, ...]:
    """Return SQL that adds the callback jobs of those of these callback batches that have ended, and deletes them.

    Send it as a separate transaction after the COMMIT that ended members: before that COMMIT, two members that end at
    the same time would each still see the other. It returns one row, a JSON list with an item for each callback: its
    id, which is also the batch's id, its queue, its kind, and the number of dead letters in the batch. Index: for each
    batch job_batch, backwards, one probe; for those without members the primary key of `batch`, batch_parent and
    dead_job_batch. Locks: the rows of ended batches; waits for a check that holds one already.
    """
    # Always in one order: each check locks its batches in the order in which it finds them.
    in_order = sorted(ids)
    wanted = compose(schema, "batch.id = ANY ({ids}::uuid[])", ids=[str(each) for each in in_order])
    any_is_over = sql.SQL(" OR ").join(compose(schema, _NONE_LEFT, id=each) for each in in_order)
    look = _finish(schema, _LOOK + _OVER + _LOOK_END, wanted, may_be_over=any_is_over)
    return BEGIN, *SETTINGS, "SET LOCAL outboxq.finished = '[]'", look, "SHOW outboxq.finished", "COMMIT"


def sweep_batches(schema: str, after: UUID, limit: int) -> str:
    """Return SQL that adds the callbacks of ended batches that were missed, among the next `limit` ones after `after`.

    A batch is missed if its last member's relay died between COMMIT and `finish_batches`. It is also missed if its last
    members were removed by an operator, by a relay of an older version, or when they became dead letters because their
    relays had died. It returns one row: the number of batches checked, the id of the last of these as text, or NULL,
    and the number of batches that had ended. Index: the primary key of `batch` from `after` on; the others are those of
    `finish_batches`.
    """
    return _finish(
        schema,
        "WITH page AS MATERIALIZED ("
        "SELECT id FROM {batch} WHERE id > {after}::uuid ORDER BY id LIMIT {limit}), "
        + _OVER
        + " SELECT (SELECT pg_catalog.count(*) FROM page), "
        '(SELECT pg_catalog.max(id::text COLLATE "C") FROM page), '
        "(SELECT pg_catalog.count(*) FROM added)",
        sql.SQL("batch.id = ANY (ARRAY(SELECT id FROM page))"),
        after=str(after),
        limit=limit,
    )


def batch_page(schema: str, after: UUID, limit: int) -> str:
    """Select the ids, as text, of the next `limit` open batches after `after`, to check them one by one.

    The pruner does so if `sweep_batches` fails for them together. Index: the primary key; no locks.
    """
    return render(
        schema,
        "SELECT id::text FROM {batch} WHERE id > {after}::uuid ORDER BY id LIMIT {limit}",
        after=str(after),
        limit=limit,
    )


def _finish(schema: str, statement: LiteralString, wanted: sql.Composable, **values: object) -> str:
    return render(
        schema, statement, wanted=wanted, batch_header=BATCH_HEADER, failed_header=BATCH_FAILED_HEADER, **values
    )


def open_batch(batch_id: UUID, callback: str, parent_id: UUID | None) -> tuple[Insert, dict[str, object]]:
    """Return the INSERT of a new callback batch, with its callback as JSON.

    `parent_id`: the batch to which the callback job itself belongs, if any. Needs only the right INSERT.

    Returns:
        The statement and its parameters.
    """
    return _OPEN_BATCH, {"id": batch_id, "callback": callback, "parent_id": parent_id}


_OPEN_BATCH = insert(batch).values(
    id=bindparam("id", type_=Uuid()),
    callback=cast(bindparam("callback", type_=Text()), JSONB()),
    parent_id=bindparam("parent_id", type_=Uuid()),
)


# The most members of a callback batch that are counted.
MAX_MEMBERS = 10_000
SUMMARY_COLUMNS = ("id", "queue", "kind", "members", "failed", "parent_id", "created_at")


def select_batches(*, limit: int) -> Executable:
    """Select the oldest open callback batches: the callback's queue and kind, the numbers of members and dead letters.

    Index: the primary key of `batch`, whose ids are in the order of time; job_batch and dead_job_batch, up to
    `MAX_MEMBERS` entries of each for a batch. No locks.
    """
    return select(*_summary(batch)).order_by(batch.c.id).limit(limit)


def select_batch(batch_id: UUID) -> Executable:
    """Select one open callback batch: the columns of `select_batches`, and its callback as JSON.

    Index: the primary key; no locks.
    """
    return select(*_summary(batch), batch.c.callback).where(batch.c.id == batch_id)


def member_states(batch_id: UUID) -> Executable:
    """Count a callback batch's members by state (one of `jobs.STATES`), among up to `MAX_MEMBERS` of them.

    Index: job_batch, up to `MAX_MEMBERS` entries of it; no locks.
    """
    some = select(state.label("state")).where(listed.c.batch_id == batch_id).limit(MAX_MEMBERS).subquery("some")
    return select(some.c.state, count().label("jobs")).group_by(some.c.state).order_by(some.c.state)


def _summary(batches: FromClause) -> list[ColumnElement[Any]]:
    callback = type_coerce(batches.c.callback, JSONB())
    return [
        batches.c.id,
        callback["queue"].astext.label("queue"),
        callback["kind"].astext.label("kind"),
        _counted(job, batches).label("members"),
        _counted(dead_job, batches).label("failed"),
        batches.c.parent_id,
        batches.c.created_at,
    ]


def _counted(rows: Table, batches: FromClause) -> ScalarSelect[int]:
    some = (
        select(literal_column("1"))
        .select_from(rows)
        .where(rows.c.batch_id == batches.c.id)
        .limit(MAX_MEMBERS)
        .correlate(batches)
        .subquery(f"some_{rows.name}")
    )
    return select(count()).select_from(some).scalar_subquery()
