"""Reasons for a job that is not in the table `job`: it is dead, finished, the callback of a batch, or not committed."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from outboxq.admin.reasons.looks import Looks
from outboxq.admin.reasons.reason import Reason
from outboxq.codec.text import duration, several
from outboxq.database.engines import RELAY_NAME
from outboxq.statements import explain as statements
from outboxq.statements.doctor.sessions import prepared_transactions
from outboxq.statements.done import finished_facts, has_done_jobs

# An id may be made this long before its transaction begins; and clocks differ.
_DRAWN_BEFORE_SECONDS = 60.0


def find_absent(looks: Looks, job_id: UUID) -> Iterator[Reason]:
    """Yield the reasons why a job neither waits nor runs.

    The job may be a dead letter, a kept finished job, the callback of a batch that is not done, or not committed;
    otherwise the reason is `not-found`.
    """
    dead = looks.row("the dead letters", statements.dead_facts(looks.schema, job_id))
    if dead is not None:
        yield _dead(job_id, dead)
        return
    kept = looks.count("the finished jobs", has_done_jobs(looks.schema)) and looks.row(
        "the finished jobs", finished_facts(looks.schema, job_id)
    )
    if kept:
        yield _finished(job_id, kept)
        return
    batch = looks.row("the open batches", statements.batch_facts(looks.schema, job_id))
    if batch is not None:
        yield _waits_for_batch(batch)
        return
    made_at = made_at_of(job_id)
    now = looks.row("the time", statements.clock())
    age = None if made_at is None or now is None else (now[0] - made_at).total_seconds()
    yield from find_uncommitted(looks, age)
    made = "" if made_at is None else f"; its id was made at {made_at:%Y-%m-%d %H:%M:%S} UTC"
    yield Reason(
        "not-found",
        f"there is no such job: it is done, was discarded or cancelled, or was never committed{made}",
        {"made_at": None if made_at is None else made_at.isoformat().replace("+00:00", "Z")},
        "Jobs that are done leave no row, unless their kind keeps them (`keep=`). A job was never committed if its "
        "producer's transaction was rolled back, or another job had its unique key (`handle.added`). One that follows "
        "another in a chain is added when that one is done, under an id of its own.",
    )


def _dead(job_id: UUID, dead: Row[Any]) -> Reason:
    return Reason(
        "dead",
        f"it became a dead letter {duration(dead.dead_seconds)} ago: {dead.reason}",
        {"queue": dead.queue, "kind": dead.kind, "attempt": dead.attempt, "dead_seconds": dead.dead_seconds},
        f"Look at its errors: outboxq dead show {job_id}. To run it again: outboxq dead retry {job_id}.",
    )


def _finished(job_id: UUID, kept: Row[Any]) -> Reason:
    others = f", for {several(kept.stands_for, 'other job', 'other jobs')} of its key too" if kept.stands_for else ""
    return Reason(
        "kept-done",
        f"it has ended: {kept.outcome} {duration(kept.finished_seconds)} ago, in attempt {kept.attempt}, after "
        f"{duration(kept.seconds)}{others}",
        {
            "queue": kept.queue,
            "kind": kept.kind,
            "outcome": kept.outcome,
            "attempt": kept.attempt,
            "finished_seconds": kept.finished_seconds,
        },
        f"See what is kept of it: outboxq done show {job_id}.",
    )


def _waits_for_batch(batch: Row[Any]) -> Reason:
    more = " or more" if batch.members > statements.MOST_COUNTED else ""
    number = several(min(batch.members, statements.MOST_COUNTED), "job", "jobs")
    return Reason(
        "waits-for-batch",
        f"the callback of a batch: it is added to queue {batch.queue!r} when the batch has ended, of which "
        f"{number}{more} wait or run",
        {"batch_id": str(batch.id), "queue": batch.queue, "kind": batch.kind, "members": batch.members},
        f"See the batch: outboxq batches show {batch.id}.",
    )


def find_batches_into(looks: Looks, queue: str) -> Iterator[Reason]:
    """Yield a reason if there is an open batch whose callback (the job added at its end) goes into this queue."""
    batch = looks.row("the open batches", statements.batches_into(looks.schema, queue))
    if batch is not None:
        yield _waits_for_batch(batch)


def find_uncommitted(looks: Looks, age: float | None) -> Iterator[Reason]:
    """Yield a reason if an open or prepared transaction may have added the job, which is then not visible yet.

    Args:
        age: How many seconds ago the job's id was made; None if that is not known.
    """
    for row in looks.rows("the transactions of producers", statements.writers(looks.schema)):
        is_relay = row.application_name == RELAY_NAME
        if is_relay and age is None:
            continue
        began_before = (age or 0.0) - (0.0 if is_relay else _DRAWN_BEFORE_SECONDS)
        if row.seconds is None or row.seconds >= began_before:
            yield _uncommitted(row)
            return
    for row in looks.rows("the prepared transactions", prepared_transactions(looks.schema)):
        if row.holds_jobs and row.seconds >= (age or 0.0) - _DRAWN_BEFORE_SECONDS:
            yield _prepared(row)
            return


def _uncommitted(row: Row[Any]) -> Reason:
    name = f", {row.application_name!r}" if row.application_name else ""
    since = "a time that is hidden" if row.seconds is None else duration(row.seconds)
    return Reason(
        "not-committed",
        f"no such job is committed, and session {row.pid} ({row.state or 'its state is hidden'}{name}) has written "
        f"jobs in a transaction that has been open for {since}: if that is its producer, the job comes with its "
        "COMMIT",
        {"pid": row.pid, "application_name": row.application_name, "state": row.state, "seconds": row.seconds},
        "Find out why that client does not commit. A session that flushed, or handed its job over, has not committed "
        f"yet. To end it: SELECT pg_terminate_backend({row.pid}); its jobs are then gone.",
    )


def _prepared(row: Row[Any]) -> Reason:
    return Reason(
        "not-committed",
        f"no such job is committed, and the prepared transaction {row.gid!r} has written jobs, and has been open for "
        f"{duration(row.seconds)}: if that is its producer, the job comes with COMMIT PREPARED",
        {"gid": row.gid, "seconds": row.seconds},
        "Have its coordinator end it. By hand: COMMIT PREPARED or ROLLBACK PREPARED, with its name.",
    )


def made_at_of(job_id: UUID) -> datetime | None:
    """Return the time at which a UUIDv7 was made, by its maker's clock; None for a UUID of another version."""
    # RFC 9562, section 5.7: 48 bits of milliseconds.
    seconds = (job_id.int >> 80) / 1000
    try:
        return datetime.fromtimestamp(seconds, UTC) if job_id.version == 7 else None
    except (OverflowError, ValueError):
        return None
