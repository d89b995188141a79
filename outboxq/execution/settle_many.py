"""Settle many leased jobs in one string: the results of calls that held no connection."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import UUID

from outboxq.database.driver import Answer, Script
from outboxq.events import Event, JobEvent, JobLeaseLost
from outboxq.execution.batch_state import BatchState
from outboxq.execution.callback_batches import FinishBatches, batch_ids
from outboxq.execution.chain import has_follower
from outboxq.execution.runtime import Result, Runtime
from outboxq.execution.settle import event_of_end
from outboxq.execution.step import Step
from outboxq.outcomes import Discard, Done
from outboxq.statements.by_index import NO_SCANS
from outboxq.statements.done import insert_finished
from outboxq.statements.lease_mode import finish_leased
from outboxq.statements.results import tell_waiters
from outboxq.statements.transaction import LOCAL_SETTINGS

# Tools that watch or cut a relay's sessions find the end of a job by these words.
_MARK = "/* as RELEASE SAVEPOINT oq_... */ "

# The state of a lone leased job, and its result.
LeasedResult: TypeAlias = tuple[BatchState, Result]


def settles_together(batch: BatchState, result: Result) -> bool:
    """Return True if the result needs no statement of its own."""
    return (isinstance(result, Done) and not has_follower(batch.job)) or isinstance(result, Discard)


@dataclass
class Settling:
    """The statements of results that are settled together, and their events."""

    runtime: Runtime
    results: Sequence[LeasedResult]
    unsure: Collection[UUID] = ()
    keeps: bool = True
    events: list[JobEvent] = field(init=False)
    steps: Sequence[Step] = field(init=False)

    def __post_init__(self) -> None:
        runtime, self.events = self.runtime, []
        for batch, result in self.results:
            assert isinstance(result, Done | Discard)
            job, seconds = batch.job, batch.running.seconds
            self.events.append(event_of_end(job, runtime.redacted(job, result), runtime, seconds))
        ids = batch_ids([batch.job for batch, _ in self.results])
        self.steps = (FinishBatches(runtime.schema, ids),) if ids else ()

    @property
    def _stands_for(self) -> dict[UUID, tuple[UUID, ...]]:
        return {job_id: ids for batch, _ in self.results for job_id, ids in batch.stands_for.items()}

    def add_to(self, script: Script, *, with_steps: bool) -> None:
        """Append a transaction that has begun, up to its COMMIT, and the steps after it."""
        schema, keeper = self.runtime.schema, self.runtime.keeper
        rows = keeper.finished_rows(self.events, self._stands_for) if self.keeps else None
        kept = insert_finished(schema, rows, keeper.relay, gone=True) if rows is not None else ""
        # Their table refuses finished rows here, and not at COMMIT.
        checking = ("SET CONSTRAINTS ALL IMMEDIATE",) if kept else ()
        script.add("settings", *LOCAL_SETTINGS, NO_SCANS, *checking)
        jobs = [event.job for event in self.events]
        script.add("finished", _MARK + finish_leased(schema, jobs, free=True, keeping=kept))
        if ended := keeper.ended(self.events, self._stands_for):
            script.add("waiters", tell_waiters(schema, ended))
        script.add("settled", "COMMIT")
        if with_steps:
            for step in self.steps:
                script.add(step.name, *step.after_commit())

    def read(self, answer: Answer) -> tuple[list[Event], list[LeasedResult]]:
        """Return the events of a string that was committed, and the results whose rows others hold."""
        lost = {job_id for (job_id, *_) in answer.rows.get("finished", ())}
        events: list[Event] = []
        for event in self.events:
            if event.job.id not in lost or event.job.id in self.unsure:
                events.append(event)
            else:
                events.append(JobLeaseLost(event.job))
        for step in self.steps:
            events += step.committed(answer.rows.get(step.name, ()))
        return events, []
