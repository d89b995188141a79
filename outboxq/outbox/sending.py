"""Senders: wrap the INSERT of new jobs, for example in a span; they see the jobs first, and may add headers.

A sender belongs to a class of sessions, or to the context of a handler's call.
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
    """Wraps the INSERTs of jobs, for example to trace them; registered by `set_sender` or `SENDER_OF_CALL`."""

    def sending(
        self, jobs: Mapping[str, NewJob], connection: Connection | None
    ) -> AbstractContextManager[Mapping[str, NewJob]]:
        """Return a context manager around the INSERT of these jobs, by their ids; it yields the jobs to insert instead.

        Args:
            connection: None if the jobs are inserted later, outside of the context.
        """
        ...


SENDER_OF_CALL: ContextVar[JobSender | None] = ContextVar("SENDER_OF_CALL", default=None)


def sender_of(session: Session) -> JobSender | None:
    """Return the sender of a session's jobs: that of its class, else that of the handler's call; None without one."""
    found: JobSender | None = getattr(session, _SENDER, None)
    return SENDER_OF_CALL.get() if found is None else found


def set_sender(sessions: type[Session], sender: JobSender) -> None:
    """Make `sender` wrap the INSERTs of jobs by sessions of this class from now on."""
    setattr(sessions, _SENDER, sender)
