"""Jobs for events that no relay has sent."""

from datetime import UTC, datetime
from uuid import UUID

from outboxq.job import Job

_NOW = datetime(2026, 1, 1, tzinfo=UTC)


def job(kind: str = "k", queue: str = "q") -> Job:
    """A job that did not wait."""
    return Job(UUID(int=7), queue, kind, "{}", "{}", 0, 1, None, 0, 0, None, None, "[]", _NOW, _NOW, 1)
