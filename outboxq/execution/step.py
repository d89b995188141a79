"""A step: statements of one feature that are sent together with the COMMIT of jobs.

The code that commits sends steps without knowing what they do.
"""

from collections.abc import Sequence
from typing import ClassVar

from outboxq.database.driver import Rows
from outboxq.events import Event


class Step:
    """Statements that are sent in one round trip with a COMMIT, and may return rows that the step reads.

    Attributes:
        name: The owner of the step's statements in the script, by which their rows are found.
        is_optional: True if the jobs are done without the step when its statements are refused.
    """

    __slots__ = ()
    name: ClassVar[str]
    is_optional: ClassVar[bool] = False

    def statements(self) -> Sequence[str]:
        """Return statements for the jobs' transaction, sent after a check that no handler has ended the transaction."""
        return ()

    def after_commit(self) -> Sequence[str]:
        """Return whole transactions, as statements, to send after COMMIT; if they fail, the jobs are still done."""
        return ()

    def committed(self, rows: Rows) -> Sequence[Event]:  # noqa: ARG002  # steps whose statements return rows read them
        """Receive the rows that the step's statements returned, after COMMIT succeeded; return events to publish."""
        return ()

    def refused(self, error: BaseException) -> "Step | None":  # noqa: ARG002  # optional steps read it
        """Receive the error that an optional step caused; return the step to send in its place, or None for none."""
        return None
