"""Finds the connection or shard to which a caller's session writes outboxq's rows, and refuses unsuitable sessions."""

from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import Session, object_mapper, scoped_session
from sqlalchemy.orm.attributes import instance_state

from outboxq.errors import EnqueueError
from outboxq.tables import JobRow, job_mapper
from outboxq.tables import metadata as ours

SyncSession: TypeAlias = Session | scoped_session[Any]
AnAsyncSession: TypeAlias = AsyncSession | async_scoped_session[Any]
AnySession: TypeAlias = SyncSession | AnAsyncSession


def plain_session(session: AnySession, what: str) -> Session:
    """Return the plain `Session` inside a caller's session, which may also be a scoped or an async one.

    Raises:
        EnqueueError: the object is no session; `what` names the called function in the message.
    """
    if isinstance(session, scoped_session | async_scoped_session):
        session = session()
    if isinstance(session, AsyncSession):
        return session.sync_session
    if isinstance(session, Session):
        return session
    raise EnqueueError(f"{what} takes an SQLAlchemy session (Session, AsyncSession, ...), got {type(session).__name__}")


def outbox_bind(session: Session) -> Engine | Connection | None:
    """Return the engine or connection to which the session sends outboxq's rows, without I/O.

    Return None for a ShardedSession, which has to choose an engine for each row.

    Raises:
        EnqueueError: the session has no bind for them or one that is not for PostgreSQL, or it sends its other rows
            elsewhere, so that jobs would be in a transaction of their own.
    """
    if isinstance(session, ShardedSession):
        return None
    try:
        # In a handler's session, `get_bind` begins the transaction.
        bind: Engine | Connection = getattr(session, "peek_bind", session.get_bind)(mapper=job_mapper())
    except UnboundExecutionError as error:
        raise EnqueueError(
            "this session is not bound to a database for the outbox: give the session a bind, or add "
            "`outboxq.tables.JobRow: engine` to its binds, with the engine that your business rows use"
        ) from error
    _check_dialect(bind)
    binds = binds_of(session)
    # Two-phase commit joins several transactions into one.
    if binds and not session.twophase:
        theirs = [
            other for key, other in binds.items() if key is not JobRow and getattr(key, "metadata", None) is not ours
        ]
        if session.bind is not None:
            theirs.append(session.bind)
        if theirs and bind not in theirs:
            raise EnqueueError(
                "this session's binds give jobs a transaction of their own, which may commit without your rows, or "
                "your rows without it: bind outboxq.tables.JobRow to the very engine object that your business rows use"
            )
    return bind


def check_session(session: Session) -> None:
    """Raise if the session cannot write outboxq's rows, as far as can be known without I/O; each flush checks the rest.

    Raises:
        EnqueueError: as in `outbox_bind`; or the session is in AUTOCOMMIT, so that each statement commits by itself.
    """
    bind = outbox_bind(session)
    if isinstance(bind, Connection):
        refuse_autocommit(bind)
    elif bind is not None:
        options: dict[str, object] = getattr(session, "execution_options", None) or {}
        level = options.get("isolation_level") or bind.get_execution_options().get("isolation_level")
        if (level or getattr(bind.dialect, "_on_connect_isolation_level", None)) == "AUTOCOMMIT":
            raise _autocommit_error()


def _check_dialect(bind: Engine | Connection) -> None:
    if bind.dialect.name != "postgresql":
        raise EnqueueError(f"the outbox needs PostgreSQL, but this session is bound to {bind.dialect.name}")


def binds_of(session: Session) -> Mapping[Any, object]:
    """Return the session's binds by class, mapper or table; its general `bind` is left out."""
    # SQLAlchemy 2.0 names it differently.
    binds: Mapping[Any, object] = getattr(session, "binds", None) or getattr(session, "_Session__binds", {})
    return binds


def transaction_connection(session: Session) -> Connection:
    """Return the connection by which the session's transaction writes outboxq's rows; begin one if necessary.

    Raises:
        EnqueueError: the connection leads to another database than PostgreSQL, or no shard can be chosen.
    """
    arguments: dict[str, Any] = {"mapper": job_mapper()}
    if isinstance(session, ShardedSession):
        arguments["shard_id"] = _shard_of_rows(session)
    connection = session.connection(bind_arguments=arguments)
    _check_dialect(connection)
    return connection


def _shard_of_rows(session: ShardedSession) -> Hashable:
    """Return the shard for jobs: that of the rows that wait for the flush or, if none wait, of the open transaction.

    The session's `shard_chooser` is called for a job only if these rows are in no shard or in several. It would have to
    derive the shard from the job; a shard other than that of the rows would need a second transaction.

    Raises:
        EnqueueError: the `shard_chooser` fails for a job.
    """
    pending = (*session.new, *session.dirty, *session.deleted)
    shards = {_shard_of(session, row) for row in pending if not isinstance(row, JobRow)} or _shards_in_use(session)
    if len(shards) == 1:
        return shards.pop()
    try:
        return _shard_of(session, JobRow(0, lambda *_: None))
    except Exception as error:
        raise EnqueueError(
            f"the rows of this transaction are in {len(shards)} shards, and the session's shard_chooser does not say "
            "which of them has the jobs: let it answer for an instance of outboxq.tables.JobRow"
        ) from error


def _shard_of(session: ShardedSession, row: object) -> Hashable:
    state = instance_state(row)
    if state.key is None:
        # get_bind calls the chooser once and records its answer, as the flush will.
        mapper: Any = job_mapper() if isinstance(row, JobRow) else object_mapper(row)
        session.get_bind(mapper, instance=row)
        return state.identity_token
    return state.key[2]


def _shards_in_use(session: ShardedSession) -> set[Hashable]:
    transaction = session.get_transaction()
    if transaction is None:
        return set()
    shards: Mapping[Hashable, Engine | Connection] = session._ShardedSession__shards  # type: ignore[attr-defined]  # noqa: SLF001  # no public reading
    return {shard for shard, bind in shards.items() if bind in transaction._connections}  # noqa: SLF001  # no public reading either


def outbox_connection(session: Session | Connection, what: str) -> Connection:
    """Return the connection by which the caller's transaction writes outboxq's rows at once, outside of a flush.

    Raises:
        EnqueueError: there is no such connection, or it cannot write these rows; `what` names the called function in
            the
            message.
    """
    if isinstance(session, Connection):
        _check_dialect(session)
        connection = session
    else:
        plain = plain_session(session, what)
        outbox_bind(plain)
        connection = transaction_connection(plain)
    refuse_autocommit(connection)
    return connection


def refuse_autocommit(connection: Connection) -> None:
    """Raise if each statement on the connection commits by itself: jobs and other rows would not commit together.

    Raises:
        EnqueueError: each statement commits by itself.
    """
    # Read by the class's own property: a relay's connection records each time that the driver's is taken from it.
    below = Connection.connection.__get__(connection).dbapi_connection
    # Every PostgreSQL driver has this attribute, or SQLAlchemy's adapter for the driver does.
    if getattr(below, "autocommit", False):
        raise _autocommit_error()


def _autocommit_error() -> EnqueueError:
    return EnqueueError(
        "this session is in AUTOCOMMIT: what is written here would not be one with your rows. "
        "Use a session whose engine has a transactional isolation level, such as READ COMMITTED"
    )
