"""Pending jobs: they wait in a session, as one more object of its unit of work, for the flush that inserts them.

The jobs of a flush are one pending object, so that savepoints, rollbacks and autoflush are SQLAlchemy's: opening a
savepoint flushes it, rolling one back expunges it. The flush begins with one INSERT for 1,000 jobs, before hooks of
users see the object. Jobs with entities among their arguments, and those of the same flush, are inserted right after
it: it may change their primary keys, or delete them. A job that waits for the primary key of a pending entity is set
aside until after the flush that gives it.

The jobs that were added in a transaction or savepoint are remembered until it ends: a COMMIT that would lose one of
them is refused.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction, UOWTransaction, object_session
from sqlalchemy.orm.attributes import instance_state

from outboxq.codec.entities import EntityArgument
from outboxq.database.sessions import refuse_autocommit, transaction_connection
from outboxq.emitter import HOOKS_OPTION
from outboxq.errors import EnqueueError
from outboxq.new_job import NewJob
from outboxq.outbox.insert import QUEUES_ANNOUNCED, explain_errors_of, insert_all, queues_of
from outboxq.outbox.sending import sender_of
from outboxq.outbox.sending_events import send_jobs_added
from outboxq.tables import JobRow, job_mapper

# Attributes of a session, and not keys of its `info`, which belongs to users and may be cleared.
_BATCH = "_outboxq_batch"
_WAITING = "_outboxq_waiting"
_ASIDE = "_outboxq_aside"
_CONNECTION = "outboxq.connection"
# Tells batches apart in their session's identity map.
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job that needs the keys that a flush gives to entities, and the transaction that it was added in."""

    id: str
    job: NewJob
    transaction: SessionTransaction | None


@dataclass(slots=True)
class _Added:
    """The batches that were added in one transaction or savepoint, and the queues of the jobs that were inserted."""

    batches: list[JobRow] = field(default_factory=list)
    queues: set[str] = field(default_factory=set)


# Weak: an entry goes with its transaction, so a rollback leaves nothing to clean up.
_added: WeakKeyDictionary[SessionTransaction, _Added] = WeakKeyDictionary()


def pending_batch(session: Session) -> JobRow | None:
    """The batch that the session's next flush will insert; None if there is none, or if it was rolled back."""
    batch: JobRow | None = vars(session).get(_BATCH)
    if batch is None or batch.jobs is None or object_session(batch) is not session:
        return None
    return batch


def add_pending(session: Session, batch: JobRow | None, named: Mapping[str, NewJob], *, has_entities: bool) -> None:
    """Add jobs by their ids to `batch`, the session's `pending_batch`, or to a new one.

    Args:
        has_entities: Some of them have entities among their arguments, and may have to wait for the keys of these.
    """
    ready = _set_aside(session, named) if has_entities else named
    if not ready:
        return
    if batch is None:
        job_mapper()
        batch = JobRow(next(_numbers), _flush_batch)
        session.add(batch)
        vars(session)[_BATCH] = batch
        added = _added.setdefault(_transactions(session)[0], _Added())
        # Batches that were written are dropped: a long transaction may have many.
        added.batches = [*(other for other in added.batches if other.jobs is not None), batch]
    assert batch.jobs is not None
    batch.jobs.update(ready)


def _set_aside(session: Session, named: Mapping[str, NewJob]) -> dict[str, NewJob]:
    """Keep the jobs that need a key until after the flush that gives it; returns the others."""
    # First, because complete() may raise: then no job is added.
    ready = {
        job_id: new.complete() if new.was_pending() else new
        for job_id, new in named.items()
        if not new.pending_entities()
    }
    for job_id, new in named.items():
        if job_id not in ready:
            _wait_for_keys(session, job_id, new)
    return ready


def _wait_for_keys(session: Session, job_id: str, new: NewJob) -> None:
    # A pending entity is in a session whose transaction has begun.
    transaction = session.get_nested_transaction() or session.get_transaction()
    vars(session).setdefault(_WAITING, []).append(_Waiting(job_id, new, transaction))
    # Only when a job waits: listening costs more than the rest of add_job.
    if not event.contains(session, "after_flush_postexec", _after_flush):
        event.listen(session, "after_flush_postexec", _after_flush)
        event.listen(session, "before_commit", _before_commit)
        event.listen(session, "after_transaction_end", _after_transaction_end)


def _transactions(session: Session) -> list[SessionTransaction]:
    """The session's open savepoints and its transaction, the innermost first."""
    found = []
    transaction = session.get_nested_transaction() or session.get_transaction()
    while transaction is not None:
        found.append(transaction)
        transaction = transaction.parent
    return found


