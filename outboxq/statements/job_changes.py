"""Changes of waiting jobs: their priority, their time, their arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Executable, and_, case, func, literal, not_, select, update

from outboxq.statements.builtin import pg
from outboxq.statements.jobs import JobFilter
from outboxq.statements.paging import page_outcome, pick_page
from outboxq.tables import job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """A change of waiting jobs that an operator requests, for `change_page`; fields that are None stay unchanged.

    Args:
        priority: The new priority, from -32,767 to 32,767.
        run_at: The new time when the jobs are to run, with a time zone.
        run_now: True to run the jobs as soon as a relay is free.
        args: The new arguments of the jobs, as the text of a JSON object.
    """

    priority: int | None = None
    run_at: datetime | None = None
    run_now: bool = False
    args: str | None = None

    def values(self) -> dict[str, Any]:
        """Return the new values of a changed job's columns, or SQL expressions for them, by the columns' names."""
        found: dict[str, Any] = {}
        if self.priority is not None:
            found["priority"] = self.priority
        if self.args is not None:
            found["args"] = self.args
        if self.run_now:
            now_state = case((job.c.state == "scheduled", "ready"), (job.c.state == "group_waiting", "grouped"))
            found |= {"run_at": pg.clock_timestamp(), "parked": 0, "state": func.coalesce(now_state, job.c.state)}
        elif self.run_at is not None:
            is_later = literal(self.run_at) > pg.clock_timestamp()
            # The claim of suspects ignores the time. A postponed suspect keeps its crashes, as after a retry.
            put_off = and_(job.c.state.in_(("ready", "suspect")), is_later)
            due = and_(job.c.state == "scheduled", not_(is_later))
            timed = case((put_off, "scheduled"), (due, "ready"), else_=job.c.state)
            found |= {"run_at": self.run_at, "parked": 0, "state": timed}
        return found

    @property
    def fits_groups(self) -> bool:
        """Return True if the change may be made to grouped jobs: it has no new priority and no `run_at`.

        Grouped jobs run in a fixed order.
        """
        return self.priority is None and self.run_at is None


# The states of waiting jobs; a job that runs in a transaction still has such a state for others, and is locked.
CHANGEABLE = ("ready", "scheduled", "suspect", "grouped", "group_waiting", "group_suspect")


def change_page(wanted: JobFilter, change: JobChange, *, after: UUID | None, limit: int) -> Executable:
    """Return SQL that changes the next page of waiting jobs that match and are not locked: the rows of `page_outcome`.

    A job keeps its `seq`, so older jobs of the same priority stay first. Relays claim from the last claimed job on; at
    intervals they claim from the start, and then find a changed job before that place. Index, locks and bound are those
    of `pick_page`.
    """
    page, picked = pick_page(job, wanted.conditions(), after, limit)
    fits = [job.c.id == picked.c.id, job.c.state.in_(CHANGEABLE)]
    if not change.fits_groups:
        fits.append(job.c.group_key.is_(None))
    changed = update(job).where(*fits).values(**change.values()).returning(job.c.id).cte("changed")
    return page_outcome(page, picked, changed)


def select_leased(ids: Sequence[UUID]) -> Executable:
    """Select the ids of those of these jobs that are leased. Index: the primary key; no locks."""
    return select(job.c.id).where(job.c.id.in_(ids), job.c.state.in_(("leased", "group_leased")))


def select_queues(ids: Sequence[UUID]) -> Executable:
    """Select the different queues of these jobs, whose relays are then woken. Index: the primary key; no locks."""
    return select(job.c.queue).where(job.c.id.in_(ids)).distinct()
