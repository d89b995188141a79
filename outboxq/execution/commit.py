"""Commit: the end of a batch's transaction, and in the same round trip the claim of the next jobs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outboxq.database.driver import ScriptResult, is_lost, run_script, transaction_status
from outboxq.database.errors import LOCK_NOT_AVAILABLE
from outboxq.errors import TransactionEndedByHandler
from outboxq.execution.batch_state import BatchState
from outboxq.execution.claim import Claimed, ClaimRequest, ClaimTransaction, forgive
from outboxq.execution.errors import ESCAPED, NO_SUCH_SAVEPOINT, ConnectionLost, TransactionEscaped
from outboxq.execution.failure import Failed
from outboxq.execution.job_batches import batch_ids, read_finished
from outboxq.execution.keep import NOTHING_KEPT, Keeper, Kept
from outboxq.execution.run import FREE_RETRIES
from outboxq.execution.runtime import Runtime
from outboxq.execution.settle import settle_result
from outboxq.fault_points import fault_point
from outboxq.statements.job_batches import finish_after_commit
from outboxq.statements.transaction import xact_status

# The statements of `commit_script`: savepoint, constraints, COMMIT.
_STATEMENTS = 3
# How many of them stand before those that keep finished jobs, and take the keys of unique jobs.
_BEFORE_KEYS = 2
# If the rows of finished jobs are refused, the transaction goes back to before them, and no further. They wait for the
# lock of an operator's forgotten session for a moment, not for as long as a handler may: slots, and the rows that
# handlers have locked, wait with them.
_KEPT_SAVEPOINT = "oq_kept"
_BRIEFLY = (
    "SELECT pg_catalog.set_config('outboxq.lock_timeout', pg_catalog.current_setting('lock_timeout'), true), "
    "pg_catalog.set_config('lock_timeout', '1s', true)"
)
# Before COMMIT too: one that sends notifications waits for the lock of others that do.
_AS_LONG_AS_BEFORE = (
    "SELECT pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('outboxq.lock_timeout'), true)"
)


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch was committed. `claimed`: what the claim that went along took; None without one."""

    claimed: Claimed | None = None


_COMMITTED = Committed()


def commit(
    connection: Connection, batch: BatchState, runtime: Runtime, next_claim: ClaimRequest | None, *, looks: bool = True
) -> Committed | None:
    """Commit a batch that has run; None if COMMIT was refused and everything undone: its jobs are to run again.

    Jobs that ran together then run each by itself. A lone job runs again, `FREE_RETRIES` times for free, after a
    deadlock, a serialization failure, or a lock_timeout, mostly of a unique job's key that another transaction is just
    taking. Any other refusal is a failed attempt of the lone job, and committed as such. Only if COMMIT itself gets no
    lock, which is never one of its rows, nothing is counted.

    A leased job whose handler wrote nothing has no transaction: it is removed later, with others. With `looks`, the
    batches (`jobs.batch`) of its jobs are looked at in the same round trip, behind COMMIT. The next claim goes along,
    unless handlers have added unique jobs.

    Raises:
        ConnectionLost: the answer to COMMIT was lost: either everything stands, or nothing.
        psycopg.Error: COMMIT was refused, and it is not known which of several jobs is the cause, or none is; or it is
            not known whether COMMIT came before the error.
        TransactionEscaped: a handler had ended the transaction.
    """
    if batch.transaction is None:
        batch.begin_commit()
        return _COMMITTED
    if batch.unique_adds:
        # Whether each was added stands in the answer to COMMIT, and that is lost if a claim behind it fails.
        next_claim = None
    behind = _Behind(_look_at_batches(batch, runtime) if looks else "", next_claim)
    try:
        return Committed(_send_commit(connection, batch, batch.transaction, runtime, behind))
    except psycopg.Error as error:
        if is_lost(connection):
            raise ConnectionLost("the connection was lost at COMMIT: either everything stands, or none") from error
        # Sent and not refused: the error came after COMMIT, or that is not known. If several jobs each passed a check
        # of their own, the one to blame shows when each runs alone.
        if batch.commit_was_sent or not (batch.is_lone or batch.runs_together):
            raise
        if error.sqlstate == LOCK_NOT_AVAILABLE and transaction_status(connection) == TransactionStatus.IDLE:
            raise
        failed = _back_to_claim(connection, batch, batch.transaction, runtime, error)
    is_conflict = failed.transient or failed.sqlstate == LOCK_NOT_AVAILABLE
    if _runs_again(batch, is_conflict=is_conflict):
        return None
    batch.events.append(settle_result(connection, batch.job, failed, runtime, batch.seconds))
    return Committed(_send_commit(connection, batch, batch.transaction, runtime, replace(behind, next_claim=None)))


