"""Commit: a batch's transaction ends in one round trip, in which the slot's next claim is sent too.

Steps are sent in the same round trip: sets of statements for other features, such as callback batches.
"""

from collections.abc import Sequence
from contextlib import suppress

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outboxq.database.driver import Answer, Script, is_listened_to, is_lost, run_script, transaction_status
from outboxq.database.errors import LOCK_NOT_AVAILABLE
from outboxq.errors import TransactionEndedByHandler
from outboxq.events import Event
from outboxq.execution.batch_state import BatchState, Ended
from outboxq.execution.claim import ClaimRequest, ClaimTransaction, forgive
from outboxq.execution.errors import ESCAPED, ConnectionLost, TransactionEscaped
from outboxq.execution.failure import Failed
from outboxq.execution.families import steps_of
from outboxq.execution.run import FREE_RETRIES
from outboxq.execution.runtime import Runtime
from outboxq.execution.settle import settle_result
from outboxq.execution.step import Step
from outboxq.fault_points import fault_point

# If an optional step is refused, only the steps are undone.
_STEPS_SAVEPOINT = "oq_steps"


def commit(
    connection: Connection, batch: BatchState, runtime: Runtime, next_claim: ClaimRequest | None
) -> Ended | None:
    """Commit a batch that has run; return its end, or None if COMMIT was refused and the batch's jobs must run again.

    If None is returned, all rows since the claim are undone. Jobs that ran together then each run alone. A lone job
    runs again after a conflict with another transaction, `FREE_RETRIES` times without a counted attempt: a deadlock, a
    serialization failure, or a lock_timeout, which usually occurs at a key that another transaction takes. Any other
    refusal is a failed attempt of the lone job, and is committed as such. But if COMMIT itself could not get a lock of
    the server, which is never a row's lock, the error is raised and no attempt counted.

    Raises:
        ConnectionLost: the answer to COMMIT was lost: all is committed, or nothing.
        psycopg.Error: COMMIT was refused, and it is not known which of several jobs is the cause, or no job is.
        TransactionEscaped: a handler had ended the transaction.
    """
    assert batch.transaction is not None, "what settles the jobs has begun it"
    sent = _send(connection, batch, batch.transaction, runtime, next_claim)
    if isinstance(sent, Ended):
        return sent
    # If several jobs each passed their own check, running each alone shows the cause. Without an event there is no
    # attempt to count: a lone job was parked, or put back by its claim.
    if not (batch.is_lone or batch.tries.together) or not batch.events:
        raise sent
    if sent.sqlstate == LOCK_NOT_AVAILABLE and transaction_status(connection) == TransactionStatus.IDLE:
        raise sent
    failed = _back_to_claim(connection, batch, batch.transaction, runtime, sent)
    is_conflict = failed.transient or failed.sqlstate == LOCK_NOT_AVAILABLE
    if _runs_again(batch, is_conflict=is_conflict):
        return None
    batch.events.append(settle_result(connection, batch.job, failed, runtime, batch.running.seconds))
    sent = _send(connection, batch, batch.transaction, runtime, None)
    if isinstance(sent, Ended):
        return sent
    raise sent


def _runs_again(batch: BatchState, *, is_conflict: bool) -> bool:
    """Record that COMMIT was refused; return True if the jobs are to run again without a counted attempt.

    Args:
        is_conflict: True if another transaction was the cause: a deadlock, a serialization failure, or a lock_timeout.
    """
    if not batch.is_lone:
        # COMMIT checked all jobs. When they run apart, each is checked alone.
        batch.tries.has_deadlocked |= is_conflict
        batch.tries.apart = True
        return True
    if is_conflict and batch.tries.refused < FREE_RETRIES:
        batch.tries.refused += 1
        return True
    return False


def _send(
    connection: Connection,
    batch: BatchState,
    transaction: ClaimTransaction,
    runtime: Runtime,
    next_claim: ClaimRequest | None,
) -> Ended | psycopg.Error:
    """Send COMMIT with its steps and the next claim; return the end of the batch, or the error if COMMIT was refused.

    Raises:
        ConnectionLost: the server did not answer.
    """
    fault_point("before-commit")
    batch.owner.begin_commit()
    riding = steps_of(batch, batch.events, runtime)
    answer, steps = send_commit(connection, transaction.inner_savepoint, riding, next_claim)
    if not answer.is_committed:
        error = answer.error or AssertionError("COMMIT was answered with ROLLBACK")
        if is_lost(connection):
            raise ConnectionLost("the connection was lost at COMMIT: all is committed, or nothing") from error
        # The server answered with an error: nothing was committed.
        batch.owner.commit_refused()
        if not isinstance(error, psycopg.Error):
            raise error
        return error
    fault_point("after-commit")
    # Not together with COMMIT if users' code listens to the engine, because it sets up each transaction.
    left = tuple(steps) if steps and is_listened_to(connection) else ()
    events = _events_of(steps, answer) if steps else ()
    report, claimed = batch.report(events), None
    if answer.error is not None:
        # The batch is committed, and the answers before the failure are valid.
        _end_failed(connection, next_claim, answer.error)
    elif next_claim is not None:
        fault_point("before-claim")
        claimed = next_claim.read(answer)
    return Ended(report, claimed, left)


