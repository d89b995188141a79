"""What the catalogue says of functions."""

from collections.abc import Iterable

from psycopg import sql

_SIDE_EFFECTS = sql.SQL("""
WITH called AS (
    SELECT p.oid, p.proname, p.provolatile, p.prokind FROM pg_catalog.pg_proc AS p
    WHERE p.proname = ANY ({names}::text[] || {words}::text[])
), parts AS (
    SELECT called.proname, called.provolatile FROM called WHERE called.prokind <> 'a'
    UNION ALL
    SELECT called.proname, part.provolatile
    FROM called
    JOIN pg_catalog.pg_aggregate AS a ON a.aggfnoid = called.oid
    JOIN pg_catalog.pg_proc AS part ON part.oid IN (
        a.aggtransfn, a.aggfinalfn, a.aggcombinefn, a.aggmtransfn, a.aggminvtransfn, a.aggmfinalfn
    )
)
SELECT proname::text FROM parts GROUP BY proname HAVING bool_and(provolatile <> 'v')
UNION ALL
SELECT word FROM unnest({words}::text[]) AS word WHERE NOT EXISTS (SELECT FROM called WHERE proname = word)
""")


def functions_without_side_effects(names: Iterable[str], words: Iterable[str]) -> str:
    """A row for each name that has functions and none of them, nor any part of an aggregate, is VOLATILE.

    Words need not have any.

    Index: pg_proc_proname_args_nsp_index, and those of the oids. No locks.
    """
    return _SIDE_EFFECTS.format(names=sql.Literal(sorted(names)), words=sql.Literal(sorted(words))).as_string(None)
