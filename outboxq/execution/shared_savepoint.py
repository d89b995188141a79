"""The savepoint that jobs of one batch share, be it by a shared run or by one call of a batch handler."""

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.database.driver import driver_connection, is_lost, run_script, transaction_status
from outboxq.database.errors import sqlstate_of
from outboxq.database.job_savepoint import Savepoint
from outboxq.errors import TransactionEndedByHandler
from outboxq.execution.attempt import ConnectionLost, Runtime, TransactionEscaped
from outboxq.execution.batch_state import BatchState
from outboxq.execution.failure import describe_failure
from outboxq.execution.settle import check_shared, current_xid

_DEADLOCKS = ("40001", "40P01")


class SharedSavepoint:
    """A savepoint for several jobs in the claim's transaction, and the way back to it.

    The claim's own seal stands for it: nothing is sent for the first jobs of a batch.

    Args:
        first: The place of the first of them in the batch.
    """

    def __init__(self, connection: Connection, work: Runtime, batch: BatchState, first: int) -> None:
        assert batch.anchor is not None
        seal = batch.anchor.seal
        if first > 0:
            # Set anew: what other jobs wrote must stay, whatever becomes of these.
            run_script(connection, f"RELEASE SAVEPOINT {seal}; SAVEPOINT {seal}")
        self._connection = connection
        self._guard = work.guard
        self._batch = batch
        self.xid = batch.anchor.xid
        self._root = connection.get_transaction()
        # Asked after each job.
        self._libpq = driver_connection(connection).pgconn
        work.guard.begin_savepoint(seal)
        self.savepoint: Savepoint | None = work.guard.savepoint

    @property
    def is_whole(self) -> bool:
        """Whether it is the innermost one still, in a transaction that works. No I/O."""
        savepoint = self.savepoint
        return (
            savepoint is not None
            and savepoint.is_active
            and self._connection.get_nested_transaction() is savepoint
            and self._libpq.transaction_status == TransactionStatus.INTRANS
        )

    def is_same_transaction(self) -> bool:
        """Whether the server still runs the claim's transaction."""
        anchor = self._batch.anchor
        return anchor is not None and current_xid(self._connection) == anchor.xid

    def keep(self) -> None:
        """Keep what lies behind it, with every deferred constraint checked, now or by the certificate.

        Raises:
            psycopg.Error, TransactionEndedByHandler: see `check_shared`.
        """
        assert self._batch.anchor is not None
        assert self.savepoint is not None
        if self._batch.one_run is None:
            check_shared(self._connection, self._batch.anchor.xid)
        self.savepoint.commit()

    def undo(self, error: BaseException, *, closed: bool) -> None:
        """Go back to it, after `error`.

        Raises:
            ConnectionLost: the transaction is gone with its connection.
            TransactionEscaped: a handler ended the transaction.
        """
        self._batch.deadlocked |= sqlstate_of(error) in _DEADLOCKS
        if is_lost(self._connection):
            raise ConnectionLost("the connection was lost while a batch ran") from error
        intact = closed and self._is_intact
        if not (intact and self._rolled_back() and self.is_same_transaction()):
            job = self._batch.jobs[self._batch.position]
            # SQLAlchemy's own account of it is better than ours, where SQLAlchemy saw it.
            reason = TransactionEndedByHandler() if intact else error
            raise TransactionEscaped(job, describe_failure(reason, job)) from error

    @property
    def _is_intact(self) -> bool:
        """Whether SQLAlchemy still knows the relay's transaction as it was."""
        root = self._root
        return root is not None and root.is_active and self._connection.get_transaction() is root

    def _rolled_back(self) -> bool:
        savepoint = self.savepoint
        # Released, its rows stand: were it taken for undone, the jobs would run on top of them.
        if savepoint is None or savepoint.is_released or transaction_status(self._connection) == TransactionStatus.IDLE:
            return False
        try:
            savepoint.undo()
        except (psycopg.Error, SQLAlchemyError) as error:
            if is_lost(self._connection):
                raise ConnectionLost("the connection was lost while a batch was undone") from error
            return False
        return transaction_status(self._connection) == TransactionStatus.INTRANS
