"""The place of a coalesced job among those of its key: the order of `seq`, and not that of the database's clock.

A job that is put back gets a new `seq`, and a header holds its first one; also that of a job whose content another row
takes over.
"""

from typing import LiteralString

from outboxq.job import ADDED_HEADER

_ADDED: LiteralString = f"'{ADDED_HEADER}'"
# A header that others wrote may be anything: it counts if it can be a number.
_MOST_DIGITS: LiteralString = "18"


def added_order(row: LiteralString) -> LiteralString:
    """The number of a job in the order of adding."""
    header = f"{row}.headers->>{_ADDED}"
    return (
        f"CASE WHEN {header} ~ '^[0-9]+$' AND pg_catalog.length({header}) <= {_MOST_DIGITS} "
        f"THEN ({header})::bigint ELSE {row}.seq END"
    )


def headers_with_order(row: LiteralString, order: LiteralString | None = None) -> LiteralString:
    """The headers of a job; with a coalescing key and no number yet, they get one: `seq`, or `order` if given."""
    order = f"{row}.seq" if order is None else order
    return (
        f"CASE WHEN {row}.unique_key IS NOT NULL AND {row}.headers->>{_ADDED} IS NULL "
        f"AND pg_catalog.jsonb_typeof({row}.headers) = 'object' "
        f"AND pg_catalog.octet_length({row}.headers::text) <= 1000000 "
        f"THEN pg_catalog.jsonb_concat({row}.headers, pg_catalog.jsonb_build_object({_ADDED}, ({order})::text)) "
        f"ELSE {row}.headers END"
    )
