"""A step: what rides on the COMMIT of jobs that have ended. The core sends steps, and knows none of them."""

from collections.abc import Sequence
from typing import ClassVar

from outboxq.database.driver import Rows
from outboxq.events import Event


class Step:
    """Statements that go into the string of a COMMIT, by themselves or with rows that the step reads.

    Attributes:
        name: Owns the step's statements in the string.
        is_optional: It has a savepoint of its own: if it is refused, the jobs are done without it.
    """

    __slots__ = ()
    name: ClassVar[str]
    is_optional: ClassVar[bool] = False

    def statements(self) -> Sequence[str]:
        """Statements of the jobs' transaction, behind the check that it is whole."""
        return ()

    def after_commit(self) -> Sequence[str]:
        """Transactions of their own behind COMMIT; if they fail, what was committed stands."""
        return ()

    def committed(self, rows: Rows) -> Sequence[Event]:  # noqa: ARG002  # for those that read them
        """Take note that the COMMIT is done, by the rows of the step's statements; returns events to publish."""
        return ()

    def refused(self, error: BaseException) -> "Step | None":  # noqa: ARG002  # for optional steps
        """Take note that an optional step was refused; returns what is sent in its place, if anything."""
        return None
