"""What an error of the database or of its driver says: an outage, a refusal, an SQLSTATE."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outboxq.errors import ConfigError

# Of the role's lock_timeout, or of a claim's.
LOCK_NOT_AVAILABLE = "55P03"
# A standby that is being promoted, a lock_timeout, and what the server ended for the sake of other transactions.
_TRANSIENT = ("25006", LOCK_NOT_AVAILABLE, "40001", "40P01")

# What a server, a pooler or libpq says when nobody gets in. Only these words are repeated: the rest of the text may
# hold a host, a user or a value.
_OUTAGE_REASONS = (
    "too many connections",
    "too many clients",
    "remaining connection slots are reserved",
    "no more connections allowed",
    "starting up",
    "shutting down",
    "not yet accepting connections",
    "in recovery mode",
    "session is read-only",
    "server is in hot standby mode",
    "Connection refused",
    "timeout expired",
    "could not translate host name",
    "closed the connection unexpectedly",
    "No space left on device",
    "No such file or directory",
    "No route to host",
    "Network is unreachable",
)


# What a server that answers says to a name or a password that it does not know: no waiting mends it. The names between
# the words are left out.
_REFUSALS = {
    "database does not exist": r'database "[^"\n]*" does not exist',
    "role does not exist": r'role "[^"\n]*" does not exist',
    "authentication failed": r"authentication failed for user",
    "no password supplied": r"no password supplied",
    "no pg_hba.conf entry": r"no pg_hba\.conf entry|pg_hba\.conf rejects",
    "role is not permitted to log in": r"is not permitted to log in",
    "permission denied for database": r"permission denied for database",
}


class NoConnection(Exception):
    """An engine gave no connection, for a reason that is its own: a token service, or a listener; the cause has it."""


@contextmanager
def opening() -> Iterator[None]:
    """While a connection is opened: whatever users' code in an engine raises is an outage, as the database's own are.

    Raises:
        NoConnection: it raised what no driver does.
    """
    try:
        yield
    except (psycopg.Error, SQLAlchemyError, OSError, ConfigError):
        raise
    except Exception as error:
        raise NoConnection from error


def outage_reason(error: BaseException) -> str | None:
    """Why there is no way in, in words that are safe to log; None if the error says nothing that is known.

    A refused connection has no SQLSTATE in libpq. If several hosts were tried, the first known reason of any.
    """
    return next((reason for reason in _OUTAGE_REASONS if reason in str(error)), None) or _refusal(error)


def is_refused(error: BaseException) -> bool:
    """Whether a server answered, and knows no such database, role or password; of several hosts, all of them."""
    return _refusal(error) is not None and not any(reason in str(error) for reason in _OUTAGE_REASONS)


def _refusal(error: BaseException) -> str | None:
    return next((words for words, pattern in _REFUSALS.items() if re.search(pattern, str(error))), None)


def sqlstate_of(error: BaseException | None) -> str | None:
    """What PostgreSQL calls an error, by any driver; SQLAlchemy's wrapper will do too."""
    original: object = error.orig if isinstance(error, DBAPIError) else error
    sqlstate = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    return sqlstate if isinstance(sqlstate, str) else None


def is_transient(error: Exception) -> bool:
    """Whether the same transaction may succeed later, by any driver.

    The server is gone, going, starting or full, its pool is, or it ended the transaction for the sake of others.
    """
    if not isinstance(error, DBAPIError):
        return isinstance(error, OSError | PoolTimeout)
    sqlstate = sqlstate_of(error)
    if sqlstate is None:
        # What a driver refuses for its data, it refuses before it sends it.
        return error.connection_invalidated or not isinstance(error, DataError)
    return error.connection_invalidated or sqlstate[:2] in ("08", "53", "57") or sqlstate in _TRANSIENT
