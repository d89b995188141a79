"""Arithmetic on stored numbers that fails for no number, and whose results the table's checks allow.

A row that was written before the checks existed may hold any number of its column's type. An overflow would fail the
whole statement, and with it every other job of the statement.

Used by claims (attempt, lease_token, and crashes of suspects), giving back and taking back (attempt, lease_token),
settling under a lease (lease_token) and parking (parked, and until when); `effects` bounds a call's attempts the same
way.
"""

from typing import LiteralString

# The greatest number that the checks allow: one less than the column could hold.
MOST_COUNTED = 32_766
MOST_TOKEN = 9_223_372_036_854_775_806


def one_more_attempt(attempt: LiteralString) -> LiteralString:
    """One attempt more, from 0 up to the greatest that the checks allow."""
    return f"least(greatest({attempt}, 0), 2147483645) + 1"


def one_attempt_less(attempt: LiteralString) -> LiteralString:
    """One attempt less, but not below 0."""
    return f"greatest({attempt}, 1) - 1"


def one_more(count: LiteralString) -> LiteralString:
    """One more of `crashes` or `parked`, from 0 up to `MOST_COUNTED`."""
    return f"least(greatest({count}, 0), 32765) + 1"


def next_token(token: LiteralString) -> LiteralString:
    """A token that no lease of this id has had: the time in microseconds, or one more than the row's if that is later.

    The tokens of a row that is gone are not stored, while a relay that hangs may still hold a lease of it: a retried
    dead letter, or a job whose id a producer chooses again, must not count them from the start.
    """
    now = "(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000::float8)::bigint"
    return f"greatest(greatest({token}, 0) % 9223372036854775806 + 1, {now})"
