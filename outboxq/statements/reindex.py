"""Upkeep: which indexes of `job` are files of almost nothing, and how they are built again beside the work.

Sent as text on the upkeep's own connection, outside of a transaction: REINDEX CONCURRENTLY cannot run inside of one.
The looks read catalogs and shared memory only, and wait for no lock.
"""

from typing import LiteralString

from psycopg import sql

# Of a session that is ours alone, never a pooler's. lock_timeout: REINDEX CONCURRENTLY waits for each transaction that
# has the table in use; nobody waits for it meanwhile, but until it is done vacuum cannot visit the table.
_SETTINGS = (
    "SET lock_timeout = '5s'; SET statement_timeout = '60s'; SET idle_session_timeout = 0; "
    "SET default_transaction_read_only = off; SET search_path = pg_catalog"
)

_LOCK = (
    "SELECT pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext('outboxq upkeep'), pg_catalog.hashtext({schema}))::text"
)

# The entries of a partial index are counted by vacuum, whenever it has cleaned it. What came since can only be bounded.
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

# 1. Another REINDEX, a migration or vacuum is at the table: only one of them may be.
# 2. and 3. Whom REINDEX CONCURRENTLY would wait for. Of other roles' transactions the age may be hidden; lock_timeout
# bounds what this does not see.
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
    """Bound whatever this session does: 5 s for a lock, 60 s for a statement."""
    return _SETTINGS


def backend_pid() -> str:
    """The backend that answers: behind a pooler, another than the connection was told of."""
    return "SELECT pg_catalog.pg_backend_pid()::text"


def owns_jobs(schema: str) -> str:
    """One row: `true` where this role may build the indexes of `job` again and drop what that may leave; else `false`.

    MAINTAIN is not enough: it does not allow dropping an index.
    """
    return _filled(
        "SELECT coalesce(pg_catalog.bool_or(pg_catalog.pg_has_role(relowner, 'USAGE')), false)::text "
        "FROM pg_catalog.pg_class WHERE oid = pg_catalog.to_regclass({job})::oid",
        schema,
    )


def lock_upkeep(schema: str) -> str:
    """One row: `true` where this session is now the only one that keeps up this installation, until it ends."""
    return sql.SQL(_LOCK).format(schema=sql.Literal(schema)).as_string(None)


def wasted_indexes(schema: str, min_bytes: int, bytes_per_entry: int) -> str:
    """The indexes of `job` that seem larger than both limits, the largest first: name, and size of the file.

    By vacuum's counts, which a crash of the server forgets: to be confirmed by `count_jobs`.
    """
    return _filled(_WASTED, schema, min_bytes=sql.Literal(min_bytes), bytes_per_entry=sql.Literal(bytes_per_entry))


def count_jobs(schema: str, limit: int) -> str:
    """One row: how many jobs there are, counted up to `limit`. No index: reads the table until it has so many."""
    return (
        sql.SQL("SELECT pg_catalog.count(*)::text FROM (SELECT FROM {} LIMIT {}) AS found")
        .format(sql.Identifier(schema, "job"), sql.Literal(limit))
        .as_string(None)
    )


def obstacle(schema: str, old_seconds: float) -> str:
    """One row: why a REINDEX would have to wait, or NULL."""
    return _filled(_OBSTACLE, schema, old_seconds=sql.Literal(old_seconds))


def left_over_indexes(schema: str) -> str:
    """The indexes that a REINDEX CONCURRENTLY of ours left when it was cancelled."""
    return _filled(_LEFT_OVER, schema)


def index_bytes(schema: str, index: str) -> str:
    """One row: the size of its file."""
    literal = sql.Literal(sql.Identifier(schema, index).as_string(None))
    return (
        sql.SQL("SELECT pg_catalog.pg_relation_size(pg_catalog.to_regclass({}))::text").format(literal).as_string(None)
    )


def reindex(schema: str, index: str) -> str:
    """Build it again from the live rows. Reads the whole table.

    Locks: SHARE UPDATE EXCLUSIVE, which neither claims nor producers wait for. Waits for the transactions that have the
    table in use, and for older snapshots.
    """
    return sql.SQL("REINDEX INDEX CONCURRENTLY {}").format(sql.Identifier(schema, index)).as_string(None)


def drop_index(schema: str, index: str) -> str:
    """Drop what is left over. Locks and waits as `reindex`."""
    return sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}").format(sql.Identifier(schema, index)).as_string(None)


def _filled(statement: LiteralString, schema: str, **values: sql.Literal) -> str:
    job = sql.Literal(sql.Identifier(schema, "job").as_string(None))
    return sql.SQL(statement).format(job=job, **values).as_string(None)
