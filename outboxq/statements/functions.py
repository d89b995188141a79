"""What the catalogue says of functions."""

from collections.abc import Iterable

from outboxq.statements.render import fill

_SIDE_EFFECTS = """
WITH called AS (
    SELECT p.oid, p.proname, p.provolatile, p.prokind FROM pg_catalog.pg_proc AS p
    WHERE p.proname = ANY ({both}::text[])
), parts AS (
    SELECT called.proname, called.provolatile FROM called WHERE called.prokind <> 'a'
    UNION ALL
    SELECT called.proname, part.provolatile
    FROM called
    JOIN pg_catalog.pg_aggregate AS a ON a.aggfnoid::oid = called.oid
    JOIN pg_catalog.pg_proc AS part ON part.oid IN (
        a.aggtransfn::oid, a.aggfinalfn::oid, a.aggcombinefn::oid, a.aggmtransfn::oid, a.aggminvtransfn::oid,
        a.aggmfinalfn::oid
    )
)
SELECT proname::text FROM parts GROUP BY proname HAVING pg_catalog.bool_and(provolatile <> 'v')
UNION ALL
SELECT word FROM pg_catalog.unnest({words}::text[]) AS word WHERE NOT EXISTS (SELECT FROM called WHERE proname = word)
"""


def functions_without_side_effects(names: Iterable[str], words: Iterable[str]) -> str:
    """A row for each name that has functions and none of them, nor any part of an aggregate, is VOLATILE.

    Words need not have any.

    Index: pg_proc_proname_args_nsp_index, and those of the oids. No locks.
    """
    some = frozenset(words)
    return fill(_SIDE_EFFECTS, both=sorted(some.union(names)), words=sorted(some))
