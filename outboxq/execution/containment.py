"""Containment: a savepoint in the relay's transaction, behind which handlers' rows are kept or undone as a whole."""

from collections.abc import Callable

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.database.driver import is_lost, run_script
from outboxq.database.errors import sqlstate_of
from outboxq.database.guard import Guard, Savepoint
from outboxq.errors import HandlerError, HandlerRolledBack, TransactionEndedByHandler
from outboxq.execution.batch_state import BatchState
from outboxq.execution.errors import ROLLED_BACK, ConnectionLost, TransactionEscaped
from outboxq.execution.failure import TRANSIENT, Describing, describe_failure
from outboxq.execution.settle import check_shared, current_xid


class Containment:
    """A savepoint for what handlers do, and the way back to it."""

    def __init__(self, connection: Connection, guard: Guard, *, in_transaction: bool = True) -> None:
        self.savepoint: Savepoint | None = None
        # Whether the server is in the relay's transaction.
        self.in_transaction = in_transaction
        self._connection = connection
        self._guard = guard
        self._root = connection.get_transaction()
        guard.savepoint = None

    def begin(self, inner_savepoint: str | None) -> None:
        """Set the savepoint; if the claim's inner savepoint is named, use that one, and send nothing."""
        self._guard.begin_savepoint(inner_savepoint)
        self.savepoint = self._guard.savepoint

    @property
    def is_intact(self) -> bool:
        """Whether SQLAlchemy still knows the relay's transaction as it was."""
        root = self._root
        return root is not None and root.is_active and self._connection.get_transaction() is root

    def check(self) -> None:
        """Check that the rows of a handler that returned as if done are still there.

        Raises:
            HandlerError: they are not.
        """
        if self.savepoint is not None and not self.savepoint.is_active:
            raise HandlerRolledBack(ROLLED_BACK)
        if self._guard.transaction_status == TransactionStatus.INERROR:
            raise HandlerError("the handler swallowed a database error, which had undone its rows: let it raise")

    def keep(self, shared_xid: str | None) -> None:
        """Keep the rows behind the savepoint.

        Args:
            shared_xid: The claim's transaction, if other jobs share it: then every deferred constraint is checked now.

        Raises:
            psycopg.Error: a deferred constraint is violated.
            TransactionEndedByHandler: this is not the claim's transaction any more.
        """
        if self.savepoint is None:
            return
        if shared_xid is not None:
            check_shared(self._connection, shared_xid)
        self.savepoint.commit()

    def undo(self, *, intact: bool) -> bool:
        """Go back to the savepoint; False if the transaction is not there any more, or not as the relay left it.

        Args:
            intact: Whether, as far as SQLAlchemy knows, the transaction is as the relay left it.

        Raises:
            ConnectionLost: the transaction is gone with its connection.
        """
        if is_lost(self._connection):
            raise ConnectionLost("the connection was lost while a handler ran")
        if self.savepoint is None:
            return self._undo_unsaved(intact=intact)
        status = self._guard.transaction_status
        # If the handler released the savepoint, its rows stand, and would be committed together with its failure.
        if not intact or self.savepoint.is_released or status == TransactionStatus.IDLE:
            return False
        try:
            self.savepoint.undo()
        except (psycopg.Error, SQLAlchemyError) as error:
            if is_lost(self._connection):
                raise ConnectionLost("the connection was lost while a handler was undone") from error
            return False
        return self._guard.transaction_status == TransactionStatus.INTRANS

    def _undo_unsaved(self, *, intact: bool) -> bool:
        status = self._guard.transaction_status
        if self.in_transaction:
            return intact and status == TransactionStatus.INTRANS
        if status != TransactionStatus.IDLE:
            # The handler began a transaction on the driver's own connection: it must not be committed with the job.
            run_script(self._connection, "ROLLBACK")
        return intact


class AttemptSavepoint(Containment):
    """The savepoint of one attempt, set when the handler first needs it: a handler that needs none pays nothing.

    That is when the handler first names its session; under a lease, when the session is first used, so that a long call
    outside the database holds no transaction open.

    Args:
        begin: Called first; it begins the transaction if need be, and names the savepoint that stands for the attempt's
            own, or None.
        in_transaction: Whether the server is in the relay's transaction already; else `begin` begins it.
    """

    def __init__(
        self, connection: Connection, guard: Guard, begin: Callable[[], str | None], *, in_transaction: bool
    ) -> None:
        super().__init__(connection, guard, in_transaction=in_transaction)
        self._begin = begin
        guard.on_first_use = self.open

    def open(self) -> None:
        """Set the savepoint, unless that was done."""
        if self.savepoint is not None:
            return
        # First: the statements below go through the guarded connection, too.
        self._guard.on_first_use = None
        try:
            inner_savepoint = self._begin()
            self.in_transaction = True
            self.begin(inner_savepoint)
        except BaseException:
            # The handler may swallow the error, and must not go on without a savepoint.
            self._guard.on_first_use = self.open
            raise


class SharedSavepoint(Containment):
    """The savepoint of several jobs of a batch: of a shared run, or of one call of a batch handler.

    The claim's own inner savepoint is used, so nothing is sent for the first jobs of a batch.

    Args:
        first: The place in the batch of the first of these jobs.
    """

    def __init__(self, connection: Connection, guard: Guard, batch: BatchState, first: int) -> None:
        super().__init__(connection, guard)
        assert batch.transaction is not None
        inner = batch.transaction.inner_savepoint
        if first > 0:
            # Set anew, so that the rows of earlier jobs stay if these jobs are undone.
            run_script(connection, f"RELEASE SAVEPOINT {inner}; SAVEPOINT {inner}")
        self._batch = batch
        self.xid = batch.transaction.xid
        self.begin(inner)

    @property
    def is_whole(self) -> bool:
        """Whether this is still the innermost savepoint, in a transaction that works. No I/O."""
        savepoint = self.savepoint
        return (
            savepoint is not None
            and savepoint.is_active
            and self._connection.get_nested_transaction() is savepoint
            and self._guard.transaction_status == TransactionStatus.INTRANS
        )

    def is_same_transaction(self) -> bool:
        """Whether the server still runs the claim's transaction."""
        return current_xid(self._connection) == self.xid

    def keep_all(self) -> None:
        """Keep the rows behind the savepoint, and check deferred constraints, unless COMMIT does it for all jobs."""
        self.keep(None if self._batch.tries.together else self.xid)

    def undo_all(self, error: BaseException, *, closed: bool) -> None:
        """Go back to the savepoint, after `error`.

        Args:
            closed: Whether the handlers' sessions could be closed.

        Raises:
            ConnectionLost: the transaction is gone with its connection.
            TransactionEscaped: a handler ended the transaction.
        """
        self._batch.tries.has_deadlocked |= sqlstate_of(error) in TRANSIENT
        intact = closed and self.is_intact
        if not (self.undo(intact=intact) and self.is_same_transaction()):
            job = self._batch.job
            # If SQLAlchemy noticed the end of the transaction, its own error says more than ours.
            reason = TransactionEndedByHandler() if intact else error
            # Writes of one job may be sent while another runs.
            args = Describing([each.args for each in self._batch.jobs])
            raise TransactionEscaped(job, describe_failure(reason, job, args)) from error
