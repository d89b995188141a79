"""Events of a session's transaction: sent to the hooks of its engine once it is committed, and never if it is not.

Events of a rolled back savepoint are not sent either. The session's own COMMIT counts: a session that is bound to a
connection in the caller's transaction sends them before that transaction ends.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from outboxq.emitter import hand_to_hooks
from outboxq.events import Event, JobsEnqueued
from outboxq.new_job import JobKeys, NewJob, UniqueJob

# An attribute of a session: its waiting events, each with its transaction or savepoint.
_WAITING_EVENTS = "_outboxq_events"


def send_jobs_added(session: Session, connection: Connection, jobs: Mapping[str, NewJob]) -> None:
    """Send a `JobsEnqueued` for each queue and kind after COMMIT.

    Callbacks of batches, and jobs that were not added because their unique key was taken, are not counted.
    """
    added = Counter(
        (new.envelope.queue, new.envelope.kind)
        for new in jobs.values()
        if not (isinstance(new, UniqueJob) and not new.answer.added) and not _is_callback(new)
    )
    send_after_commit(session, connection, [JobsEnqueued(*names, count) for names, count in added.items()])


def _is_callback(new: NewJob) -> bool:
    """Return True if the job is the callback of a batch, which becomes a job when the batch has ended."""
    return isinstance(new.keys, JobKeys) and new.keys.opens_batch


def send_after_commit(session: Session, connection: Connection, events: Iterable[Event]) -> None:
    """Send events to the engine's hooks after COMMIT; drop them if the present transaction or savepoint rolls back."""
    transaction = session.get_nested_transaction() or session.get_transaction()
    options = connection.get_execution_options()
    vars(session).setdefault(_WAITING_EVENTS, []).extend((transaction, options, each) for each in events)
    # Only if there are events, because listening costs more than all other work.
    if not event.contains(session, "after_commit", _after_commit):
        event.listen(session, "after_commit", _after_commit)
        event.listen(session, "after_soft_rollback", _after_rollback)


def _after_commit(session: Session) -> None:
    waiting, savepoint = vars(session)[_WAITING_EVENTS], session.get_nested_transaction()
    if savepoint is not None:
        vars(session)[_WAITING_EVENTS] = [
            (savepoint.parent if transaction is savepoint else transaction, *rest) for transaction, *rest in waiting
        ]
        return
    vars(session)[_WAITING_EVENTS] = []
    for _, options, each in waiting:
        hand_to_hooks(options, each)


def _after_rollback(session: Session, ended: SessionTransaction) -> None:
    vars(session)[_WAITING_EVENTS] = [item for item in vars(session)[_WAITING_EVENTS] if not _is_within(item[0], ended)]


def _is_within(transaction: SessionTransaction | None, outer: SessionTransaction) -> bool:
    while transaction is not None and transaction is not outer:
        transaction = transaction.parent
    return transaction is outer
