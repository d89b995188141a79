"""The guard on a relay's connection: while a handler runs, transaction verbs are refused before they are sent.

What goes around SQLAlchemy (the driver's own cursor) is not seen here; the certificate finds it.
"""

import sys
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

from sqlalchemy import Connection, NestedTransaction, PoolProxiedConnection, event

from outboxq.driver import driver_connection, run_script
from outboxq.errors import HandlerRolledBack, TransactionVerbRefused
from outboxq.sql_words import first_word, leading_words

_TRANSACTION_VERBS = frozenset(("BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "PREPARE"))


class Savepoint(NestedTransaction):
    """A running job's own.

    `is_released`: what lies behind it stands, and it cannot be gone back to any more.
    """

    __slots__ = ("is_released",)

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.is_released = False

    @property
    def name(self) -> str:
        """What the server calls it."""
        return self._savepoint

    def undo(self) -> None:
        """Go back to it, also where SQLAlchemy has been told to.

        It says that it has also where nothing could be sent, and rows may have come behind it by the driver's cursor.

        Raises:
            psycopg.Error, SQLAlchemyError: it is not there.
        """
        if self.is_active:
            self.rollback()
        else:
            run_script(self.connection, f"ROLLBACK TO SAVEPOINT {self.name}")

    def _do_commit(self) -> None:
        super()._do_commit()
        self.is_released = True


class _Seal(Savepoint):
    """A savepoint that is there already, and that the certificate releases: neither costs a statement.

    It shows no name that a handler could use to forge it.
    """

    __slots__ = ("_seal",)

    def __init__(self, connection: Connection, seal: str) -> None:
        # As SQLAlchemy's own, but for the SAVEPOINT.
        self.connection = connection
        self.is_active = True
        self.is_released = False
        self._savepoint = "outboxq_sealed"
        self._seal = seal
        self._previous_nested = connection._nested_transaction  # noqa: SLF001  # where SQLAlchemy's own enters itself
        connection._nested_transaction = self  # noqa: SLF001  # as above

    @property
    def name(self) -> str:
        return self._seal

    def _close_impl(self, deactivate_from_connection: bool, warn_already_deactive: bool) -> None:
        self._savepoint = self._seal
        super()._close_impl(deactivate_from_connection, warn_already_deactive)

    def _do_commit(self) -> None:
        if not self.is_active:
            super()._do_commit()
        self.is_active = False
        self._deactivate_from_connection()
        self.is_released = True


class Watcher(Protocol):
    """Who is told what becomes of the connection."""

    def sees(self, statement: str) -> None:
        """It is about to be sent."""
        ...

    def hands_out(self) -> None:
        """The driver's own connection is taken, which can be used unseen."""
        ...


class _Watched(Connection):
    """A connection that says when the driver's own is taken from it, also by way of a result."""

    outboxq_guard: "Guard"

    @property
    def connection(self) -> PoolProxiedConnection:
        guard = self.outboxq_guard
        if guard.watcher is not None:
            guard.watcher.hands_out()
        elif guard.opener is not None:
            # Else what goes over the driver's cursor would lie before the job's savepoint, and survive its failure.
            guard.opener()
        return super().connection


def _watched(factory: type[Any], guard: "Guard") -> type[Any]:
    """The driver's cursors, which lead to its connection too."""

    class Watched(factory):  # type: ignore[misc]  # the user's own, or the driver's
        @property
        def connection(self) -> object:
            watcher = guard.watcher
            if watcher is not None and not _is_asked_by_driver():
                watcher.hands_out()
            return super().connection

    return Watched


def _is_asked_by_driver() -> bool:
    # It asks its cursors for their connection too, for the types that it adapts.
    caller = sys._getframe(2).f_globals  # noqa: SLF001  # in the library reference, and cheap: each statement passes here
    return str(caller.get("__name__", "")).partition(".")[0] in ("psycopg", "psycopg_binary", "psycopg_c")


class Guard:
    """Watches one connection. `savepoint` is the running job's own, or None between jobs.

    `opener` begins it, where a handler runs whose savepoint has not begun: also for what a handler sends through the
    connection instead of its session. `watcher` is told of every statement before it is sent, and of who takes
    the driver's connection.
    """

    def __init__(self, connection: Connection) -> None:
        self.savepoint: Savepoint | None = None
        self.opener: Callable[[], None] | None = None
        self.watcher: Watcher | None = None
        self._connection = connection
        # Of a test, around all of its jobs.
        self._around = connection.get_nested_transaction()
        # Its events and its transaction are tied to the object: another one could not stand in for it.
        self._class = type(connection)
        connection.__class__ = _Watched
        connection.__dict__["outboxq_guard"] = self
        driver: Any = driver_connection(connection)
        self._factories = driver.cursor_factory, driver.server_cursor_factory
        driver.cursor_factory = _watched(driver.cursor_factory, self)
        driver.server_cursor_factory = _watched(driver.server_cursor_factory, self)
        event.listen(connection, "before_cursor_execute", self._before_execute)
        event.listen(connection, "commit", self._before_commit)
        event.listen(connection, "rollback", self._before_rollback)

    def remove(self) -> None:
        """Stop watching a connection that others go on to use."""
        self._connection.__class__ = self._class
        del self._connection.__dict__["outboxq_guard"]
        driver: Any = driver_connection(self._connection)
        driver.cursor_factory, driver.server_cursor_factory = self._factories
        event.remove(self._connection, "before_cursor_execute", self._before_execute)
        event.remove(self._connection, "commit", self._before_commit)
        event.remove(self._connection, "rollback", self._before_rollback)

    def begin_savepoint(self, seal: str | None) -> None:
        """Begin the running job's own savepoint.

        Args:
            seal: The name of one that is there already, and stands for it: nothing is sent.
        """
        # A handler before may have left one of its own open: they would become a chain, for as long as claims follow.
        self._connection._nested_transaction = self._around  # noqa: SLF001  # nothing else drops them without a statement
        self.savepoint = Savepoint(self._connection) if seal is None else _Seal(self._connection, seal)

    def _before_execute(
        self, _connection: object, _cursor: object, statement: str, _parameters: object, _context: object, _many: bool
    ) -> None:
        if self.opener is not None:
            self.opener()
        if self.watcher is not None:
            self.watcher.sees(statement)
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

    def let_go(self) -> None:
        """No handler runs any more."""
        self.savepoint = self.opener = self.watcher = None


def may_end_transaction(statement: str) -> bool:
    """Whether there may be a transaction verb in a statement that was let through.

    The server takes several statements at once where they come without parameters. One by one nothing but a verb ends
    a transaction: procedures and DO blocks cannot inside of a transaction block (2D000). A statement that does not
    begin with its verb may have one behind a comment that only the server can read.
    """
    return ";" in statement or not statement.lstrip()[:1].isalpha()


def is_savepoint_verb(statement: str) -> bool:
    """Whether it is about a savepoint, as SQLAlchemy's own transactions send it."""
    return statement.startswith(("SAVEPOINT ", "RELEASE SAVEPOINT ", "ROLLBACK TO SAVEPOINT "))


def _refused_verb(statement: str) -> str | None:
    # Each statement passes here, and nearly all of them end at once.
    verb = first_word(statement)
    if verb not in _TRANSACTION_VERBS:
        return None
    following = tuple(islice(leading_words(statement), 1, 3))
    if verb in ("START", "PREPARE"):
        return f"{verb} TRANSACTION" if following[:1] == ("TRANSACTION",) else None
    # ROLLBACK TO and the savepoint verbs stay allowed: SQLAlchemy's begin_nested() sends them.
    return None if verb == "ROLLBACK" and "TO" in following else verb