def _runs_again(batch: BatchState, *, is_conflict: bool) -> bool:
    """Take note that COMMIT was refused; whether the jobs run again for free."""
    if not batch.is_lone:
        # COMMIT made the check for all jobs. When they run apart, each is checked by itself.
        batch.has_deadlocked |= is_conflict
        batch.runs_apart = True
        return True
    if is_conflict and batch.refused < FREE_RETRIES:
        batch.refused += 1
        return True
    return False


@dataclass(frozen=True, slots=True)
class _Behind:
    """What is sent behind COMMIT in the same string: a look at batches, then the next claim, as far as there are any.

    Each is a transaction of its own: the look must not see the members of before COMMIT, nor may its locks last for as
    long as the next handlers.
    """

    look: str
    next_claim: ClaimRequest | None

    def text(self) -> str:
        """All of it; nothing if there is neither."""
        claim = "" if self.next_claim is None else self.next_claim.text_after_commit()
        return f"{self.look}; {claim}" if self.look and claim else self.look or claim


def _look_at_batches(batch: BatchState, runtime: Runtime) -> str:
    ids = () if batch.is_plain else batch_ids(batch.jobs)
    return finish_after_commit(runtime.schema, ids) if ids else ""


def _send_commit(
    connection: Connection, batch: BatchState, transaction: ClaimTransaction, runtime: Runtime, behind: _Behind
) -> Claimed | None:
    fault_point("before-commit")
    batch.begin_commit()
    keys = batch.unique_adds.statements(runtime.schema) if batch.unique_adds else []
    text, next_claim = behind.text(), behind.next_claim
    kept = runtime.keeper.statements(runtime.schema, batch.events, batch.stands_for, runtime.prepared_rows)
    try:
        results = _run(connection, transaction.inner_savepoint, keys, text, runtime.keeper, kept)
    except psycopg.Error as error:
        if not text or not _failed_after_commit(connection, transaction, error):
            if not is_lost(connection):
                # The server answered with an error: nothing was committed. Without an answer that would not be known.
                batch.commit_refused()
            raise
        _forgive(connection, next_claim, error)
        fault_point("after-commit")
        return None
    taken = [results.pop(_BEFORE_KEYS) for _ in keys]
    check_committed(results)
    if taken:
        batch.unique_adds.record(taken)
    fault_point("after-commit")
    rest = results[_STATEMENTS:]
    if behind.look:
        batch.finished = read_finished(rest)
        ended = next(place for place, result in enumerate(rest) if result.tag == "COMMIT")
        rest = rest[ended + 1 :]
    if next_claim is None:
        return None
    fault_point("before-claim")
    return next_claim.read_after_commit(rest)


def _forgive(connection: Connection, request: ClaimRequest | None, error: psycopg.Error) -> None:
    """Clear the marks of a claim that failed after COMMIT; its error shows when it is sent again, by itself.

    ROLLBACK and COMMIT are sent as statements: SQLAlchemy's transaction is over on the server, but not for SQLAlchemy.
    """
    run_script(connection, "ROLLBACK")
    if request is None or request.failed(error):
        return
    try:
        forgive(connection, request)
        run_script(connection, "COMMIT")
    except psycopg.Error:
        # The next claim meets the same error, and reports it.
        run_script(connection, "ROLLBACK")


def _failed_after_commit(connection: Connection, transaction: ClaimTransaction, error: psycopg.Error) -> bool:
    """Whether it was the look or the next claim that failed: the batch is committed, and its savepoint is gone.

    Raises:
        psycopg.Error: the same error; that could not be found out.
    """
    if error.sqlstate in ESCAPED or is_lost(connection):
        return False
    try:
        if transaction_status(connection) == TransactionStatus.IDLE:
            # Either COMMIT was refused, or it was done, and what came meanwhile, such as a cancellation, hit BEGIN.
            status = run_script(connection, xact_status(transaction.xid))[0].rows[0][0]
            run_script(connection, "ROLLBACK")
            return status == "committed"
        run_script(connection, transaction.reset())
    except psycopg.Error as gone:
        if gone.sqlstate != NO_SUCH_SAVEPOINT:
            # Cancelled, perhaps: nothing is known, and the recovery asks the server.
            raise error from None
        return True
    return False


