"""Pending jobs: they wait in a session, as one more object of its unit of work, for the flush that inserts them.

The jobs of a flush are one pending object, so that savepoints, rollbacks and autoflush are SQLAlchemy's: opening a
savepoint flushes it, rolling one back expunges it. The flush begins with one INSERT for each 1,000 jobs, before users'
hooks see the object. Jobs with entities among their arguments, and those of the same flush, are inserted right after
the flush, because it may change the entities' primary keys, or delete entities. A job that needs the primary key of a
pending entity is set aside until after the flush that assigns the key.

The session remembers the jobs that were added in a transaction or savepoint until that ends, and refuses a COMMIT that
would lose one of them.
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
# Distinguishes batches in their session's identity map.
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job whose entities get their primary keys at a later flush, and the transaction in which it was added."""

    id: str
    job: NewJob
    transaction: SessionTransaction | None


@dataclass(slots=True)
class _Added:
    """The jobs that were added in one transaction or savepoint of a session.

    `batches`: an object with the jobs of each flush, to refuse a COMMIT that would lose one. `queues`: the queues of
    the jobs that were inserted already; if there are too many, one notification wakes all relays.
    """

    batches: list[JobRow] = field(default_factory=list)
    queues: set[str] = field(default_factory=set)


# Weak: an entry disappears with its transaction, so a rollback leaves nothing to clean up.
_added: WeakKeyDictionary[SessionTransaction, _Added] = WeakKeyDictionary()


def pending_batch(session: Session) -> JobRow | None:
    """Return the object with the jobs that the session's next flush will insert; None if there are none.

    It is also None if a rollback has removed the jobs.
    """
    batch: JobRow | None = vars(session).get(_BATCH)
    if batch is None or batch.jobs is None or object_session(batch) is not session:
        return None
    return batch


def add_pending(session: Session, batch: JobRow | None, named: Mapping[str, NewJob], *, has_entities: bool) -> None:
    """Make jobs, given by their ids, wait in the session for its next flush: in its `pending_batch`, or in a new one.

    Args:
        has_entities: True if some of them have entities among their arguments, and may have to wait for the entities'
            keys.
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
        # Written batches are dropped, because a long transaction may have many.
        added.batches = [*(other for other in added.batches if other.jobs is not None), batch]
    assert batch.jobs is not None
    batch.jobs.update(ready)


def _set_aside(session: Session, named: Mapping[str, NewJob]) -> dict[str, NewJob]:
    """Set the jobs aside whose entities have no primary key yet, until a flush assigns it; return the other jobs."""
    # First, because complete() may raise an error: then no job is added.
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
    # A pending entity is in a session with an open transaction.
    transaction = session.get_nested_transaction() or session.get_transaction()
    vars(session).setdefault(_WAITING, []).append(_Waiting(job_id, new, transaction))
    # Only when a job waits: listening costs more than all other work of add_job.
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
    """Return the batches (each the jobs of one flush) of the session's transaction that still have to be inserted.

    Those that a rollback has removed are left out.
    """
    added = filter(None, map(_added.get, _transactions(session)))
    return [batch for each in added for batch in each.batches if batch.jobs is not None]


def holds_only_jobs(session: Session) -> bool:
    """Return True if the session's new objects are only jobs, and its next flush would insert every waiting job.

    The relay may then insert the jobs itself, without that flush.
    """
    new = len(session._new)  # noqa: SLF001  # `new` builds a set of objects each time
    if _BATCH not in vars(session) and _WAITING not in vars(session):
        return new == 0
    batch = pending_batch(session)
    # The flush refuses a batch that was added in a transaction which is closed by now.
    is_whole = _unwritten(session) == ([] if batch is None else [batch])
    return is_whole and not vars(session).get(_WAITING) and new == (batch is not None)


def current_transaction(session: Session) -> SessionTransaction | None:
    """The session's innermost savepoint, or its transaction; None if it has not begun."""
    return session.get_nested_transaction() or session.get_transaction()


def is_within(session: Session, transaction: SessionTransaction) -> bool:
    """Return True if this transaction or savepoint of the session is open."""
    return any(each is transaction for each in _transactions(session))


