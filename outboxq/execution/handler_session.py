"""The sessions of handlers: joined to the relay's transaction, made when a handler first uses one."""

import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from outboxq.database.answers import note
from outboxq.database.defects import contain
from outboxq.errors import HandlerRolledBack
from outboxq.execution.errors import ROLLED_BACK
from outboxq.handlers.deferred import Write, defer, send_at_commit
from outboxq.handlers.unlocked import UnlockedChanges
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession


class HandlerSession(OutboxSession):
    """The session of a handler.

    Attributes:
        on_first_use: Called before it uses its connection; None if transaction and savepoint exist already.
        watched: Entities whose rows are not locked, with the object that checks their changes before each flush.
        is_rolled_back: Its transaction was rolled back, and not just a savepoint.
    """

    on_first_use: Callable[[], None] | None = None
    is_rolled_back = False
    watched: tuple[UnlockedChanges, Sequence[object]] | None = None

    def watch(self, changes: UnlockedChanges, entities: Sequence[object]) -> None:
        """Check the changes of these entities before each flush, by `changes`."""
        if entities:
            self.watched = changes, entities

    def look(self) -> None:
        """Check the changes of watched entities now."""
        if self.watched is not None:
            changes, entities = self.watched
            try:
                changes.look(entities)
            except Exception as error:  # noqa: BLE001  # raised again, unless it is a defect
                contain(error)
                self.watched = None

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """SQLAlchemy's hook before every use of a connection."""
        if self.on_first_use is not None:
            self.on_first_use()
        if self.watched is not None and getattr(kwargs.get("clause"), "_for_update_arg", None) is not None:
            # The handler locks rows itself, perhaps those of the watched entities.
            self.watched = None
        return super().get_bind(*args, **kwargs)

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        """SQLAlchemy's hook for every flush, also an autoflush and that of a commit."""
        if self.watched is not None:
            self.look()
        super().flush(objects)

    def peek_bind(self, **kwargs: Any) -> Engine | Connection:
        """The engine or connection that the session would use; begins no savepoint."""
        return super().get_bind(**kwargs)

    def check(self) -> None:
        """Check that the handler did not roll the session's transaction back in any way.

        Raises:
            HandlerRolledBack: it did, and returned as if done.
        """
        if self.is_rolled_back:
            raise HandlerRolledBack(ROLLED_BACK)


def _note_rollback(session: HandlerSession, ended: SessionTransaction) -> None:
    if ended.parent is None:
        session.is_rolled_back = True


send_at_commit(HandlerSession)
# A session that has not used its connection has no savepoint there that would show its rollback.
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


IS_OVER = "the job of this context is over: its session cannot be opened any more"

# close_resets_only=False: a task or thread that the handler left behind must not write into another job's transaction.
SESSION_OPTIONS: dict[str, Any] = {
    "join_transaction_mode": "rollback_only",
    "expire_on_commit": False,
    "close_resets_only": False,
}