def send_commit(
    connection: Connection, inner_savepoint: str, steps: Sequence[Step], next_claim: ClaimRequest | None = None
) -> tuple[Answer, Sequence[Step]]:
    """Send a check that no handler has ended the transaction, the steps, COMMIT and the next claim in one round trip.

    PostgreSQL stops at the first failure. The check releases a savepoint: it fails if a handler has ended the
    transaction (3B001, 25P01) or swallowed an error (25P02). So any later error, usually of a deferred constraint,
    belongs to the relay's own transaction.

    Returns:
        The answer, and the steps that were sent with it: a refused optional step is replaced or left out.
    """
    check = f"RELEASE SAVEPOINT {inner_savepoint}"
    while True:
        script = Script([("check", check), ("check", "SET CONSTRAINTS ALL IMMEDIATE")])
        if steps:
            script.add("check", f"SAVEPOINT {_STEPS_SAVEPOINT}")
            for step in steps:
                script.add(step.name, *step.statements())
        script.add("commit", "COMMIT")
        if steps and not is_listened_to(connection):
            for step in steps:
                script.add(step.name, *step.after_commit())
        if next_claim is not None:
            next_claim.add_to(script, begins=True)
        answer = script.send(connection)
        if answer.error is None or answer.is_committed or is_lost(connection):
            return answer, steps
        refused = next((step for step in steps if step.is_optional and step.name == answer.failed_at), None)
        if refused is None:
            return answer, steps
        # A refused optional step neither undoes the transaction nor makes its handlers run again.
        instead = refused.refused(answer.error)
        rest = [step if step is not refused else instead for step in steps]
        steps, check = [step for step in rest if step is not None], f"ROLLBACK TO SAVEPOINT {_STEPS_SAVEPOINT}"


def send_left(connection: Connection, steps: Sequence[Step]) -> tuple[Event, ...]:
    """Send the statements of steps that belong after COMMIT and could not be sent with it; return the steps' events.

    Each step has its own transaction; SQLAlchemy must have none open.
    """
    events: tuple[Event, ...] = ()
    for step in steps:
        script = Script().add(step.name, *step.after_commit())
        if not script.parts:
            continue
        with connection.begin():
            answer = script.send(connection)
            if answer.error is not None and not is_lost(connection):
                run_script(connection, "ROLLBACK")
        events += tuple(step.committed(answer.rows.get(step.name, ())))
    return events


def _end_failed(connection: Connection, request: ClaimRequest | None, error: psycopg.Error) -> None:
    """Roll back the transaction of a step or of the next claim, which failed after COMMIT in the same round trip.

    Also clear the marks that a failed claim left in rows. The error is not raised: the next claim is sent again by
    itself, and then raises it. ROLLBACK and COMMIT are sent as statements, because SQLAlchemy considers the transaction
    open.
    """
    with suppress(psycopg.Error):
        run_script(connection, "ROLLBACK")
        if request is None or request.failed(error):
            return
        try:
            forgive(connection, request)
            run_script(connection, "COMMIT")
        except psycopg.Error:
            # The next claim meets the same error, and reports it.
            run_script(connection, "ROLLBACK")


def _back_to_claim(
    connection: Connection, batch: BatchState, transaction: ClaimTransaction, runtime: Runtime, error: psycopg.Error
) -> Failed:
    """Undo all rows since the claim, after COMMIT was refused with `error`; return that error as a failed attempt.

    Raises:
        ConnectionLost: the connection was lost after the refusal.
        TransactionEscaped: a handler had ended the transaction.
    """
    failed = runtime.describe(error, batch.job)
    try:
        run_script(connection, transaction.reset())
    except psycopg.Error as gone:
        if is_lost(connection):
            raise ConnectionLost("the connection was lost after COMMIT was refused") from gone
        batch.blame_all(range(len(batch.jobs)))
        if error.sqlstate in ESCAPED:
            failed = runtime.describe(TransactionEndedByHandler(), batch.job)
        raise TransactionEscaped(batch.job, failed) from gone
    batch.forget_outcomes()
    # The rollback also undid the time-outs that were set for one handler.
    batch.running.timeout_seconds = runtime.registry.timeout_seconds(batch.queue)
    return failed


def commit_checked(connection: Connection, inner_savepoint: str, steps: Sequence[Step]) -> tuple[Event, ...]:
    """Send COMMIT with these steps, and return the steps' events; raise an error unless the transaction is committed.

    Nothing is committed if a handler has ended the transaction, which the release of `inner_savepoint` shows.

    Raises:
        psycopg.Error: nothing was committed, unless the connection was lost in between.
    """
    answer, steps = send_commit(connection, inner_savepoint, steps)
    if not answer.is_committed:
        raise answer.error or AssertionError("COMMIT was answered with ROLLBACK")
    if answer.error is not None:
        _end_failed(connection, None, answer.error)
    return _events_of(steps, answer)


def _events_of(steps: Sequence[Step], answer: Answer) -> tuple[Event, ...]:
    return tuple(event for step in steps for event in step.committed(answer.rows.get(step.name, ())))
