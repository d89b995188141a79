"""The doctor's statements for sessions, transactions, replication slots and settings.

All of them read views of the server's shared memory or small catalogs, and none waits for a lock.
"""

from collections.abc import Sequence

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Executable,
    TableClause,
    Text,
    TextClause,
    Uuid,
    bindparam,
    cast,
    column,
    select,
    table,
    text,
)

from outboxq.statements.builtin import count
from outboxq.statements.render import quote_identifier
from outboxq.tables import StoredText

LISTED = 100

# The table locks of SELECT FOR UPDATE and of writes, by pg_locks' names: held until the transaction ends.
ROW_MODES = ("RowShareLock", "RowExclusiveLock")
# The table locks that keep others from reading or writing rows.
BLOCKING_MODES = ("ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")


def qualified(schema: str, name: str) -> str:
    """Return a table's name with its schema, quoted, for a statement made by SQLAlchemy's `text()`.

    A colon in a name is escaped, because in `text()` it would begin a parameter.
    """
    return quote_identifier(schema, name).replace(":", r"\:")


def schema_name(schema: str) -> BindParameter[str]:
    """Return the bound parameter `schema` with this value, for a statement made by SQLAlchemy's `text()`."""
    return bindparam("schema", schema, type_=StoredText())


def backend_pid() -> TextClause:
    """Select the process id of the backend that runs this transaction, to find out if a pooler changes it."""
    return text("SELECT pg_catalog.pg_backend_pid()")


def lock_holders(schema: str) -> TextClause:
    """Select sessions whose transaction has locked rows of `job`, or has a lock on a table that blocks others' work.

    The modes of such a lock are `BLOCKING_MODES`. Bound: 100 rows.
    """
    return text(
        """\
SELECT held.modes, held.tables, activity.pid, activity.state, activity.application_name, activity.usename,
  activity.backend_xid::text AS xid,
  extract(epoch FROM pg_catalog.clock_timestamp() - activity.xact_start)::float8 AS seconds
FROM (
  SELECT locks.pid, pg_catalog.array_agg(DISTINCT locks.mode) AS modes,
    pg_catalog.array_agg(DISTINCT class.relname::text) AS tables
  FROM pg_catalog.pg_locks AS locks JOIN pg_catalog.pg_class AS class ON class.oid = locks.relation
    JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
  WHERE locks.locktype = 'relation' AND locks.granted AND class.relkind IN ('r', 'p')
    AND locks.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND namespace.nspname = :schema
    AND (locks.mode = ANY (:blocking) OR (class.relname = 'job' AND locks.mode = ANY (:row_modes)))
  GROUP BY locks.pid
) AS held JOIN pg_catalog.pg_stat_activity AS activity USING (pid)
WHERE activity.pid <> pg_catalog.pg_backend_pid()
ORDER BY activity.xact_start NULLS LAST LIMIT :listed"""
    ).bindparams(schema_name(schema), blocking=list(BLOCKING_MODES), row_modes=list(ROW_MODES), listed=LISTED)


def jobs_of(schema: str) -> TableClause:
    """Return the table `job` of a schema, for `leased_jobs`: only its `id`, and the system column `xmax` as a text."""
    return table("job", column("id", Uuid()), column("xmax", Text()), schema=schema)


def leased_jobs(jobs: TableClause, transactions: list[str], stretch: Sequence[ColumnElement[bool]]) -> Executable:
    """Count the jobs of one part of the table whose rows each of these transactions has deleted, changed or locked.

    So the doctor can say how many jobs a session holds. `transactions`: their ids. `stretch`: the part of the table, as
    conditions from `stretches`. No locks.
    """
    by = cast(jobs.c.xmax, StoredText())
    return select(by.label("xid"), count().label("jobs")).where(by.in_(transactions), *stretch).group_by(by)


def snapshot_holders() -> TextClause:
    """Select sessions of this database whose snapshots keep vacuum from removing dead rows, the oldest snapshot first.

    Bound: 100. Sessions of other databases, and vacuums, have no such effect here.
    """
    return text(
        """\
SELECT pid, state, application_name, usename,
  extract(epoch FROM pg_catalog.clock_timestamp() - xact_start)::float8 AS seconds,
  greatest(pg_catalog.age(backend_xmin), pg_catalog.age(backend_xid)) AS transactions
FROM pg_catalog.pg_stat_activity
WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid()
  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
  AND backend_type IS DISTINCT FROM 'autovacuum worker' AND backend_type IS DISTINCT FROM 'walsender'
  AND pid NOT IN (SELECT pid FROM pg_catalog.pg_stat_progress_vacuum)
ORDER BY transactions DESC, xact_start NULLS LAST LIMIT :listed"""
    ).bindparams(listed=LISTED)


