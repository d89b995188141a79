"""Recovery: determines what was committed of a failed batch, so that no job is lost, doubled or uncounted.

Only this module decides how to go on after an error of a claim or a batch, by the error and the progress of the batch.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import msgspec
import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.clock import clock
from outboxq.database.driver import end_transaction, is_lost, pause
from outboxq.database.errors import LOCK_NOT_AVAILABLE, QUERY_CANCELED, READ_ONLY, sqlstate_of
from outboxq.errors import LeaseLost
from outboxq.events import Event, JobLeaseLost, JobsParked
from outboxq.execution import settle
from outboxq.execution.aside import is_of_a_row, set_aside_first
from outboxq.execution.batch_state import BatchReport, BatchState, Ended, begin_transaction
from outboxq.execution.claim import ClaimRequest, claim_one, clear_marks, forgive
from outboxq.execution.commit import commit_checked
from outboxq.execution.errors import ConnectionLost, ConnectionSpoiled, TransactionEscaped, WritesRefused
from outboxq.execution.families import steps_of
from outboxq.execution.find_outcome import (
    COMMITTED_BY_HANDLER,
    LeftPrepared,
    find_outcome,
    leave_prepared,
    was_committed,
    write_dead_letters,
)
from outboxq.execution.runtime import Result, Runtime, SettledByClaim, UnknownKindResult
from outboxq.execution.settle import JobRowHeld, settle_result
from outboxq.execution.take_back import release, take_back_held, take_back_lost
from outboxq.job import THEN_HEADER, Job
from outboxq.outcomes import Done
from outboxq.statements.group_claim import AnyScript
from outboxq.statements.settle import postpone as postponed

# The time and the interval of queries for the end of a transaction whose connection the relay has closed.
_OUTCOME_SECONDS, _RETRY_SECONDS = 10.0, 0.005
POSTPONED = timedelta(minutes=5)
# The number of jobs of each sort that are compared with a job that cannot be claimed.
_COMPARED = 10


def recover_claim(connection: Connection, request: ClaimRequest, error: BaseException, schema: str) -> Ended:
    """Clear the marks that a failed claim left in rows; return its end, by which the slot finds the faulty row.

    A failed claim leaves the same marks as the claim of a dead relay. If one row of several caused the failure, the
    next claims take one job each, until one of them fails on that row; its job is then made a dead letter or put off.
    The end has no report if the claim would fail again.
    """
    if request.failed(error):
        # The next claim is sent in another way.
        return Ended(BatchReport(0, ()))
    was_too_large = sqlstate_of(error) == QUERY_CANCELED
    # If the cause makes these claims fail too, the claim's own error counts.
    with suppress(psycopg.Error, SQLAlchemyError):
        picked = _forgive(connection, request)
        if request.limit > 1 and is_of_a_row(error):
            return Ended(BatchReport(0, ()), run_alone=request.limit, was_too_large=was_too_large)
        if picked:
            others = (other for other in _alike(connection, request) if other[1] != picked[0])
            events = set_aside_first(connection, schema, (request.script, picked[0]), others, error)
            if events is not None:
                return Ended(BatchReport(0, events), was_too_large=was_too_large)
    return Ended(None, was_too_large=was_too_large)


def _alike(connection: Connection, request: ClaimRequest) -> Iterator[tuple[AnyScript, UUID]]:
    """Yield jobs to compare with one that cannot be claimed, each as a script that claims it, and its id.

    They are at most `_COMPARED` jobs of each sort of the queue; marks of rolled back claims in their rows are cleared.
    """
    for script in request.alike:
        for job_id in _forgive(connection, ClaimRequest(script, _COMPARED)):
            yield script, job_id


def _forgive(connection: Connection, request: ClaimRequest) -> list[UUID]:
    with connection.begin():
        return forgive(connection, request)


def recover(connection: Connection, batch: BatchState, error: BaseException, runtime: Runtime) -> Ended:
    """Determine what was committed of a batch that ended in `error`, and settle its other jobs; return the batch's end.

    Args:
        connection: A working connection: the batch's own, or a new one if that was lost.

    Raises:
        ConnectionLost: the server has not noticed yet that the transaction's connection is gone.
        Abandoned: the relay has taken the batch away from its slot.
    """
    batch.owner.begin_recovery()
    end_transaction(connection)
    ended = _recover(connection, batch, error, runtime)
    # Done in any case, because some jobs may have ended.
    return replace(ended, left=tuple(steps_of(batch, (), runtime)))


def _recover(connection: Connection, batch: BatchState, error: BaseException, runtime: Runtime) -> Ended:
    match error:
        case JobRowHeld():
            return Ended(take_back_held(connection, batch.job, runtime))
        case LeaseLost():
            return Ended(BatchReport(1, (JobLeaseLost(batch.job),)))
        case TransactionEscaped():
            return _recover_escaped(connection, batch, error, runtime)
        case ConnectionSpoiled():
            # The relay has closed the connection: the server will notice it soon.
            outcome = find_outcome_soon(connection, batch)
        case _:
            outcome = find_outcome(connection, batch)
    if outcome is not None:
        return Ended(outcome)
    match error:
        case WritesRefused() if batch.late_result is None:
            # The claim was written: behind a pooler, another connection may lead to the primary again.
            return Ended(BatchReport(1, release(connection, batch.job)))
        case ConnectionLost() if batch.late_result is not None:
            # A leased job whose handler wrote nothing, and had ended when its connection turned out to be lost.
            return Ended(record_result(connection, batch, batch.job, batch.late_result, runtime))
        case ConnectionSpoiled() if batch.running.together == 1:
            return Ended(record_result(connection, batch, batch.job, error.failed, runtime, batch.claimed_ids))
        case ConnectionLost() if not isinstance(error, ConnectionSpoiled):
            # A job that caused the loss is found when it runs alone; in transaction mode, by its claim's mark.
            return Ended(take_back_lost(connection, batch.job, runtime) if batch.is_leased else None)
    return _recover_rolled_back(connection, batch, error, runtime)


def _recover_rolled_back(connection: Connection, batch: BatchState, error: BaseException, runtime: Runtime) -> Ended:
    """Recover a batch that was rolled back: record a lone job's failed attempt, or let several jobs run one by one."""
    if not batch.is_leased:
        with connection.begin():
            clear_marks(connection, runtime.schema, batch.claimed_ids)
    if not batch.is_lone:
        # The jobs shared a transaction, so the faulty one is not known.
        return Ended(None, run_alone=len(batch.jobs))
    if isinstance(batch.decided.get(batch.job.id), SettledByClaim):
        # It has not run, and waits as before; the slot pauses.
        raise error
    if runtime.handler_of(batch.job) is None or sqlstate_of(error) == LOCK_NOT_AVAILABLE:
        # Either a job of an unknown kind that could not be parked, or one whose COMMIT got no lock while another COMMIT
        # that notifies hangs.
        report = postpone(connection, batch.job, runtime)
    else:
        report = record_result(connection, batch, batch.job, runtime.describe(error, batch.job), runtime)
    return Ended(report, run_alone=1)


