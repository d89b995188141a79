"""Finds out from the server what was committed of a batch that ended in an error or whose COMMIT got no answer."""

import logging

import psycopg
from sqlalchemy import Connection

from outboxq.database.driver import is_lost, run_outside_transaction, run_script
from outboxq.errors import LeaseLost, TransactionEndedByHandler
from outboxq.events import JobLeaseLost, JobsParked
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
# The time to wait for a prepared transaction that may hold the job's own row, which only its end frees.
_BRIEFLY = "SET LOCAL lock_timeout = '500ms'"


class LeftPrepared(Exception):
    """A handler has prepared the batch's transaction (two-phase commit) as `gid`, and the relay may not end it.

    The relay's role lacks the right to roll it back. So it is not known what will be committed.
    """

    def __init__(self, gid: str) -> None:
        super().__init__(gid)
        self.gid = gid


def find_outcome(connection: Connection, batch: BatchState) -> BatchReport | None:
    """Find out what was committed of a batch that ended in an error; return its report, or None if nothing was.

    If the relay's COMMIT succeeded and only its answer was lost, all is committed. If the transaction was committed
    although the relay never sent COMMIT, a handler committed it: the handler's job becomes a dead letter, and the jobs
    after it are put back. If a handler prepared the transaction (two-phase commit), and the relay has no right to roll
    it back, the handler's job does not run again.

    Args:
        connection: A working connection.

    Raises:
        ConnectionLost: the server has not noticed yet that the transaction's connection is gone.
    """
    try:
        return _resolve(connection, batch)
    except LeftPrepared as left:
        return leave_prepared(connection, batch, describe_failure(TransactionEndedByHandler(), batch.job), left)


def _resolve(connection: Connection, batch: BatchState) -> BatchReport | None:
    if batch.transaction is not None and _server_epoch(connection) != batch.claimed.request.server.epoch:
        return _resolve_by_presence(connection, batch)
    # An earlier recovery's COMMIT was not answered: a second recovery could put back jobs that are done by now.
    if batch.dead_letters is not None and was_committed(connection, batch.dead_letters.xid):
        return _report_of(batch, batch.dead_letters)
    if batch.transaction is None or not was_committed(connection, batch.transaction.xid):
        return None
    if batch.owner.commit_was_sent:
        return batch.report()
    failed = describe_failure(TransactionEndedByHandler(), batch.job)
    return write_dead_letters(connection, batch, COMMITTED_BY_HANDLER, failed)


def _resolve_by_presence(connection: Connection, batch: BatchState) -> BatchReport | None:
    """Find the outcome by the job's row, because a crash or a failover may have caused transaction ids to be reused.

    If the row is there, nothing was committed. If it is gone, this relay's COMMIT removed it, provided that COMMIT was
    sent and the server may have committed it. Otherwise another relay ran the job first, and has reported it. If the
    transaction's id was reused and committed, both relays report the job.
    """
    assert batch.transaction is not None
    with connection.begin():
        still_there = settle.is_unchanged(connection, batch.job)
        is_ours = run_script(connection, may_be_committed(batch.transaction.xid))[0][0]
    if still_there:
        return None
    return batch.report() if batch.owner.commit_was_sent and is_ours else BatchReport(len(batch.jobs), ())


def _server_epoch(connection: Connection) -> str:
    with connection.begin():
        return server_epoch(connection)


def was_committed(connection: Connection, xid: str) -> bool:
    with connection.begin():
        status = run_script(connection, xact_status(xid))[0][0]
        prepared = run_script(connection, prepared_as(xid)) if status == "in progress" else ()
    for (gid,) in prepared:
        _undo_prepared(connection, str(gid))
        return was_committed(connection, xid)
    if status == "in progress":
        raise ConnectionLost("it is not known yet whether the last transaction was committed")
    return bool(status == "committed")


def _undo_prepared(connection: Connection, gid: str) -> None:
    """Roll back the relay's transaction, which a handler has prepared (two-phase commit).

    A transaction that stays prepared would lock the job and its rows for ever, and a later COMMIT PREPARED could add
    its rows to those of another run of the job.

    Raises:
        LeftPrepared: another role prepared it.
    """
    try:
        run_outside_transaction(connection, rollback_prepared(gid))
    except psycopg.Error as error:
        if is_lost(connection):
            raise
        # If the name is undefined, another session has ended it: the caller queries how.
        if error.sqlstate != _UNDEFINED_OBJECT:
            logger.exception("a handler prepared its transaction as %r: the relay may not roll it back, do so", gid)
            raise LeftPrepared(gid) from error


def leave_prepared(connection: Connection, batch: BatchState, failed: Failed, left: LeftPrepared) -> BatchReport:
    """Return the report of a batch whose transaction a handler has prepared and the relay has no right to roll back.

    In transaction mode the jobs wait for the end of that transaction, which holds their rows. A leased job's row is
    free, and the job would run again although the transaction may be committed: so it becomes a dead letter.
    """
    if not batch.is_leased:
        return BatchReport(len(batch.jobs), ())
    return write_dead_letters(connection, batch, _PREPARED_BY_HANDLER.format(gid=left.gid), failed)


def write_dead_letters(connection: Connection, batch: BatchState, reason: str, failed: Failed) -> BatchReport:
    """Make the jobs that ran last, whose rows may be committed, dead letters; put back the batch's jobs after them."""
    jobs, position = batch.jobs, batch.running.position
    try:
        with connection.begin():
            if batch.is_leased:
                run_script(connection, _BRIEFLY)
            for job in batch.running_jobs:
                settle.dead_letter(connection, job, reason, failed.record)
            for job in jobs[position + batch.running.together :]:
                settle.release(connection, job)
            dead_letters = batch.dead_letters = DeadLetters(str(settle.current_xid(connection)), reason, failed)
    except LeaseLost:
        return BatchReport(len(jobs), (JobLeaseLost(batch.job),))
    return _report_of(batch, dead_letters)


def _report_of(batch: BatchState, dead_letters: DeadLetters) -> BatchReport:
    reason, failed = dead_letters.reason, dead_letters.failed
    died = (settle.died(job, reason, failed.record, failed.error, batch.running.seconds) for job in batch.running_jobs)
    # Only jobs before the handler's were parked: those after it are put back.
    of_claim = [event for event in batch.of_claim if not isinstance(event, JobsParked)]
    parked = batch.parked(batch.jobs[: batch.running.position])
    return BatchReport(len(batch.jobs), (*batch.events, *of_claim, *parked, *died))
