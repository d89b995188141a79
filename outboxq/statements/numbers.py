"""Arithmetic on stored numbers that fails for none of them, and comes to what the table's checks allow.

A row that was written before there were checks may hold any number of its column's type. An overflow would fail the
whole statement, and with it every other job that the statement is for.

What counts on stored numbers: claims (attempt, lease_token, of suspects crashes), giving back and taking back (attempt,
lease_token), settling under a lease (lease_token), parking (parked, and how long it lasts); `effects` does so with the
attempts of a call.
"""

from typing import LiteralString

# The greatest that the checks allow is one less than the column could hold.
MOST_COUNTED = 32_766


def one_more_attempt(attempt: LiteralString) -> LiteralString:
    """Counted from 0, and no further than is allowed."""
    return f"least(greatest({attempt}, 0), 2147483645) + 1"


def one_attempt_less(attempt: LiteralString) -> LiteralString:
    """Not below 0."""
    return f"greatest({attempt}, 1) - 1"


def one_more(count: LiteralString) -> LiteralString:
    """For `crashes` and `parked`: counted from 0 up to `MOST_COUNTED`."""
    return f"least(greatest({count}, 0), 32765) + 1"


def next_token(token: LiteralString) -> LiteralString:
    """The next one, and 1 after the greatest: it only has to be different, not greater."""
    return f"greatest({token}, 0) % 9223372036854775806 + 1"