def _recover_escaped(connection: Connection, batch: BatchState, escaped: TransactionEscaped, runtime: Runtime) -> Ended:
    """Recover after a handler ended the transaction: jobs whose rows may be committed never run again.

    If the handler committed it, the later jobs of the batch are in no table until this recovery commits. They are lost
    if this process or the server dies in between. Only a handler that commits on the driver's own connection causes
    that.
    """
    failed = runtime.redacted(escaped.job, escaped.failed)
    try:
        if batch.transaction is not None and was_committed(connection, batch.transaction.xid):
            return Ended(write_dead_letters(connection, batch, COMMITTED_BY_HANDLER, failed))
    except LeftPrepared as left:
        return Ended(leave_prepared(connection, batch, failed, left))
    if batch.running.together > 1:
        # One handler ran several jobs, and the one for which it ended the transaction is not known.
        with connection.begin():
            clear_marks(connection, runtime.schema, batch.claimed_ids)
        return Ended(None, run_alone=len(batch.jobs))
    # Rolled back: every job waits again, and the attempt of the handler's job is counted.
    try:
        events = _settle_anew(connection, batch, escaped.job, escaped.failed, runtime, batch.claimed_ids)
    except LeaseLost:
        end_transaction(connection)
        events = ()
    return Ended(BatchReport(len(batch.jobs), events))


