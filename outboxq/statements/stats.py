"""Counting the jobs that wait, run and died, and the effects and kinds that are unknown."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Executable, and_, case, exists, not_, select

from outboxq.statements.builtin import count, pg, seconds
from outboxq.statements.jobs import STATES, listed, running_transactions, state, xmax
from outboxq.tables import dead_job, effect, paused_kind, queue


def count_jobs() -> Executable:
    """One row per queue with jobs. Reads the table once, whatever its size; no locks."""
    jobs = select(listed.c.queue, listed.c.run_at, listed.c.parked, state).subquery("jobs")
    is_parked = and_(jobs.c.state.in_(("scheduled", "due")), jobs.c.parked > 0)
    waited_since = pg.min(jobs.c.run_at).filter(jobs.c.state.in_(("ready", "due", "grouped")))
    return select(
        jobs.c.queue,
        *(_count(name, jobs.c.state == name) for name in STATES),
        _count("parked", is_parked),
        seconds(pg.statement_timestamp() - waited_since).label("oldest_waiting_seconds"),
    ).group_by(jobs.c.queue)


def count_left(served: Sequence[str]) -> Executable:
    """How many jobs are left when a relay of these queues has nothing to run: (sort, jobs), the sorts of `admin.stats`.

    Reads the table once, whatever its size; no locks.
    """
    jobs = select(listed.c.queue, listed.c.parked, listed.c.attempt, state).subquery("jobs")
    paused = jobs.c.queue.in_(select(queue.c.name).where(queue.c.paused_at.is_not(None)))
    sort = case(
        (jobs.c.queue.not_in(served), "not_served"),
        (and_(jobs.c.state.in_(("scheduled", "due")), jobs.c.parked > 0), "parked"),
        (and_(jobs.c.state == "scheduled", jobs.c.attempt > 0), "in_backoff"),
        (jobs.c.state == "scheduled", "later"),
        (and_(jobs.c.state.in_(("ready", "due", "grouped")), paused), "paused"),
        (jobs.c.state == "grouped", "behind"),
        else_="elsewhere",
    ).label("sort")
    return select(sort, count().label("jobs")).group_by(sort)


def count_dead() -> Executable:
    """One row per queue with dead letters. Reads the index dead_job_queue once; no locks."""
    return select(dead_job.c.queue, count().label("dead")).group_by(dead_job.c.queue)


def parked_kinds() -> Executable:
    """The kinds that no relay knew, and that are not paused, per queue. Index: job_scheduled, read once; no locks."""
    is_paused = exists().where(paused_kind.c.queue == listed.c.queue, paused_kind.c.kind == listed.c.kind)
    return (
        select(
            listed.c.queue,
            listed.c.kind,
            count().label("jobs"),
            pg.min(listed.c.run_at).label("next_look_at"),
        )
        .where(listed.c.state == "scheduled", listed.c.parked > 0, not_(xmax.in_(running_transactions())), ~is_paused)
        .group_by(listed.c.queue, listed.c.kind)
        .order_by(listed.c.queue, listed.c.kind)
    )


def paused_queues() -> Executable:
    """The queues that are paused. Reads the small table `queue`; no locks."""
    return select(queue.c.name, queue.c.paused_at).where(queue.c.paused_at.is_not(None))


def count_unknown_effects() -> Executable:
    """How many effects wait for an operator. Index: effect_unknown, which holds no others; no locks."""
    return select(count()).select_from(effect).where(effect.c.status == "unknown")


def _count(name: str, *conditions: ColumnElement[bool]) -> ColumnElement[int]:
    return count().filter(*conditions).label(name)
