"""Commit: the end of a batch's transaction, with the steps that ride on it, and the next claim, in one round trip."""

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
    """Commit a batch that has run; return None if COMMIT was refused and all undone: its jobs are to run again.

    Jobs that ran together then run each by itself. A lone job runs again, `FREE_RETRIES` times for free, after a
    deadlock, a serialization failure, or a lock_timeout, usually at a key that another transaction takes.
    Any other refusal is a failed attempt of the lone job, and committed as such; but if COMMIT itself gets no lock,
    which is never that of a row, the error is raised, and nothing counted.

    Raises:
        ConnectionLost: the answer to COMMIT was lost: all is committed, or nothing.
        psycopg.Error: COMMIT was refused, and it is not known which of several jobs is the cause, or none is.
        TransactionEscaped: a handler had ended the transaction.
    """
    assert batch.transaction is not None, "what settles the jobs has begun it"
    sent = _send(connection, batch, batch.transaction, runtime, next_claim)
    if isinstance(sent, Ended):
        return sent
    # If several jobs each passed their own check, the one to blame shows when each runs alone. Without an event there
    # is no attempt to charge: a lone job was parked, or put back by its claim.
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
    """Record that COMMIT was refused; return True if the jobs run again for free."""
    if not batch.is_lone:
        # COMMIT checked all jobs. When they run apart, each is checked by itself.
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
    """Send COMMIT, the steps and the next claim; return the error of a COMMIT that was refused.

    Raises:
        ConnectionLost: there was no answer.
    """
    fault_point("before-commit")
    batch.owner.begin_commit()
    riding = steps_of(batch, batch.events, runtime)
    answer, steps = send_commit(connection, transaction.inner_savepoint, riding, next_claim)
    if not answer.is_committed:
        error = answer.error or AssertionError("COMMIT was answered with ROLLBACK")
        if is_lost(connection):
            raise ConnectionLost("the connection was lost at COMMIT: either everything stands, or none") from error
        # The server answered with an error: nothing was committed.
        batch.owner.commit_refused()
        if not isinstance(error, psycopg.Error):
            raise error
        return error
    fault_point("after-commit")
    # Not with COMMIT if users' code listens to the engine: it sets up each transaction.
    left = tuple(steps) if steps and is_listened_to(connection) else ()
    events = _events_of(steps, answer) if steps else ()
    report, claimed = batch.report(events), None
    if answer.error is not None:
        # The batch is committed, and the answers up to the failure hold.
        _end_failed(connection, next_claim, answer.error)
    elif next_claim is not None:
        fault_point("before-claim")
        claimed = next_claim.read(answer)
    return Ended(report, claimed, left)


def send_commit(
    connection: Connection, inner_savepoint: str, steps: Sequence[Step], next_claim: ClaimRequest | None = None
) -> tuple[Answer, Sequence[Step]]:
    """Commit a transaction of ours in one round trip, with its steps, if its checks pass.

    PostgreSQL stops at the first failure. The savepoint comes first: a transaction that a handler ended has lost it
    (3B001, 25P01), and one in which an error was swallowed refuses it (25P02), so that any later error, usually a
    deferred constraint, is of the relay's own transaction. Drivers report success when `commit()` ends a failed
    transaction; the command tag of COMMIT does not.

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
        # For an optional step the transaction is not undone, nor do its handlers run again.
        instead = refused.refused(answer.error)
        rest = [step if step is not refused else instead for step in steps]
        steps, check = [step for step in rest if step is not None], f"ROLLBACK TO SAVEPOINT {_STEPS_SAVEPOINT}"


def send_left(connection: Connection, steps: Sequence[Step]) -> tuple[Event, ...]:
    """Send the steps' statements that could not go along with COMMIT; SQLAlchemy has no transaction open."""
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
    """End the transaction that failed after COMMIT, and clear the claim's marks; sent again alone, it shows its error.

    ROLLBACK and COMMIT are sent as statements: SQLAlchemy's transaction ended on the server, but not for SQLAlchemy.
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
    """Undo all rows after the claim, for a refused COMMIT (usually a deferred constraint); return its error.

    Raises:
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
    # The rollback also undid the time-outs that were set for a handler alone.
    batch.running.timeout_seconds = runtime.registry.timeout_seconds(batch.queue)
    return failed


def commit_checked(connection: Connection, inner_savepoint: str, steps: Sequence[Step]) -> tuple[Event, ...]:
    """Commit by `send_commit`, check that it is done, and return the events of the steps.

    Raises:
        psycopg.Error: nothing was committed, unless the connection was lost on the way.
    """
    answer, steps = send_commit(connection, inner_savepoint, steps)
    if not answer.is_committed:
        raise answer.error or AssertionError("COMMIT was answered with ROLLBACK")
    if answer.error is not None:
        _end_failed(connection, None, answer.error)
    return _events_of(steps, answer)


def _events_of(steps: Sequence[Step], answer: Answer) -> tuple[Event, ...]:
    return tuple(event for step in steps for event in step.committed(answer.rows.get(step.name, ())))