def find_outcome_soon(connection: Connection, batch: BatchState) -> BatchReport | None:
    """Call `find_outcome`, again until the server has ended the batch's transaction; return its report, or None.

    None means that nothing was committed.

    Raises:
        ConnectionLost: the server has not ended the transaction within `_OUTCOME_SECONDS`.
    """
    deadline = clock() + _OUTCOME_SECONDS
    while True:
        try:
            return find_outcome(connection, batch)
        except ConnectionLost:
            if clock() > deadline:
                raise
            pause(connection, _RETRY_SECONDS)


def record_result(
    connection: Connection,
    batch: BatchState,
    job: Job,
    result: Result,
    runtime: Runtime,
    cleared: tuple[UUID, ...] = (),
) -> BatchReport:
    """Settle a job by its result in a separate transaction, because its batch's was rolled back or never began.

    If another relay has taken the job by now, nothing is written. If the job cannot be settled, it is put off.

    Args:
        cleared: The ids of jobs whose claim was rolled back on purpose. The marks that the claim left in their rows are
            cleared too: relays would take marked jobs for jobs whose relay died.
    """
    try:
        return BatchReport(1, _settle_anew(connection, batch, job, result, runtime, cleared))
    except LeaseLost:
        end_transaction(connection)
        return BatchReport(1, (JobLeaseLost(job),))
    except (psycopg.Error, SQLAlchemyError) as error:
        # If the connection is lost or leads to a standby, the slot recovers on another one.
        if is_lost(connection) or sqlstate_of(error) == READ_ONLY:
            raise
        end_transaction(connection)
        if isinstance(result, Done) and THEN_HEADER in job.headers:
            # The next job of its chain is refused, and would be each time: an attempt is counted.
            failed = runtime.describe(error, job)
            return BatchReport(1, _settle_anew(connection, batch, job, failed, runtime, cleared))
        return postpone(connection, job, runtime, cleared)


def postpone(connection: Connection, job: Job, runtime: Runtime, batch: tuple[UUID, ...] = ()) -> BatchReport:
    """Put off, by `POSTPONED`, a job that can be neither settled nor left to another relay; no attempt is counted.

    Args:
        batch: The ids of jobs whose claim was rolled back on purpose. The marks that the claim left in their rows are
            cleared too: relays would take marked jobs for jobs whose relay died.
    """
    with connection.begin():
        clear_marks(connection, runtime.schema, batch)
        connection.execute(postponed(job, POSTPONED, passes=settle.passes(job, runtime)))
    return BatchReport(1, ())


def _settle_anew(
    connection: Connection, batch: BatchState, job: Job, result: Result, runtime: Runtime, cleared: tuple[UUID, ...]
) -> tuple[Event, ...]:
    """Settle a job whose transaction was rolled back, in a new transaction; commit, and return the events.

    A leased job is still claimed; any other job is claimed again first. Return no events if another relay has taken the
    job.
    """
    # Jobs that a leased run has merged are gone for good; others wait again, because their claim was rolled back.
    taken_along = batch.stands_for if batch.is_leased else {}
    with connection.begin():
        if job.lease_token is None:
            # In the same transaction as the job's settlement: between two transactions another slot could take it
            # uncounted.
            clear_marks(connection, runtime.schema, cleared)
            again = claim_one(connection, runtime.schema, str(job.id))
            if not again.jobs or again.transaction is None:
                return ()
            # It has not waited since: the claim that was rolled back counts.
            job = msgspec.structs.replace(again.jobs[0], claimed_at=job.claimed_at)
            inner = again.transaction.inner_savepoint
        else:
            inner = begin_transaction(connection).inner_savepoint
        event: Event
        if isinstance(result, UnknownKindResult):
            settle.park(connection, job)
            event = JobsParked(batch.queue, (job.kind,), 1)
        else:
            event = settle_result(connection, job, result, runtime, batch.running.seconds)
        steps = steps_of(batch, [event], runtime, taken_along)
        return event, *commit_checked(connection, inner, steps)
