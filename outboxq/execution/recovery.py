"""Recover: find out what stands of a batch that did not end in order, and leave no job lost, doubled or uncounted."""

import logging
from datetime import timedelta
from uuid import UUID

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.database.driver import is_lost, run_outside_transaction, run_script
from outboxq.errors import LeaseLost, TransactionEndedByHandler
from outboxq.events import Event, JobCrashed, JobDied, JobEvent, JobInterrupted, JobLeaseLost, JobsParked
from outboxq.execution import settle
from outboxq.execution.aside import Rows, take_one
from outboxq.execution.attempt import ConnectionLost, Result, Runtime, TransactionEscaped, UnknownKindResult
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.execution.claim import anchor, claim_one, clear_marks
from outboxq.execution.failure import Failed, describe_failure
from outboxq.execution.transaction_mode import end_transaction, settle_result
from outboxq.job import Job
from outboxq.statements.lease import take_back, take_back_locked
from outboxq.statements.server import server_epoch
from outboxq.statements.transaction import end_backend, may_be_committed, prepared_as, rollback_prepared, xact_status

logger = logging.getLogger("outboxq.relay")

_UNDEFINED_OBJECT = "42704"
PUT_OFF = timedelta(minutes=5)
COMMITTED_BY_HANDLER = "committed by its handler: some of its rows may stand, so it never runs again"
_PREPARED_BY_HANDLER = (
    "its handler prepared the transaction as {gid!r}, and the relay may not end it: its rows may come to stand, so it "
    "never runs again. Look what it did, then COMMIT PREPARED or ROLLBACK PREPARED"
)
# Its handler may have locked the job's own row, which only the end of that transaction frees.
_BRIEFLY = "SET LOCAL lock_timeout = '500ms'"


class _LeftPrepared(Exception):
    """The transaction of a batch is prepared, as `gid`, and the relay may not end it."""

    def __init__(self, gid: str) -> None:
        super().__init__(gid)
        self.gid = gid


def find_outcome(connection: Connection, progress: BatchState) -> BatchReport | None:
    """Find out what stands of a batch that ended in an error, on a connection that works; None where nothing does.

    Committed by our certificate, whose answer was lost: everything stands. Committed although we never sent COMMIT: a
    handler did it, and the jobs behind it are put back.

    Prepared by a handler, and not ours to end: its job never runs beside it.

    Raises:
        ConnectionLost: the server has not noticed yet that the transaction's connection is gone.
    """
    try:
        return _resolve(connection, progress)
    except _LeftPrepared as left:
        return _leave_prepared(connection, progress, describe_failure(TransactionEndedByHandler(), progress.job), left)


def _resolve(connection: Connection, progress: BatchState) -> BatchReport | None:
    if progress.anchor is not None and _server_epoch(connection) != progress.epoch:
        return _resolve_by_presence(connection, progress)
    # An earlier recovery whose COMMIT was not answered: were it repeated, jobs put back and done since would run again.
    if progress.recovery_xid is not None and _was_committed(connection, progress.recovery_xid):
        return _recovered(progress)
    if progress.anchor is None or not _was_committed(connection, progress.anchor.xid):
        return None
    if progress.certifying:
        return progress.report()
    failed = describe_failure(TransactionEndedByHandler(), progress.job)
    return _bury(connection, progress, COMMITTED_BY_HANDLER, failed)


def _resolve_by_presence(connection: Connection, progress: BatchState) -> BatchReport | None:
    """After a crash or a failover, when the number of a lost transaction is given out again: the row is the truth.

    Gone, it was removed by our COMMIT, if we sent it and the server may know of it; else another relay has been
    quicker, and has reported it. If our number was given out again, to a transaction that was committed, both report.
    """
    assert progress.anchor is not None
    with connection.begin():
        still_there = settle.is_unchanged(connection, progress.job)
        is_ours = run_script(connection, may_be_committed(progress.anchor.xid))[0].rows[0][0]
    if still_there:
        return None
    return progress.report() if progress.certifying and is_ours else BatchReport(len(progress.jobs), ())


def _server_epoch(connection: Connection) -> str:
    with connection.begin():
        return server_epoch(connection)


def record_failed_attempt(
    connection: Connection, job: Job, failed: Failed, work: Runtime, batch: tuple[Job, ...] = ()
) -> BatchReport:
    """Count an attempt of a job in a transaction of its own: it failed outside its handler, or was cut off.

    Another relay may have taken it meanwhile. Where it cannot even be settled, it is put off instead.

    Args:
        batch: The jobs whose marks are cleared with it, because their claim was rolled back on purpose.
    """
    try:
        event = _settle_anew(connection, job, failed, work, batch)
        return BatchReport(1, () if event is None else (event,))
    except LeaseLost:
        end_transaction(connection)
        return BatchReport(1, (JobLeaseLost(job),))
    except (psycopg.Error, SQLAlchemyError):
        if is_lost(connection):
            raise
        end_transaction(connection)
        return postpone(connection, job, work, batch)


