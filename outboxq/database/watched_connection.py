"""A relay's connection and its cursors, which tell its guard what goes to the driver beside SQLAlchemy."""

import sys
from typing import Any, Protocol

from sqlalchemy import Connection, PoolProxiedConnection


class DriverUse(Protocol):
    """What a guard is told of the use of the driver's own connection and cursors."""

    @property
    def is_handlers_turn(self) -> bool:
        """Whether a handler runs."""
        ...

    def hands_out(self) -> None:
        """The driver's own connection is taken."""
        ...

    def sends(self, query: object) -> None:
        """One of the driver's cursors sends this: for SQLAlchemy, or by itself."""
        ...


class WatchedConnection(Connection):
    """A connection that says when the driver's own is taken from it, also by way of a result.

    `outboxq_guard` is None once it was lent and taken back.
    """

    outboxq_guard: DriverUse | None

    @property
    def connection(self) -> PoolProxiedConnection:
        if self.outboxq_guard is not None:
            self.outboxq_guard.hands_out()
        return super().connection


def watched_cursor(factory: type[Any], guard: DriverUse) -> type[Any]:
    """The driver's cursors, which lead to its connection too, and can be used beside SQLAlchemy themselves."""

    class Watched(factory):  # type: ignore[misc]  # the user's own, or the driver's
        @property
        def connection(self) -> object:
            if guard.is_handlers_turn and not _is_asked_by_driver():
                guard.hands_out()
            return super().connection

        def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
            guard.sends(query)
            return super().execute(query, *args, **kwargs)

        def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
            guard.sends(query)
            return super().executemany(query, *args, **kwargs)

        def stream(self, *args: Any, **kwargs: Any) -> Any:
            guard.sends(None)
            return super().stream(*args, **kwargs)

        def copy(self, *args: Any, **kwargs: Any) -> Any:
            guard.sends(None)
            return super().copy(*args, **kwargs)

    return Watched


def _is_asked_by_driver() -> bool:
    # It asks its cursors for their connection too, for the types that it adapts.
    caller = sys._getframe(2).f_globals  # noqa: SLF001  # in the library reference, and cheap: each statement passes here
    return str(caller.get("__name__", "")).partition(".")[0] in ("psycopg", "psycopg_binary", "psycopg_c")
