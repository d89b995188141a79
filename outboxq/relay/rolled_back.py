"""Recovery of batches and claims that ended in an error, on the connection on which the error occurred."""

from dataclasses import replace

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.database.closing import give_up
from outboxq.database.driver import is_lost
from outboxq.database.errors import LOCK_NOT_AVAILABLE, describe_error, sqlstate_of
from outboxq.errors import LeaseLost
from outboxq.events import BatchRolledBack
from outboxq.execution.batch_state import BatchReport, BatchState, Ended
from outboxq.execution.claim import Claimed, ClaimRequest
from outboxq.execution.errors import BatchDeadlocked, ConnectionSpoiled, TransactionEscaped, WritesRefused
from outboxq.execution.recovery import recover, recover_claim
from outboxq.execution.runtime import Runtime
from outboxq.execution.settle import JobRowHeld
from outboxq.relay.planner import Planner
from outboxq.relay.state import RelayState


def recover_here(
    state: RelayState, connection: Connection, batch: BatchState, error: BaseException, runtime: Runtime, running: int
) -> Ended:
    """Find out, on a batch's own connection, what was committed of it before `error`, and write the other outcomes.

    Raises `error` if this connection cannot show that: it is lost, for example, or the relay has taken the batch away
    from the slot.

    Args:
        running: The number of jobs in the claim of the batch, for the event `BatchRolledBack`.
    """
    if isinstance(error, TransactionEscaped | LeaseLost | BatchDeadlocked):
        batch.owner.begin_recovery()
        if isinstance(error, JobRowHeld):
            state.lease.excuse(batch.job)
        try:
            ended = recover(connection, batch, error, runtime)
        except (psycopg.Error, SQLAlchemyError) as refused:
            # The recovery's own writes were refused: the attempt is counted, or the job put off, as for any database
            # error.
            error = refused
        else:
            if ended.report is None:
                state.emit(BatchRolledBack(batch.queue, running, describe_error(error)))
            return replace(ended, report=ended.report or BatchReport(0, ()))
    elif not isinstance(error, psycopg.Error | SQLAlchemyError | WritesRefused):
        if runtime.guard.left is None or not runtime.is_failure(error):
            raise error
        # A handler left the cause on the connection: a listener, or a type that it registered.
        give_up(connection)
        raise ConnectionSpoiled(runtime.describe(error, batch.job)) from error
    if is_lost(connection) or batch.owner.is_seized:
        raise error
    state.emit(BatchRolledBack(batch.queue, running, describe_error(error)))
    return recover(connection, batch, error, runtime)


def recover_claim_here(
    state: RelayState, planner: Planner, connection: Connection, request: ClaimRequest, error: BaseException
) -> Ended | None:
    """Deal with a claim that ended in `error`, so that the next claim can succeed; raise `error` if it would fail too.

    Returns how the claim ended. Returns None if the slot is to go on with other claims, because this one gave up
    waiting for a lock, or because its suspect (a job that ran when its relay died) could not be claimed.
    """
    if not isinstance(error, psycopg.Error | SQLAlchemyError) or is_lost(connection):
        raise error
    if request.script.lock and sqlstate_of(error) == LOCK_NOT_AVAILABLE:
        # The claim gave up because another claim of the queue hangs.
        planner.record_claim(Claimed(request, is_full=True), is_called=False)
        return None
    ended = recover_claim(connection, request, error, state.config.schema)
    planner.record(request, ended)
    if ended.report is not None:
        return ended
    if not request.sort.is_suspect:
        raise error
    # The job was not even claimed: ready jobs do not wait for it.
    state.quarantine.record_refusal(request.queue, error)
    planner.record_claim(Claimed(request), is_called=False)
    return None
