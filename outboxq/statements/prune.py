"""Pruning: delete expired messages, effects, finished rows and dead letters, a bounded number at a time.

Each function returns the SQL of a deletion, sent as text on the pruner's own connection as one transaction: `BEGIN`,
the deletion, COMMIT. If the process dies, or the answer to COMMIT is lost, the next round deletes what is left.
"""

from typing import LiteralString

from psycopg import sql

from outboxq.statements.by_index import NO_SCANS
from outboxq.statements.cancel import COUNTS
from outboxq.statements.render import fill, render

# synchronous_commit: a deletion need not wait for the disk or a standby; if a crash undoes it, it is made again.
# lock_timeout: the statement never waits for rows, but a migration may lock the table. enable_*: instead of probing a
# thousand keys, the planner would read a whole table of 100,000 rows, every time.
BEGIN = f"""\
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL synchronous_commit = off; SET LOCAL lock_timeout = '1s'; \
{NO_SCANS}; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"""

# MATERIALIZED: a bare `IN (SELECT ... LIMIT ...)` may be planned as a join whose limited side runs again for each row
# of the other, and then takes more than the limit. Every condition for deletion is inside, and is checked again on the
# newest version of a row that has just changed. statement_timestamp(), unlike clock_timestamp(), is stable and can
# bound the index.
_DELETE = """\
WITH expired AS MATERIALIZED (
  SELECT {key} FROM {table}
  WHERE expires_at < pg_catalog.statement_timestamp(){unless}
  ORDER BY expires_at
  LIMIT {limit} OFFSET {skip}
  FOR UPDATE SKIP LOCKED
), deleted AS (
  DELETE FROM {table} AS gone USING expired WHERE {same} RETURNING 1
)
SELECT pg_catalog.count(*) FROM deleted"""


def delete_messages(schema: str, limit: int, skip: int = 0) -> str:
    """Return SQL that deletes up to `limit` expired messages, except the oldest `skip`.

    It returns one row, the number of deleted rows. Index: inbox_expires, from its start; the primary key. Locks: the
    rows, skipping those that another transaction holds. A session that accepts a message which is being deleted waits
    for this transaction, and accepts it again.
    """
    return _delete(schema, "inbox", ("consumer", "message_id"), limit, skip)


def delete_effects(schema: str, limit: int, skip: int = 0) -> str:
    """Return SQL that deletes up to `limit` expired effects, except the oldest `skip`.

    It returns one row, the number of deleted rows. An effect whose status is `started` or `unknown` stays. Index:
    effect_expires, from its start; the primary key. Locks: the rows, skipping those that another transaction holds: it
    may be claiming the effect again.
    """
    # The table's own check allows no expiry in these states; tested here nevertheless.
    return _delete(schema, "effect", ("scope", "key"), limit, skip, " AND status NOT IN ('started', 'unknown')")


def delete_finished(schema: str, limit: int, skip: int = 0) -> str:
    """Return SQL that deletes up to `limit` expired finished rows, except the oldest `skip`.

    It returns one row, the number of deleted ones. Index: done_job_expires, from its start; the primary key. Locks: the
    rows, skipping those that another transaction holds: one that overwrites the row for a job of the same id.
    """
    return _delete(schema, "done_job", ("id",), limit, skip)


_DELETE_REQUESTS: LiteralString = f"""\
WITH old AS MATERIALIZED (
  SELECT request.job_id FROM {{cancel_request}} AS request
  WHERE request.requested_at < pg_catalog.statement_timestamp() - interval '1 hour'
    AND NOT EXISTS (SELECT FROM {{job}} AS job WHERE {COUNTS})
  ORDER BY request.requested_at
  LIMIT {{limit}} OFFSET {{skip}}
  FOR UPDATE OF request SKIP LOCKED
), deleted AS (
  DELETE FROM {{cancel_request}} AS gone USING old WHERE gone.job_id = old.job_id RETURNING 1
)
SELECT pg_catalog.count(*) FROM deleted"""


def delete_requests(schema: str, limit: int, skip: int = 0) -> str:
    """Return SQL that deletes up to `limit` cancellation requests older than an hour whose jobs are gone.

    It returns one row, the number of deleted requests. While its job exists, a request stays, because the job may come
    back from a retry or a crash. A later job of the same id does not count. Reads all requests, of which there are few;
    index: the primary key of `job`. Locks: the rows, skipping those that others hold.
    """
    return render(schema, _DELETE_REQUESTS, limit=limit, skip=skip)


