"""SQL arithmetic on stored numbers, such as a job's attempts: it never fails, and its results satisfy the checks.

A row that is older than the checks may contain any number of its column's type, and an overflow would make the whole
statement fail, for all of its jobs. So the stored number is first raised to at least 0 and bounded from above.

Used by claims, by statements that put or take back jobs, by settling under a lease, and by postponing jobs of unknown
kinds; `effects` bounds a call's attempts in the same way.
"""

from typing import LiteralString

# The highest number that the checks allow: one less than the column's type could hold.
MOST_COUNTED = 32_766
MOST_TOKEN = 9_223_372_036_854_775_806


def one_more_attempt(attempt: LiteralString) -> LiteralString:
    """Return an SQL expression for `attempt` + 1; a number outside 0 to 2147483645 counts as the nearest bound.

    `attempt` is SQL, such as a column's name. The result is within the table's checks: from 1 to 2147483646.
    """
    return f"least(greatest({attempt}, 0), 2147483645) + 1"


def one_attempt_less(attempt: LiteralString) -> LiteralString:
    """Return an SQL expression for `attempt` - 1, but not below 0. `attempt` is SQL, such as a column's name."""
    return f"greatest({attempt}, 1) - 1"


def one_more(count: LiteralString) -> LiteralString:
    """Return an SQL expression for `count` + 1; a number outside 0 to 32765 counts as the nearest bound.

    `count` is SQL, such as the name of the smallint column `crashes` or `parked`. The result is from 1 to
    `MOST_COUNTED`.
    """
    return f"least(greatest({count}, 0), 32765) + 1"


def next_token(token: LiteralString) -> LiteralString:
    """Return an SQL expression for a lease token that no earlier lease of this job's id has had.

    It is the time in microseconds, or one more than the row's token if that is higher. The tokens of a deleted row are
    not stored, while a suspended relay may still hold a lease of it. So a retried dead letter, or a job whose id a
    producer reuses, must not count tokens from the start.
    """
    now = "(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000::float8)::bigint"
    return f"greatest(greatest({token}, 0) % 9223372036854775806 + 1, {now})"
