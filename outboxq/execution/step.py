"""A step: statements that ride on the COMMIT of ended jobs. The core sends steps, and knows none of them."""

from collections.abc import Sequence
from typing import ClassVar

from outboxq.database.driver import Rows
from outboxq.events import Event


class Step:
    """Statements that go into the string of a COMMIT, by themselves or with rows that the step reads.

    Attributes:
        name: Owns the step's statements in the string.
        is_optional: If its statements are refused, the jobs are done without it.
    """

    __slots__ = ()
    name: ClassVar[str]
    is_optional: ClassVar[bool] = False

    def statements(self) -> Sequence[str]:
        """Statements of the jobs' transaction, after the check that it is whole."""
        return ()

    def after_commit(self) -> Sequence[str]:
        """Transactions of their own after COMMIT; if they fail, the jobs are done all the same."""
        return ()

    def committed(self, rows: Rows) -> Sequence[Event]:  # noqa: ARG002  # steps whose statements return rows read them
        """Receive the rows of the step's statements, once COMMIT is done; return events to publish."""
        return ()

    def refused(self, error: BaseException) -> "Step | None":  # noqa: ARG002  # optional steps read it
        """Receive the error of an optional step; return the step to send in its place, if any."""
        return None
