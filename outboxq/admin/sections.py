"""Reads an overview in sections, one by one: if the database refuses a section, or is slow, only that part is missing.

Each section is read in a savepoint that is rolled back, which also undoes its settings. A section locks no row, waits
0.2 s at most for a locked table, and is given up after 2 s.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from outboxq.database.driver import is_lost, run_script
from outboxq.database.errors import (
    INSUFFICIENT_PRIVILEGE,
    LOCK_NOT_AVAILABLE,
    QUERY_CANCELED,
    describe_error,
    explain_missing_tables,
    sqlstate_of,
)
from outboxq.database.settings import SET_OURS
from outboxq.errors import SchemaError
from outboxq.statements import by_index

Part = TypeVar("Part")

_SETTINGS = f"{SET_OURS}SET LOCAL statement_timeout = '2s'; SET LOCAL lock_timeout = '200ms'"
# Without these settings a walk over the first 10,000 jobs of a queue would read and sort all its jobs, whenever the
# planner thinks that they are few.
BY_INDEX = "; ".join(by_index.BY_INDEX)


@dataclass(frozen=True, slots=True)
class NotKnown:
    """A section that could not be read: its name, and the reason."""

    part: str
    reason: str


class Sections:
    """Reads an overview section by section, in the caller's transaction, whose settings and locks stay as they were.

    Args:
        settings: SQL with more settings, executed before each section.
        seconds: The time for all sections together; sections after that are not read.
    """

    def __init__(self, connection: Connection, *, settings: str = "", seconds: float = math.inf) -> None:
        self._connection = connection
        self._settings = f"{_SETTINGS}; {settings}" if settings else _SETTINGS
        self._ends_at = time.monotonic() + seconds
        self.refused: list[NotKnown] = []

    def at(self, name: str, look: Callable[[], Part]) -> Part | None:
        """Read the section `name` by calling `look`; return its result.

        If the database refuses a query, or the time for all sections is used up, return None and add the reason to
        `refused`.

        Raises:
            DBAPIError: the connection is lost.
        """
        if time.monotonic() > self._ends_at:
            self.refused.append(NotKnown(name, "not looked at, because the others took too long"))
            return None
        savepoint = self._connection.begin_nested()
        try:
            run_script(self._connection, self._settings)
            return look()
        except SchemaError as error:
            self.refused.append(NotKnown(name, str(error)))
            return None
        except (DBAPIError, psycopg.Error) as error:
            if sqlstate_of(error) is None or is_lost(self._connection):
                raise
            self.refused.append(NotKnown(name, _why_refused(error)))
            return None
        finally:
            if not is_lost(self._connection):
                savepoint.rollback()


def _why_refused(error: DBAPIError | psycopg.Error) -> str:
    """Return the reason why a section could not be read, in a sentence, such as a missing right or a time-out."""
    sqlstate = sqlstate_of(error)
    if sqlstate == INSUFFICIENT_PRIVILEGE:
        original = error.orig if isinstance(error, DBAPIError) else error
        said = original.diag.message_primary if isinstance(original, psycopg.Error) else "permission denied"
        return f"{said}: a reader needs SELECT there, which the SQL of `outboxq roles --sql` gives"
    if sqlstate == QUERY_CANCELED:
        return "not known in 2 s; `outboxq doctor` looks at what may be in the way"
    if sqlstate == LOCK_NOT_AVAILABLE:
        return "another session has locked a table; `outboxq doctor` looks at what may be in the way"
    missing = explain_missing_tables(error)
    return f"refused by the database: {describe_error(error)}" if missing is None else str(missing)
