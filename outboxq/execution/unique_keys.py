"""Unique jobs that handlers add: a step (statements sent with COMMIT) takes their keys.

The keys are taken last, in COMMIT's own round trip. So a producer that adds a job of the same key waits at most for a
COMMIT, and not for a handler. If another job has the key, the new job is deleted before it becomes visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outboxq.database.driver import Rows
from outboxq.events import FollowerSuppressed
from outboxq.execution.chain import suppressed_followers
from outboxq.execution.step import Step
from outboxq.new_job import UniqueJob
from outboxq.outbox.unique import record_taken, statements_that_take_keys


@dataclass(frozen=True, slots=True)
class TakeKeys(Step):
    """The step (statements sent with COMMIT) that takes the unique keys of jobs which handlers have added."""

    schema: str
    added: dict[str, UniqueJob]
    name = "unique keys"

    def statements(self) -> Sequence[str]:
        """Return the statements that take the keys, one for each 1,000 jobs."""
        return statements_that_take_keys(self.schema, self.added)

    def committed(self, rows: Rows) -> tuple[FollowerSuppressed, ...]:
        """Record in the jobs' handles if each was added; return events for refused ones that were next in a chain."""
        return tuple(suppressed_followers(record_taken(self.added, rows)))