def _unwritten(session: Session) -> list[JobRow]:
    """The batches of the session's transaction that were neither rolled back nor written to the table yet."""
    added = filter(None, map(_added.get, _transactions(session)))
    return [batch for each in added for batch in each.batches if batch.jobs is not None]


def holds_only_jobs(session: Session) -> bool:
    """Return True if a flush of the session's new objects would insert nothing but jobs, and every job."""
    new = len(session._new)  # noqa: SLF001  # `new` builds a set of objects each time
    if _BATCH not in vars(session) and _WAITING not in vars(session):
        return new == 0
    batch = pending_batch(session)
    # A batch that was added in a transaction which is closed by now is refused by the flush.
    is_whole = _unwritten(session) == ([] if batch is None else [batch])
    return is_whole and not vars(session).get(_WAITING) and new == (batch is not None)


def current_transaction(session: Session) -> SessionTransaction | None:
    """The session's innermost savepoint, or its transaction; None if it has not begun."""
    return session.get_nested_transaction() or session.get_transaction()


def is_within(session: Session, transaction: SessionTransaction) -> bool:
    """Return True if this transaction or savepoint of the session is open."""
    return any(each is transaction for each in _transactions(session))


def replace_pending(session: Session, job_id: str, new: NewJob) -> bool:
    """Put another job into the place of one that the next flush would insert; False if that is written already."""
    batch = pending_batch(session)
    if batch is not None and batch.jobs is not None and job_id in batch.jobs:
        batch.jobs[job_id] = new
        return True
    waiting: list[_Waiting] = vars(session).get(_WAITING, [])
    for place, item in enumerate(waiting):
        if item.id == job_id:
            waiting[place] = _Waiting(job_id, new, item.transaction)
            return True
    return False


def change_pending(session: Session, change: Callable[[Mapping[str, NewJob]], Mapping[str, NewJob]]) -> None:
    """Put other jobs into the places of those that the next flushes would insert, by their ids."""
    batch = pending_batch(session)
    waiting: list[_Waiting] = vars(session).get(_WAITING, [])
    jobs = {} if batch is None or batch.jobs is None else batch.jobs
    if not (jobs or waiting):
        return
    changed = change({**jobs, **{item.id: item.job for item in waiting}})
    jobs.update((job_id, changed[job_id]) for job_id in jobs)
    waiting[:] = [_Waiting(item.id, changed[item.id], item.transaction) for item in waiting]


def take_jobs(session: Session) -> Mapping[str, NewJob]:
    """Take the jobs of the session's next flush out of it, to be inserted by `insert_all` in the same transaction."""
    batch = pending_batch(session)
    if batch is None:
        return {}
    jobs = _complete(batch.jobs or {}) if _has_entities(batch) else batch.jobs or {}
    batch.jobs = None
    Session.expunge(session, batch)
    vars(session)[_BATCH] = None
    return jobs


def _complete(jobs: Mapping[str, NewJob]) -> dict[str, NewJob]:
    return {job_id: new.complete() for job_id, new in jobs.items()}


def _before_flush(session: Session, context: UOWTransaction, _instances: object) -> None:
    batch = pending_batch(session)
    if batch is None and not vars(session).get(_WAITING):
        return
    connection = transaction_connection(session)
    # Before any row of the flush: AUTOCOMMIT would commit the business rows without their jobs.
    refuse_autocommit(connection)
    context.attributes[_CONNECTION] = connection
    if batch is not None:
        has_entities = _has_entities(batch)
        if has_entities:
            # For reading: so that the flush runs to its end, and calls `_write_set_aside`, with nothing else to write.
            context.register_object(instance_state(batch), listonly=True)
        Session.expunge(session, batch)
        _write(session, connection, batch, has_entities=has_entities)


def write_plain_jobs(session: Session, connection: Connection) -> bool:
    """Insert the jobs of the session's next flush now, and return True; not if some have entities."""
    batch = pending_batch(session)
    if batch is None or _has_entities(batch):
        return False
    refuse_autocommit(connection)
    Session.expunge(session, batch)
    _write(session, connection, batch, has_entities=False)
    return True


def _flush_batch(connection: Connection, batch: JobRow) -> None:
    """Write the jobs that a hook of this flush added after `_before_flush`."""
    session = object_session(batch)
    assert session is not None
    refuse_autocommit(connection)
    _write(session, connection, batch, has_entities=_has_entities(batch))


def _has_entities(batch: JobRow) -> bool:
    # A list: for plain jobs, which are all checked, it takes half the time of a generator.
    some = [new for new in (batch.jobs or {}).values() if new.entities or new.followers]
    return any(map(NewJob.has_entities, some))


