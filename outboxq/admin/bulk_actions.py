"""Actions on many rows, which `admin.bulk` runs page by page.

Each finds its next rows, changes them, and describes its change for the audit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import ClassVar, Self, TypeAlias
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from outboxq.admin import cancellation, dead_letters, jobs
from outboxq.admin.audit import Action
from outboxq.admin.cancellation import CancelOutcome
from outboxq.admin.dead_letters import DeadFilter, DeadJob
from outboxq.admin.jobs import JobChange, JobFilter, WaitingJob
from outboxq.errors import ArgumentError
from outboxq.statements.paging import KindCount, Page

# Written into the audit instead of arguments.
NOT_KEPT = "not kept"


@dataclass(frozen=True, slots=True)
class _OfDead:
    """Base of the actions on dead letters: finds, counts and samples the chosen dead letters."""

    wanted: DeadFilter

    leaves_marks: ClassVar[bool] = False
    to_retry: ClassVar[bool] = False

    @property
    def ids(self) -> tuple[UUID, ...] | None:
        """The chosen ids; None if a filter chooses the rows."""
        return self.wanted.ids

    def until(self, moment: datetime) -> Self:
        """Return the same action, restricted to dead letters that died by `moment`, to leave out later ones."""
        return replace(self, wanted=replace(self.wanted, died_before=moment))

    def find(self, connection: Connection, after: UUID | None) -> tuple[UUID, ...]:
        """Return the ids of the next dead letters that match, in the order of ids, after the id `after`."""
        return dead_letters.find_ids(connection, self.wanted, after=after)

    def count(self, connection: Connection, most: int | None, give_up_at: float) -> tuple[KindCount, ...]:
        """Count the dead letters that match, by queue and kind, `most` of them at most.

        `give_up_at`: the time of `time.monotonic()` at which to raise `TimeoutError`.
        """
        return dead_letters.count_matching(
            connection, self.wanted, to_retry=self.to_retry, most=most, give_up_at=give_up_at
        )

    def sample(self, connection: Connection, limit: int) -> Sequence[DeadJob]:
        """Return up to `limit` of the dead letters that match, to be shown to the operator."""
        return dead_letters.sample(connection, self.wanted, limit)


@dataclass(frozen=True, slots=True)
class RetryDead(_OfDead):
    """Turns dead letters into ready jobs again, with new arguments if `args` (JSON text) is given."""

    args: str | None = field(default=None, repr=False)

    name: ClassVar[Action] = "dead.retry"
    to_retry: ClassVar[bool] = True

    def run(self, connection: Connection, ids: Sequence[UUID]) -> Page:
        """Turn these dead letters into ready jobs, except those that no longer match; return the ids by outcome."""
        return dead_letters.retry_page(connection, replace(self.wanted, ids=tuple(ids)), limit=len(ids), args=self.args)

    @property
    def change(self) -> dict[str, object] | None:
        """The change as the audit describes it: a note that new arguments are not kept; None without new arguments."""
        return None if self.args is None else {"args": NOT_KEPT}


@dataclass(frozen=True, slots=True)
class DiscardDead(_OfDead):
    """Deletes dead letters for good."""

    name: ClassVar[Action] = "dead.discard"
    args: ClassVar[None] = None
    change: ClassVar[None] = None

    def run(self, connection: Connection, ids: Sequence[UUID]) -> Page:
        """Delete these dead letters, except those that no longer match; return the ids by outcome."""
        return dead_letters.discard_page(connection, replace(self.wanted, ids=tuple(ids)), limit=len(ids))


@dataclass(frozen=True, slots=True)
class _OfJobs:
    """Base of the actions on jobs: finds, counts and samples the chosen jobs."""

    wanted: JobFilter

    leaves_marks: ClassVar[bool] = True

    @property
    def ids(self) -> tuple[UUID, ...] | None:
        """The chosen ids; None if a filter chooses the rows."""
        return self.wanted.ids

    def until(self, moment: datetime) -> Self:
        """Return the same action, restricted to jobs that were added by `moment`, to leave out later ones."""
        return replace(self, wanted=replace(self.wanted, created_before=moment))

    def find(self, connection: Connection, after: UUID | None) -> tuple[UUID, ...]:
        """Return the ids of the next jobs that match, in the order of ids, after the id `after`, without locks."""
        return jobs.find_ids(connection, self.wanted, after=after)

    def count(self, connection: Connection, most: int | None, give_up_at: float) -> tuple[KindCount, ...]:
        """Count the jobs that match, by queue and kind, `most` of them at most.

        `give_up_at`: the time of `time.monotonic()` at which to raise `TimeoutError`.
        """
        return jobs.count_matching(connection, self.wanted, most=most, give_up_at=give_up_at)

    def sample(self, connection: Connection, limit: int) -> Sequence[WaitingJob]:
        """Return up to `limit` of the jobs that match, to be shown to the operator."""
        return jobs.sample(connection, self.wanted, limit)


@dataclass(frozen=True, slots=True)
class CancelJobs(_OfJobs):
    """Cancels jobs by deleting their rows; a job that a transaction runs is not cancelled."""

    name: ClassVar[Action] = "job.cancel"
    args: ClassVar[None] = None
    change: ClassVar[None] = None

    def run(self, connection: Connection, ids: Sequence[UUID]) -> Page:
        """Delete the rows of these jobs, except those that no longer match; return the ids by outcome."""
        if self.wanted == JobFilter(ids=self.wanted.ids):
            done = jobs.cancel_jobs(connection, ids)
            return Page(changed=done.cancelled, held=done.running)
        return jobs.cancel_page(connection, replace(self.wanted, ids=tuple(ids)), limit=len(ids))


@dataclass(frozen=True, slots=True)
class CancelRunning(_OfJobs):
    """Cancels jobs, including running ones: ends waiting jobs, and requests relays to end the jobs that they run.

    A found job is cancelled even if it no longer matches the filter, for example because it has begun to run.

    `outcome`: "discard" to delete the cancelled jobs, "dead" to make them dead letters.
    """

    outcome: CancelOutcome = "discard"

    name: ClassVar[Action] = "job.cancel_running"
    args: ClassVar[None] = None

    def run(self, connection: Connection, ids: Sequence[UUID]) -> Page:
        """End those of these jobs that wait, and request relays to end those that run; return the ids by outcome."""
        done = cancellation.cancel_running(connection, ids, self.outcome)
        return Page(changed=(*done.cancelled, *done.requested), held=(), requested=done.requested)

    @property
    def change(self) -> dict[str, object]:
        """The description of the change for the audit: `outcome`, the end of the jobs (discarded or dead letters)."""
        return {"outcome": self.outcome}


@dataclass(frozen=True, slots=True)
class ChangeJobs(_OfJobs):
    """Changes the priority, the due time or the arguments of waiting jobs; `to` has the new values."""

    to: JobChange

    name: ClassVar[Action] = "job.change"

    @property
    def args(self) -> str | None:
        """The new arguments, as JSON text; None if the jobs keep theirs."""
        return self.to.args

    def run(self, connection: Connection, ids: Sequence[UUID]) -> Page:
        """Change these jobs, except those that no longer match; return the ids by outcome."""
        return jobs.change_page(connection, replace(self.wanted, ids=tuple(ids)), self.to, limit=len(ids))

    @property
    def change(self) -> dict[str, object]:
        """The description of the change for the audit: the new values, and a note that new arguments are not kept."""
        to = self.to
        found = {"priority": to.priority, "run_at": to.run_at, "run_now": to.run_now or None}
        return {**found, **({} if to.args is None else {"args": NOT_KEPT})}


BulkAction: TypeAlias = RetryDead | DiscardDead | CancelJobs | CancelRunning | ChangeJobs


def fields_of(wanted: DeadFilter | JobFilter) -> dict[str, object]:
    """Return all fields of a filter, by their names, for the audit's column `filter`."""
    return {each.name: getattr(wanted, each.name) for each in fields(wanted)}


