"""Cancel jobs: waiting ones are deleted at once, running ones are ended by their relay."""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args, overload
from uuid import UUID

from sqlalchemy import Connection, TwoPhaseTransaction, text
from sqlalchemy.orm import Session

from outboxq.database.answers import AsyncTarget, SyncTarget, run_on
from outboxq.errors import ArgumentError
from outboxq.outbox.handle import JobHandle, job_id_of
from outboxq.statements import cancel as statements
from outboxq.statements import results, wake
from outboxq.statements.paging import read_page
from outboxq.tables import job as job_table
from outboxq.tables import mapped_schema

CancelOutcome: TypeAlias = Literal["discard", "dead"]
Cancellation: TypeAlias = Literal["cancelled", "requested", "not_found"]


@dataclass(frozen=True, slots=True)
class Requested:
    """The result of cancelling several jobs: their ids, by what has become of them.

    `cancelled`: these jobs waited, and are deleted. `requested`: a relay runs these jobs, and a request to cancel them
    is stored for it. `not_found`: no such job waits or runs.
    """

    cancelled: tuple[UUID, ...]
    requested: tuple[UUID, ...]
    not_found: tuple[UUID, ...]


@overload
def cancel(connection: SyncTarget, job: JobHandle | UUID | str, outcome: CancelOutcome = "discard") -> Cancellation: ...


@overload
def cancel(
    connection: AsyncTarget, job: JobHandle | UUID | str, outcome: CancelOutcome = "discard"
) -> Coroutine[Any, Any, Cancellation]: ...


def cancel(
    connection: SyncTarget | AsyncTarget,
    job: JobHandle | UUID | str,
    outcome: CancelOutcome = "discard",
) -> Cancellation | Coroutine[Any, Any, Cancellation]:
    """Cancel a job, when the caller's transaction commits; await the result on an async session.

    A waiting job is deleted. For a running one a request is stored: its relay sets `ctx.cancelled`, cancels its
    statement or its task, and after two seconds ends its connection; the handler's rows are rolled back. Never waits
    for the job. If the caller's transaction is rolled back instead, nothing is cancelled; a job that waited then runs
    in a transaction of its own, like one whose relay has crashed.

    Needs the rights of an operator ([roles](../roles.md)).

    Args:
        job: Its handle, or its id, also as text.
        outcome: "discard" leaves no trace of the job, "dead" a dead letter with the reason "cancelled".

    Returns:
        "cancelled": it waited, and is deleted. "requested": it ran a moment ago; unless it ends before its relay
        receives the request, it is cancelled. "not_found": done, dead, or never existed.

    Raises:
        ArgumentError: the outcome is another one, or a text is no id.
    """
    if outcome not in get_args(CancelOutcome):
        raise ArgumentError(f"cancel takes the outcome 'discard' or 'dead', got {outcome!r}")
    job_id = job_id_of(job)
    return run_on(connection, partial(_cancel, job_id=job_id, outcome=outcome), "cancel(...)")


def _cancel(connection: Session | Connection, job_id: UUID, outcome: CancelOutcome) -> Cancellation:
    if isinstance(connection, Session):
        # The job may be one that this same session has added.
        connection.flush()
        connection = connection.connection(bind_arguments={"clause": job_table})
    done = cancel_or_request(connection, [job_id], outcome)
    return "cancelled" if done.cancelled else "requested" if done.requested else "not_found"


def cancel_or_request(connection: Connection, ids: Sequence[UUID], outcome: CancelOutcome) -> Requested:
    """Cancel these jobs if they wait, and request the cancellation of those that run.

    A job that a relay is ending because of an earlier request counts as requested.
    """
    gone = end_waiting(connection, ids, outcome)
    others = [job_id for job_id in ids if job_id not in gone]
    asked: set[UUID] = set()
    if others:
        # A job that was put back in between is ended by its next claim.
        asked = set(connection.execute(statements.request(others, outcome)).scalars())
        if _may_notify(connection):
            channel = wake.channel_name(mapped_schema(connection))
            connection.execute(wake.NOTIFY, {"channel": channel, "payload": wake.SETTINGS})
    return Requested(
        cancelled=tuple(job_id for job_id in ids if job_id in gone),
        requested=tuple(job_id for job_id in others if job_id in asked),
        not_found=tuple(job_id for job_id in others if job_id not in asked),
    )


def end_waiting(
    connection: Connection,
    ids: Sequence[UUID],
    outcome: CancelOutcome,
    *,
    leased: bool = False,
    asked: bool = False,
) -> set[UUID]:
    """Cancel these jobs if they wait, and delete requests to cancel them; return the ids of the cancelled jobs.

    Args:
        leased: Also cancel jobs that a relay has claimed under a lease.
        asked: Cancel only jobs whose cancellation was requested before.
    """
    schema = mapped_schema(connection)
    if outcome == "dead":
        buried = statements.bury_waiting(schema, ids, leased=leased, asked=asked)
        gone: set[UUID] = set(connection.execute(text(buried)).scalars())
    else:
        cancelled = statements.cancel_waiting(ids, leased=leased, asked=asked)
        gone = set(read_page(connection.execute(cancelled)).changed)
    if gone:
        connection.execute(statements.drop_free_requests(list(gone)))
        if _may_notify(connection):
            connection.execute(text(results.tell_waiters(schema, gone)))
    return gone


def _may_notify(connection: Connection) -> bool:
    """Return True if this transaction may send NOTIFY; a two-phase one may not, as PREPARE TRANSACTION would fail.

    Without a notification, relays, and code that waits for results, find the change when they poll.
    """
    return not isinstance(connection.get_transaction(), TwoPhaseTransaction)
