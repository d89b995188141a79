"""The step of unique jobs that handlers have added: their keys are taken at COMMIT.

Last, and in COMMIT's own string, so that a producer which adds a job of the same key waits for a COMMIT, and not for a
handler. Jobs of keys that are taken are deleted again, before anybody has seen them.
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
    """Takes the keys of these jobs."""

    schema: str
    adds: UniqueAdds
    name = "unique keys"

    def statements(self) -> Sequence[str]:
        """The keys in the order of their bytes: two transactions that want the same keys wait in one order."""
        return self.adds.statements(self.schema)

    def committed(self, rows: Rows) -> tuple[FollowerSuppressed, ...]:
        """Tell the jobs' handles what became of them; returns the events of followers that were not added."""
        return tuple(suppressed_followers(self.adds.record(rows)))
