"""Actions on many rows: each finds its next rows, changes them, and says what the audit keeps of it."""

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
    """The part of actions on dead letters that finds and shows them."""

    wanted: DeadFilter

    leaves_marks: ClassVar[bool] = False
    to_retry: ClassVar[bool] = False

    @property
    def ids(self) -> tuple[UUID, ...] | None:
        """The ids, if these are meant and no filter."""
        return self.wanted.ids

    def until(self, moment: datetime) -> Self:
        """The action without what dies from now on."""
        return replace(self, wanted=replace(self.wanted, died_before=moment))

    def find(self, connection: Connection, after: UUID | None) -> tuple[UUID, ...]:
        """The next dead letters, in order."""
        return dead_letters.find_ids(connection, self.wanted, after=after)

    def count(self, connection: Connection, most: int | None, give_up_at: float) -> tuple[KindCount, ...]:
        """The number of rows by queue and kind, as `count_matching` counts."""
        return dead_letters.count_matching(
            connection, self.wanted, to_retry=self.to_retry, most=most, give_up_at=give_up_at
        )

    def sample(self, connection: Connection, limit: int) -> Sequence[DeadJob]:
        """Some of them."""
        return dead_letters.sample(connection, self.wanted, limit)


@dataclass(frozen=True, slots=True)
class RetryDead(_OfDead):
    """Make dead letters ready jobs again, with other arguments if `args` gives some."""

    args: str | None = field(default=None, repr=False)

    name: ClassVar[Action] = "dead.retry"
    to_retry: ClassVar[bool] = True

    def run(self, connection: Connection, ids: Sequence[UUID]) -> Page:
        """Retry those of these that still match."""
        return dead_letters.retry_page(connection, replace(self.wanted, ids=tuple(ids)), limit=len(ids), args=self.args)

    @property
    def change(self) -> dict[str, object] | None:
        """The part of the change that the audit keeps."""
        return None if self.args is None else {"args": NOT_KEPT}


@dataclass(frozen=True, slots=True)
class DiscardDead(_OfDead):
    """Delete dead letters for good."""

    name: ClassVar[Action] = "dead.discard"
    args: ClassVar[None] = None
    change: ClassVar[None] = None

    def run(self, connection: Connection, ids: Sequence[UUID]) -> Page:
        """Discard those of these that still match."""
        return dead_letters.discard_page(connection, replace(self.wanted, ids=tuple(ids)), limit=len(ids))


@dataclass(frozen=True, slots=True)
class _OfJobs:
    """The part of actions on jobs that finds and shows them."""

    wanted: JobFilter

    leaves_marks: ClassVar[bool] = True

    @property
    def ids(self) -> tuple[UUID, ...] | None:
        """The ids, if these are meant and no filter."""
        return self.wanted.ids

    def until(self, moment: datetime) -> Self:
        """The action without what is added from now on."""
        return replace(self, wanted=replace(self.wanted, created_before=moment))

    def find(self, connection: Connection, after: UUID | None) -> tuple[UUID, ...]:
        """The next jobs, in order, without locking any."""
        return jobs.find_ids(connection, self.wanted, after=after)

    def count(self, connection: Connection, most: int | None, give_up_at: float) -> tuple[KindCount, ...]:
        """The number of rows by queue and kind, as `count_matching` counts."""
        return jobs.count_matching(connection, self.wanted, most=most, give_up_at=give_up_at)

    def sample(self, connection: Connection, limit: int) -> Sequence[WaitingJob]:
        """Some of them."""
        return jobs.sample(connection, self.wanted, limit)


@dataclass(frozen=True, slots=True)
class CancelJobs(_OfJobs):
    """Delete jobs that wait."""

    name: ClassVar[Action] = "job.cancel"
    args: ClassVar[None] = None
    change: ClassVar[None] = None

    def run(self, connection: Connection, ids: Sequence[UUID]) -> Page:
        """Cancel those of these that still match."""
        if self.wanted == JobFilter(ids=self.wanted.ids):
            done = jobs.cancel_jobs(connection, ids)
            return Page(changed=done.cancelled, held=done.running)
        return jobs.cancel_page(connection, replace(self.wanted, ids=tuple(ids)), limit=len(ids))


@dataclass(frozen=True, slots=True)
class CancelRunning(_OfJobs):
    """Delete jobs that wait, and have the relays of those that run end them.

    Of a filter also those that no longer match since they were found: they began to run, for example.
    """

    outcome: CancelOutcome = "discard"

    name: ClassVar[Action] = "job.cancel_running"
    args: ClassVar[None] = None

    def run(self, connection: Connection, ids: Sequence[UUID]) -> Page:
        """Cancel these, or request it from their relays."""
        done = cancellation.cancel_running(connection, ids, self.outcome)
        return Page(changed=(*done.cancelled, *done.requested), held=(), requested=done.requested)

    @property
    def change(self) -> dict[str, object]:
        """The part of the change that the audit keeps."""
        return {"outcome": self.outcome}


@dataclass(frozen=True, slots=True)
class ChangeJobs(_OfJobs):
    """Change jobs that wait."""

    to: JobChange

    name: ClassVar[Action] = "job.change"

    @property
    def args(self) -> str | None:
        """The arguments that they are given, if any."""
        return self.to.args

    def run(self, connection: Connection, ids: Sequence[UUID]) -> Page:
        """Change those of these that still match."""
        return jobs.change_page(connection, replace(self.wanted, ids=tuple(ids)), self.to, limit=len(ids))

    @property
    def change(self) -> dict[str, object]:
        """The part of the change that the audit keeps."""
        to = self.to
        found = {"priority": to.priority, "run_at": to.run_at, "run_now": to.run_now or None}
        return {**found, **({} if to.args is None else {"args": NOT_KEPT})}


BulkAction: TypeAlias = RetryDead | DiscardDead | CancelJobs | CancelRunning | ChangeJobs


def fields_of(wanted: DeadFilter | JobFilter) -> dict[str, object]:
    """A filter as it was given, by the names of its fields."""
    return {each.name: getattr(wanted, each.name) for each in fields(wanted)}


def read_action(name: str, wanted: str | None, change: str | None, args: str | None) -> BulkAction | None:
    """The action that the audit keeps by these texts; None if it is not one on many rows.

    Args:
        args: The arguments, which the audit does not keep.

    Raises:
        ArgumentError: the action gives arguments, and `args` does not, or the other way round.
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
