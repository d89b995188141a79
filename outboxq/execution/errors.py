"""Errors that end a batch, and never leave the relay."""

from typing import TYPE_CHECKING

from outboxq.errors import OutboxqError
from outboxq.job import Job

if TYPE_CHECKING:
    from outboxq.execution.failure import Failed

ROLLED_BACK = (
    "the handler rolled its session back, then returned as if done: raise instead, "
    "or use session.begin_nested() for the part that may fail"
)
SWALLOWED = "the handler swallowed a database error, which had undone its rows: let it raise"

NO_SUCH_SAVEPOINT = "3B001"
# The inner savepoint is gone, or refused: a handler ended or broke the relay's transaction.
ESCAPED = frozenset({NO_SUCH_SAVEPOINT, "25P01", "25P02"})


class ConnectionLost(OutboxqError):
    """The connection was lost: the server has undone the claim, or committed it; no attempt is counted."""


class WritesRefused(ConnectionLost):
    """The server takes no writes: a standby, which was the primary or will be. No handler's statement was sent."""


class ConnectionSpoiled(ConnectionLost):
    """A handler left the connection so that nothing can be sent on it: it is closed, and the attempt counted."""

    def __init__(self, failed: "Failed") -> None:
        super().__init__("a handler left a statement of its own unfinished")
        self.failed = failed


class Abandoned(OutboxqError):
    """The relay took this batch away from its slot, which must not commit any of it."""


class SharingEnded(BaseException):
    """A shared batch cannot go on, for a reason of outboxq's own: raised into the handler that runs.

    Each job of the batch runs again, by itself. No `except Exception` of a handler's catches it.
    """


class BatchDeadlocked(OutboxqError):
    """A second deadlock of a job in its batch: the other jobs hold locks up to COMMIT, and none is to blame."""

    def __init__(self) -> None:
        super().__init__("a deadlock with rows that several jobs of the batch have locked")


class TransactionEscaped(OutboxqError):
    """A handler ended the claim's transaction, or left it without the claim's savepoint."""

    def __init__(self, job: Job, failed: "Failed") -> None:
        super().__init__(f"the handler of {job.kind!r} ended the relay's transaction")
        self.job = job
        self.failed = failed
