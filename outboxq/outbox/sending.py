"""Senders: wrap the INSERT of new jobs, for example in a span; they see the jobs first, and may give them headers.

A sender belongs to a class of sessions, or to a context: that of a handler's call.
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
    """Wraps the INSERTs of jobs."""

    def sending(
        self, jobs: Mapping[str, NewJob], connection: Connection | None
    ) -> AbstractContextManager[Mapping[str, NewJob]]:
        """A context around the INSERT of these jobs, by their ids; its value are the jobs to insert in their place.

        Args:
            connection: None if they are inserted later, and only read now.
        """
        ...


SENDER_OF_CALL: ContextVar[JobSender | None] = ContextVar("SENDER_OF_CALL", default=None)


def sender_of(session: Session) -> JobSender | None:
    """The sender of a session's jobs, if it has one."""
    found: JobSender | None = getattr(session, _SENDER, None)
    return SENDER_OF_CALL.get() if found is None else found


def set_sender(sessions: type[Session], sender: JobSender) -> None:
    """From now on wrap the INSERTs of jobs of these sessions by `sender`."""
    setattr(sessions, _SENDER, sender)
