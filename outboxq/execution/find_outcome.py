"""What stands of a batch that did not end in order: the server is asked, never guessed at."""

import logging

import psycopg
from sqlalchemy import Connection

from outboxq.database.driver import is_lost, run_outside_transaction, run_script
from outboxq.errors import LeaseLost, TransactionEndedByHandler
from outboxq.events import JobDied, JobLeaseLost
from outboxq.execution import settle
from outboxq.execution.batch_state import BatchReport, BatchState, DeadLetters
from outboxq.execution.errors import ConnectionLost
from outboxq.execution.failure import Failed, describe_failure
from outboxq.statements.server import server_epoch
from outboxq.statements.transaction import may_be_committed, prepared_as, rollback_prepared, xact_status

logger = logging.getLogger("outboxq.relay")

_UNDEFINED_OBJECT = "42704"
COMMITTED_BY_HANDLER = "committed by its handler: some of its rows may stand, so it never runs again"
_PREPARED_BY_HANDLER = (
    "its handler prepared the transaction as {gid!r}, and the relay may not end it: its rows may come to stand, so it "
    "never runs again. Look what it did, then COMMIT PREPARED or ROLLBACK PREPARED"
)
# Its handler may have locked the job's own row, which only the end of that transaction frees.
_BRIEFLY = "SET LOCAL lock_timeout = '500ms'"


class LeftPrepared(Exception):
    """The transaction of a batch is prepared, as `gid`, and the relay may not end it."""

    def __init__(self, gid: str) -> None:
        super().__init__(gid)
        self.gid = gid


def find_outcome(connection: Connection, batch: BatchState) -> BatchReport | None:
    """Find out what stands of a batch that ended in an error, on a connection that works; None if nothing does.

    Committed by the relay's COMMIT, whose answer was lost: everything stands. Committed although the relay never sent
    COMMIT: a handler did it, and the jobs behind it are put back. Prepared by a handler, and not the relay's to end:
    its job never runs beside it.

    Raises:
        ConnectionLost: the server has not noticed yet that the transaction's connection is gone.
    """
    try:
        return _resolve(connection, batch)
    except LeftPrepared as left:
        return leave_prepared(connection, batch, describe_failure(TransactionEndedByHandler(), batch.job), left)


def _resolve(connection: Connection, batch: BatchState) -> BatchReport | None:
    if batch.transaction is not None and _server_epoch(connection) != batch.epoch:
        return _resolve_by_presence(connection, batch)
    # An earlier recovery whose COMMIT was not answered: were it repeated, jobs put back and done since would run again.
    if batch.dead_letters is not None and was_committed(connection, batch.dead_letters.xid):
        return _report_of(batch, batch.dead_letters)
    if batch.transaction is None or not was_committed(connection, batch.transaction.xid):
        return None
    if batch.commit_was_sent:
        return batch.report()
    failed = describe_failure(TransactionEndedByHandler(), batch.job)
    return write_dead_letters(connection, batch, COMMITTED_BY_HANDLER, failed)


def _resolve_by_presence(connection: Connection, batch: BatchState) -> BatchReport | None:
    """After a crash or a failover, when the number of a lost transaction is given out again: the row is the truth.

    Gone, it was removed by our COMMIT, if we sent it and the server may know of it; else another relay has been
    quicker, and has reported it. If our number was given out again, to a transaction that was committed, both report.
    """
    assert batch.transaction is not None
    with connection.begin():
        still_there = settle.is_unchanged(connection, batch.job)
        is_ours = run_script(connection, may_be_committed(batch.transaction.xid))[0].rows[0][0]
    if still_there:
        return None
    return batch.report() if batch.commit_was_sent and is_ours else BatchReport(len(batch.jobs), ())


def _server_epoch(connection: Connection) -> str:
    with connection.begin():
        return server_epoch(connection)


def was_committed(connection: Connection, xid: str) -> bool:
    with connection.begin():
        status = run_script(connection, xact_status(xid))[0].rows[0][0]
        prepared = run_script(connection, prepared_as(xid))[0].rows if status == "in progress" else ()
    for (gid,) in prepared:
        _undo_prepared(connection, str(gid))
        return was_committed(connection, xid)
    if status == "in progress":
        raise ConnectionLost("it is not known yet whether the last transaction was committed")
    return status == "committed"


def _undo_prepared(connection: Connection, gid: str) -> None:
    """End the relay's transaction that a handler has prepared.

    Left alone it would hold the job and its rows for ever, and could be committed beside another run of the job.

    Raises:
        LeftPrepared: another role prepared it.
    """
    try:
        run_outside_transaction(connection, rollback_prepared(gid))
    except psycopg.Error as error:
        if is_lost(connection):
            raise
        # Or it was ended by another meanwhile: the server knows how.
        if error.sqlstate != _UNDEFINED_OBJECT:
            logger.exception("a handler prepared its transaction as %r: the relay may not roll it back, do so", gid)
            raise LeftPrepared(gid) from error


def leave_prepared(connection: Connection, batch: BatchState, failed: Failed, left: LeftPrepared) -> BatchReport:
    """Free the slot of a transaction that is prepared, and not ours to end.

    It holds the rows of the jobs that it claimed: they wait for its end, and nothing can be written about them. A
    leased job is free, and would run again beside it.
    """
    if not batch.is_leased:
        return BatchReport(len(batch.jobs), ())
    return write_dead_letters(connection, batch, _PREPARED_BY_HANDLER.format(gid=left.gid), failed)


def write_dead_letters(connection: Connection, batch: BatchState, reason: str, failed: Failed) -> BatchReport:
    """Make dead letters of what may stand already, and put the jobs behind it back."""
    jobs, position = batch.jobs, batch.position
    try:
        with connection.begin():
            if batch.is_leased:
                run_script(connection, _BRIEFLY)
            for job in batch.running_jobs:
                settle.dead_letter(connection, job, reason, failed.record)
            for job in jobs[position + batch.together :]:
                settle.release(connection, job)
            dead_letters = batch.dead_letters = DeadLetters(str(settle.current_xid(connection)), reason)
    except LeaseLost:
        return BatchReport(len(jobs), (JobLeaseLost(batch.job),))
    return _report_of(batch, dead_letters)


def _report_of(batch: BatchState, dead_letters: DeadLetters) -> BatchReport:
    died = (JobDied(job, dead_letters.reason) for job in batch.running_jobs)
    return BatchReport(len(batch.jobs), (*batch.events, *died))
