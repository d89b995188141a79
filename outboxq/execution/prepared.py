"""Prepared statements: the names of those that a slot's connection should have on the server."""

import math

from outboxq.database.errors import sqlstate_of

# Errors of prepared statements: invalid_sql_statement_name, duplicate_prepared_statement, and feature_not_supported,
# "cached plan must not change result type".
_NO_SUCH, _THERE_ALREADY, _TABLE_CHANGED = "26000", "42P05", "0A000"
# If statements are lost before this many executions, as many are sent as text.
_WORTHWHILE = 20


def may_be_of_prepared(error: BaseException) -> bool:
    """Return True if an error may be of a statement that was prepared, or was not, and of no other."""
    return sqlstate_of(error) in (_NO_SUCH, _THERE_ALREADY, _TABLE_CHANGED)


class PreparedStatements:
    """The statements of one sort that a connection has prepared, as far as is known.

    The driver drops all prepared statements at a rollback, and behind a transaction pooler each transaction may come
    to another session. A statement that fails for this costs a round trip only. It is prepared again, unless the
    loss before was a moment ago: then statements are sent as text for a while.

    Attributes:
        names: The names of the statements that are prepared.
        is_plain: Statements are sent as plain text for now.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.is_plain = False
        # Executions since the last loss; below zero while statements are sent as text.
        self._age: float = _WORTHWHILE

    def succeeded(self, name: str) -> None:
        """Record that the statement of this name was executed: it is prepared now, or was sent as text."""
        if not self.is_plain:
            self.names.add(name)
        self._age += 1
        self.is_plain = self._age < 0

    def failed(self, error: BaseException, name: str) -> bool:
        """Return True if a statement failed because it was prepared, or was not: it is worth another try."""
        if self.is_plain or not may_be_of_prepared(error):
            return False
        sqlstate = sqlstate_of(error)
        if sqlstate == _THERE_ALREADY:
            # By an earlier try that was rolled back: a name always has the same text.
            self.names.add(name)
            return True
        self.names.clear()
        if sqlstate == _TABLE_CHANGED:
            # The old plan stays under its name.
            self._age = -math.inf
        else:
            self._age = 0 if self._age >= _WORTHWHILE else -_WORTHWHILE
        self.is_plain = self._age < 0
        return True
