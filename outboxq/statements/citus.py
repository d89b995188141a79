"""The state of Citus in a database: if it manages outboxq's own tables, and if these have their two-phase triggers.

Citus commits a transaction with rows on a single worker there first, and then on the coordinator, where outboxq's
tables are: after a crash between both, a handler's rows could be committed while its job runs again. So migrations
install a trigger on those of outboxq's tables that users' transactions write. The trigger also writes to a table that
Citus manages, so that Citus uses two-phase commit.
"""

from sqlalchemy import TextClause, text

from outboxq.statements.doctor.sessions import schema_name

# A column of a SELECT list, or a condition: Citus is installed in this database. Its catalog is named with its schema,
# so that no other table is mistaken for it.
HAS_CITUS = "pg_catalog.to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL"
# The tables that users' transactions write: those of producers (`schedules.put` too), handlers, the inbox and effects.
# Relays and operators write all others in their own transactions.
GUARDED = (
    "job", "dead_job", "done_job", "unique_key", "batch", "cancel_request", "rate", "inbox", "effect", "schedule",
)  # fmt: skip


def citus_state(schema: str) -> TextClause:
    """Select the state of Citus in one row, for the doctor and for relays as they start. No locks.

    Send it only to a database that has Citus: others lack the catalog, and it would fail.

    `has_distributed`: true if Citus manages tables of other schemas. `managed`: the names of outboxq's tables that
    Citus manages, although it should not. `unguarded`: the names of the tables that lack an enabled two-phase trigger;
    all of them if Citus does not manage the table to which the trigger writes.
    """
    return text(
        """\
WITH ours AS (
  SELECT class.oid, class.relname::text AS name FROM pg_catalog.pg_class AS class
    JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
  WHERE namespace.nspname = :schema AND class.relkind IN ('r', 'p')
), known AS (
  SELECT entry.logicalrelid::oid AS oid, ours.name
  FROM pg_catalog.pg_dist_partition AS entry LEFT JOIN ours ON ours.oid = entry.logicalrelid::oid
)
SELECT EXISTS (SELECT FROM known WHERE name IS NULL) AS has_distributed,
  ARRAY(SELECT name FROM known WHERE name <> 'two_phase' ORDER BY name) AS managed,
  ARRAY(
    SELECT name FROM ours WHERE name = ANY (CAST(:guarded AS text[])) AND NOT (
      EXISTS (SELECT FROM known WHERE name = 'two_phase') AND EXISTS (
        SELECT FROM pg_catalog.pg_trigger
        WHERE tgrelid = ours.oid AND tgname = 'use_two_phase'::name AND tgenabled IN ('O', 'A')
      )
    ) ORDER BY name
  ) AS unguarded"""
    ).bindparams(schema_name(schema), guarded=list(GUARDED))
