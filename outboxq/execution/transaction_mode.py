"""A batch on its way: claimed, executed, settled, certified.

In transaction mode in one transaction on one connection; under a lease the claim is committed first. Written once: a
thread calls it on its `Connection`, an event loop through `run_sync`.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outboxq.codec.entities import EntityKey
from outboxq.database.driver import is_lost, run_script, transaction_status
from outboxq.errors import TransactionEndedByHandler
from outboxq.events import (
    JobsSuspected,
)
from outboxq.execution import settle
from outboxq.execution.attempt import FREE_RETRIES, execute
from outboxq.execution.batch_call import call_batch_handler
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.execution.claim import Claimed, ClaimRequest, ClaimTransaction, claim, forgive
from outboxq.execution.errors import ConnectionLost, TransactionEscaped
from outboxq.execution.failure import Failed, describe_failure
from outboxq.execution.outcome import _ended, settle_result
from outboxq.execution.plan import Segment, plan_segments
from outboxq.execution.preload import Locks, entity_keys, lock_ahead
from outboxq.execution.runtime import Result, Runtime, UnknownKindResult
from outboxq.execution.shared_batch import run_shared
from outboxq.fault_points import fault_point
from outboxq.handlers.handler import AnyHandler
from outboxq.job import Job
from outboxq.outcomes import Discard, Done
from outboxq.statements.transaction import local_timeouts, local_timeouts_off, xact_status

# Seal, constraints, COMMIT.
_CERTIFICATE = 3


def _begin(connection: Connection, progress: BatchState, *, shared: bool) -> str | None:
    """The transaction of the batch; the seal of a job that is alone in it is as good as a savepoint of its own."""
    anchored = progress.begin(connection)
    return None if shared else anchored.seal


class Pilot(Protocol):
    """Who has batches run: told how far they are, and asked where to go on."""

    def started(self, progress: BatchState) -> None:
        """Jobs were claimed, and the first handler has not begun. After any error, `resolve` this progress."""
        ...

    def following(self, progress: BatchState) -> ClaimRequest | None:
        """The claim that goes with the COMMIT of these jobs, if any should."""
        ...

    def ended(self, report: BatchReport) -> None:
        """A batch was committed, and another one was claimed with it."""
        ...


def run_batches(connection: Connection, request: ClaimRequest, work: Runtime, pilot: Pilot) -> BatchReport | None:
    """Claim, run the jobs, commit, and so on while `pilot` says so and jobs come; the last batch's report.

    In transaction mode; under a lease see `outboxq.execution.lease_mode`.

    None where nothing waited.

    Raises:
        ConnectionLost, psycopg.Error, SQLAlchemyError: what stands of the batch is to be found out.
        TransactionEscaped: a handler ended the transaction: `recover` what it left.
        Abandoned: the relay has taken the batch away.
    """
    fault_point("before-claim")
    with connection.begin():
        claimed = claim(connection, request)
        if claimed.anchor is not None:
            # Committed by the certificates inside; leaving the block ends what was begun behind the last of them.
            return _run_claimed(connection, claimed, work, pilot)
    return BatchReport(0, (JobsSuspected(request.queue, claimed.moved),)) if claimed.moved else None


def _run_claimed(connection: Connection, claimed: Claimed, work: Runtime, pilot: Pilot) -> BatchReport:
    while True:
        request = claimed.request
        progress = BatchState(
            request.queue, claimed.jobs, claimed.anchor, claimed.moved, request.timeout_seconds, work.epoch
        )
        pilot.started(progress)
        fault_point("after-claim")
        next_claimed = work_off(connection, progress, work, pilot)
        if next_claimed is None or not (next_claimed.jobs or next_claimed.moved):
            return progress.report()
        pilot.ended(progress.report())
        if not next_claimed.jobs:
            # Should this not be committed, they are found with their marks again.
            return BatchReport(0, (JobsSuspected(next_claimed.request.queue, next_claimed.moved),))
        claimed = next_claimed


def end_transaction(connection: Connection) -> None:
    """Roll back whatever a handler left open, for SQLAlchemy and for the driver below it."""
    connection.rollback()
    if transaction_status(connection) != TransactionStatus.IDLE:
        run_script(connection, "ROLLBACK")


def execute_all(connection: Connection, progress: BatchState, work: Runtime, *, shared: bool) -> None:
    """Execute and settle each job of a claimed batch; its events become true when the transaction commits.

    Args:
        shared: Check each job as one that shares its transaction with others.

    Raises:
        ConnectionLost, TransactionEscaped: see `execute`.
        LeaseLost: another relay may have the job.
    """
    # New, or undone to before the first handler.
    work.guard.is_altered = False
    spans = [Segment("alone", range(len(progress.jobs)))] if progress.is_apart else plan_segments(progress, work)
    progress.one_run = spans[0].how if len(spans) == 1 and spans[0].how != "alone" else None
    try:
        _execute_spans(connection, progress, work, spans, shared=shared)
    finally:
        # Also of handlers that were not seen to their end.
        work.guard.take_back()


def _execute_spans(
    connection: Connection, progress: BatchState, work: Runtime, spans: Sequence[Segment], *, shared: bool
) -> None:
    locks = Locks()
    if progress.one_run is None:
        # Else it locks what it loads.
        _lock_rows(connection, progress, work, locks)
    for span in spans:
        if span.how == "shared" and run_shared(connection, progress, work, span.places, span.arguments, locks):
            continue
        if span.how == "group" and _execute_group(connection, progress, work, span, locks):
            continue
        if span.how != "alone":
            progress.one_run = None
            # What it locked, and what was locked before it, was let go when it was undone.
            locks.forget()
            _lock_rows(connection, progress, work, locks)
        for position in span.places:
            progress.position = position
            _execute_alone(connection, progress, work, shared=shared)


def _lock_rows(connection: Connection, progress: BatchState, work: Runtime, locks: Locks) -> None:
    """Lock what the handlers of several jobs ask for, before the first of them runs.

    All in one order: else two batches that have rows in common could wait for each other.
    """
    if len(progress.jobs) == 1 or progress.is_leased:
        return
    handlers = {kind: work.handler_of(job) for kind, job in {job.kind: job for job in progress.jobs}.items()}
    locking = {kind: found for kind, found in handlers.items() if found is not None and found.signature().locks}
    if locking:
        keys = [
            key for job in progress.jobs if job.kind in locking for key in _locked_keys(locking[job.kind], job, work)
        ]
        try:
            lock_ahead(connection, keys, locks)
        except BaseException as error:
            # Each takes its own when it runs, and fails by itself if it cannot: also for a listener of the user's.
            if is_lost(connection) or progress.anchor is None or not work.is_failure(error):
                raise
            run_script(connection, f"ROLLBACK TO SAVEPOINT {progress.anchor.seal}")
            locks.forget()


def _locked_keys(handler: AnyHandler, job: Job, work: Runtime) -> list[EntityKey]:
    try:
        return [key for key in entity_keys([handler.signature().decode(job.args)]) if key.locked]
    except BaseException as error:
        # Users' own types raise what they like; when the job runs, it is recorded with it.
        if not work.is_failure(error):
            raise
        return []


def _execute_group(connection: Connection, progress: BatchState, work: Runtime, span: Segment, locks: Locks) -> bool:
    begun = time.perf_counter()
    outcomes = work.invoker.apart(call_batch_handler, connection, progress, work, span.places, span.arguments, locks)
    if outcomes is None:
        return False
    seconds = time.perf_counter() - begun
    for position, outcome in zip(span.places, outcomes, strict=True):
        progress.position = position
        progress.events.append(settle_result(connection, progress.job, outcome, work, seconds))
    return True


def _execute_alone(connection: Connection, progress: BatchState, work: Runtime, *, shared: bool) -> None:
    job = progress.job
    begun = time.perf_counter()
    result = _execute_one(connection, progress, job, work, shared=shared)
    if isinstance(result, Done | Discard) and _wrote_nothing(connection, progress):
        progress.events.append(_ended(job, work.kept(job, result), time.perf_counter() - begun))
        return
    is_idle = transaction_status(connection) == TransactionStatus.IDLE
    if progress.is_leased and progress.anchor is not None and is_idle:
        # Ended by its handler: what is written now is no part of it, and may wait for what the handler has prepared.
        raise TransactionEscaped(job, describe_failure(TransactionEndedByHandler(), job))
    if not progress.begun and is_idle:
        # The handler worked outside the database: should this connection be gone by now, its work is not.
        progress.late_result = result
    progress.begin(connection)
    progress.late_result = None
    if isinstance(result, UnknownKindResult):
        progress.unknown.append(job)
        settle.park(connection, job)
    else:
        progress.events.append(settle_result(connection, job, result, work, time.perf_counter() - begun))


def _wrote_nothing(connection: Connection, progress: BatchState) -> bool:
    """Whether a leased job's transaction has not begun, nor one around it on the driver's own connection."""
    is_untouched = progress.anchor is None and not progress.begun
    return is_untouched and transaction_status(connection) == TransactionStatus.IDLE


def _execute_one(connection: Connection, progress: BatchState, job: Job, work: Runtime, *, shared: bool) -> Result:
    handler = work.handler_of(job)
    seconds = None if handler is None else handler.timeout_seconds
    if seconds != progress.timeout_seconds and handler is not None:
        # The transaction was set up for the longest deadline of its queue, or the last job's.
        if progress.anchor is not None:
            settings, seal = local_timeouts(seconds) or local_timeouts_off(), progress.anchor.seal
            # Below the seal of a job that is alone: going back to it must not undo them.
            run_script(connection, settings if shared else f"RELEASE SAVEPOINT {seal}; {settings}SAVEPOINT {seal}")
        progress.timeout_seconds = seconds
    progress.deadline = None if seconds is None else time.monotonic() + seconds
    try:
        xid = progress.anchor.xid if shared and progress.anchor is not None else None
        begin = partial(_begin, connection, progress, shared=shared)
        return execute(connection, handler, job, work, shared_xid=xid, begin=begin)
    finally:
        progress.deadline = None


def work_off(connection: Connection, progress: BatchState, work: Runtime, pilot: Pilot) -> Claimed | None:
    """Execute, settle and commit; what was claimed with that.

    A leased job that is over and wrote nothing has no `anchor` afterwards: it is left to be removed with others.
    """
    alone = progress.lone_job is not None
    for tries_left in range(FREE_RETRIES, -1, -1):
        execute_all(connection, progress, work, shared=not alone)
        if progress.anchor is None:
            progress.begin_commit()
            return None
        try:
            return _certify(connection, progress, _following(connection, progress, work, pilot))
        except psycopg.Error as error:
            if is_lost(connection):
                raise ConnectionLost("the connection was lost at COMMIT: either everything stands, or none") from error
            if progress.certifying:
                # It came behind COMMIT, or nobody knows.
                raise
            if not alone and progress.one_run is None:
                # Every job passed its own check; who is to blame shows when each runs alone.
                raise
            failed = _back_to_claim(connection, progress, work, error)
            if not alone:
                # What each would have been checked for was left to COMMIT. Now it is not.
                progress.deadlocked |= failed.transient
                progress.is_apart = True
            elif tries_left == 0 or not failed.transient:
                # A deadlock or a serialization failure runs once more, for free.
                progress.events.append(settle_result(connection, progress.job, failed, work, 0.0))
                _certify(connection, progress)
                return None
    raise AssertionError("the last try is recorded, whatever it came to")


def _following(connection: Connection, progress: BatchState, work: Runtime, pilot: Pilot) -> ClaimRequest | None:
    return None if is_listened_to(connection) or work.guard.left else pilot.following(progress)


def is_listened_to(connection: Connection) -> bool:
    """Whether users' listeners on the engine (SET LOCAL ROLE, a tenant) want to see each transaction begin or end.

    They see what SQLAlchemy begins, not what a string of ours does.
    """
    listeners = connection.engine.dispatch
    return bool(listeners.begin or listeners.commit)


def _certify(connection: Connection, progress: BatchState, following: ClaimRequest | None = None) -> Claimed | None:
    """Commit, and claim the next jobs in the same round trip; None where none were asked for."""
    fault_point("before-commit")
    progress.begin_commit()
    assert progress.anchor is not None
    script = settle.commit_script(progress.anchor.seal)
    if following is not None:
        script += f"; {following.text_after_commit()}"
    try:
        results = run_script(connection, script)
    except psycopg.Error as error:
        committed = following is not None and _failed_behind_commit(connection, progress.anchor, error)
        # Another answer that is an error: nothing was committed. Without an answer, nobody knows.
        progress.certifying = committed or is_lost(connection)
        if following is None or not committed:
            raise
        # The claim that came with it says what ails it when it is sent by itself.
        run_script(connection, "ROLLBACK")
        if not following.failed(error):
            _forgive(connection, following)
        fault_point("after-commit")
        return None
    settle.check_committed(results)
    fault_point("after-commit")
    if following is None:
        return None
    fault_point("before-claim")
    return following.read_after_commit(results[_CERTIFICATE:])


def _forgive(connection: Connection, request: ClaimRequest) -> None:
    """As `forgive`, where SQLAlchemy's transaction is over for the server and not for SQLAlchemy."""
    try:
        forgive(connection, request)
        run_script(connection, "COMMIT")
    except psycopg.Error:
        # Whatever it is, it ails the next claim too, which says so.
        run_script(connection, "ROLLBACK")