def postpone(connection: Connection, job: Job, work: Runtime, batch: tuple[Job, ...] = ()) -> BatchReport:
    """Move a job that can neither be settled nor parked out of the way of its queue, with no attempt counted.

    Args:
        batch: As of `record_failed_attempt`.
    """
    with connection.begin():
        clear_marks(connection, work.schema, batch)
        settle.postpone(connection, job, PUT_OFF)
    return BatchReport(1, ())


def settle_on_new_connection(
    connection: Connection, progress: BatchState, work: Runtime, result: Result
) -> BatchReport:
    """A leased handler that wrote nothing had ended when its idle connection turned out to be gone: settle it here."""
    job = progress.job
    try:
        with connection.begin():
            seal = anchor(connection).seal
            if isinstance(result, UnknownKindResult):
                settle.park(connection, job)
                events: tuple[Event, ...] = (JobsParked(progress.queue, (job.kind,), 1),)
            else:
                events = (settle_result(connection, job, result, work, 0.0),)
            settle.commit_checked(connection, seal)
    except LeaseLost:
        events = (JobLeaseLost(job),)
    except (psycopg.Error, SQLAlchemyError):
        if is_lost(connection):
            raise
        end_transaction(connection)
        return postpone(connection, job, work)
    return BatchReport(1, events)


def return_to_suspects(
    connection: Connection, job: Job, work: Runtime, message: str = "the connection was lost while the job ran"
) -> BatchReport:
    """A leased job's run came to nothing while its relay lives on: as if the relay had died with it."""

    assert job.lease_token is not None
    schema, token = work.schema, job.lease_token

    def run(statement: str) -> Rows:
        with connection.begin():
            return run_script(connection, statement)[0].rows

    rows = take_one(run, lambda most: take_back(schema, job.id, token, most, message), work.max_crashes)
    return BatchReport(1, tuple(crashed(row) for row in rows))


def held_up(connection: Connection, job: Job, work: Runtime) -> BatchReport:
    """A leased job ended well, and another transaction held its row: it runs again.

    While the row is held nothing can be done about it: the relay's beat takes it back later.
    """
    assert job.lease_token is not None
    statement = take_back_locked(work.schema, job.id, job.lease_token, job.crashes)
    with connection.begin():
        rows = run_script(connection, statement)[0].rows
    return BatchReport(1, tuple(crashed(row) for row in rows))


def crashed(row: tuple[object, ...]) -> JobCrashed:
    """The event of one row of a reaping statement, from either driver or libpq's texts."""
    job_id, queue, kind, crashes, died = row
    return JobCrashed(UUID(str(job_id)), str(queue), str(kind), int(str(crashes)), str(died) in ("t", "True"))


def settle_aborted(
    connection: Connection, progress: BatchState, work: Runtime, failed: Failed | None, *, is_crash: bool
) -> BatchReport:
    """What becomes of a batch that the relay took away from its slot, whose transaction it has ended.

    Args:
        failed: The attempt of the job that ran; None where the relay is stopping, or nobody knows who is to blame.
        is_crash: It may be this job that takes the relay with it: as if the relay had died already, so that it runs
            alone next, and is counted there.

    Raises:
        ConnectionLost: the server has not ended the transaction yet.
    """
    report = find_outcome(connection, progress)
    if report is not None:
        return report
    if failed is not None:
        return record_failed_attempt(connection, progress.job, failed, work, progress.jobs)
    if is_crash:
        # Without a lease the claim's mark says so.
        if progress.is_leased:
            return return_to_suspects(connection, progress.job, work, "the event loop was blocked while the job ran")
    elif not progress.is_leased:
        with connection.begin():
            clear_marks(connection, work.schema, progress.jobs)
    else:
        try:
            with connection.begin():
                settle.release(connection, progress.job)
        except LeaseLost:
            return BatchReport(0, (JobLeaseLost(progress.job),))
    return BatchReport(0, (JobInterrupted(progress.job),))


def end_other_transaction(connection: Connection, progress: BatchState, *, terminate: bool) -> None:
    """Cancel what a slot's backend runs, or terminate it, so that no late write can land."""
    if progress.anchor is not None:
        with connection.begin():
            run_script(connection, end_backend(progress.anchor.pid, progress.anchor.xid, terminate=terminate))