def prepared_transactions(schema: str) -> TextClause:
    """Select prepared transactions of this database, the oldest first.

    `holds_jobs`: true if the transaction locks rows of `job`. Bound: 100.
    """
    return text(
        """\
SELECT prepared.gid, prepared.owner::text AS owner, prepared.transaction::text AS xid,
  extract(epoch FROM pg_catalog.clock_timestamp() - prepared.prepared)::float8 AS seconds,
  pg_catalog.age(prepared.transaction) AS transactions,
  EXISTS (
    -- No session has them, and the lock on its own id leads from a transaction to its other locks.
    SELECT FROM pg_catalog.pg_locks AS own
      JOIN pg_catalog.pg_locks AS locks ON locks.virtualtransaction = own.virtualtransaction AND locks.pid IS NULL
      JOIN pg_catalog.pg_class AS class ON class.oid = locks.relation
      JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
    WHERE own.transactionid = prepared.transaction AND own.pid IS NULL AND locks.locktype = 'relation'
      AND namespace.nspname = :schema AND class.relname = 'job'
  ) AS holds_jobs
FROM pg_catalog.pg_prepared_xacts AS prepared
WHERE prepared.database = pg_catalog.current_database()
ORDER BY prepared.prepared LIMIT :listed"""
    ).bindparams(schema_name(schema), listed=LISTED)


def replication_slots() -> TextClause:
    """Select permanent replication slots. Their `inactive_since` exists from PostgreSQL 17 on. Bound: 100."""
    return text(
        """\
SELECT slots.slot_name::text AS name, slots.slot_type AS type, slots.active, slots.active_pid, slots.wal_status,
  pg_catalog.age(slots.xmin) AS xmin_age, pg_catalog.age(slots.catalog_xmin) AS catalog_xmin_age,
  pg_catalog.pg_wal_lsn_diff(
    CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
      ELSE pg_catalog.pg_current_wal_lsn() END, slots.restart_lsn
  )::bigint AS retained_bytes,
  extract(
    epoch FROM pg_catalog.clock_timestamp() - CAST(pg_catalog.to_jsonb(slots) ->> 'inactive_since' AS timestamptz)
  )::float8 AS inactive_seconds
FROM pg_catalog.pg_replication_slots AS slots
WHERE NOT slots.temporary
ORDER BY slots.slot_name LIMIT :listed"""
    ).bindparams(listed=LISTED)


def standby_feedback() -> TextClause:
    """Select standbys whose feedback (hot_standby_feedback), without a slot, keeps vacuum from removing dead rows.

    Bound: 100.
    """
    return text(
        """\
SELECT pid, application_name, client_addr::text AS address, pg_catalog.age(backend_xmin) AS transactions
FROM pg_catalog.pg_stat_replication WHERE backend_xmin IS NOT NULL
ORDER BY transactions DESC LIMIT :listed"""
    ).bindparams(listed=LISTED)


def hidden_transactions() -> TextClause:
    """Count sessions of this database whose transaction has an age and a state that this role may not see."""
    return text(
        """\
SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity
WHERE datname = pg_catalog.current_database() AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)
  AND query = '<insufficient privilege>'"""
    )


def settings(names: tuple[str, ...]) -> TextClause:
    """Select the values with which this role's sessions in this database begin, for settings of these names.

    A name that the server does not know has no row.
    """
    # reset_val, because `setting` would show this transaction's own settings.
    return text(
        "SELECT name, reset_val AS value, unit, source FROM pg_catalog.pg_settings "
        "WHERE name = ANY (:names) ORDER BY name"
    ).bindparams(names=list(names))


def role_settings(schema: str, names: tuple[str, ...]) -> TextClause:
    """Select the values that are stored for other roles (ALTER ROLE ... SET), for settings of these names. Bound: 100.

    Only roles that may delete from `job`, as a relay must, are included, and only values that apply in this database.
    """
    return text(
        """\
SELECT role.rolname::text AS role, pg_catalog.split_part(entry, '=', 1) AS name,
  pg_catalog.substr(entry, pg_catalog.strpos(entry, '=') + 1) AS value
FROM pg_catalog.pg_db_role_setting AS stored CROSS JOIN pg_catalog.unnest(stored.setconfig) AS entry
  JOIN pg_catalog.pg_roles AS role ON role.oid = stored.setrole
WHERE stored.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()))
  AND role.rolname <> session_user AND pg_catalog.split_part(entry, '=', 1) = ANY (:names)
  AND EXISTS (
    SELECT FROM pg_catalog.pg_class AS class
      JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
    WHERE namespace.nspname = :schema AND class.relname = 'job'
      AND pg_catalog.has_table_privilege(role.oid, class.oid, 'DELETE')
  )
ORDER BY 1, 2 LIMIT :listed"""
    ).bindparams(schema_name(schema), names=list(names), listed=LISTED)


def connection_room() -> TextClause:
    """Select the open and the allowed connections of the server, of this database and of this role.

    For the latter two, -1 means that there is no limit.
    """
    return text(
        """\
WITH clients AS (
  SELECT datname, usename FROM pg_catalog.pg_stat_activity WHERE usesysid IS NOT NULL AND datid IS NOT NULL
)
SELECT 'the server' AS of, (SELECT pg_catalog.count(*) FROM clients) AS open,
  pg_catalog.current_setting('max_connections')::integer
    - pg_catalog.current_setting('superuser_reserved_connections')::integer
    - coalesce(pg_catalog.current_setting('reserved_connections', true)::integer, 0) AS allowed
UNION ALL
SELECT 'this database', (SELECT pg_catalog.count(*) FROM clients WHERE datname = pg_catalog.current_database()),
  datconnlimit
FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()
UNION ALL
SELECT 'role ' || session_user::text, (SELECT pg_catalog.count(*) FROM clients WHERE usename = session_user),
  rolconnlimit
FROM pg_catalog.pg_roles WHERE rolname = session_user"""
    )
