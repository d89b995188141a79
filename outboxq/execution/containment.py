"""Containment: the way back to a savepoint in the relay's transaction, and the savepoint of jobs that run together.

Handlers' rows are kept or undone as a whole.
"""

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, RootTransaction
from sqlalchemy.exc import SQLAlchemyError

from outboxq.database.driver import is_lost, run_script
from outboxq.database.errors import sqlstate_of
from outboxq.database.guard import Guard, Savepoint
from outboxq.errors import HandlerError, HandlerRolledBack, TransactionEndedByHandler
from outboxq.execution.batch_state import BatchState
from outboxq.execution.errors import ROLLED_BACK, SWALLOWED, ConnectionLost, TransactionEscaped
from outboxq.execution.failure import TRANSIENT, describe_failure
from outboxq.execution.settle import check_shared, current_xid


def is_intact(connection: Connection, root: RootTransaction | None) -> bool:
    """Return True if, as far as SQLAlchemy knows, `root` is still the connection's transaction."""
    return root is not None and root.is_active and connection.get_transaction() is root


def undo(
    connection: Connection, guard: Guard, savepoint: Savepoint | None, *, intact: bool, in_transaction: bool = True
) -> bool:
    """Go back to a savepoint; return False if the transaction has ended, or is not as the relay left it.

    Args:
        savepoint: None if it was never set.
        intact: As far as SQLAlchemy knows, the transaction is as the relay left it.
        in_transaction: The server was in the relay's transaction when the handler began, or the savepoint was set.

    Raises:
        ConnectionLost: the transaction is gone with its connection.
    """
    if is_lost(connection):
        raise ConnectionLost("the connection was lost while a handler ran")
    status = guard.transaction_status
    if savepoint is None and in_transaction:
        return intact and status == TransactionStatus.INTRANS
    if savepoint is None:
        if status != TransactionStatus.IDLE:
            # The handler began a transaction on the driver's own connection: it must not be committed with the job.
            run_script(connection, "ROLLBACK")
        return intact
    # If the handler released the savepoint, its rows would be committed together with its failure.
    if not intact or savepoint.is_released or status == TransactionStatus.IDLE:
        return False
    try:
        savepoint.undo()
    except (psycopg.Error, SQLAlchemyError) as error:
        if is_lost(connection):
            raise ConnectionLost("the connection was lost while a handler was undone") from error
        return False
    return guard.transaction_status == TransactionStatus.INTRANS


class SharedSavepoint:
    """The savepoint of several jobs of a batch: of a shared run, or of one call of a batch handler.

    The claim's own inner savepoint is used, so nothing is sent for the first jobs of a batch.

    Args:
        first: The place in the batch of the first of these jobs.
    """

    def __init__(self, connection: Connection, guard: Guard, batch: BatchState, first: int) -> None:
        assert batch.transaction is not None
        inner = batch.transaction.inner_savepoint
        if first > 0:
            # Set again: the rows of earlier jobs stay if these jobs are undone.
            run_script(connection, f"RELEASE SAVEPOINT {inner}; SAVEPOINT {inner}")
        self.xid = batch.transaction.xid
        self._batch = batch
        self._connection = connection
        self._guard = guard
        self._root = connection.get_transaction()
        self.savepoint = guard.begin_savepoint(inner)

    def check(self, *, closed: bool) -> None:
        """Check that this is still the innermost savepoint of a working transaction. No I/O.

        Args:
            closed: The handler's session was closed without an error, if it was.

        Raises:
            HandlerError: a handler returned as if done, and its rows were undone, or it left another transaction.
        """
        status = self._guard.transaction_status
        if not self.savepoint.is_active:
            raise HandlerRolledBack(ROLLED_BACK)
        if status == TransactionStatus.INERROR:
            raise HandlerError(SWALLOWED)
        is_innermost = self._connection.get_nested_transaction() is self.savepoint
        if not (closed and is_innermost and status == TransactionStatus.INTRANS):
            raise HandlerRolledBack("the handler left its session's transaction in another one than it was given")

    def is_same_transaction(self) -> bool:
        """Return True if the open transaction is still the claim's."""
        return current_xid(self._connection) == self.xid

    def keep_all(self) -> None:
        """Keep the rows after the savepoint; check deferred constraints, unless COMMIT does it for all jobs.

        Raises:
            psycopg.Error: a deferred constraint is violated.
            TransactionEndedByHandler: this is not the claim's transaction any more.
        """
        if not self._batch.tries.together:
            check_shared(self._connection, self.xid)
        self.savepoint.commit()

    def undo_all(self, error: BaseException, *, closed: bool) -> None:
        """Go back to the savepoint, after `error`.

        Args:
            closed: The handlers' sessions were closed without an error.

        Raises:
            ConnectionLost: the transaction is gone with its connection.
            TransactionEscaped: a handler ended the transaction.
        """
        self._batch.tries.has_deadlocked |= sqlstate_of(error) in TRANSIENT
        intact = closed and is_intact(self._connection, self._root)
        is_undone = undo(self._connection, self._guard, self.savepoint, intact=intact)
        if not (is_undone and self.is_same_transaction()):
            job = self._batch.job
            # If SQLAlchemy noticed the end of the transaction, its error says more than ours.
            reason = TransactionEndedByHandler() if intact else error
            # Writes of one job may be sent while another runs.
            args = [each.args for each in self._batch.jobs]
            raise TransactionEscaped(job, describe_failure(reason, job, args=args)) from error
