"""Errors that end a batch. The relay handles all of them: none is raised to its caller."""

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
# The inner savepoint is gone or refused: a handler ended or broke the relay's transaction.
ESCAPED = frozenset({NO_SUCH_SAVEPOINT, "25P01", "25P02"})


class ConnectionLost(OutboxqError):
    """The connection was lost: the server undoes the batch's transaction or has committed it; no attempt is counted."""


class WritesRefused(ConnectionLost):
    """The server accepts no writes, because it is a standby, as during a failover. No handler's statement was sent."""


class ConnectionSpoiled(ConnectionLost):
    """A handler left the connection unusable: no statement can be sent. It was closed, and the attempt is counted."""

    def __init__(self, failed: "Failed") -> None:
        super().__init__("a handler left a statement of its own unfinished")
        self.failed = failed


class Abandoned(OutboxqError):
    """The relay took this batch away from its slot (the worker that runs it), which must not commit any part of it."""


class SharingEnded(BaseException):
    """Raised in a handler whose job shares a savepoint with others, if outboxq cannot go on and no handler is to blame.

    Then each of these jobs runs again, by itself. This is a BaseException, so that a handler's `except Exception` does
    not catch it.
    """


class BatchDeadlocked(OutboxqError):
    """A job of a batch has deadlocked twice, perhaps with locks that other jobs of its batch hold until COMMIT.

    So no job is blamed: the whole batch is rolled back, and its jobs run alone.
    """

    def __init__(self) -> None:
        super().__init__("a deadlock with rows that several jobs of the batch have locked")


class TransactionEscaped(OutboxqError):
    """A handler ended the claim's transaction, or removed the claim's savepoint: its rows may have been committed."""

    def __init__(self, job: Job, failed: "Failed") -> None:
        super().__init__(f"the handler of {job.kind!r} ended the relay's transaction")
        self.job = job
        self.failed = failed
