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
from outboxq.outbox.unique import UniqueAdds


@dataclass(frozen=True, slots=True)
class TakeKeys(Step):
    """Take the keys of added jobs."""

    schema: str
    adds: UniqueAdds
    name = "unique keys"

    def statements(self) -> Sequence[str]:
        """Take the keys in the order of their bytes: two transactions that want the same keys wait in one order."""
        return self.adds.statements(self.schema)

    def committed(self, rows: Rows) -> tuple[FollowerSuppressed, ...]:
        """Record in the jobs' handles if they were added; return the events of followers that were not."""
        return tuple(suppressed_followers(self.adds.record(rows)))
