"""Turns an error by which a step's SQL refuses a migration into an exception with only the database's reason."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError

from outboxq.errors import MigrationRefused

# The text with which every refusal begins, in the `RAISE` of a step.
_OURS = "outboxq"


@contextmanager
def refusals_in_short() -> Iterator[None]:
    """Raise a one-line error if a migration step in this block refuses; SQLAlchemy's error has the whole `DO` block.

    Raises:
        MigrationRefused: a step refused; the message contains the database's reason and hint.
    """
    try:
        yield
    except DBAPIError as error:
        reason, hint = _said(error.orig)
        if not reason.startswith(_OURS):
            raise
        raise MigrationRefused(f"{reason.removeprefix(_OURS + ': ')}. {hint}".strip()) from None


def _said(error: BaseException | None) -> tuple[str, str]:
    """Return message and hint of a database error of psycopg, psycopg2 or asyncpg; empty texts if it has none."""
    diagnostic = getattr(error, "diag", None)
    if diagnostic is not None:
        return diagnostic.message_primary or "", diagnostic.message_hint or ""
    # SQLAlchemy's error wraps asyncpg's.
    cause = None if error is None else error.__cause__
    return str(getattr(cause, "message", None) or cause or ""), str(getattr(cause, "hint", None) or "")