def _write(session: Session, connection: Connection, batch: JobRow, *, has_entities: bool) -> None:
    """Write a batch, or set it aside if it has entities: the flush may change their primary keys, or delete them."""
    if batch not in _unwritten(session):
        raise EnqueueError("jobs that wait in a session cannot be moved to another session: add them there")
    # Jobs that a hook of this flush adds from here on go into the next flush.
    vars(session)[_BATCH] = None
    if has_entities:
        vars(session).setdefault(_ASIDE, []).append(batch)
    else:
        _insert(session, connection, batch.jobs or {})
        # Last: if the INSERT fails, the batch counts as unwritten, and the commit is refused.
        batch.jobs = None


def _insert(session: Session, connection: Connection, jobs: Mapping[str, NewJob]) -> None:
    explain_errors_of(connection)
    sender = sender_of(session)
    with nullcontext(jobs) if sender is None else sender.sending(jobs, connection) as sent:
        # Of the whole transaction: until its end it has a lock for each queue that it announces.
        queues = _added.setdefault(_transactions(session)[-1], _Added()).queues
        queues |= queues_of(sent)
        if session.twophase:
            # PREPARE TRANSACTION refuses a transaction that has notified.
            insert_all(connection, sent, wakes="none")
        else:
            insert_all(connection, sent, wakes="by queue" if len(queues) <= QUEUES_ANNOUNCED else "all")
        if connection.get_execution_options().get(HOOKS_OPTION):
            send_jobs_added(session, connection, sent)


def _write_set_aside(session: Session, context: UOWTransaction) -> None:
    """Write the jobs that `_write` has set aside, now that the keys of their entities are those of the flush."""
    batches: list[JobRow] = vars(session).pop(_ASIDE, [])
    unwritten = _unwritten(session) if batches else []
    # Others are of a flush that failed.
    for batch in [each for each in batches if each in unwritten]:
        # The flush has taken it for a row.
        session.identity_map.safe_discard(instance_state(batch))
        batch.jobs = _complete(batch.jobs or {})
        _insert(session, context.attributes.get(_CONNECTION) or transaction_connection(session), batch.jobs)
        # Last, as in `_write`.
        batch.jobs = None


def _after_flush(session: Session, context: UOWTransaction) -> None:
    waiting: list[_Waiting] = vars(session).get(_WAITING, [])
    ready = {item.id: item.job for item in waiting if _has_keys(session, item.job)}
    if not ready:
        return
    vars(session)[_WAITING] = [item for item in waiting if item.id not in ready]
    # No connection if a hook of this flush has added the first job that waits.
    connection = context.attributes.get(_CONNECTION) or transaction_connection(session)
    _insert(session, connection, _complete(ready))


def _has_keys(session: Session, new: NewJob) -> bool:
    arguments = (new.entities or {}).values()
    return not any(each.is_pending() or _has_left(session, each) for each in arguments)


def _has_left(session: Session, argument: EntityArgument) -> bool:
    """Return True if another session, which may never commit its row, has the entity that had no primary key."""
    return argument.key is None and object_session(argument.entity) is not session


def _refuse_to_lose_jobs(session: Session) -> None:
    """Refuse to commit if a job left the session unwritten. Jobs that are still pending are flushed by the commit."""
    if _BATCH not in vars(session):
        # No job was ever added to it.
        return
    lost = [batch.jobs or {} for batch in _unwritten(session) if object_session(batch) is not session]
    if lost:
        count, kinds = sum(map(len, lost)), {new.kind for jobs in lost for new in jobs.values()}
        raise EnqueueError(
            f"{count} {'job' if count == 1 else 'jobs'} ({', '.join(map(repr, sorted(kinds)))}) left this session "
            "before being written, by expunge(), expunge_all() or a flush that failed, and would be lost: roll back"
        )


def _before_commit(session: Session) -> None:
    """Refuse to commit if a job waits for an entity that left the session: the job would be lost silently."""
    if not vars(session).get(_WAITING):
        return
    session.flush()
    for item in vars(session)[_WAITING]:
        names = ", ".join(repr(name) for name, each in (item.job.entities or {}).items() if each.key is None)
        raise EnqueueError(
            f"a job {item.job.kind!r} waits for the primary key of argument {names}, which left this session before it "
            "was flushed: keep the entity in the session, or roll back"
        )


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    # Jobs that still wait were rolled back: a transaction or savepoint that is committed flushes first.
    waiting: list[_Waiting] = vars(session).get(_WAITING, [])
    vars(session)[_WAITING] = [item for item in waiting if item.transaction is not transaction]


# On the class: listening to each session costs more than its jobs. insert=True: hooks of users that ran before ours
# would meet our object.
event.listen(Session, "before_flush", _before_flush, insert=True)
event.listen(Session, "before_commit", _refuse_to_lose_jobs, insert=True)
event.listen(Session, "after_flush_postexec", _write_set_aside)
