"""The HTTP answers to errors: a status, and a sentence that says no more than the user may know."""

import psycopg
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outboxq.dashboard.parameters import BadRequest
from outboxq.database.errors import (
    INSUFFICIENT_PRIVILEGE,
    LOCK_NOT_AVAILABLE,
    QUERY_CANCELED,
    describe_error,
    explain_missing_tables,
    sqlstate_of,
)
from outboxq.errors import (
    ArgumentError,
    AuditNotFound,
    BatchNotFound,
    EffectNotFound,
    InvalidKey,
    JobNotFound,
    MessageNotFound,
    OutboxqError,
    PayloadError,
    ScheduleNotFound,
    SchemaError,
    UnknownKind,
)

_NOT_FOUND = (AuditNotFound, BatchNotFound, EffectNotFound, JobNotFound, MessageNotFound, ScheduleNotFound)


class Refused(Exception):
    """Raised to refuse a request, with the HTTP status and a sentence for the user."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


# Errors that a page or an action may raise; code below SQLAlchemy raises psycopg's own.
EXPECTED = (Refused, OutboxqError, DBAPIError, psycopg.Error, PoolTimeout)


def answer_to(error: Exception) -> Refused:
    """Return the refusal to send for an error of a page or an action: an HTTP status, and a sentence for the user."""
    match error:
        case Refused():
            return error
        case BadRequest() | InvalidKey() | ArgumentError():
            return Refused(400, str(error))
        case PayloadError() | UnknownKind():
            return Refused(400, f"The arguments do not fit: {error}")
        case SchemaError():
            return Refused(503, str(error))
        case DBAPIError() | psycopg.Error() | PoolTimeout():
            return _of_database(error)
        case TimeoutError():
            return Refused(503, "So many rows could not be looked through in time: ask for fewer, or use `outboxq`.")
        case OutboxqError() if isinstance(error, _NOT_FOUND):
            return Refused(404, str(error))
        case _:
            return Refused(409, str(error))


def _of_database(error: DBAPIError | psycopg.Error | PoolTimeout) -> Refused:
    missing = explain_missing_tables(error)
    if missing is not None:
        return Refused(503, str(missing))
    match sqlstate_of(error):
        case str() as state if state == INSUFFICIENT_PRIVILEGE:
            return Refused(403, "The database role of the dashboard may not do this: see `outboxq roles --sql`.")
        case "25006":
            return Refused(403, "This server is a replica, or takes no changes: open the dashboard of the primary.")
        case str() as state if state == QUERY_CANCELED:
            return Refused(503, "The database did not answer in time. The doctor looks at what may be in the way.")
        case str() as state if state == LOCK_NOT_AVAILABLE:
            return Refused(503, "Another session has locked what this needs. Try again in a moment.")
        case "23505":
            return Refused(409, "It was done already, or another session has just done the same: look again.")
        case None if isinstance(error, DataError):
            return Refused(503, "A row holds a value that cannot be read: `outboxq migrate` repairs such rows.")
        case str() as state if state.startswith("22"):
            return Refused(400, f"The database cannot hold such a value: {describe_error(error)}.")
        case _:
            return Refused(503, f"The database did not answer: {describe_error(error)}.")
