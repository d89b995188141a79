"""Settles many leased jobs of any claims in one round trip, each by its own lease token.

The steps of their outcomes, which are statements of other features, are sent too. A job whose row another transaction
has locked is left for the next round trip, so that the others do not wait for it. A lost lease of one job does not
affect the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from outboxq.database.driver import ANY_SERVER, Answer, Script, ServerSession
from outboxq.events import Event, JobLeaseLost
from outboxq.execution.families import steps_of_many
from outboxq.execution.keep import Keeper
from outboxq.execution.settle import Finish, Settlement
from outboxq.execution.step import Step
from outboxq.job import Job
from outboxq.statements.by_index import NO_SCANS, PLANNED_ONCE
from outboxq.statements.done import insert_finished
from outboxq.statements.lease_mode import (
    bury_leased,
    finish_leased,
    finish_prepared,
    finishing,
    put_back_leased,
    standing,
)
from outboxq.statements.settle import Bury, PutBack
from outboxq.statements.transaction import READABLE_DATES

# Tools that watch or cut a relay's sessions recognise the end of a job by these words.
_MARK = "/* as RELEASE SAVEPOINT oq_... */ "
# No statement waits for a job's row, but one may wait for a table's lock, and all other jobs wait with it.
_PATIENCE = "SET LOCAL lock_timeout = '1s'"
_SETTLING = ("finished", "put back", "buried")
_NO_OTHERS: Mapping[UUID, tuple[UUID, ...]] = {}


@dataclass(frozen=True, slots=True)
class Settled:
    """The result of settlements that were sent together.

    Attributes:
        events: The events to publish, in the order of the settlements; `JobLeaseLost` for a job whose lease was lost.
        held: The settlements that were not written, because another transaction had locked their jobs' rows.
    """

    events: tuple[Event, ...]
    held: tuple[Settlement, ...]


@dataclass(slots=True, eq=False)
class SettleMany:
    """The settlements of leased jobs, as statements of one transaction, which the dispatcher sends.

    Args:
        stands_for: By the id of a job that ran, the ids of the jobs merged into it.
        unsure: True if the same settlements were sent before, and the answer to COMMIT was lost.

    Attributes:
        steps: The steps whose statements are sent with COMMIT.
        after_commit: The statements of steps after COMMIT, each with its step.
    """

    settlements: Sequence[Settlement]
    schema: str
    keeper: Keeper = field(default_factory=Keeper)
    stands_for: Mapping[UUID, tuple[UUID, ...]] = field(default_factory=lambda: _NO_OTHERS)
    unsure: bool = False
    steps: Sequence[Step] = field(init=False)
    after_commit: Sequence[tuple[Step, Sequence[str]]] = field(init=False)

    def __post_init__(self) -> None:
        ended = [each.change.job for each in self.settlements if type(each.change) is not PutBack]
        self.steps = steps_of_many(ended, self._events(), self.schema, self.keeper, self.stands_for)
        self.after_commit = [(step, after) for step in self.steps if (after := step.after_commit())]

    def _events(self) -> list[Event]:
        return [each.event for each in self.settlements if each.event is not None]

    def add_to(
        self, script: Script, server: ServerSession = ANY_SERVER, *, keep: bool = True, free: bool = True
    ) -> str | None:
        """Append the statements that settle the jobs, for a transaction that has just begun.

        The statements' owners, by which `read` finds their rows, are "settings", "finished", "put back", "buried" and
        the steps.

        Args:
            server: The session on the server that executes them, which may have a prepared statement.
            keep: True to write the finished rows of kinds with `keep=`.
            free: True to leave out jobs whose rows are locked. Otherwise each statement waits for such rows, up to
                `_PATIENCE`.

        Returns:
            The name of the prepared statement, if one is executed.
        """
        done, back, dead = list[Job](), list[PutBack](), list[Bury]()
        for settlement in self.settlements:
            change = settlement.change
            if isinstance(change, Finish):
                done.append(change.job)
            elif isinstance(change, PutBack):
                back.append(change)
            else:
                dead.append(change)
        rows = self.keeper.finished_rows(self._events(), self.stands_for) if keep else None
        kept = "" if rows is None else insert_finished(self.schema, rows, self.keeper.relay, gone=True)
        # A statement whose rows are refused fails by itself, and COMMIT does not.
        checking = ("SET CONSTRAINTS ALL IMMEDIATE",) if kept or back or dead else ()
        script.add("settings", READABLE_DATES, _PATIENCE, NO_SCANS, *checking)
        prepared = None
        if done and free and not (kept or server.claims.is_plain):
            prepared, definition = finishing(self.schema)
            preparing = () if prepared in server.claims.names else (definition,)
            script.add("settings", PLANNED_ONCE)
            script.add("finished", *preparing, _MARK + finish_prepared(self.schema, done))
        elif done:
            script.add("finished", _MARK + finish_leased(self.schema, done, free=free, keeping=kept))
        if back:
            script.add("put back", *(_MARK + text for text in put_back_leased(self.schema, back, free=free)))
        if dead:
            script.add("buried", _MARK + bury_leased(self.schema, dead, free=free))
        for step in self.steps:
            script.add(step.name, *step.statements())
        return prepared

    @property
    def is_asked(self) -> bool:
        """Return True if a query must find the jobs still in the table: an earlier COMMIT may have settled some."""
        return self.unsure and bool(self.settlements)

    def add_question(self, script: Script) -> None:
        """Append a query for the jobs that are still in the table, if an earlier COMMIT may have settled some.

        The query comes after COMMIT, because only a new statement sees changes that were committed while the earlier
        statements waited for a row. It is sent in the same round trip, because the answer to a separate query could be
        lost, and the outcome with it.
        """
        if self.is_asked:
            script.add("standing", standing(self.schema, (settlement.job for settlement in self.settlements)))

    def read(self, answer: Answer) -> Settled:
        """Read the result from the answer to a committed script with the statements of `add_to` and `add_question`."""
        left: dict[UUID, bool] = {job_id: held for owner in _SETTLING for job_id, held in answer.rows.get(owner, ())}
        if not left:
            return Settled(tuple(self._events()), ())
        standing = {job_id for (job_id,) in answer.rows["standing"]} if self.is_asked else set[UUID]()
        events: list[Event] = []
        held: list[Settlement] = []
        for settlement in self.settlements:
            job, is_held = settlement.job, left.get(settlement.job.id)
            if is_held:
                held.append(settlement)
            elif is_held is not None and not self._is_settled_before(settlement, standing):
                events.append(JobLeaseLost(job))
            elif settlement.event is not None:
                events.append(settlement.event)
        return Settled(tuple(events), tuple(held))

    def _is_settled_before(self, settlement: Settlement, standing: set[UUID]) -> bool:
        """Return True if the relay has lost a job's lease only because its own earlier COMMIT has settled the job.

        Args:
            standing: The ids of jobs that are still in the table.
        """
        if not self.is_asked:
            return False
        # A job that was to be put back is in the queue again, by this relay or by a reaper. Any other job is gone.
        return isinstance(settlement.change, PutBack) or settlement.job.id not in standing
