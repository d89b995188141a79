"""The step of unique jobs that handlers have added: their keys are taken at COMMIT.

Last, in COMMIT's own string, so that a producer that adds a job of the same key waits for a COMMIT, and not for a
handler. Jobs whose keys other jobs have are deleted again, before they can be seen.
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
    """Take the keys of added jobs."""

    schema: str
    added: dict[str, UniqueJob]
    name = "unique keys"

    def statements(self) -> Sequence[str]:
        """One for each 1,000 jobs."""
        return statements_that_take_keys(self.schema, self.added)

    def committed(self, rows: Rows) -> tuple[FollowerSuppressed, ...]:
        """Record in the jobs' handles if they were added; return the events of followers that were not."""
        return tuple(suppressed_followers(record_taken(self.added, rows)))
