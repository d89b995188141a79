"""Read-only queries that `admin.explain` makes; each locks no row, and ends within two seconds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, Executable, Row
from sqlalchemy.exc import DBAPIError

from outboxq.admin.reasons.reason import Reason
from outboxq.codec.text import duration
from outboxq.database.driver import is_lost, run_script
from outboxq.database.errors import sqlstate_of
from outboxq.database.settings import SET_OURS
from outboxq.statements.by_index import BY_INDEX
from outboxq.statements.doctor import sessions
from outboxq.tables import mapped_schema

_SETTINGS = (
    f"SET TRANSACTION READ ONLY; {SET_OURS}SET LOCAL statement_timeout = '2s'; SET LOCAL lock_timeout = '200ms'; "
    f"{'; '.join(BY_INDEX)}"
)
_INSUFFICIENT_PRIVILEGE = "42501"
_REFUSALS = {
    "57014": "not known in 2 s",
    "55P03": "not known, as a table is locked by another session",
    _INSUFFICIENT_PRIVILEGE: "not known, as this role may not look",
}


class Looks:
    """Executes the queries of one explanation, each in a savepoint that is rolled back, to undo settings and locks.

    A query that fails, such as for a missing right or after two seconds, returns no rows; `not_known` reports these
    queries.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.schema = mapped_schema(connection)
        self._refused: dict[str, str] = {}

    def rows(self, subject: str, statement: Executable) -> Sequence[Row[Any]]:
        """Return all rows of a query; none if the query fails.

        Args:
            subject: The name of the data that the query reads, for the report of a failure.

        Raises:
            DBAPIError: the connection is lost.
        """
        try:
            with self._aside():
                return self.connection.execute(statement).all()
        except (DBAPIError, psycopg.Error) as error:
            sqlstate = sqlstate_of(error)
            if sqlstate is None or is_lost(self.connection):
                raise
            self._refused[subject] = _REFUSALS.get(sqlstate, f"not known (SQLSTATE {sqlstate})")
            return ()

    def row(self, subject: str, statement: Executable) -> Row[Any] | None:
        """Return the first row of a query; None if there are no rows or the query fails."""
        return next(iter(self.rows(subject, statement)), None)

    def count(self, subject: str, statement: Executable) -> int:
        """Return the number that a query returns; 0 if the query fails."""
        row = self.row(subject, statement)
        return 0 if row is None else int(row[0])

    def is_refused(self, subject: str) -> bool:
        """Return True if a query with this `subject` has failed."""
        return subject in self._refused

    def not_known(self) -> Iterator[Reason]:
        """Yield one reason that names the data of all failed queries, if any, and what may have made them slow."""
        if not self._refused:
            return
        said = [f"{subject}: {why}" for subject, why in self._refused.items()]
        advice = "Ask again; `outboxq doctor` looks at what may be in the way."
        if _REFUSALS[_INSUFFICIENT_PRIVILEGE] in self._refused.values():
            advice = "Ask as a role of `outboxq roles`: a reader may look at everything here."
        details: dict[str, str | int | float | bool | list[str] | None] = {"looks": list(self._refused)}
        pinned = self.row("the oldest snapshot", sessions.snapshot_holders())
        if pinned is not None and (pinned.seconds or 0) >= 1:
            said.append(f"session {pinned.pid} has pinned the oldest snapshot for {duration(pinned.seconds)}")
            details |= {"snapshot_pid": pinned.pid, "snapshot_seconds": pinned.seconds}
            advice = (
                "Dead rows that vacuum cannot remove make looks slow: see snapshot-pinned-by-session of the doctor."
            )
        yield Reason("not-known", "; ".join(said), details, advice)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        savepoint = self.connection.begin_nested()
        try:
            run_script(self.connection, _SETTINGS)
            yield
        finally:
            if not is_lost(self.connection):
                savepoint.rollback()
