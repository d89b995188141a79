"""Enqueue: a job becomes a row in the caller's own transaction, by the flush of the caller's session."""

import weakref
from collections.abc import Iterable

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, object_session

from outboxq.clock import uuid7s
from outboxq.database.sessions import AnySession, check_session, plain_session
from outboxq.errors import ArgumentError, EnqueueError
from outboxq.new_job import NewJob, has_unique_key, with_answer
from outboxq.outbox.handle import JobHandle, make_handle
from outboxq.outbox.kinds import JobKind, P
from outboxq.outbox.pending import add_pending, pending_batch


def add_job(session: AnySession, kind: JobKind[P], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
    """Add a job to any SQLAlchemy session: `Session`, `AsyncSession`, `scoped_session`, or a subclass of these.

    The job is one more row of the session's transaction: it runs if the transaction commits, and never existed if that,
    or the savepoint around it, rolls back. This is no coroutine, not even for async sessions.

    Returns:
        A handle whose `id` is final already. Of a job with a unique key, `handle.added` says after the flush whether
        it was added.

    Raises:
        ArgumentError: the arguments do not fit the handler, or JSON cannot hold them.
        JobTooLarge: over 256 KiB of JSON.
        EnqueueError: the session cannot hold jobs (AUTOCOMMIT, or `binds` that leave the outbox out).
    """
    plain = plain_session(session, "add_job")
    if not isinstance(kind, JobKind):
        raise ArgumentError(f"add_job takes a handler, or a kind made by external(...), got {type(kind).__name__}")
    return add_new(plain, [kind.job(*args, **kwargs)])[0]


def add_jobs(session: AnySession, jobs: Iterable[NewJob]) -> list[JobHandle]:
    """Add many jobs, made by `kind.job(...)`, to one unit of work. All are checked before the first is added.

    Raises:
        ArgumentError, JobTooLarge, EnqueueError: for the same reasons as in `add_job`.
    """
    # The iterable is read to its end first, so that a generator that fails half-way adds no jobs.
    return add_new(plain_session(session, "add_job"), list(jobs))


class OutboxSession(Session):
    """A `Session` with `add_job` and `add_jobs`: `sessionmaker(engine, class_=OutboxSession)`."""

    add_job = add_job
    add_jobs = add_jobs


class AsyncOutboxSession(AsyncSession):
    """An `AsyncSession` with `add_job` and `add_jobs`, which do no I/O and are not awaited."""

    sync_session_class = OutboxSession
    add_job = add_job
    add_jobs = add_jobs


def add_new(session: Session, jobs: list[NewJob]) -> list[JobHandle]:
    """Add all jobs to a sync session or, if one of them is refused, none; return their handles."""
    batch = pending_batch(session)
    if batch is None:
        check_session(session)
    is_keyed = has_entities = False
    for new in jobs:
        if not isinstance(new, NewJob) or new.entities:
            _check(session, new)
            has_entities = True
        if new.keys is not None:
            is_keyed = True
    if is_keyed:
        jobs = [with_answer(new) if has_unique_key(new) else new for new in jobs]
    named = dict(zip(uuid7s(len(jobs)), jobs, strict=True))
    add_pending(session, batch, named, has_entities=has_entities)
    transaction = session.get_transaction()
    # Weak, and one object for all handles of the transaction.
    added_by = None if transaction is None else weakref.ref(transaction)
    if is_keyed:
        return [make_handle(job_id, new, added_by) for job_id, new in named.items()]
    return [
        JobHandle(job_id, new.envelope.kind, new.envelope.queue, new.envelope.keeps_result, added_by)
        for job_id, new in named.items()
    ]


def _check(session: Session, new: NewJob) -> None:
    if not isinstance(new, NewJob):
        raise ArgumentError(f"add_jobs takes jobs made by kind.job(...), got {type(new).__name__}")
    for entity in new.pending_entities():
        if object_session(entity) is not session:
            raise EnqueueError(
                f"{new.kind!r} was given a new {type(entity).__name__}, which has no primary key yet and is not in "
                "this session: session.add() it before add_job"
            )
