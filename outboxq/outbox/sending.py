"""What stands around the INSERT of new jobs, such as a span: it sees the jobs first, and may give them headers.

It belongs to a class of sessions, or to a context: that of a handler's call.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outboxq.new_job import NewJob

# An attribute of a class of sessions.
_SENDER = "_outboxq_sender"


class JobSender(Protocol):
    """Stands around the INSERTs of jobs."""

    def sending(
        self, jobs: Mapping[str, NewJob], connection: Connection | None
    ) -> AbstractContextManager[Mapping[str, NewJob]]:
        """A context around the INSERT of these jobs, by their ids; its value are the jobs to insert in their place.

        Args:
            connection: None if they are inserted later, and only looked at now.
        """
        ...


SENDER_OF_CALL: ContextVar[JobSender | None] = ContextVar("SENDER_OF_CALL", default=None)


def sender_of(session: Session) -> JobSender | None:
    """What stands around the INSERTs of a session's jobs."""
    found: JobSender | None = getattr(session, _SENDER, None)
    return SENDER_OF_CALL.get() if found is None else found


def set_sender(sessions: type[Session], sender: JobSender) -> None:
    """From now on `sender` stands around the INSERTs of jobs of these sessions."""
    setattr(sessions, _SENDER, sender)
