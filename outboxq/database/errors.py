"""Classifies errors of the database and its driver (is the server away, is the login refused, may a retry succeed?).

Also describes them in words that are safe to log.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outboxq.errors import ConfigError, SchemaError
from outboxq.tables import LATEST_VERSION

_SQLSTATE = re.compile(r"[0-9A-Z]{5}")
_UNDEFINED_TABLE_OR_COLUMN = ("42P01", "42703", "3F000")
# A lock_timeout has passed, the role's or a claim's.
LOCK_NOT_AVAILABLE = "55P03"
# The server is a standby, or the transaction is READ ONLY.
READ_ONLY = "25006"
DEADLOCK = "40P01"
# A standby that is being promoted, a lock_timeout, and transactions that the server ended in favour of others.
_TRANSIENT = (READ_ONLY, LOCK_NOT_AVAILABLE, "40001", DEADLOCK)
# The words of a server, a pooler or libpq when it refuses or loses a connection. Only these words are repeated: the
# full text may contain a host, a user or a value.
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
    "Connection reset by peer",
    "Connection timed out",
    "Broken pipe",
    "was not answered within",
    "server login failed",
    "query_wait_timeout",
    "the connection is closed",
    "the connection is lost",
    "SSL connection has been closed",
)
# The answers of a server that does not know a name or a password: waiting does not help. The names between the words
# are left out.
_REFUSALS = {
    "database does not exist": r'database "[^"\n]*" does not exist',
    "role does not exist": r'role "[^"\n]*" does not exist',
    "authentication failed": r"authentication failed for user",
    "no password supplied": r"no password supplied",
    "no pg_hba.conf entry": r"no pg_hba\.conf entry|pg_hba\.conf rejects",
    "role is not permitted to log in": r"is not permitted to log in",
    "permission denied for database": r"permission denied for database",
}


def sqlstate_of(error: BaseException | None) -> str | None:
    """Return the SQLSTATE of an error of SQLAlchemy, psycopg, psycopg2 or asyncpg; None for any other error."""
    try:
        original: object = error.orig if isinstance(error, DBAPIError) else error
        sqlstate = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    except BaseException:  # noqa: BLE001  # a property of users': its own error must not hide the given one
        return None
    # Users' exceptions may have an attribute of this name with another meaning.
    return sqlstate if isinstance(sqlstate, str) and _SQLSTATE.fullmatch(sqlstate) else None


_NOT_SUPPORTED = "0A000"
# The server functions that raise 0A000 ("cached plan must not change result type"), 26000 and 42P05. Other errors share
# these SQLSTATEs, and their texts are translated.
_OF_PREPARED = ("RevalidateCachedQuery", "FetchPreparedStatement", "StorePreparedStatement")


def is_of_prepared(error: BaseException) -> bool:
    """Return True if a statement failed only because it was prepared, so that another try can succeed.

    An ALTER TABLE has made the statement's plan outdated, its name is in use already, or the server has lost it.
    """
    try:
        original: object = error.orig if isinstance(error, DBAPIError) else error
        return isinstance(original, psycopg.Error) and original.diag.source_function in _OF_PREPARED
    except BaseException:  # noqa: BLE001  # an error of users' own, as in `sqlstate_of`
        return False


def explain_missing_tables(error: BaseException | None) -> SchemaError | None:
    """Return the SchemaError to raise in place of `error` if an outboxq table or column is missing; else None.

    The statement that failed must use outboxq's tables only: for users' tables the advice to run `outboxq migrate` is
    wrong.
    """
    if sqlstate_of(error) not in _UNDEFINED_TABLE_OR_COLUMN:
        return None
    return SchemaError(
        "an outboxq table is missing, or older than this outboxq: run `outboxq migrate`, or call "
        f"`outboxq.migrations.upgrade(op, to={LATEST_VERSION})` in a revision of your Alembic history"
    )


@contextmanager
def missing_tables_explained() -> Iterator[None]:
    """Raise an error that advises to run `outboxq migrate` if a statement in this block misses a table or column.

    The block must use outboxq's tables only.

    Raises:
        SchemaError: instead of the database's error.
    """
    try:
        yield
    except DBAPIError as error:
        missing = explain_missing_tables(error)
        if missing is None:
            raise
        raise missing from error


class NoConnection(Exception):
    """An engine gave no connection because users' code in it failed, such as a listener or a token service's client.

    `opening` raises it, and a relay treats it as an outage of the database. The error of that code is the `__cause__`.
    """


@contextmanager
def opening() -> Iterator[None]:
    """Raise errors of users' code in the engine as NoConnection, in a block that opens a connection.

    The caller can then treat them as an outage of the database, and try again.

    Raises:
        NoConnection: instead of an error of that code; errors of the driver and of SQLAlchemy are raised unchanged.
    """
    try:
        yield
    except (psycopg.Error, SQLAlchemyError, OSError, ConfigError):
        raise
    except Exception as error:
        raise NoConnection from error


def outage_reason(error: BaseException) -> str | None:
    """Return the reason why no connection is possible, in words that are safe to log; None if none is known.

    The reason is found in the text, because libpq gives a refused connection no SQLSTATE. If several hosts were tried,
    the text has an error of each, and one known reason is returned.
    """
    return next((reason for reason in _OUTAGE_REASONS if reason in str(error)), None) or _refusal(error)


def is_refused(error: BaseException) -> bool:
    """Return True if the server answered and refused the login: it knows no such database, role or password.

    Waiting does not help then. If several hosts were tried, each must have refused the login.
    """
    return _refusal(error) is not None and not any(reason in str(error) for reason in _OUTAGE_REASONS)


def _refusal(error: BaseException) -> str | None:
    return next((words for words, pattern in _REFUSALS.items() if re.search(pattern, str(error))), None)


# query_canceled: by a time-out, or by a call of pg_cancel_backend().
QUERY_CANCELED = "57014"
# A right is missing.
INSUFFICIENT_PRIVILEGE = "42501"


def is_database_unavailable(error: BaseException) -> bool:
    """Return True if the server is unreachable, stopping, starting, full or a standby; False if it refused a statement.

    An error without an SQLSTATE counts as unavailable.
    """
    sqlstate = sqlstate_of(error)
    if sqlstate is None:
        return True
    # 25006: the server is a standby that will be promoted, or the wrong server. A cancelled statement is no outage.
    return (sqlstate[:2] in ("08", "53", "57") and sqlstate != QUERY_CANCELED) or sqlstate == READ_ONLY


def describe_error(error: BaseException) -> str:
    """Return an error's type, with its SQLSTATE or a known reason.

    The driver's text is left out, because it may contain a host, a user or a value.
    """
    if isinstance(error, NoConnection):
        return type(error.__cause__).__name__
    original: object = error.orig if isinstance(error, DBAPIError) else error
    reason = sqlstate_of(error) or (outage_reason(error) if isinstance(error, DBAPIError | psycopg.Error) else None)
    return f"{type(original).__name__}{f' ({reason})' if reason else ''}"


def describe_refusal(error: BaseException) -> str:
    """Return the type and SQLSTATE of an error of one of outboxq's own statements, as text for a message.

    If the server does not support a feature (0A000), the server's message is added. It quotes no value, unless a user's
    function raises it: then it is left out.
    """
    original = error.orig if isinstance(error, DBAPIError) else error
    said = describe_error(error)
    if not isinstance(original, psycopg.Error) or sqlstate_of(error) != _NOT_SUPPORTED:
        return said
    raised = original.diag.source_function == "exec_stmt_raise"
    return said if raised else f"{said}: {original.diag.message_primary}"


def is_transient(error: Exception) -> bool:
    """Return True if the same transaction may succeed later; errors of any driver are understood.

    This is so if the server is unreachable, stopping, starting, full or a standby, if the engine's pool is exhausted,
    or if the server ended the transaction because of others (deadlock, serialization failure, lock_timeout).
    """
    if not isinstance(error, DBAPIError):
        return isinstance(error, OSError | PoolTimeout)
    sqlstate = sqlstate_of(error)
    if sqlstate is None:
        # A driver does not send data that it refuses, and would refuse it again.
        return error.connection_invalidated or not isinstance(error, DataError)
    return error.connection_invalidated or sqlstate[:2] in ("08", "53", "57") or sqlstate in _TRANSIENT
