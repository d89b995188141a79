"""Prepared statements: those of a slot's connection, by name, as far as the server can be expected to have them."""

import time
from typing import Protocol

from outboxq.database.errors import sqlstate_of

# Errors of prepared statements: invalid_sql_statement_name, duplicate_prepared_statement, and feature_not_supported,
# "cached plan must not change result type".
_NO_SUCH, _THERE_ALREADY, _TABLE_CHANGED = "26000", "42P05", "0A000"
# The most prepared claims on a connection: a backend keeps about 200 kB for each. A relay needs a few for each limit.
PREPARED_MOST = 32
# If more than one statement in twenty fails because it was prepared, none is prepared for a minute.
_CREDIT, _LOSS, _PLAIN_SECONDS = 60, 20, 60.0


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
    may come to another session. A statement that fails for this costs a round trip and nothing else; if it happens
    often, statements are sent as plain text for a while. The one that was not used for longest makes room for a new
    one.
    """

    def __init__(self, most: int = PREPARED_MOST) -> None:
        self._most = most
        # In the order of their last use.
        self._names: dict[str, None] = {}
        self._credit = _CREDIT
        self._plain_until = 0.0

    def is_plain(self) -> bool:
        """Whether statements are sent as plain text for now."""
        return time.monotonic() < self._plain_until

    def has(self, statement: Prepared) -> bool:
        """Whether this statement is prepared, as far as is known."""
        return statement.name in self._names

    def preparing(self, statement: Prepared) -> list[str]:
        """The statements in front of the execution of this one; none if it is prepared."""
        if self.has(statement):
            return []
        gone = self._to_let_go()
        return [f"DEALLOCATE {gone}", statement.definition] if gone else [statement.definition]

    def succeeded(self, statement: Prepared) -> None:
        """Record that this statement is prepared now."""
        if self.is_plain():
            return
        self._use(statement.name)
        self._credit = min(self._credit + 1, _CREDIT)

    def failed(self, error: BaseException, statement: Prepared) -> bool:
        """Whether a statement failed because it was prepared, or was not, so that it is worth another try."""
        if not may_be_of_prepared(error) or self.is_plain():
            return False
        if sqlstate_of(error) == _THERE_ALREADY:
            # This name was forgotten when another one was lost; it is still prepared.
            self._use(statement.name)
            return True
        self._names.clear()
        self._credit -= _LOSS
        if self._credit < 0:
            self._credit, self._plain_until = _CREDIT, time.monotonic() + _PLAIN_SECONDS
        return True

    def _use(self, name: str) -> None:
        gone = self._to_let_go()
        if name in self._names:
            del self._names[name]
        elif gone is not None:
            del self._names[gone]
        self._names[name] = None

    def _to_let_go(self) -> str | None:
        return next(iter(self._names)) if len(self._names) >= self._most else None
