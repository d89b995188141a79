"""Catalog queries that show if changes of a table's rows may be postponed, and several sent as one UPDATE.

A relay does so, to save round trips, with changes that a handler makes through its session. Every role can read the
catalogs. No locks except those of any catalog read.
"""

from psycopg import sql

from outboxq.statements.render import fill

# True if any table has a trigger or a constraint that may be checked at COMMIT; constraints have internal triggers.
DEFERRABLE = "SELECT EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgdeferrable)"

# The name is resolved as in any statement of this session.
# - plain: an ordinary table; SELECT and UPDATE of that name reach all of its rows, and no others.
# - inert: an UPDATE runs no trigger and no user's code in a constraint or an index, and computes no column. Built-in
#   functions are in no row of pg_depend.
# - contains inserts, deletes: these change no other table, by a default or a cascade, and are checked at once.
# - primary key: its columns, if equal keys have equal bytes, so that the process compares keys as the server does.
# - bound columns: if an UPDATE changes them, other rows may matter: they are in a unique or an exclusion index, or in a
#   constraint that is checked at COMMIT, or have a type of the user's with rules of its own.
_FACTS = """\
SELECT facts.oid::bigint AS oid,
  facts.relkind = 'r' AND NOT facts.relrowsecurity AND NOT facts.relhasrules AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_inherits WHERE inhrelid = facts.oid OR inhparent = facts.oid
  ) AS is_plain,
  NOT EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = facts.oid AND NOT tgisinternal) AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_constraint AS entry JOIN pg_catalog.pg_depend ON objid = entry.oid
      AND classid = 'pg_catalog.pg_constraint'::regclass::oid AND refclassid = ANY ({code})
    WHERE entry.conrelid = facts.oid
  ) AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_index AS key JOIN pg_catalog.pg_depend ON objid = key.indexrelid
      AND classid = 'pg_catalog.pg_class'::regclass::oid AND refclassid = ANY ({code})
    WHERE key.indrelid = facts.oid
  ) AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_attribute WHERE attrelid = facts.oid AND attgenerated <> ''
  ) AS is_inert,
  NOT EXISTS (
    SELECT FROM pg_catalog.pg_constraint WHERE conrelid = facts.oid AND condeferrable
  ) AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_attrdef AS entry JOIN pg_catalog.pg_depend ON objid = entry.oid
      AND classid = 'pg_catalog.pg_attrdef'::regclass::oid AND refclassid = ANY ({code})
    WHERE entry.adrelid = facts.oid
  ) AS contains_inserts,
  NOT EXISTS (
    SELECT FROM pg_catalog.pg_constraint
    WHERE confrelid = facts.oid AND (condeferrable OR confdeltype NOT IN ('a', 'r'))
  ) AS contains_deletes,
  ARRAY(
    SELECT attname::text FROM pg_catalog.pg_index AS key JOIN pg_catalog.pg_attribute ON attrelid = key.indrelid
      AND attnum = ANY (key.indkey)
    WHERE key.indrelid = facts.oid AND key.indisprimary AND (
      SELECT pg_catalog.bool_and(part.atttypid = ANY ({exact}) AND coalesce(rule.collisdeterministic, true))
      FROM pg_catalog.pg_attribute AS part LEFT JOIN pg_catalog.pg_collation AS rule
        ON rule.oid = part.attcollation
      WHERE part.attrelid = key.indrelid AND part.attnum = ANY (key.indkey)
    )
  ) AS primary_key,
  ARRAY(
    SELECT attname::text FROM pg_catalog.pg_attribute AS of_table JOIN pg_catalog.pg_type ON pg_type.oid = atttypid
    WHERE attrelid = facts.oid AND attnum > 0 AND NOT attisdropped AND (
      NOT (typtype = 'e' OR typtype = 'b' AND typnamespace = 'pg_catalog'::regnamespace::oid)
      OR EXISTS (
        SELECT FROM pg_catalog.pg_index AS key
        WHERE key.indrelid = facts.oid AND (key.indisunique OR key.indisexclusion)
          AND (attnum = ANY (key.indkey) OR key.indexprs IS NOT NULL OR key.indpred IS NOT NULL)
      ) OR EXISTS (
        SELECT FROM pg_catalog.pg_constraint WHERE conrelid = facts.oid AND condeferrable AND attnum = ANY (conkey)
      )
    )
  ) AS bound_columns
FROM pg_catalog.pg_class AS facts WHERE facts.oid = pg_catalog.to_regclass({name})::oid"""


# The catalogs of users' functions and operators; an operator class is several operators.
_CODE = sql.SQL("'{pg_catalog.pg_proc, pg_catalog.pg_operator, pg_catalog.pg_opclass}'::pg_catalog.regclass[]::oid[]")
# Some of the built-in types in which equal values have equal bytes.
_EXACT = sql.SQL(
    "'{int2, int4, int8, uuid, text, varchar, date, bool, timestamp, timestamptz}'::pg_catalog.regtype[]::oid[]"
)


def table_facts(name: str) -> str:
    """Select the facts of one table that decide if changes of its rows may be postponed and sent together.

    One row, or none without the table; the comment on `_FACTS` explains each column. Index: pg_class by oid, other
    catalogs by that.

    Args:
        name: The table's name as in SQL, quoted if needed.
    """
    return fill(_FACTS, name=name, code=_CODE, exact=_EXACT)
