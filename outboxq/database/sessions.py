"""The sessions that callers bring: which database or shard they lead to, and which cannot hold rows of ours."""

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
    """The sync session below the session, scoped session or async session that the caller has.

    Raises:
        EnqueueError: not a session; `what` names the call in its message.
    """
    if isinstance(session, scoped_session | async_scoped_session):
        session = session()
    if isinstance(session, AsyncSession):
        return session.sync_session
    if isinstance(session, Session):
        return session
    raise EnqueueError(f"{what} takes an SQLAlchemy session (Session, AsyncSession, ...), got {type(session).__name__}")


def outbox_bind(session: Session) -> Engine | Connection | None:
    """The bind for the session's own rows of the outbox and the inbox; None if a ShardedSession has to choose. No I/O.

    Raises:
        EnqueueError: there is none, it is no PostgreSQL database, or none of the session's own rows go to it.
    """
    if isinstance(session, ShardedSession):
        return None
    try:
        # `get_bind` of a handler's session begins its transaction.
        bind: Engine | Connection = getattr(session, "peek_bind", session.get_bind)(mapper=job_mapper())
    except UnboundExecutionError as error:
        raise EnqueueError(
            "this session is not bound to a database for the outbox: give the session a bind, or add "
            "`outboxq.tables.JobRow: engine` to its binds, with the engine that your business rows use"
        ) from error
    _check_dialect(bind)
    binds = binds_of(session)
    # Two-phase commit makes one of several transactions.
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
    """Refuse a session that cannot hold rows of ours, as far as that shows without I/O; each flush checks again.

    Raises:
        EnqueueError: as `outbox_bind` does, or the session is in AUTOCOMMIT.
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
    """The binds of a session other than its `bind`, by class, mapper or table."""
    # Named differently in SQLAlchemy 2.0.
    binds: Mapping[Any, object] = getattr(session, "binds", None) or getattr(session, "_Session__binds", {})
    return binds


def transaction_connection(session: Session) -> Connection:
    """The connection of the session's transaction for rows of ours.

    Raises:
        EnqueueError: it leads to another database than PostgreSQL, or no shard can be chosen.
    """
    arguments: dict[str, Any] = {"mapper": job_mapper()}
    if isinstance(session, ShardedSession):
        arguments["shard_id"] = _shard_of_rows(session)
    connection = session.connection(bind_arguments=arguments)
    _check_dialect(connection)
    return connection


def _shard_of_rows(session: ShardedSession) -> Hashable:
    """The shard of the rows that wait for the flush; without any, the one that the transaction uses already.

    The session's `shard_chooser` is called only if that leaves none or several: it would have to know a job's shard
    from the job, and another one than the rows' would make two transactions.

    Raises:
        EnqueueError: the `shard_chooser` does not know either.
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
        # get_bind calls the chooser once, and records the answer, as the flush will.
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
    """The connection of the session's transaction for rows of ours, for statements that are sent at once.

    Raises:
        EnqueueError: there is none, or none that can hold them; `what` names the call in its message.
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
    """Refuse a connection on which each statement commits by itself.

    Raises:
        EnqueueError: it does.
    """
    # By the class's own property: a relay's connection records each time that the driver's is taken from it.
    below = Connection.connection.__get__(connection).dbapi_connection
    # Every PostgreSQL driver has it, or SQLAlchemy's adapter for it does.
    if getattr(below, "autocommit", False):
        raise _autocommit_error()


def _autocommit_error() -> EnqueueError:
    return EnqueueError(
        "this session is in AUTOCOMMIT: what is written here would not be one with your rows. "
        "Use a session whose engine has a transactional isolation level, such as READ COMMITTED"
    )
