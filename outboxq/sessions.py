"""The sessions that callers bring: which they are, where they lead, and the ones that cannot hold anything of ours."""

from typing import Any, TypeAlias

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outboxq.errors import EnqueueError
from outboxq.tables import JobRow

AnySession: TypeAlias = "Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any]"


def plain_session(session: AnySession, what: str) -> Session:
    """The sync session below whatever the caller has.

    Raises:
        EnqueueError: not a session; `what` names the call in its message.
    """
    if isinstance(session, scoped_session | async_scoped_session):
        session = session()
    if isinstance(session, AsyncSession):
        return session.sync_session
    if isinstance(session, Session):
        return session
    raise EnqueueError(f"{what} takes an SQLAlchemy session (Session, AsyncSession, ...), got {type_name(session)}")


def type_name(value: object) -> str:
    """How an error names what it was given."""
    return type(value).__name__


def outbox_bind(session: Session) -> Engine | Connection:
    """Where the session's own rows of the outbox and the inbox go.

    Raises:
        EnqueueError: nowhere, or to another database than PostgreSQL.
    """
    try:
        bind = session.get_bind(mapper=JobRow)
    except UnboundExecutionError as error:
        raise EnqueueError(
            "this session is not bound to a database for the outbox: give the session a bind, or add "
            "`outboxq.tables.JobRow: engine` to its binds, with the engine that your business rows use"
        ) from error
    if bind.dialect.name != "postgresql":
        raise EnqueueError(f"the outbox needs PostgreSQL, but this session is bound to {bind.dialect.name}")
    return bind


def is_autocommit_by_default(session: Session, engine: Engine) -> bool:
    """Whether the engine or the session asks for AUTOCOMMIT, as far as their settings tell; the flush looks again."""
    session_options: dict[str, object] = getattr(session, "execution_options", None) or {}
    level = session_options.get("isolation_level") or engine.get_execution_options().get("isolation_level")
    return (level or getattr(engine.dialect, "_on_connect_isolation_level", None)) == "AUTOCOMMIT"


def refuse_autocommit(connection: Connection) -> None:
    """Refuse a connection on which each statement commits by itself.

    Raises:
        EnqueueError: it does.
    """
    # Every PostgreSQL driver has it, or SQLAlchemy's adapter for it does.
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise autocommit_error()


def autocommit_error() -> EnqueueError:
    """The refusal of AUTOCOMMIT."""
    return EnqueueError(
        "this session is in AUTOCOMMIT: what is written here would not be one with your rows. "
        "Use a session whose engine has a transactional isolation level, such as READ COMMITTED"
    )
