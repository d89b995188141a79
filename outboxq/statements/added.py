"""SQL expressions for the order in which the jobs of one coalescing key were added: by `seq`, and not by the clock.

By this order, coalescing finds the newest of the jobs that it merges. A job that goes back to its queue gets a new
`seq`. So its headers keep its first `seq`, or the number of the newer job whose arguments it took over.
"""

from typing import LiteralString

from outboxq.job import ADDED_HEADER

_ADDED: LiteralString = f"'{ADDED_HEADER}'"
# Other programs may write anything into a header: it counts if it can be a number.
_MOST_DIGITS: LiteralString = "18"


def added_order(row: LiteralString) -> LiteralString:
    """Return an SQL expression for a job's number in the order of adding: from its headers, or else its `seq`.

    By this number, coalescing finds the newest job of a key. `row` is the alias of the job's row in the statement.
    """
    header = f"{row}.headers->>{_ADDED}"
    return (
        f"CASE WHEN {header} ~ '^[0-9]+$' AND pg_catalog.length({header}) <= {_MOST_DIGITS} "
        f"THEN ({header})::bigint ELSE {row}.seq END"
    )


def headers_with_order(row: LiteralString, order: LiteralString | None = None) -> LiteralString:
    """Return an SQL expression for a job's headers, with its number in the order of adding if it needs one.

    A job needs the number if it has a coalescing key (waiting jobs of the same key are merged into one run). A number
    that the headers already contain stays; a missing one is `seq`, or the expression `order` if given. `row` is the
    alias of the job's row in the statement.
    """
    order = f"{row}.seq" if order is None else order
    return (
        f"CASE WHEN {row}.unique_key IS NOT NULL AND {row}.headers->>{_ADDED} IS NULL "
        f"AND pg_catalog.jsonb_typeof({row}.headers) = 'object' "
        f"AND pg_catalog.octet_length({row}.headers::text) <= 1000000 "
        f"THEN pg_catalog.jsonb_concat({row}.headers, pg_catalog.jsonb_build_object({_ADDED}, ({order})::text)) "
        f"ELSE {row}.headers END"
    )
