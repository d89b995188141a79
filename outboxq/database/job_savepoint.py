"""The savepoint of a running job, as SQLAlchemy's own nested transaction."""

from sqlalchemy import Connection, NestedTransaction

from outboxq.database.driver import run_script


class Savepoint(NestedTransaction):
    """A running job's own savepoint. Once it `is_released`, what came after it can no longer be undone."""

    __slots__ = ("is_released",)

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.is_released = False

    @property
    def name(self) -> str:
        """Its name in the server."""
        return self._savepoint

    def undo(self) -> None:
        """Roll back to the savepoint, even if SQLAlchemy says that it did.

        SQLAlchemy says so also if it could send nothing, and rows may have come after it by the driver's cursor.

        Raises:
            psycopg.Error, SQLAlchemyError: the savepoint is gone.
        """
        if self.is_active:
            self.rollback()
        else:
            run_script(self.connection, f"ROLLBACK TO SAVEPOINT {self.name}")

    def _do_commit(self) -> None:
        super()._do_commit()
        self.is_released = True


class ClaimSavepoint(Savepoint):
    """The savepoint of a claim, which is there already and which COMMIT's script releases: neither costs a statement.

    It shows a made-up name, so that a handler cannot name the true one.
    """

    __slots__ = ("_claim_name",)

    def __init__(self, connection: Connection, name: str) -> None:
        # As SQLAlchemy's own __init__, but without the SAVEPOINT.
        self.connection = connection
        self.is_active = True
        self.is_released = False
        self._savepoint = "outboxq_sealed"
        self._claim_name = name
        self._previous_nested = connection._nested_transaction  # noqa: SLF001  # where SQLAlchemy's own enters itself
        connection._nested_transaction = self  # noqa: SLF001  # and leaves again

    @property
    def name(self) -> str:
        return self._claim_name

    def _close_impl(self, deactivate_from_connection: bool, warn_already_deactive: bool) -> None:
        self._savepoint = self._claim_name
        super()._close_impl(deactivate_from_connection, warn_already_deactive)

    def _do_commit(self) -> None:
        if not self.is_active:
            super()._do_commit()
        self.is_active = False
        self._deactivate_from_connection()
        self.is_released = True
