"""The guard on a relay's connection: while a handler runs, transaction verbs are refused before they are sent.

What goes around SQLAlchemy (the driver's own cursor) is not seen here; the certificate finds it.
"""

import re
from collections.abc import Callable

from sqlalchemy import Connection, NestedTransaction, event
from sqlalchemy.engine import ExecutionContext
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause, SavepointClause

from outboxq.errors import HandlerRolledBack, TransactionVerbRefused

_LEADING_COMMENTS = re.compile(r"(?:\s+|--[^\n]*\n|/\*.*?\*/)*", re.DOTALL)
# ROLLBACK TO and the savepoint verbs stay allowed: SQLAlchemy's begin_nested() sends them.
_REFUSED = re.compile(
    r"(?:BEGIN|COMMIT|END|ABORT|START\s+TRANSACTION|PREPARE\s+TRANSACTION"
    r"|ROLLBACK(?!\s+(?:WORK\s+|TRANSACTION\s+)?TO\b))\b",
    re.IGNORECASE,
)


_OPTION = "outboxq_guard"


class Guard:
    """Watches one connection. `savepoint` is the running job's own, or None between jobs.

    `opener` begins it, where a handler runs whose savepoint has not begun: also for what a handler sends through the
    connection instead of its session.
    """

    _seal: str | None
    _adopted: str | None

    def __init__(self, connection: Connection) -> None:
        self.savepoint: NestedTransaction | None = None
        self.opener: Callable[[], None] | None = None
        self._connection = connection
        self._seal = self._adopted = None
        connection.execution_options(**{_OPTION: self})
        # On the dialect, which others use too: they have no guard.
        if not event.contains(connection.dialect, "do_execute", _do_execute):
            event.listen(connection.dialect, "do_execute", _do_execute)
        event.listen(connection, "before_cursor_execute", self._before_execute)
        event.listen(connection, "commit", self._before_commit)
        event.listen(connection, "rollback", self._before_rollback)

    def remove(self) -> None:
        """Stop watching a connection that others go on to use."""
        self._connection.execution_options(**{_OPTION: None})
        event.remove(self._connection, "before_cursor_execute", self._before_execute)
        event.remove(self._connection, "commit", self._before_commit)
        event.remove(self._connection, "rollback", self._before_rollback)

    def begin_savepoint(self, seal: str | None) -> None:
        """Begin the running job's own savepoint.

        Args:
            seal: The name of one that is there already, and stands for it: nothing is sent.
        """
        self._seal, self._adopted = seal, None
        try:
            self.savepoint = self._connection.begin_nested()
        finally:
            if self._adopted is None:
                # It did not come to that, or went another way: nothing else may be taken for it.
                self._seal = None

    def stand_in(self, cursor: DBAPICursor, statement: object) -> bool:
        """Whether a statement of the adopted savepoint needs nothing sent, or what was needed has been sent here."""
        if self._seal is None:
            return False
        if isinstance(statement, SavepointClause) and self._adopted is None:
            self._adopted = statement.ident
            return True
        if isinstance(statement, RollbackToSavepointClause) and statement.ident == self._adopted:
            cursor.execute(f"ROLLBACK TO SAVEPOINT {self._seal}")
            return True
        # Released by the certificate.
        return isinstance(statement, ReleaseSavepointClause) and statement.ident == self._adopted

    def _before_execute(
        self, _connection: object, _cursor: object, statement: str, _parameters: object, _context: object, _many: bool
    ) -> None:
        if self.opener is not None:
            self.opener()
        if self.savepoint is None:
            return
        verb = _refused_verb(statement)
        if verb:
            raise TransactionVerbRefused(
                f"the handler sent {verb}, but its transaction is the relay's: return to commit, raise to roll back"
            )
        if not self.savepoint.is_active and not statement.startswith("ROLLBACK TO"):
            # Its savepoint is gone: what it wrote now would survive its own failure.
            raise HandlerRolledBack("the handler went on after it rolled its session back: use session.begin_nested()")

    def _before_commit(self, _connection: object) -> None:
        if self._handler_runs():
            raise TransactionVerbRefused("the handler committed the relay's connection: return, and the relay commits")

    def _before_rollback(self, _connection: object) -> None:
        if self._handler_runs():
            raise TransactionVerbRefused(
                "the handler rolled back the relay's connection: raise, and the relay undoes it"
            )

    def _handler_runs(self) -> bool:
        return self.savepoint is not None or self.opener is not None


def _do_execute(cursor: DBAPICursor, _statement: str, _parameters: object, context: ExecutionContext) -> bool:
    guard, compiled = context.execution_options.get(_OPTION), context.compiled
    # By SQLAlchemy's own clause: users' listeners may have changed the text.
    return isinstance(guard, Guard) and compiled is not None and guard.stand_in(cursor, compiled.statement)


def _refused_verb(statement: str) -> str | None:
    comments = _LEADING_COMMENTS.match(statement)
    refused = _REFUSED.match(statement, comments.end() if comments else 0)
    return refused.group(0).upper() if refused else None
