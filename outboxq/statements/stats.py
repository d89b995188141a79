"""Counting what waits, runs and died, and what nobody knows."""

from sqlalchemy import ColumnElement, Executable, Float, and_, cast, extract, func, not_, or_, select

from outboxq.statements.backlog import listed, running_transactions, xmax
from outboxq.tables import dead_job, effect, queue


def count_jobs() -> Executable:
    """One row per queue with jobs. Reads the table once, whatever its size; no locks."""
    running = xmax.in_(running_transactions())
    waiting = not_(running)
    scheduled = listed.c.state == "scheduled"
    due = listed.c.run_at <= func.statement_timestamp()
    runnable = and_(waiting, or_(listed.c.state == "ready", and_(scheduled, due)))
    return select(
        listed.c.queue,
        _count("ready", waiting, listed.c.state == "ready"),
        _count("running", running),
        _count("scheduled", waiting, scheduled, not_(due)),
        _count("due", waiting, scheduled, due),
        _count("parked", waiting, scheduled, listed.c.parked > 0),
        _count("leased", waiting, listed.c.state == "leased"),
        _count("suspect", waiting, listed.c.state == "suspect"),
        cast(
            extract("epoch", func.statement_timestamp() - func.min(listed.c.run_at).filter(runnable)), Float(53)
        ).label("oldest_waiting_seconds"),
    ).group_by(listed.c.queue)


def count_dead() -> Executable:
    """One row per queue with dead letters. Reads the index dead_job_queue once; no locks."""
    return select(dead_job.c.queue, func.count().label("dead")).group_by(dead_job.c.queue)


def parked_kinds() -> Executable:
    """The kinds that no relay knew, per queue. Index: job_scheduled, read once; no locks."""
    return (
        select(
            listed.c.queue,
            listed.c.kind,
            func.count().label("jobs"),
            func.min(listed.c.run_at).label("next_look_at"),
        )
        .where(listed.c.state == "scheduled", listed.c.parked > 0, not_(xmax.in_(running_transactions())))
        .group_by(listed.c.queue, listed.c.kind)
        .order_by(listed.c.queue, listed.c.kind)
    )


def paused_queues() -> Executable:
    """The queues that are paused. Reads the small table `queue`; no locks."""
    return select(queue.c.name, queue.c.paused_at).where(queue.c.paused_at.is_not(None))


def count_unknown_effects() -> Executable:
    """How many effects wait for an operator. Index: effect_unknown, which holds no others; no locks."""
    return select(func.count()).select_from(effect).where(effect.c.status == "unknown")


def _count(name: str, *conditions: ColumnElement[bool]) -> ColumnElement[int]:
    return func.count().filter(*conditions).label(name)
