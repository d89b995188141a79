"""Prepared statements: those of a slot's connection, by name, as far as the server can be expected to have them."""

from typing import Protocol

from outboxq.database.errors import sqlstate_of

# Errors of prepared statements: invalid_sql_statement_name, duplicate_prepared_statement, and feature_not_supported,
# "cached plan must not change result type".
_NO_SUCH, _THERE_ALREADY, _TABLE_CHANGED = "26000", "42P05", "0A000"
# How often a connection may lose its statements until it prepares none any more.
_MOST_LOSSES = 1


def may_be_of_prepared(error: BaseException) -> bool:
    """Whether an error may be one of a statement that was prepared, or was not, and of no other."""
    return sqlstate_of(error) in (_NO_SUCH, _THERE_ALREADY, _TABLE_CHANGED)


class Prepared(Protocol):
    """A statement that can be prepared: its name on a connection, and its PREPARE statement."""

    @property
    def name(self) -> str: ...
    @property
    def definition(self) -> str: ...


class PreparedStatements:
    """The statements of one sort that a connection has prepared, as far as is known.

    The driver drops all prepared statements when it sees a rollback, and behind a transaction pooler each transaction
    may come to another session. A statement that fails for this costs a round trip and nothing else. Statements are
    prepared again after the first loss, and sent as text from the second one on.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._losses = 0

    def is_plain(self) -> bool:
        """Whether statements are sent as plain text."""
        return self._losses > _MOST_LOSSES

    def has(self, statement: Prepared) -> bool:
        """Whether this statement is prepared, as far as is known."""
        return statement.name in self._names

    def preparing(self, statement: Prepared) -> list[str]:
        """The statements in front of the execution of this one; none if it is prepared."""
        return [] if self.has(statement) else [statement.definition]

    def succeeded(self, statement: Prepared) -> None:
        """Record that this statement is prepared now."""
        self._names.add(statement.name)

    def failed(self, error: BaseException, statement: Prepared) -> bool:
        """Whether a statement failed because it was prepared, or was not, so that it is worth another try."""
        if self.is_plain() or not may_be_of_prepared(error):
            return False
        if sqlstate_of(error) == _THERE_ALREADY:
            # By an earlier try whose transaction was rolled back: a name stands for one text.
            self._names.add(statement.name)
        else:
            self._names.clear()
            self._losses += 1
        return True
