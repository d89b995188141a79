"""Citus and outboxq's own tables: those that it manages, and those that lack the guard.

A transaction with rows on one worker commits there before it commits on the coordinator, where outboxq's tables are.
The guard is a trigger that also writes a table that Citus manages: then Citus prepares the transaction first.
"""

from sqlalchemy import TextClause, text

from outboxq.statements.doctor.sessions import schema_name

# A column of a SELECT list, or a condition: Citus is installed in this database. By its catalog's full name, so that no
# other schema's table is taken for it.
HAS_CITUS = "pg_catalog.to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL"
# The tables that users' transactions write: of producers (`schedules.put` too), handlers, the inbox and effects. Relays
# and operators write all others in their own transactions.
GUARDED = (
    "job", "dead_job", "done_job", "unique_key", "batch", "cancel_request", "rate", "inbox", "effect", "schedule",
)  # fmt: skip


def citus_state(schema: str) -> TextClause:
    """The state of Citus, in one row. For databases that have Citus: others lack its catalog. Catalogs only; no locks.

    `has_distributed`: other tables of the database are Citus'. `managed`: those of the schema. `unguarded`: tables of
    the schema that lack the guard, or a part of it.
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
