"""What a relay did, counted while it runs and reported at its end."""

from collections import Counter
from dataclasses import dataclass

from outboxq.events import JobCrashed, JobDied, JobDone, JobLeaseLost, JobRetried, JobSetAside
from outboxq.execution.batch_state import BatchReport


@dataclass(frozen=True, slots=True)
class RelayReport:
    """What a relay did: jobs done, attempts that failed, and jobs that moved to the dead letters (failed too).

    `leases_lost` counts handlers that ended after another relay had taken their job: their rows were rolled back.
    """

    done: int
    failed: int
    died: int
    leases_lost: int = 0


@dataclass(slots=True)
class RelayCounters:
    """What a relay has done so far. Slots add under the lock."""

    claimed: int = 0
    done: int = 0
    failed: int = 0
    died: int = 0
    leases_lost: int = 0

    def add(self, report: BatchReport) -> None:
        """Count the events of one committed batch."""
        of = Counter(map(type, report.events))
        crashes = [event for event in report.events if isinstance(event, JobCrashed)] if of[JobCrashed] else []
        self.claimed += report.claimed
        self.done += of[JobDone]
        self.failed += of[JobRetried] + of[JobDied] + of[JobCrashed] + of[JobSetAside]
        self.died += of[JobDied] + of[JobSetAside] + sum(event.died for event in crashes)
        self.leases_lost += of[JobLeaseLost]

    def report(self) -> RelayReport:
        """The counts that users see."""
        return RelayReport(self.done, self.failed, self.died, self.leases_lost)
