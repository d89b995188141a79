"""A wait for the end of a job, and the outcome that it receives."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from uuid import UUID

from outboxq.database.driver import DriverConnection


@dataclass(frozen=True, slots=True)
class Ending:
    """The outcome of a job that has ended, which the listener passes to the callers that wait for the job.

    Attributes:
        outcome: The outcome in the table `done_job`; `dead` for a dead letter; `gone` if no table has the job.
        result: The value that its handler returned, as JSON text, if it is kept.
        reason: The reason of a dead letter.
    """

    outcome: str
    result: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One caller's wait for the end of a job, as the listener for results keeps it.

    Args:
        deadline: The end of the wait, by `clock()`. The caller itself checks the time, unless its event loop is closed
            before.
        connect: Opens a connection outside a transaction.
        loop: The event loop that waits, and in which `connect` works; None for a thread.
        future: Receives the outcome of the job, or an error.
    """

    job_id: UUID
    deadline: float
    connect: Callable[[], DriverConnection]
    loop: asyncio.AbstractEventLoop | None = None
    future: "Future[Ending]" = field(default_factory=Future["Ending"])

    def is_abandoned(self, now: float) -> bool:
        return now >= self.deadline or (self.loop is not None and self.loop.is_closed())

    def can_connect(self) -> bool:
        return self.loop is None or self.loop.is_running()
