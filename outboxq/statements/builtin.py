"""PostgreSQL's own functions, named with their schema, so that the search path cannot replace them.

Statements written as text do the same. COALESCE, LEAST and EXTRACT are syntax, and so always PostgreSQL's own; an
operator is PostgreSQL's own if PostgreSQL has one for exactly the operands' types.
"""

from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Function, cast, extract, func, literal_column

from outboxq.tables import Real

pg = func.pg_catalog


def count() -> Function[int]:
    """Return the SQL expression `pg_catalog.count(*)`, which no other function in the search path can replace."""
    return pg.count(literal_column("*"), type_=BigInteger())


def seconds(interval: ColumnElement[Any]) -> ColumnElement[float]:
    """Return the SQL expression of an interval as a number of seconds."""
    return cast(extract("epoch", interval), Real())


def unnest(*arrays: ColumnElement[Any]) -> Function[Any]:
    """Return a table expression with the arrays' elements side by side.

    With several arrays, `unnest` is PostgreSQL's syntax and not a function, and accepts no schema before its name.
    """
    return func.unnest(*arrays) if len(arrays) > 1 else pg.unnest(*arrays)