_DELETE_PROGRESS: LiteralString = """\
WITH old AS MATERIALIZED (
  SELECT noted.job_id FROM {progress} AS noted
  WHERE noted.noted_at < pg_catalog.statement_timestamp() - interval '1 minute'
    AND NOT EXISTS (SELECT FROM {job} AS job WHERE job.id = noted.job_id)
  ORDER BY noted.noted_at
  LIMIT {limit} OFFSET {skip}
  FOR UPDATE OF noted SKIP LOCKED
), deleted AS (
  DELETE FROM {progress} AS gone USING old WHERE gone.job_id = old.job_id RETURNING 1
)
SELECT pg_catalog.count(*) FROM deleted"""


def delete_progress(schema: str, limit: int, skip: int = 0) -> str:
    """Return SQL that deletes up to `limit` progress notes of jobs that are gone: one row, the number of deleted notes.

    Relays delete their own notes, so these belong to killed relays. Reads all notes, of which there are few; index: the
    primary key of `job`. Locks: the rows, skipping those that others hold.
    """
    return render(schema, _DELETE_PROGRESS, limit=limit, skip=skip)


# As JSON, because tables before step 11 have no such column.
_KEEP: LiteralString = "pg_catalog.to_jsonb(settings) ->> 'keep_dead_seconds'::text"
_SELECT_KEPT: LiteralString = """\
SELECT kept.name, kept.keep FROM (SELECT name, {keep} AS keep FROM {queue_table} AS settings) AS kept
WHERE kept.keep IS NOT NULL ORDER BY kept.name"""
# The statement itself reads the operators' setting, so that no deletion follows after the setting is undone.
_DELETE_DEAD: LiteralString = """\
WITH kept AS MATERIALIZED (
  SELECT coalesce((SELECT ({keep})::float8 FROM {queue_table} AS settings WHERE settings.name = {queue}), {declared})
    AS seconds
), expired AS MATERIALIZED (
  SELECT letter.id FROM {dead} AS letter
  WHERE letter.queue = {queue}
    AND letter.died_at < pg_catalog.statement_timestamp() - pg_catalog.make_interval(
      secs => (SELECT seconds FROM kept WHERE seconds > 0::float8))
  ORDER BY letter.died_at
  LIMIT {limit} OFFSET {skip}
  FOR UPDATE OF letter SKIP LOCKED
), deleted AS (
  DELETE FROM {dead} AS gone USING expired WHERE gone.id = expired.id RETURNING 1
)
SELECT pg_catalog.count(*) FROM deleted"""


def select_kept(schema: str) -> str:
    """Select the queues for which operators have set how long dead letters are kept, with the seconds (0: for ever).

    Reads the small table `queue`; no locks.
    """
    return render(schema, _SELECT_KEPT, keep=sql.SQL(_KEEP))


def delete_dead(schema: str, queue: str, declared: float | None, limit: int, skip: int = 0) -> str:
    """Return SQL that deletes up to `limit` expired dead letters of a queue, except the oldest `skip`.

    It returns one row, the number of deleted dead letters. Index: dead_job_queue (queue, died_at), from the queue's
    oldest; the primary key. Locks: the rows, skipping those that another transaction holds. A job that has just died
    again is not deleted, because its time starts again.

    Args:
        declared: The seconds for which the application keeps dead letters, if operators have set none; None for ever.
    """
    seconds = sql.SQL("NULL::float8") if declared is None else sql.SQL("{}::float8").format(float(declared))
    return render(schema, _DELETE_DEAD, keep=sql.SQL(_KEEP), queue=queue, declared=seconds, limit=limit, skip=skip)


def _delete(
    schema: str, table: str, key: tuple[LiteralString, ...], limit: int, skip: int, unless: LiteralString = ""
) -> str:
    return fill(
        _DELETE,
        table=sql.Identifier(schema, table),
        key=sql.SQL(", ").join(map(sql.SQL, key)),
        same=sql.SQL(" AND ").join(sql.SQL(f"gone.{name} = expired.{name}") for name in key),
        limit=limit,
        skip=skip,
        unless=sql.SQL(unless),
    )