def _was_committed(connection: Connection, xid: str) -> bool:
    with connection.begin():
        status = run_script(connection, xact_status(xid))[0].rows[0][0]
        prepared = run_script(connection, prepared_as(xid))[0].rows if status == "in progress" else ()
    for (gid,) in prepared:
        _undo_prepared(connection, str(gid))
        return _was_committed(connection, xid)
    if status == "in progress":
        raise ConnectionLost("it is not known yet whether the last transaction was committed")
    return status == "committed"


def _undo_prepared(connection: Connection, gid: str) -> None:
    """End the relay's transaction that a handler has prepared.

    Left alone it would hold the job and its rows for ever, and could be committed beside another run of the job.

    Raises:
        _LeftPrepared: another role prepared it.
    """
    try:
        run_outside_transaction(connection, rollback_prepared(gid))
    except psycopg.Error as error:
        if is_lost(connection):
            raise
        # Or it was ended by another meanwhile: the server knows how.
        if error.sqlstate != _UNDEFINED_OBJECT:
            logger.exception("a handler prepared its transaction as %r: the relay may not roll it back, do so", gid)
            raise _LeftPrepared(gid) from error


def _leave_prepared(connection: Connection, progress: BatchState, failed: Failed, left: _LeftPrepared) -> BatchReport:
    """Free the slot of a transaction that is prepared, and not ours to end.

    It holds the rows of the jobs that it claimed: they wait for its end, and nothing can be written about them. A
    leased job is free, and would run again beside it.
    """
    if not progress.is_leased:
        return BatchReport(len(progress.jobs), ())
    return _bury(connection, progress, _PREPARED_BY_HANDLER.format(gid=left.gid), failed)


def recover(
    connection: Connection, progress: BatchState, work: Runtime, escaped: TransactionEscaped
) -> BatchReport | None:
    """After a handler ended the transaction: find out what stands, and leave no job lost or half done.

    None where all jobs wait again as they were, since one handler ran several of them: nobody knows whose fault it was.

    Between that handler's COMMIT and ours the jobs behind it are in no table; the death of this process, or of the
    server, in that window loses them, and only a handler that commits on the driver's own connection opens it.
    """
    failed = work.kept(escaped.job, escaped.failed)
    try:
        if progress.anchor is not None and _was_committed(connection, progress.anchor.xid):
            return _bury(connection, progress, COMMITTED_BY_HANDLER, failed)
    except _LeftPrepared as left:
        return _leave_prepared(connection, progress, failed, left)
    if progress.together > 1:
        with connection.begin():
            clear_marks(connection, work.schema, progress.jobs)
        return None
    # Rolled back: every job waits again, and this one pays.
    try:
        event = _settle_anew(connection, escaped.job, escaped.failed, work, progress.jobs)
    except LeaseLost:
        end_transaction(connection)
        event = None
    return BatchReport(len(progress.jobs), () if event is None else (event,))


def _settle_anew(
    connection: Connection, job: Job, failed: Failed, work: Runtime, batch: tuple[Job, ...] = ()
) -> JobEvent | None:
    """Settle a job whose own transaction was rolled back; None where another relay has taken it meanwhile."""
    with connection.begin():
        if job.lease_token is None:
            # In one transaction with the charge: between two, another slot could take the job uncharged.
            clear_marks(connection, work.schema, batch)
            again = claim_one(connection, work.schema, str(job.id))
            if not again.jobs or again.anchor is None:
                return None
            job, seal = again.jobs[0], again.anchor.seal
        else:
            seal = anchor(connection).seal
        event = settle_result(connection, job, failed, work, 0.0)
        settle.commit_checked(connection, seal)
    return event


def _bury(connection: Connection, progress: BatchState, reason: str, failed: Failed) -> BatchReport:
    """Bury what may stand already, and put the jobs behind it back."""
    jobs, position = progress.jobs, progress.position
    try:
        with connection.begin():
            if progress.is_leased:
                run_script(connection, _BRIEFLY)
            for job in jobs[position : position + progress.together]:
                settle.dead_letter(connection, job, reason, failed.record)
            for job in jobs[position + progress.together :]:
                settle.release(connection, job)
            progress.recovery_xid, progress.buried_because = str(settle.current_xid(connection)), reason
    except LeaseLost:
        return BatchReport(len(jobs), (JobLeaseLost(progress.job),))
    return _recovered(progress)


def _recovered(progress: BatchState) -> BatchReport:
    ran = progress.jobs[progress.position : progress.position + progress.together]
    died = (JobDied(job, progress.buried_because) for job in ran)
    return BatchReport(len(progress.jobs), (*progress.events, *died))