def _back_to_claim(
    connection: Connection, batch: BatchState, transaction: ClaimTransaction, runtime: Runtime, error: psycopg.Error
) -> Failed:
    """Undo all rows behind the claim after a refused COMMIT (mostly a deferred constraint); returns its error.

    Raises:
        TransactionEscaped: a handler had ended the transaction.
    """
    failed = runtime.describe(error, batch.job)
    batch.unknown.clear()
    try:
        run_script(connection, transaction.reset())
    except psycopg.Error as gone:
        if is_lost(connection):
            raise ConnectionLost("the connection was lost after COMMIT was refused") from gone
        batch.blame_all(range(len(batch.jobs)))
        if error.sqlstate in ESCAPED:
            failed = runtime.describe(TransactionEndedByHandler(), batch.job)
        raise TransactionEscaped(batch.job, failed) from gone
    batch.events.clear()
    batch.unique_adds.clear()
    batch.blocked.clear()
    # The rollback also undid the time-outs that were set for a handler alone.
    batch.timeout_seconds = runtime.registry.timeout_seconds(batch.queue)
    return failed


def commit_script(inner_savepoint: str, late: Sequence[str] = ()) -> str:
    """Statements that commit the claim's transaction, in one round trip, and only if everything in it holds.

    PostgreSQL stops at the first failure. The savepoint comes first: a transaction that a handler ended has lost it
    (3B001, 25P01), and one in which an error was swallowed refuses it (25P02), so that any later error is of the
    relay's own transaction: a deferred constraint, mostly. Drivers report success when `commit()` ends a failed
    transaction; the command tag of the last statement does not.

    Args:
        late: Other statements of the relay's. Behind the savepoint: never in another transaction than theirs.
    """
    before_commit = "".join(f"{statement}; " for statement in late)
    return f"RELEASE SAVEPOINT {inner_savepoint}; SET CONSTRAINTS ALL IMMEDIATE; {before_commit}COMMIT"


def _kept_statements(kept: Kept) -> list[str]:
    """Write the rows of finished jobs, and tell those who wait for them."""
    telling = [kept.telling] if kept.telling else []
    keeping = kept.keeping()
    if not keeping:
        return telling
    # Executed by its name alone, the INSERT sees to its patience by itself. PREPARE takes a lock too.
    within = keeping if kept.is_prepared() else [_BRIEFLY, *keeping, _AS_LONG_AS_BEFORE]
    return [f"SAVEPOINT {_KEPT_SAVEPOINT}", *within, f"RELEASE SAVEPOINT {_KEPT_SAVEPOINT}", *telling]


def commit_checked(connection: Connection, inner_savepoint: str, keeper: Keeper, kept: Kept = NOTHING_KEPT) -> None:
    """Commit by `commit_script`, and check that it is done.

    Args:
        keeper: Made `kept`, and is told if the table refuses it.

    Raises:
        psycopg.Error: nothing was committed, unless the connection was lost on the way.
    """
    check_committed(_run(connection, inner_savepoint, [], "", keeper, kept))


def _run(
    connection: Connection,
    inner_savepoint: str,
    keys: Sequence[str],
    behind: str,
    keeper: Keeper,
    kept: Kept,
) -> list[ScriptResult]:
    """Send `commit_script`, once more without the rows of finished jobs if their table refuses them.

    If a row of one of their ids is there already, it gives way in the second try; and if their INSERT is prepared and
    that failed, its text is sent. Returns the results of all other statements: a transaction whose rows stand is not
    undone, nor are its handlers run again, for what is kept of it.

    Args:
        keys: Take the keys of the unique jobs that handlers have added. Last, and in the same round trip, so that a
            producer which adds a job of the same key waits for a COMMIT, and not for a handler.
    """
    following, keeping = f"; {behind}" if behind else "", _kept_statements(kept)
    try:
        results = run_script(connection, commit_script(inner_savepoint, [*keeping, *keys]) + following)
    except psycopg.Error as error:
        may_be_theirs = keeper.may_be_refusal(error) or kept.failed_as_prepared(error)
        # The savepoint is there only if its own statement failed: those behind have released it.
        if not (kept.rows and may_be_theirs and _goes_back(connection, _KEPT_SAVEPOINT)):
            raise
        return _run(connection, _KEPT_SAVEPOINT, keys, behind, keeper, kept.after(error, keeper))
    kept.succeeded()
    del results[_BEFORE_KEYS : _BEFORE_KEYS + len(keeping)]
    return results


def _goes_back(connection: Connection, savepoint: str) -> bool:
    # If COMMIT itself was refused, no transaction is left: the next statement would begin another one, which has no
    # savepoints either and would be taken for that of the next claim.
    if transaction_status(connection) != TransactionStatus.INERROR:
        return False
    try:
        run_script(connection, f"ROLLBACK TO SAVEPOINT {savepoint}")
    except psycopg.Error:
        # Not there, or the connection is lost: the first error says what happened.
        return False
    return True


def check_committed(results: Sequence[ScriptResult]) -> None:
    """Look at the command tag: a COMMIT that rolls back says so there, and nowhere else."""
    tag = results[_STATEMENTS - 1].tag
    if tag != "COMMIT":
        raise AssertionError(f"COMMIT was answered with {tag}")
