"""What the steps themselves refuse, as an error with the database's reason alone."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError

from outboxq.errors import MigrationRefused

# What every refusal of ours begins with, in the `RAISE` of a step.
_OURS = "outboxq"


@contextmanager
def refusals_in_short() -> Iterator[None]:
    """Within the block, what a step refuses is one line; SQLAlchemy's own error repeats the whole `DO` block.

    Raises:
        MigrationRefused: a step refused; the message has the reason and the hint of the database.
    """
    try:
        yield
    except DBAPIError as error:
        reason, hint = _said(error.orig)
        if not reason.startswith(_OURS):
            raise
        raise MigrationRefused(f"{reason.removeprefix(_OURS + ': ')}. {hint}".strip()) from None


def _said(error: BaseException | None) -> tuple[str, str]:
    """The message and the hint of an error of psycopg's, psycopg2's or asyncpg's; empty if there are none."""
    diagnostic = getattr(error, "diag", None)
    if diagnostic is not None:
        return diagnostic.message_primary or "", diagnostic.message_hint or ""
    # Around asyncpg's error stands SQLAlchemy's.
    cause = None if error is None else error.__cause__
    return str(getattr(cause, "message", None) or cause or ""), str(getattr(cause, "hint", None) or "")