def read_action(name: str, wanted: str | None, change: str | None, args: str | None) -> BulkAction | None:
    """Rebuild an action on many rows from its row in the audit, to resume it; return None if `name` is another action.

    Args:
        name: The action's name, such as `dead.retry`.
        wanted: The filter, as JSON text.
        change: The new values, as JSON text.
        args: The new arguments, as JSON text, from the operator: the audit does not keep them.

    Raises:
        ArgumentError: the action changes arguments and `args` is missing, or it changes none and `args` is given.
    """
    if name not in ("dead.retry", "dead.discard", "job.cancel", "job.cancel_running", "job.change"):
        return None
    to = msgspec.json.decode(change or "{}", type=dict[str, msgspec.Raw])
    if (to.pop("args", None) is None) is not (args is None):
        raise ArgumentError(
            "it gives jobs other arguments, which the audit does not keep: give them again"
            if args is None
            else "it gives jobs no other arguments: give none"
        )
    if name.startswith("dead."):
        dead = msgspec.json.decode(wanted or "{}", type=DeadFilter)
        return RetryDead(dead, args) if name == "dead.retry" else DiscardDead(dead)
    found = msgspec.json.decode(wanted or "{}", type=JobFilter)
    if name == "job.cancel":
        return CancelJobs(found)
    if name == "job.cancel_running":
        return CancelRunning(found, msgspec.json.decode(to["outcome"], type=CancelOutcome))
    return ChangeJobs(found, replace(msgspec.json.decode(msgspec.json.encode(to), type=JobChange), args=args))
