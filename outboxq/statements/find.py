"""Looking for one job, wherever it is."""

from typing import Any
from uuid import UUID

from sqlalchemy import Select, case, literal, or_, select, union_all
from sqlalchemy.sql.elements import ColumnElement

from outboxq.statements.jobs import listed, running_transactions, xmax
from outboxq.tables import dead_job


def find_job(job_id: UUID) -> Select[Any]:
    """The job as it waits, runs or is dead; one row at most, in one snapshot. Index: both primary keys; no locks."""
    runs: ColumnElement[bool] = or_(listed.c.state == "leased", xmax.in_(running_transactions()))
    waiting = select(
        listed.c.id,
        listed.c.kind,
        listed.c.queue,
        case((runs, "running"), else_="waiting").label("state"),
        listed.c.attempt,
    ).where(listed.c.id == job_id)
    dead = select(
        dead_job.c.id, dead_job.c.kind, dead_job.c.queue, literal("dead").label("state"), dead_job.c.attempt
    ).where(dead_job.c.id == job_id)
    found = union_all(waiting, dead).subquery("found")
    return select(found).limit(1)
