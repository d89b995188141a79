"""Batches that the relay has taken away from their slots: their jobs are settled in separate transactions."""

import logging
from collections.abc import Sequence

import psycopg
from sqlalchemy import Connection

from outboxq.database.driver import Script, is_lost, run_script
from outboxq.error_record import ErrorRecord
from outboxq.events import Event, JobInterrupted, JobLeaseLost
from outboxq.execution.aside import describe, is_of_a_row, say_of_job
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.execution.claim import clear_marks
from outboxq.execution.failure import Failed, count_unfinished
from outboxq.execution.recovery import find_outcome_soon, record_result
from outboxq.execution.runtime import CancelledResult, Runtime
from outboxq.execution.settle import Settlement
from outboxq.execution.settle_many import SettleMany
from outboxq.execution.take_back import release, take_back_lost
from outboxq.job import Job
from outboxq.statements.lease import INTERRUPTED, note_interrupted
from outboxq.statements.settle import PutBack
from outboxq.statements.transaction import end_backend

# A job that blocks its relay's stop could do so for ever, while a slow one is merely interrupted by each deployment. So
# it runs again unchanged this often, and then as a suspect.
FREE_INTERRUPTIONS = 10
_INTERRUPTED = "its relay stopped before the job had ended"


def settle_aborted(
    connection: Connection, batch: BatchState, runtime: Runtime, failed: Failed | None, *, is_crash: bool
) -> BatchReport:
    """Settle a batch that the relay took away from its slot, after ending its transaction.

    Args:
        failed: The failed attempt to record for the job that ran; None if the relay is stopping, or the job that ran is
            not known.
        is_crash: True if the job that ran may be about to kill the relay, for example because it blocks the event loop.
            The job is then treated as if the relay had died: it becomes a suspect, which runs alone next under a lease,
            and that claim counts the crash. The same is done to a job that was interrupted `FREE_INTERRUPTIONS` times.

    Raises:
        ConnectionLost: the server has not ended the transaction yet.
    """
    report = find_outcome_soon(connection, batch)
    if report is not None:
        return report
    if failed is not None:
        return record_result(connection, batch, batch.job, failed, runtime, batch.claimed_ids)
    if batch.is_leased:
        return _take_back(connection, batch, runtime, is_crash=is_crash)
    if is_crash or any(count_unfinished(job.errors) >= FREE_INTERRUPTIONS for job in batch.running_jobs):
        # The claim's mark makes this job a suspect: the marks of the others are cleared.
        running = {job.id for job in batch.running_jobs}
        with connection.begin():
            clear_marks(connection, runtime.schema, [each for each in batch.claimed_ids if each not in running])
    else:
        _clear_and_note(connection, batch, runtime)
    return BatchReport(0, (JobInterrupted(batch.job),))


def _take_back(connection: Connection, batch: BatchState, runtime: Runtime, *, is_crash: bool) -> BatchReport:
    """Make the leased jobs of a batch wait again: as suspects after a crash, or if they were interrupted too often."""
    events: tuple[Event, ...] = ()
    charged = 0
    for job in batch.jobs:
        if is_crash or count_unfinished(job.errors) >= FREE_INTERRUPTIONS:
            why = "the event loop was blocked while the job ran" if is_crash else _INTERRUPTED
            report = take_back_lost(connection, job, runtime, why)
            events, charged = events + report.events, charged + report.claimed
        else:
            record = ErrorRecord(job.attempt, INTERRUPTED, _INTERRUPTED)
            events += release(connection, job, record) or (JobInterrupted(job),)
    return BatchReport(charged, events)


def _clear_and_note(connection: Connection, batch: BatchState, runtime: Runtime) -> None:
    """Clear the marks that an interrupted batch's claim left in rows; record the interruption of jobs that ran.

    Relays would take marked jobs for jobs whose relay died. The record is written in the same transaction, because
    another relay may take the jobs as soon as it commits. The record is left out if the server refuses it.
    """
    running = [str(job.id) for job in batch.running_jobs]
    with connection.begin():
        clear_marks(connection, runtime.schema, batch.claimed_ids)
        run_script(connection, "SAVEPOINT oq_noted")
        try:
            run_script(connection, note_interrupted(runtime.schema, running, _INTERRUPTED))
        except psycopg.Error as error:
            if is_lost(connection) or not is_of_a_row(error):
                raise
            run_script(connection, "ROLLBACK TO SAVEPOINT oq_noted")
            message = "that a job was interrupted could not be noted"
            say_of_job(logging.WARNING, message, batch.job.kind, batch.job.id, describe(error))


def give_back(connection: Connection, batches: Sequence[BatchState], runtime: Runtime) -> tuple[Event, ...]:
    """Put back leased jobs that the relay took from their slots and that had no transaction; return the events.

    All are put back in one round trip, except for jobs that were interrupted `FREE_INTERRUPTIONS` times: each of those
    becomes a suspect, which runs alone next. A job whose row another transaction has locked is not put back; it runs
    again when its lease ends.

    Args:
        batches: The batches.
    """
    events: tuple[Event, ...] = ()
    settlements = []
    begun = {job.id for batch in batches if batch.running.call is not None for job in batch.jobs}
    for job in (job for batch in batches for job in batch.jobs):
        if job.id not in begun:
            settlements.append(Settlement(PutBack(job=job, attempt=job.attempt - 1), None))
        elif count_unfinished(job.errors) >= FREE_INTERRUPTIONS:
            events += take_back_lost(connection, job, runtime, _INTERRUPTED).events
        else:
            record = ErrorRecord(job.attempt, INTERRUPTED, _INTERRUPTED).as_json()
            back = PutBack(job=job, attempt=job.attempt - 1, record=record)
            settlements.append(Settlement(back, None))
    many, script = SettleMany(settlements, runtime.schema), Script()
    if settlements:
        many.add_to(script)
        script.add("settled", "COMMIT")
        with connection.begin():
            answer = script.send(connection)
            if answer.error is not None:
                raise answer.error
        settled = many.read(answer)
        gone = {settlement.job.id for settlement in settled.held}
        gone |= {event.job.id for event in settled.events if isinstance(event, JobLeaseLost)}
        back_again = (each.job for each in settlements if each.job.id in begun - gone)
        events += (*settled.events, *map(JobInterrupted, back_again))
    return events


def settle_cancelled(
    connection: Connection, batch: BatchState, cancelled: tuple[Job, ...], runtime: Runtime
) -> BatchReport:
    """End the cancelled jobs of a batch that the relay took away from its slot, after ending its transaction.

    The other jobs of the batch wait again, unchanged.

    Raises:
        ConnectionLost: the server has not ended the transaction yet.
    """
    report = find_outcome_soon(connection, batch)
    if report is not None:
        return report
    events: tuple[Event, ...] = ()
    for job in cancelled:
        events += record_result(connection, batch, job, CancelledResult(), runtime, batch.claimed_ids).events
    return BatchReport(len(batch.jobs), events)


def end_other_transaction(connection: Connection, batch: BatchState, *, terminate: bool) -> None:
    """Cancel the statement of the slot's server process, or terminate the process: the batch writes nothing more."""
    if batch.transaction is not None:
        with connection.begin():
            run_script(connection, end_backend(batch.transaction.pid, batch.transaction.xid, terminate=terminate))