def _failed_behind_commit(connection: Connection, anchor: ClaimTransaction, error: psycopg.Error) -> bool:
    """Whether it was the next claim that failed: the transaction was sealed, and its savepoint is gone."""
    if error.sqlstate in settle.UNSEALED or is_lost(connection):
        return False
    if transaction_status(connection) == TransactionStatus.IDLE:
        # COMMIT was refused; or it was not, and what came while it lasted, such as a cancellation, hit BEGIN.
        status = run_script(connection, xact_status(anchor.xid))[0].rows[0][0]
        run_script(connection, "ROLLBACK")
        return status == "committed"
    try:
        run_script(connection, anchor.reset())
    except psycopg.Error as gone:
        return gone.sqlstate == settle.NO_SUCH_SAVEPOINT
    return False


def _back_to_claim(connection: Connection, progress: BatchState, work: Runtime, error: psycopg.Error) -> Failed:
    """After a certificate failed, mostly for a deferred constraint: undo all rows behind the claim. What it failed for.

    Raises:
        TransactionEscaped: a handler had ended the transaction.
    """
    assert progress.anchor is not None
    failed = describe_failure(error, progress.job)
    progress.unknown.clear()
    try:
        run_script(connection, progress.anchor.reset())
    except psycopg.Error as gone:
        if is_lost(connection):
            raise ConnectionLost("the connection was lost after COMMIT was refused") from gone
        progress.blame_all(range(len(progress.jobs)))
        if error.sqlstate in settle.UNSEALED:
            failed = describe_failure(TransactionEndedByHandler(), progress.job)
        raise TransactionEscaped(progress.job, failed) from gone
    progress.events.clear()
    # Gone with the savepoint: what was set for the handler alone.
    progress.timeout_seconds = work.registry.timeout_seconds(progress.queue)
    return failed
