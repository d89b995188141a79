"""Arithmetic on stored numbers that fails for none of them.

A row may hold any number of its column's type. An overflow would fail the whole statement, and with it every other job
that the statement is for.
"""

from typing import LiteralString

# The next of them is the greatest integer.
_ALMOST_INTEGER: LiteralString = "2147483646"
_ALMOST_SMALLINT: LiteralString = "32766"


def one_more_attempt(attempt: LiteralString) -> LiteralString:
    """Counted from 0, and no further than the column can hold."""
    return f"least(greatest({attempt}, 0), {_ALMOST_INTEGER}) + 1"


def one_attempt_less(attempt: LiteralString) -> LiteralString:
    """Not below 0."""
    return f"greatest({attempt}, 1) - 1"


def one_more(count: LiteralString) -> LiteralString:
    """For `crashes` and `parked`, as `one_more_attempt`."""
    return f"least(greatest({count}, 0), {_ALMOST_SMALLINT}) + 1"


def next_token(token: LiteralString) -> LiteralString:
    """A fence asks whether a token is another one, not whether it is greater: behind the greatest comes 1."""
    return f"{token} % 9223372036854775807 + 1"
