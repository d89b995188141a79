"""PostgreSQL's own functions, named with their schema: what else has such a name in the search path is not asked.

So are those in texts. What only syntax can say, such as COALESCE, LEAST and EXTRACT, is PostgreSQL's own anyhow; an
operator is, if it has one for exactly the types that it is given.
"""

from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Float, Function, cast, extract, func, literal_column

pg = func.pg_catalog


def count() -> Function[int]:
    """`count(*)`."""
    return pg.count(literal_column("*"), type_=BigInteger())


def seconds(interval: ColumnElement[Any]) -> ColumnElement[float]:
    """An interval as a number."""
    return cast(extract("epoch", interval), Float(53))


def unnest(*arrays: ColumnElement[Any]) -> Function[Any]:
    """Their elements side by side. Of several arrays it is syntax, which has no schema and is PostgreSQL's own."""
    return func.unnest(*arrays) if len(arrays) > 1 else pg.unnest(*arrays)
