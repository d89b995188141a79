"""Enqueue: a job becomes a row in the caller's own transaction.

A job is a mapped row in the caller's unit of work, so that savepoints, rollbacks and autoflush are SQLAlchemy's. Only a
job that waits for the primary key of a pending entity is kept aside, and inserted by Core right after the flush that
gives the entity its key; a rollback before that forgets both, and a commit without that flush is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from sqlalchemy import Connection, Insert, event, func, insert, literal, text
from sqlalchemy.engine import ExceptionContext, ExecutionContext
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, SessionTransaction, UOWTransaction, object_session

from outboxq.errors import ArgumentError, EnqueueError
from outboxq.job import JobHandle, uuid7
from outboxq.kinds import JobKind, JobOptions, NewJob, P
from outboxq.sessions import (
    AnySession,
    autocommit_error,
    explain_missing_tables,
    is_autocommit_by_default,
    outbox_bind,
    plain_session,
    refuse_autocommit,
    type_name,
)
from outboxq.tables import JobRow, job

_WAITING = "outboxq.waiting"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job that needs the keys of entities that are not flushed yet, and the transaction that it was added in."""

    id: UUID
    job: NewJob
    transaction: SessionTransaction | None


class OutboxSession(Session):
    """A `Session` with `add_job` and `add_jobs`: `sessionmaker(engine, class_=OutboxSession)`."""

    def add_job(self, kind: JobKind[P], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """Add a job to this unit of work: it exists if and only if this transaction commits.

        Does no I/O. See `outboxq.add_job`.
        """
        return add_job(self, kind, *args, **kwargs)

    def add_jobs(self, jobs: Iterable[NewJob]) -> list[JobHandle]:
        """Add many jobs, made by `kind.job(...)`. See `add_job`."""
        return add_jobs(self, jobs)


class AsyncOutboxSession(AsyncSession):
    """An `AsyncSession` with `add_job` and `add_jobs`, which do no I/O and are not awaited."""

    sync_session_class = OutboxSession

    def add_job(self, kind: JobKind[P], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """Add a job to this unit of work: it exists if and only if this transaction commits.

        Not a coroutine: nothing is sent before the flush. See `outboxq.add_job`.
        """
        return add_job(self, kind, *args, **kwargs)

    def add_jobs(self, jobs: Iterable[NewJob]) -> list[JobHandle]:
        """Add many jobs, made by `kind.job(...)`. See `add_job`."""
        return add_jobs(self, jobs)


def add_job(session: AnySession, kind: JobKind[P], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
    """Add a job to any SQLAlchemy session: `Session`, `AsyncSession`, `scoped_session`, or a subclass of these.

    The job is one more row of the session's transaction: it runs if that commits, and never existed if it, or the
    savepoint around it, rolls back. Not a coroutine, also for async sessions.

    Returns:
        A handle whose `id` is final already.

    Raises:
        ArgumentError: the arguments do not fit the handler, or JSON cannot hold them.
        JobTooLarge: over 256 KiB of JSON.
        EnqueueError: a session that cannot hold jobs (AUTOCOMMIT, or `binds` that leave the outbox out).
    """
    plain = plain_session(session, "add_job")
    if not isinstance(kind, JobKind):
        raise ArgumentError(f"add_job takes a handler, or a kind made by external(...), got {type_name(kind)}")
    return _add(plain, [kind.job(*args, **kwargs)])[0]


def add_jobs(session: AnySession, jobs: Iterable[NewJob]) -> list[JobHandle]:
    """Add many jobs, made by `kind.job(...)`, to one unit of work. All are checked before the first is added.

    Raises:
        ArgumentError, JobTooLarge, EnqueueError: as `add_job`.
    """
    # Drawn first: a generator that fails half-way adds nothing.
    return _add(plain_session(session, "add_job"), list(jobs))


def _add(session: Session, jobs: list[NewJob]) -> list[JobHandle]:
    _prepare(session)
    for new in jobs:
        _check(session, new)
    return [_add_one(session, new) for new in jobs]


def _check(session: Session, new: NewJob) -> None:
    if not isinstance(new, NewJob):
        raise ArgumentError(f"add_jobs takes jobs made by kind.job(...), got {type_name(new)}")
    for entity in new.pending_entities():
        if object_session(entity) is not session:
            raise EnqueueError(
                f"{new.kind!r} takes a {type_name(entity)} that has no primary key yet and is not in this session: "
                "session.add() it before add_job"
            )


def _add_one(session: Session, new: NewJob) -> JobHandle:
    handle = JobHandle(uuid7(), new.kind, new.queue)
    if new.pending_entities():
        _watch_for_keys(session)
        # A pending entity is in a session whose transaction has begun.
        transaction = session.get_nested_transaction() or session.get_transaction()
        session.info.setdefault(_WAITING, []).append(_Waiting(handle.id, new, transaction))
    else:
        session.add(_row(handle.id, new))
    return handle


def _values(job_id: UUID, new: NewJob) -> dict[str, object]:
    return {
        "id": job_id,
        "queue": new.queue,
        "kind": new.kind,
        "args": new.encode(),
        "headers": new.headers,
        "priority": new.options.priority,
        "max_attempts": new.options.max_attempts,
        **_schedule(new.options),
    }


def _schedule(options: JobOptions) -> dict[str, object]:
    if options.run_at is not None:
        return {"state": "scheduled", "run_at": options.run_at}
    # The database's clock decides, so that no producer's clock can be wrong.
    if options.delay is not None and options.delay > timedelta(0):
        return {"state": "scheduled", "run_at": func.clock_timestamp() + literal(options.delay)}
    return {"state": "ready"}


def _row(job_id: UUID, new: NewJob) -> JobRow:
    row = JobRow()
    for name, value in _values(job_id, new).items():
        setattr(row, name, value)
    return row


def _prepare(session: Session) -> None:
    """Refuse what can be seen without I/O, and look again at each flush."""
    bind = outbox_bind(session)
    if isinstance(bind, Connection):
        refuse_autocommit(bind)
    elif is_autocommit_by_default(session, bind):
        raise autocommit_error()
    # On the dialect: engine.execution_options() makes engines for a moment, which share it.
    if not event.contains(bind.dialect, "handle_error", _explain_missing_tables):
        event.listen(bind.dialect, "handle_error", _explain_missing_tables)
    if not event.contains(session, "before_flush", _before_flush):
        event.listen(session, "before_flush", _before_flush)


def _watch_for_keys(session: Session) -> None:
    # Only where a job waits: listening costs more than the rest of add_job.
    if not event.contains(session, "after_flush_postexec", _after_flush):
        event.listen(session, "after_flush_postexec", _after_flush)
        event.listen(session, "before_commit", _before_commit)
        event.listen(session, "after_transaction_end", _after_transaction_end)


def _before_flush(session: Session, _context: UOWTransaction, _instances: object) -> None:
    if not (session.info.get(_WAITING) or any(isinstance(row, JobRow) for row in session.new)):
        return
    connection = session.connection(bind_arguments={"mapper": JobRow})
    refuse_autocommit(connection)
    if session.twophase:
        # PREPARE TRANSACTION refuses a transaction that has notified. Local, and per flush: a rolled back savepoint
        # takes the setting with it.
        connection.execute(text("SELECT set_config('outboxq.notify', 'off', true)"))


def _after_flush(session: Session, _context: UOWTransaction) -> None:
    waiting: list[_Waiting] = session.info.get(_WAITING, [])
    ready = [item for item in waiting if _has_keys(session, item)]
    if not ready:
        return
    session.info[_WAITING] = [item for item in waiting if item not in ready]
    connection = session.connection(bind_arguments={"mapper": JobRow})
    for item in ready:
        connection.execute(insert(job).values(_values(item.id, item.job)))


def _has_keys(session: Session, item: _Waiting) -> bool:
    return not item.job.pending_entities() and all(
        object_session(entity) is session for entity in item.job.pending.values()
    )


def _before_commit(session: Session) -> None:
    """Refuse to commit without a job whose entity left the session: it would vanish without a word."""
    if not session.info.get(_WAITING):
        return
    session.flush()
    for item in session.info[_WAITING]:
        names = ", ".join(repr(name) for name in item.job.pending)
        raise EnqueueError(
            f"a job {item.job.kind!r} waits for the primary key of argument {names}, which left this session before it "
            "was flushed: keep the entity in the session, or roll back"
        )


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    # What a transaction or a savepoint leaves waiting was rolled back with it: committing either flushes first.
    waiting: list[_Waiting] = session.info.get(_WAITING, [])
    session.info[_WAITING] = [item for item in waiting if item.transaction is not transaction]


def _explain_missing_tables(context: ExceptionContext) -> None:
    missing = explain_missing_tables(context.original_exception)
    if missing is not None and _inserts_jobs(context.execution_context):
        raise missing from context.original_exception


def _inserts_jobs(context: ExecutionContext | None) -> bool:
    statement = context.compiled.statement if context is not None and context.compiled is not None else None
    return isinstance(statement, Insert) and statement.table is job