def replace_pending(session: Session, job_id: str, new: NewJob) -> bool:
    """Replace a job that waits in the session for a flush; return False if there is none with this id."""
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
    """Replace the jobs that wait in the session for a flush by those that `change` returns for the same ids."""
    batch = pending_batch(session)
    waiting: list[_Waiting] = vars(session).get(_WAITING, [])
    jobs = {} if batch is None or batch.jobs is None else batch.jobs
    if not (jobs or waiting):
        return
    changed = change({**jobs, **{item.id: item.job for item in waiting}})
    jobs.update((job_id, changed[job_id]) for job_id in jobs)
    waiting[:] = [_Waiting(item.id, changed[item.id], item.transaction) for item in waiting]


def take_jobs(session: Session) -> Mapping[str, NewJob]:
    """Remove the jobs of the next flush from the session, and return them for `insert_all` in the same transaction."""
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
            # Read only, so that the flush runs to its end and calls `_write_set_aside`, although it writes no other
            # rows.
            context.register_object(instance_state(batch), listonly=True)
        Session.expunge(session, batch)
        _write(session, connection, batch, has_entities=has_entities)


def write_plain_jobs(session: Session, connection: Connection) -> bool:
    """Insert the jobs of the session's next flush now, and return True.

    Returns False and inserts nothing if there are no such jobs, or if some have entities among their arguments.
    """
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
    """Insert the jobs of a flush or, if `has_entities` is True, leave them to `_write_set_aside` after it.

    The flush may still change the entities' primary keys, or delete entities.
    """
    if batch not in _unwritten(session):
        raise EnqueueError("jobs that wait in a session cannot be moved to another session: add them there")
    # Jobs that a hook of this flush adds from here on belong to the next flush.
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
        # For the whole transaction: until its end it holds a lock for each queue that it announces.
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
    """Insert the jobs with entities, which `_write` has left for the end of the flush: the entities have keys now."""
    batches: list[JobRow] = vars(session).pop(_ASIDE, [])
    unwritten = _unwritten(session) if batches else []
    # Other batches belong to a flush that failed.
    for batch in [each for each in batches if each in unwritten]:
        # The flush has treated it as a row.
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
    # There is no connection if a hook of this flush has added the first waiting job.
    connection = context.attributes.get(_CONNECTION) or transaction_connection(session)
    _insert(session, connection, _complete(ready))


def _has_keys(session: Session, new: NewJob) -> bool:
    arguments = (new.entities or {}).values()
    return not any(each.is_pending() or _has_left(session, each) for each in arguments)


def _has_left(session: Session, argument: EntityArgument) -> bool:
    """Return True if an entity without a primary key has moved to another session, which may never commit its row."""
    return argument.key is None and object_session(argument.entity) is not session


def _refuse_to_lose_jobs(session: Session) -> None:
    """Refuse to commit if a job left the session before it was inserted, as by `expunge`: it would be lost.

    Jobs that still wait in the session are no obstacle: the commit flushes them.
    """
    if _BATCH not in vars(session):
        # No job was ever added to this session.
        return
    lost = [batch.jobs or {} for batch in _unwritten(session) if object_session(batch) is not session]
    if lost:
        count, kinds = sum(map(len, lost)), {new.kind for jobs in lost for new in jobs.values()}
        raise EnqueueError(
            f"{count} {'job' if count == 1 else 'jobs'} ({', '.join(map(repr, sorted(kinds)))}) left this session "
            "before being written, by expunge(), expunge_all() or a flush that failed, and would be lost: roll back"
        )


def _before_commit(session: Session) -> None:
    """Flush, and refuse to commit if a job still waits for an entity that left the session: it would be lost."""
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
    # Jobs that still wait were rolled back: a committed transaction or savepoint flushes first.
    waiting: list[_Waiting] = vars(session).get(_WAITING, [])
    vars(session)[_WAITING] = [item for item in waiting if item.transaction is not transaction]


# On the class, because listening to each session costs more than its jobs. insert=True, because earlier users' hooks
# would see outboxq's object.
event.listen(Session, "before_flush", _before_flush, insert=True)
event.listen(Session, "before_commit", _refuse_to_lose_jobs, insert=True)
event.listen(Session, "after_flush_postexec", _write_set_aside)
