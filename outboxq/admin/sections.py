"""Sections: parts of one read of the database; one that is refused or slow leaves the others intact.

Each is read in a savepoint that is rolled back, and its settings with it. It locks no row, waits 0.2 s at the most for
a table that is locked, and is given up after 2 s.
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
# Otherwise a walk over the first 10,000 jobs of a queue would read, and sort, all of them, as soon as the planner
# thinks that they are few.
BY_INDEX = "; ".join(by_index.BY_INDEX)


@dataclass(frozen=True, slots=True)
class NotKnown:
    """A section that is empty, and why."""

    part: str
    reason: str


class Sections:
    """The sections of one read, in the caller's transaction, which they leave as it was.

    Args:
        settings: Statements for each section, after its bounds.
        seconds: What all sections together may take: those that come later are not read.
    """

    def __init__(self, connection: Connection, *, settings: str = "", seconds: float = math.inf) -> None:
        self._connection = connection
        self._settings = f"{_SETTINGS}; {settings}" if settings else _SETTINGS
        self._ends_at = time.monotonic() + seconds
        self.refused: list[NotKnown] = []

    def at(self, name: str, look: Callable[[], Part]) -> Part | None:
        """The result of `look`; None if the database refuses it.

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
    """The reason why a section is empty, in a sentence: a missing right, or what is in the way."""
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
