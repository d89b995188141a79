"""Errors of the database and of its driver, by what they mean: an outage, a refusal, an SQLSTATE."""

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
# A lock_timeout ran out, the role's or a claim's.
LOCK_NOT_AVAILABLE = "55P03"
# A standby, or a transaction that is READ ONLY.
READ_ONLY = "25006"
DEADLOCK = "40P01"
# A standby that is being promoted, a lock_timeout, and transactions that the server ended for the sake of others.
_TRANSIENT = (READ_ONLY, LOCK_NOT_AVAILABLE, "40001", DEADLOCK)
# The words of a server, a pooler or libpq when it lets no connection in, or when one is lost. Only these are
# repeated: the rest of the text may hold a host, a user or a value.
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
# The answers of a server to a name or a password that it does not know: waiting does not help. The names between
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


def sqlstate_of(error: BaseException | None) -> str | None:
    """The SQLSTATE of an error of SQLAlchemy's, psycopg's, psycopg2's or asyncpg's; None for any other."""
    try:
        original: object = error.orig if isinstance(error, DBAPIError) else error
        sqlstate = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    except BaseException:  # noqa: BLE001  # a property of users': its own error must not hide the given one
        return None
    # Users' errors may call something else so.
    return sqlstate if isinstance(sqlstate, str) and _SQLSTATE.fullmatch(sqlstate) else None


_NOT_SUPPORTED = "0A000"
# The functions of the server that raise 0A000 ("cached plan must not change result type"), 26000 and 42P05. Their
# SQLSTATEs are those of other errors too, and their texts are translated.
_OF_PREPARED = ("RevalidateCachedQuery", "FetchPreparedStatement", "StorePreparedStatement")


def is_of_prepared(error: BaseException) -> bool:
    """Return True if a statement failed only because it was prepared: an ALTER TABLE came since, or it was lost."""
    try:
        original: object = error.orig if isinstance(error, DBAPIError) else error
        return isinstance(original, psycopg.Error) and original.diag.source_function in _OF_PREPARED
    except BaseException:  # noqa: BLE001  # an error of users' own, as in `sqlstate_of`
        return False


def explain_missing_tables(error: BaseException | None) -> SchemaError | None:
    """The error to raise for one of a statement on our tables alone; None if it says something else."""
    if sqlstate_of(error) not in _UNDEFINED_TABLE_OR_COLUMN:
        return None
    return SchemaError(
        "an outboxq table is missing, or older than this outboxq: run `outboxq migrate`, or call "
        f"`outboxq.migrations.upgrade(op, to={LATEST_VERSION})` in a revision of your Alembic history"
    )


@contextmanager
def missing_tables_explained() -> Iterator[None]:
    """Explain missing tables, around statements on our tables alone.

    Raises:
        SchemaError: instead of the database's error, if they are missing.
    """
    try:
        yield
    except DBAPIError as error:
        missing = explain_missing_tables(error)
        if missing is None:
            raise
        raise missing from error


class NoConnection(Exception):
    """An engine gave no connection, for a reason that is its own: a token service, or a listener; the cause has it."""


@contextmanager
def opening() -> Iterator[None]:
    """Count errors of users' code in an engine as outages, as the database's are, while a connection is opened.

    Raises:
        NoConnection: it raised an error that is no driver's.
    """
    try:
        yield
    except (psycopg.Error, SQLAlchemyError, OSError, ConfigError):
        raise
    except Exception as error:
        raise NoConnection from error


def outage_reason(error: BaseException) -> str | None:
    """The reason why no connection is possible, in words that are safe to log; None if the error has no known one.

    A refused connection has no SQLSTATE in libpq. If several hosts were tried, the first known reason of any.
    """
    return next((reason for reason in _OUTAGE_REASONS if reason in str(error)), None) or _refusal(error)


def is_refused(error: BaseException) -> bool:
    """Return True if a server answered, and knows no such database, role or password; of several hosts, all of them."""
    return _refusal(error) is not None and not any(reason in str(error) for reason in _OUTAGE_REASONS)


def _refusal(error: BaseException) -> str | None:
    return next((words for words, pattern in _REFUSALS.items() if re.search(pattern, str(error))), None)


# query_canceled: by a time-out, or by a call of pg_cancel_backend().
QUERY_CANCELED = "57014"
# A right is missing.
INSUFFICIENT_PRIVILEGE = "42501"


def is_database_unavailable(error: BaseException) -> bool:
    """Return True if the server is gone, going, starting or full, and did not merely refuse a statement."""
    sqlstate = sqlstate_of(error)
    if sqlstate is None:
        return True
    # 25006: a standby, which will be promoted, or is not the server that was meant. A cancelled statement is no outage.
    return (sqlstate[:2] in ("08", "53", "57") and sqlstate != QUERY_CANCELED) or sqlstate == READ_ONLY


def describe_error(error: BaseException) -> str:
    """The type of an error, and its SQLSTATE or a known reason: driver texts may hold a host, a user or a value."""
    if isinstance(error, NoConnection):
        return type(error.__cause__).__name__
    original: object = error.orig if isinstance(error, DBAPIError) else error
    reason = sqlstate_of(error) or (outage_reason(error) if isinstance(error, DBAPIError | psycopg.Error) else None)
    return f"{type(original).__name__}{f' ({reason})' if reason else ''}"


def describe_refusal(error: BaseException) -> str:
    """`describe_error` for a statement of ours, with the server's message if it does not support that.

    Such a message quotes no value, unless a function of users' raises it.
    """
    original = error.orig if isinstance(error, DBAPIError) else error
    said = describe_error(error)
    if not isinstance(original, psycopg.Error) or sqlstate_of(error) != _NOT_SUPPORTED:
        return said
    raised = original.diag.source_function == "exec_stmt_raise"
    return said if raised else f"{said}: {original.diag.message_primary}"


def is_transient(error: Exception) -> bool:
    """Return True if the same transaction may succeed later, by any driver.

    The server is gone, going, starting or full, its pool is, or it ended the transaction for the sake of others.
    """
    if not isinstance(error, DBAPIError):
        return isinstance(error, OSError | PoolTimeout)
    sqlstate = sqlstate_of(error)
    if sqlstate is None:
        # Data that a driver refuses was not sent, and would be refused again.
        return error.connection_invalidated or not isinstance(error, DataError)
    return error.connection_invalidated or sqlstate[:2] in ("08", "53", "57") or sqlstate in _TRANSIENT
