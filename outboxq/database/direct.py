"""Sends a single compiled statement on a relay's connection by the driver's cursor, without SQLAlchemy's execution.

SQLAlchemy's own execution takes several times as long. This module sends the same text and values, and raises the same
errors. It creates no execution context and calls no listeners, so it is only for connections without listeners.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Connection, Dialect, Select, Update

from outboxq.database.driver import dbapi_connection
from outboxq.database.guard import guard_of
from outboxq.database.session_listeners import is_ours
from outboxq.emitter import HOOKS_OPTION

T = TypeVar("T")
# All other statements are left to SQLAlchemy.
_OPTIONS = frozenset(("isolation_level", HOOKS_OPTION))


def is_direct(connection: Connection) -> bool:
    """Return True if this module may send statements on a connection, with the same effect as SQLAlchemy.

    It may if no listeners are registered for statements, the job has set no options or settings on the connection, and
    the transaction works.
    """
    guard, heard, dialect = guard_of(connection), connection.dispatch, connection.dialect.dispatch
    return (
        guard is not None
        and guard.is_as_given
        and _OPTIONS.issuperset(connection.get_execution_options())
        # The logger to which the engine writes its statements.
        and not connection._echo  # noqa: SLF001  # SQLAlchemy has no other name for it
        and not (heard.before_execute or heard.after_execute or heard.after_cursor_execute)
        # The guard's own listeners.
        and len([*heard.before_cursor_execute]) == 1
        and not (dialect.do_execute or dialect.do_executemany)
        and all(map(is_ours, dialect.handle_error))
        and not connection.dialect.positional
    )


def fetch(
    connection: Connection, statement: Select[Any], parameters: Mapping[str, object]
) -> tuple[list[Any], tuple[int, ...]]:
    """Send a SELECT; return its rows as the driver reads them, and the oid of each column's type.

    Raises:
        sqlalchemy.exc.DBAPIError: as SQLAlchemy would raise it.
    """
    return _executed(
        connection, statement, parameters, lambda cursor: (cursor.fetchall(), tuple(it[1] for it in cursor.description))
    )


def send_update(connection: Connection, statement: Update, parameters: Mapping[str, object]) -> int:
    """Send an UPDATE; return the number of rows that it matched.

    Raises:
        sqlalchemy.exc.DBAPIError: as SQLAlchemy would raise it.
    """
    return _executed(connection, statement, parameters, lambda cursor: int(cursor.rowcount))


def _executed(connection: Connection, statement: Any, parameters: Mapping[str, object], read: Callable[[Any], T]) -> T:
    text, values_of = _compiled(statement, connection.dialect)
    values, cursor, guard = values_of(parameters), None, guard_of(connection)
    assert guard is not None
    try:
        cursor = dbapi_connection(connection).cursor()
        guard.announce(text)
        cursor.execute(text, values)
        return read(cursor)
    except BaseException as error:
        # As in SQLAlchemy: an error that ends a thread or task arrives here too.
        if isinstance(error, psycopg.Error) or not isinstance(error, Exception):
            connection._handle_dbapi_exception(error, text, values, cursor, None)  # noqa: SLF001  # it wraps errors, and tells listeners
        raise
    finally:
        if cursor is not None:
            cursor.close()


# The cache is small: one dialect for each engine.
@lru_cache(512)
def _compiled(statement: Any, dialect: Dialect) -> tuple[str, Callable[[Mapping[str, object]], dict[str, object]]]:
    """Return the SQL text of a statement, and a function that converts given parameters to those that are sent."""
    compiled = statement.compile(dialect=dialect)
    convert: tuple[tuple[str, Callable[[object], object]], ...] = tuple(compiled._bind_processors.items())  # noqa: SLF001  # as SQLAlchemy's own context does

    # Names that the driver cannot read are replaced in the text.
    named = compiled.escaped_bind_names

    def values_of(parameters: Mapping[str, object]) -> dict[str, object]:
        values: dict[str, object] = compiled.construct_params(parameters, escape_names=False)
        for name, converted in convert:
            values[name] = converted(values[name])
        return {named.get(name, name): value for name, value in values.items()} if named else values

    return compiled.string, values_of
