"""The sessions of handlers: joined to the relay's transaction, made when a handler first asks for one."""

import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

import psycopg
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import InvalidRequestError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from outboxq.database.answers import note
from outboxq.database.defects import contain
from outboxq.errors import HandlerRolledBack
from outboxq.execution.errors import ROLLED_BACK
from outboxq.handlers.deferred import Write, defer, send_at_commit
from outboxq.handlers.unlocked import UnlockedChanges
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession


def nothing() -> None:
    """The opener of a session whose transaction and savepoint are there already."""


class HandlerSession(OutboxSession):
    """The session of a handler; calls `on_first_use` before it uses its connection.

    Attributes:
        watched: Entities whose rows are not locked, with the object that looks at their changes before each flush.
        is_rolled_back: Its transaction was rolled back, and not just a savepoint.
    """

    on_first_use: Callable[[], None]
    is_rolled_back = False
    watched: tuple[UnlockedChanges, Sequence[object]] | None = None

    def watch(self, changes: UnlockedChanges, entities: Sequence[object]) -> None:
        """Have `changes` look at the changes of these entities before each flush."""
        if entities:
            self.watched = changes, entities

    def look(self) -> None:
        """Have the changes of watched entities looked at now."""
        if self.watched is not None:
            changes, entities = self.watched
            try:
                changes.look(entities)
            except Exception as error:  # noqa: BLE001  # raised again, unless it is a defect
                contain(error)
                self.watched = None

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """SQLAlchemy's hook before every use of a connection."""
        self.on_first_use()
        if self.watched is not None and getattr(kwargs.get("clause"), "_for_update_arg", None) is not None:
            # The handler locks rows itself, perhaps those of the watched entities.
            self.watched = None
        return super().get_bind(*args, **kwargs)

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        """SQLAlchemy's hook for every flush, also for an autoflush and that of a commit."""
        self.look()
        super().flush(objects)

    def peek_bind(self, **kwargs: Any) -> Engine | Connection:
        """The engine or connection that the session would use; does not begin a savepoint."""
        return super().get_bind(**kwargs)

    def check(self) -> None:
        """Check that the handler did not roll the session's transaction back, by whatever method.

        Raises:
            HandlerRolledBack: it did, and returned as if done.
        """
        if self.is_rolled_back:
            raise HandlerRolledBack(ROLLED_BACK)


def _note_rollback(session: HandlerSession, ended: SessionTransaction) -> None:
    if ended.parent is None:
        session.is_rolled_back = True


send_at_commit(HandlerSession)
# A session that has not used its connection yet has nothing to undo there: no savepoint says that it was rolled back.
event.listen(HandlerSession, "after_soft_rollback", _note_rollback)


class AsyncHandlerSession(AsyncOutboxSession):
    """The session of an async handler: its coroutines are counted, none of which the handler may leave unawaited."""

    sync_session_class = HandlerSession


def _counted(name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    def counted(self: AsyncHandlerSession, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        coroutine = method(self, *args, **kwargs)
        note(coroutine, f"ctx.session.{name}(...)")
        return coroutine

    return counted


for _name, _method in inspect.getmembers(AsyncSession, inspect.isfunction):
    if inspect.iscoroutinefunction(_method) and not _name.startswith("_"):
        setattr(AsyncHandlerSession, _name, _counted(_name, _method))


def hand_over(deferred: list[Write], session: Session) -> None:
    """Give a session the statements that were deferred before it was made."""
    if deferred:
        defer(session, *deferred)
        deferred.clear()


class AttemptSession:
    """The session of one attempt, made when it is first asked for: a handler that needs none does not pay for it."""

    def __init__(self, make: Callable[[], HandlerSession]) -> None:
        self._make = make
        self.made: HandlerSession | None = None

    def session(self) -> HandlerSession:
        """The session.

        Raises:
            InvalidRequestError: the attempt is over: a session would write into another job's transaction.
        """
        if self.made is None:
            self.made = self._make()
        return self.made

    def close(self) -> bool:
        """Close the session for good; False if that fails, because the transaction below it is not as it was.

        Errors of users' listeners are raised.
        """
        self._make = _refuse
        try:
            if self.made is not None:
                self.made.close()
        except (SQLAlchemyError, psycopg.Error):
            return False
        return True


def _refuse() -> NoReturn:
    raise InvalidRequestError("the job of this context is over: its session cannot be opened any more")


# close_resets_only=False: a task or thread that the handler left behind must not write into another job's transaction.
SESSION_OPTIONS: dict[str, Any] = {
    "join_transaction_mode": "rollback_only",
    "expire_on_commit": False,
    "close_resets_only": False,
}
