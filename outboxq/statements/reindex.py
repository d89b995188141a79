"""Reindexing: find the bloated indexes of `job`, and rebuild them while relays go on working.

Sent as text on the reindexer's own connection, outside of a transaction: REINDEX CONCURRENTLY cannot run inside of one.
The queries read catalogs and shared memory only, and wait for no lock.
"""

from psycopg import sql

from outboxq.statements.render import fill, quote_identifier, render

# Vacuum counts the entries of a partial index when it cleans it. The number added since can only be bounded.
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

# First: another REINDEX, a migration or a vacuum works on the table: only one of them may. Then: transactions that
# REINDEX CONCURRENTLY would wait for. The age of other roles' transactions may be hidden; lock_timeout bounds the wait
# for these.
_OBSTACLE = """\
SELECT CASE
  WHEN EXISTS (
    SELECT FROM pg_catalog.pg_locks WHERE locktype = 'relation' AND relation = pg_catalog.to_regclass({job})::oid
      AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
      AND mode IN ('ShareUpdateExclusiveLock', 'ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
        'AccessExclusiveLock')
  ) THEN 'somebody else works on the table'
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
    """Limit every statement of this session: 5 s for a lock, 60 s in all."""
    # SET, as the session is ours alone, never a pooler's. lock_timeout: REINDEX CONCURRENTLY waits for each transaction
    # that uses the table. Claims and producers do not wait for it, but until then vacuum cannot visit the table.
    return (
        "SET lock_timeout = '5s'; SET statement_timeout = '60s'; SET idle_session_timeout = 0; "
        "SET default_transaction_read_only = off; SET search_path = pg_catalog"
    )


def backend_pid() -> str:
    """One row: the pid of the backend that answers; behind a pooler not the one that the client received at connect."""
    return "SELECT pg_catalog.pg_backend_pid()::text"


def owns_jobs(schema: str) -> str:
    """One row: `true` if this role may rebuild the indexes of `job` and drop left-over ones, else `false`.

    MAINTAIN is not enough: it does not allow dropping an index.
    """
    return fill(
        "SELECT coalesce(pg_catalog.bool_or(pg_catalog.pg_has_role(relowner, 'USAGE')), false)::text "
        "FROM pg_catalog.pg_class WHERE oid = pg_catalog.to_regclass({job})::oid",
        job=quote_identifier(schema, "job"),
    )


def try_lock_reindexing(schema: str) -> str:
    """One row: `true` if this session is now the only one that reindexes this installation, until it ends."""
    return fill(
        "SELECT pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext('outboxq upkeep'), "
        "pg_catalog.hashtext({schema}))::text",
        schema=schema,
    )


def wasted_indexes(schema: str, min_bytes: int, bytes_per_entry: int) -> str:
    """The indexes of `job` that seem larger than both limits, the largest first: name and size of the file.

    By vacuum's counts, which a crash of the server discards: to be confirmed by `count_jobs`.
    """
    return fill(_WASTED, job=quote_identifier(schema, "job"), min_bytes=min_bytes, bytes_per_entry=bytes_per_entry)


def count_jobs(schema: str, limit: int) -> str:
    """One row: the number of jobs, up to `limit`. No index: reads the table until it has so many."""
    counted = "SELECT pg_catalog.count(*)::text FROM (SELECT FROM {job} LIMIT {limit}) AS found"
    return render(schema, counted, limit=limit)


def obstacle(schema: str, old_seconds: float) -> str:
    """One row: the reason why a REINDEX would have to wait, or NULL."""
    return fill(_OBSTACLE, job=quote_identifier(schema, "job"), old_seconds=old_seconds)


def left_over_indexes(schema: str) -> str:
    """The invalid indexes that a cancelled REINDEX CONCURRENTLY of ours has left."""
    return fill(_LEFT_OVER, job=quote_identifier(schema, "job"))


def index_bytes(schema: str, index: str) -> str:
    """One row: the size of the index's file."""
    size = "SELECT pg_catalog.pg_relation_size(pg_catalog.to_regclass({index}))::text"
    return fill(size, index=quote_identifier(schema, index))


def reindex(schema: str, index: str) -> str:
    """Rebuild an index from the live rows. Reads the whole table.

    Locks: SHARE UPDATE EXCLUSIVE, for which neither claims nor producers wait. Waits for the transactions that use the
    table, and for older snapshots.
    """
    return fill("REINDEX INDEX CONCURRENTLY {index}", index=sql.Identifier(schema, index))


def drop_index(schema: str, index: str) -> str:
    """Drop a left-over index. Locks: SHARE UPDATE EXCLUSIVE; waits for transactions that use the table."""
    return fill("DROP INDEX CONCURRENTLY IF EXISTS {index}", index=sql.Identifier(schema, index))
