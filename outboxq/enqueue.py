"""Enqueue: a job becomes a row in the caller's own transaction.

The jobs of a flush are one pending object in the caller's unit of work, so that savepoints, rollbacks and autoflush are
SQLAlchemy's: opening a savepoint flushes it, rolling one back expunges it. Its flush is one INSERT for 1,000 jobs. Only
a job that waits for the primary key of a pending entity is kept aside, and inserted right after the flush that gives
its key; a rollback before that forgets both, and a commit without that flush is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count, islice

from sqlalchemy import Connection, Insert, event, text
from sqlalchemy.engine import ExceptionContext, ExecutionContext
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapper, Session, SessionTransaction, UOWTransaction, object_session

from outboxq.errors import ArgumentError, EnqueueError
from outboxq.job import uuid7s
from outboxq.kinds import JobHandle, JobKind, NewJob, P
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
from outboxq.statements.enqueue import JOBS_PER_INSERT, insert_jobs
from outboxq.tables import JobRow, job

_BATCH = "outboxq.batch"
WAITING = "outboxq.waiting"
# What a session's `info` holds of this module.
OURS = frozenset({_BATCH, WAITING})
# Tells batches apart in their session's identity map.
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job that needs the keys of entities that are not flushed yet, and the transaction that it was added in."""

    id: str
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
    batch = _pending_batch(session)
    if batch is None:
        _prepare(session)
    for new in jobs:
        if not isinstance(new, NewJob) or new.pending:
            _check(session, new)
    named = dict(zip(uuid7s(len(jobs)), jobs, strict=True))
    ready = _set_aside(session, named) if any(new.pending for new in jobs) else named
    if ready:
        _append(session, batch, ready)
    return [JobHandle(job_id, new.envelope.kind, new.envelope.queue) for job_id, new in named.items()]


def _check(session: Session, new: NewJob) -> None:
    if not isinstance(new, NewJob):
        raise ArgumentError(f"add_jobs takes jobs made by kind.job(...), got {type_name(new)}")
    for entity in new.pending_entities():
        if object_session(entity) is not session:
            raise EnqueueError(
                f"{new.kind!r} takes a {type_name(entity)} that has no primary key yet and is not in this session: "
                "session.add() it before add_job"
            )


def _set_aside(session: Session, named: Mapping[str, NewJob]) -> dict[str, NewJob]:
    """Keep what needs a key until after the flush that gives it; returns the others, complete."""
    # First: it may refuse, and then none is added.
    ready = {job_id: new.complete() for job_id, new in named.items() if not new.pending_entities()}
    for job_id, new in named.items():
        if job_id not in ready:
            _wait_for_keys(session, job_id, new)
    return ready


def _pending_batch(session: Session) -> JobRow | None:
    """What the session's next flush will insert, as far as it was added in a transaction that still stands."""
    batch: JobRow | None = session.info.get(_BATCH)
    if batch is None or batch.jobs is None or object_session(batch) is not session:
        return None
    return batch


def _append(session: Session, batch: JobRow | None, jobs: Mapping[str, NewJob]) -> None:
    if batch is None:
        batch = JobRow(next(_numbers))
        session.add(batch)
        session.info[_BATCH] = batch
    batch.jobs.update(jobs)


def _wait_for_keys(session: Session, job_id: str, new: NewJob) -> None:
    _watch_for_keys(session)
    # A pending entity is in a session whose transaction has begun.
    transaction = session.get_nested_transaction() or session.get_transaction()
    session.info.setdefault(WAITING, []).append(_Waiting(job_id, new, transaction))


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
    if not (isinstance(session, OutboxSession) or event.contains(session, "before_flush", _before_flush)):
        event.listen(session, "before_flush", _before_flush)


def _watch_for_keys(session: Session) -> None:
    # Only where a job waits: listening costs more than the rest of add_job.
    if not event.contains(session, "after_flush_postexec", _after_flush):
        event.listen(session, "after_flush_postexec", _after_flush)
        event.listen(session, "before_commit", _before_commit)
        event.listen(session, "after_transaction_end", _after_transaction_end)


def _before_flush(session: Session, _context: UOWTransaction, _instances: object) -> None:
    # Before any row of the flush, the business rows' included: they would be committed without their jobs.
    if session.info.get(WAITING) or _pending_batch(session) is not None:
        refuse_autocommit(session.connection(bind_arguments={"mapper": JobRow}))


# For all sessions of the class at once: listening to each costs more than its jobs.
event.listen(OutboxSession, "before_flush", _before_flush)


@event.listens_for(JobRow, "before_insert")
def _flush_batch(_mapper: Mapper[JobRow], connection: Connection, batch: JobRow) -> None:
    session = object_session(batch)
    assert session is not None
    # Taken out: what is added from here on, by an event of this flush, is for the next one.
    jobs, batch.jobs = batch.jobs, None
    session.info.pop(_BATCH, None)
    _insert(session, connection, jobs or {})


def _insert(session: Session, connection: Connection, jobs: Mapping[str, NewJob]) -> None:
    if session.twophase:
        # PREPARE TRANSACTION refuses a transaction that has notified. Local, and per flush: a rolled back savepoint
        # takes the setting with it.
        connection.execute(text("SELECT set_config('outboxq.notify', 'off', true)"))
    rest = iter(jobs.items())
    while some := dict(islice(rest, JOBS_PER_INSERT)):
        connection.execute(*insert_jobs(some))


def _after_flush(session: Session, _context: UOWTransaction) -> None:
    waiting: list[_Waiting] = session.info.get(WAITING, [])
    ready = {item.id: item for item in waiting if _has_keys(session, item)}
    if not ready:
        return
    session.info[WAITING] = [item for item in waiting if item.id not in ready]
    connection = session.connection(bind_arguments={"mapper": JobRow})
    _insert(session, connection, {job_id: item.job.complete() for job_id, item in ready.items()})


def _has_keys(session: Session, item: _Waiting) -> bool:
    return not item.job.pending_entities() and all(
        object_session(entity) is session for entity in (item.job.pending or {}).values()
    )


def _before_commit(session: Session) -> None:
    """Refuse to commit without a job whose entity left the session: it would vanish without a word."""
    if not session.info.get(WAITING):
        return
    session.flush()
    for item in session.info[WAITING]:
        names = ", ".join(repr(name) for name in item.job.pending or ())
        raise EnqueueError(
            f"a job {item.job.kind!r} waits for the primary key of argument {names}, which left this session before it "
            "was flushed: keep the entity in the session, or roll back"
        )


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    # What a transaction or a savepoint leaves waiting was rolled back with it: committing either flushes first.
    waiting: list[_Waiting] = session.info.get(WAITING, [])
    session.info[WAITING] = [item for item in waiting if item.transaction is not transaction]


def _explain_missing_tables(context: ExceptionContext) -> None:
    missing = explain_missing_tables(context.original_exception)
    if missing is not None and _inserts_jobs(context.execution_context):
        raise missing from context.original_exception


def _inserts_jobs(context: ExecutionContext | None) -> bool:
    statement = context.compiled.statement if context is not None and context.compiled is not None else None
    return isinstance(statement, Insert) and statement.table is job
