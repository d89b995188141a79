"""Reindexing: finds the indexes of `job` that are far larger than their rows need, and rebuilds them while relays work.

Sent as text on the reindexer's own connection, outside a transaction, because REINDEX CONCURRENTLY cannot run inside
one. The queries read only catalogs and shared memory, and wait for no lock.
"""

from psycopg import sql

from outboxq.statements.render import fill, quote_identifier, render

# Vacuum counts the entries of a partial index when it cleans it. The number added since can only be estimated from
# above.
_WASTED = """\
SELECT index_class.relname, bytes::text
FROM pg_catalog.pg_index AS entry JOIN pg_catalog.pg_class AS index_class ON index_class.oid = entry.indexrelid
  CROSS JOIN LATERAL (SELECT pg_catalog.pg_relation_size(entry.indexrelid) AS bytes) AS file
  JOIN pg_catalog.pg_stat_all_tables AS counts ON counts.relid = entry.indrelid
WHERE entry.indrelid = pg_catalog.to_regclass({job})::oid AND entry.indisvalid AND index_class.reltuples >= 0::real
  AND index_class.relname::text ~ '^job_(pkey|ready|scheduled|leased|suspect)$'
  AND bytes > {min_bytes}
  AND bytes::float8 > {bytes_per_entry}::float8
    * (index_class.reltuples::float8 + (counts.n_ins_since_vacuum + counts.n_dead_tup)::float8)
ORDER BY bytes DESC"""

# First: another REINDEX, a migration or a vacuum works on the table, and only one of them may. Then: transactions for
# which REINDEX CONCURRENTLY would wait. The age of other roles' transactions may be hidden; lock_timeout bounds the
# wait for these.
_OBSTACLE = """\
SELECT CASE
  WHEN EXISTS (
    SELECT FROM pg_catalog.pg_locks WHERE locktype = 'relation' AND relation = pg_catalog.to_regclass({job})::oid
      AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
      AND mode IN ('ShareUpdateExclusiveLock', 'ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
        'AccessExclusiveLock')
  ) THEN 'another session works on the table'
  WHEN EXISTS (
    SELECT FROM pg_catalog.pg_stat_activity
    WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid()
      AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
      AND pid NOT IN (SELECT pid FROM pg_catalog.pg_stat_progress_vacuum)
      AND xact_start < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => {old_seconds})
  ) THEN 'a transaction is old'
  WHEN EXISTS (
    SELECT FROM pg_catalog.pg_prepared_xacts
    WHERE database = pg_catalog.current_database()
      AND prepared < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => {old_seconds})
  ) THEN 'a prepared transaction is old'
END"""

_LEFT_OVER = """\
SELECT index_class.relname
FROM pg_catalog.pg_index AS entry JOIN pg_catalog.pg_class AS index_class ON index_class.oid = entry.indexrelid
WHERE entry.indrelid = pg_catalog.to_regclass({job})::oid AND NOT entry.indisvalid
  AND index_class.relname::text ~ '^job_(pkey|ready|scheduled|leased|suspect)_cc(new|old)[0-9]*$'
ORDER BY 1"""


def settings() -> str:
    """Return SQL that bounds each statement of this session: 5 s for a wait for a lock, 60 s in all."""
    # SET, because the session is never a pooler's. lock_timeout: REINDEX CONCURRENTLY waits for each transaction that
    # uses the table. Claims and producers do not wait for it, but vacuum cannot visit the table until then.
    return (
        "SET lock_timeout = '5s'; SET statement_timeout = '60s'; SET idle_session_timeout = 0; "
        "SET default_transaction_read_only = off; SET search_path = pg_catalog"
    )


def backend_pid() -> str:
    """Select one row: the pid of the backend that answers.

    If it differs from the pid received at connect, a pooler is in between, which may run statements in another session.
    """
    return "SELECT pg_catalog.pg_backend_pid()::text"


def owns_jobs(schema: str) -> str:
    """Select one row: `true` if this role may rebuild the indexes of `job` and drop invalid ones, else `false`.

    The right MAINTAIN is not enough: it does not allow dropping an index.
    """
    return fill(
        "SELECT coalesce(pg_catalog.bool_or(pg_catalog.pg_has_role(relowner, 'USAGE')), false)::text "
        "FROM pg_catalog.pg_class WHERE oid = pg_catalog.to_regclass({job})::oid",
        job=quote_identifier(schema, "job"),
    )


def try_lock_reindexing(schema: str) -> str:
    """Select one row: `true` if this session is now the only one that reindexes this installation.

    Then the session holds an advisory lock until it ends. Never waits.
    """
    return fill(
        "SELECT pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext('outboxq upkeep'), "
        "pg_catalog.hashtext({schema}))::text",
        schema=schema,
    )


def wasted_indexes(schema: str, min_bytes: int, bytes_per_entry: int) -> str:
    """Select the indexes of `job` that seem larger than both limits: name and file size in bytes, the largest first.

    The limits are `min_bytes`, and `bytes_per_entry` for each row of `job`. The number of rows is vacuum's count, which
    a server crash discards: confirm the result by `count_jobs`.
    """
    return fill(_WASTED, job=quote_identifier(schema, "job"), min_bytes=min_bytes, bytes_per_entry=bytes_per_entry)


def count_jobs(schema: str, limit: int) -> str:
    """Select one row: the number of jobs, up to `limit`.

    No index: reads the table until it has found so many.
    """
    counted = "SELECT pg_catalog.count(*)::text FROM (SELECT FROM {job} LIMIT {limit}) AS found"
    return render(schema, counted, limit=limit)


def obstacle(schema: str, old_seconds: float) -> str:
    """Select one row: the reason, as text, why a REINDEX would have to wait, or NULL if it need not.

    A transaction counts as a reason if it is older than `old_seconds`.
    """
    return fill(_OBSTACLE, job=quote_identifier(schema, "job"), old_seconds=old_seconds)


def left_over_indexes(schema: str) -> str:
    """Select the names of the invalid indexes that a cancelled REINDEX CONCURRENTLY of an index of outboxq has left."""
    return fill(_LEFT_OVER, job=quote_identifier(schema, "job"))


def index_bytes(schema: str, index: str) -> str:
    """Select one row: the size of the index's file in bytes."""
    size = "SELECT pg_catalog.pg_relation_size(pg_catalog.to_regclass({index}))::text"
    return fill(size, index=quote_identifier(schema, index))


def reindex(schema: str, index: str) -> str:
    """Return the REINDEX CONCURRENTLY statement of an index, which rebuilds it from the live rows.

    It reads the whole table. Locks: SHARE UPDATE EXCLUSIVE, for which neither claims nor producers wait. Waits for the
    transactions that use the table, and for older snapshots.
    """
    return fill("REINDEX INDEX CONCURRENTLY {index}", index=sql.Identifier(schema, index))


def drop_index(schema: str, index: str) -> str:
    """Return SQL that drops an invalid index, left by a cancelled REINDEX.

    Locks: SHARE UPDATE EXCLUSIVE; waits for transactions that use the table.
    """
    return fill("DROP INDEX CONCURRENTLY IF EXISTS {index}", index=sql.Identifier(schema, index))
