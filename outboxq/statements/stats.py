"""Counts of the jobs that wait, run and died, and of unknown effects and kinds."""

from collections.abc import Sequence
from typing import Any, LiteralString
from uuid import UUID

from sqlalchemy import (
    CTE,
    Boolean,
    ColumnElement,
    Executable,
    FromClause,
    Select,
    Subquery,
    and_,
    case,
    exists,
    literal,
    literal_column,
    not_,
    select,
    text,
    true,
    union_all,
)

from outboxq.statements.builtin import count, pg, seconds
from outboxq.statements.jobs import STATES, listed, running_transactions, state, xmax
from outboxq.statements.render import render
from outboxq.tables import Instant, StoredText, dead_job, effect, paused_kind, queue


def count_jobs() -> Executable:
    """Count the jobs of each queue by state: one row per queue that has any. Reads the whole table once; no locks."""
    jobs = select(listed.c.queue, listed.c.run_at, listed.c.parked, state).subquery("jobs")
    is_parked = and_(jobs.c.state.in_(("scheduled", "due")), jobs.c.parked > 0)
    waited_since = pg.min(jobs.c.run_at).filter(jobs.c.state.in_(("ready", "due", "grouped")))
    return select(
        jobs.c.queue,
        *(_count(name, jobs.c.state == name) for name in STATES),
        _count("parked", is_parked),
        seconds(pg.statement_timestamp() - waited_since).label("oldest_waiting_seconds"),
    ).group_by(jobs.c.queue)


# The walks over the jobs of a queue: the stored states that each finds, and the order of its index.
_WALKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ready", "listed.state = 'ready'", ("queue", "(-priority)", "seq")),
    ("scheduled", "listed.state = 'scheduled'", ("queue", "run_at")),
    ("suspect", "listed.state = 'suspect'", ("queue", "seq")),
    ("grouped", "listed.group_key IS NOT NULL AND listed.state <> 'group_waiting'", ("queue",)),
    ("group_waiting", "listed.state = 'group_waiting'", ("queue", "run_at")),
)
WALKS = (*(name for name, _, _ in _WALKS), "leased")


def count_first_jobs(most: int, only: str | None = None) -> Executable:
    """Count the jobs of each queue by state, like `count_jobs`, but read only the first `most` entries of each index.

    With `only`, only this queue is counted. There are six walks, each through one index, from a queue's first job to
    the last one that it counts; the leased jobs of all queues are one walk. `walked_...`: the number of jobs that each
    walk found, up to `most` + 1. Indexes: job_ready, job_scheduled, job_suspect, job_group, job_group_state,
    job_leased. No locks.
    """
    jobs = _walked(most, only)
    is_parked = and_(jobs.c.state.in_(("scheduled", "due")), jobs.c.parked > 0)
    waited_since = pg.min(jobs.c.run_at).filter(jobs.c.state.in_(("ready", "due", "grouped")))
    return select(
        jobs.c.queue,
        *(_count(name, jobs.c.state == name) for name in STATES),
        _count("parked", is_parked),
        seconds(pg.statement_timestamp() - waited_since).label("oldest_waiting_seconds"),
        *(_count(f"walked_{name}", jobs.c.walk == name) for name in WALKS),
    ).group_by(jobs.c.queue)


def first_ids(states: Sequence[str], most: int, only: str | None = None) -> Select[tuple[UUID]]:
    """Select the ids of jobs in these states (of `STATES`), among those that `count_first_jobs` reads.

    It finds running jobs too, because relays claim the first jobs of the same indexes. Bound: `most` + 1 jobs for each
    queue and each of five indexes, and as many leased ones. No locks.
    """
    jobs = _walked(most, only)
    return select(jobs.c.id).where(jobs.c.state.in_(states)).distinct()


def _walked(most: int, only: str | None) -> Subquery:
    walks = [_walk(*walk, most, only) for walk in _WALKS]
    leased = (
        select(*_walked_columns("leased"))
        .where(_condition("listed.state = 'leased'"), *([] if only is None else [listed.c.queue == only]))
        .limit(most + 1)
        .subquery("first_leased")
    )
    return union_all(*walks, select(leased)).subquery("jobs")


def _walked_columns(walk: str) -> list[ColumnElement[Any]]:
    name = literal(walk, StoredText()).label("walk")
    return [name, listed.c.id, listed.c.queue, listed.c.run_at, listed.c.parked, state]


def _walk(name: str, condition: str, order: tuple[str, ...], most: int, only: str | None) -> Select[Any]:
    """Return a query of the first `most` + 1 jobs of each queue, or of the queue `only`, in the order of one index."""
    queues = _queues(name, listed, _condition(condition), only)
    first = (
        select(*_walked_columns(name))
        .where(listed.c.queue == queues.c.queue, _condition(condition))
        .order_by(*(text(f"listed.{column}" if column.isidentifier() else "(-listed.priority)") for column in order))
        .limit(most + 1)
        .lateral(f"first_{name}")
    )
    return select(first).select_from(queues.join(first, true()))


def _condition(predicate: str) -> ColumnElement[bool]:
    """Return the condition of a partial index, exactly as in the index's definition, so that the planner uses it."""
    return literal_column(predicate, Boolean())


def _queues(name: str, rows: FromClause, condition: ColumnElement[bool], only: str | None = None) -> CTE:
    """Return a CTE of the distinct queues in an index whose first column is the queue; only the queue `only` if given.

    Each queue is found by a probe of the index after the previous one.
    """
    if only is not None:
        return select(literal(only, StoredText()).label("queue")).cte(f"queues_{name}")
    column = rows.c.queue
    probe = select(column).where(condition).order_by(column).limit(1)
    found = select(probe.scalar_subquery().label("queue")).cte(f"queues_{name}", recursive=True)
    following = probe.where(column > found.c.queue).correlate(found).scalar_subquery()
    return found.union_all(select(following).where(found.c.queue.is_not(None)))


def count_first_dead(most: int, only: str | None = None) -> Executable:
    """Count the dead letters of each queue, or of the queue `only`, up to `most` + 1: one row per queue with any.

    Index: dead_job_queue; no locks.
    """
    queues = _queues("dead", dead_job, true(), only)
    first = select(dead_job.c.died_at).where(dead_job.c.queue == queues.c.queue).limit(most + 1).lateral("first")
    return (
        select(queues.c.queue, count().label("dead")).select_from(queues.join(first, true())).group_by(queues.c.queue)
    )


_ESTIMATE: LiteralString = "EXPLAIN (FORMAT JSON) SELECT FROM {job} AS job WHERE state = {state}"
_OF_QUEUE: LiteralString = " AND queue = {name}"
_ESTIMATE_DEAD: LiteralString = "EXPLAIN (FORMAT JSON) SELECT FROM {dead} AS job WHERE queue = {name}"


def estimate_jobs(schema: str, name: str | None, state: str) -> str:
    """Return an EXPLAIN whose plan, as JSON, estimates how many jobs, of one queue or of all, are in a stored state.

    Reads only the statistics.
    """
    return render(schema, _ESTIMATE if name is None else _ESTIMATE + _OF_QUEUE, name=name, state=state)


def estimate_dead(schema: str, name: str) -> str:
    """Return an EXPLAIN whose plan, as JSON, estimates how many dead letters a queue has.

    Reads only the statistics.
    """
    return render(schema, _ESTIMATE_DEAD, name=name)


def first_parked_kinds(most: int, only: str | None = None) -> Executable:
    """Count the jobs that were postponed because no relay knew their kind, like `parked_kinds`, but read only a part.

    Only the first `most` scheduled jobs of each queue, or of the queue `only`, are read. Index: job_scheduled; no
    locks.
    """
    queues = _queues("parked", listed, _condition("listed.state = 'scheduled'"), only)
    first = (
        select(listed.c.queue, listed.c.kind, listed.c.run_at, listed.c.parked, xmax.label("held_by"))
        .where(listed.c.queue == queues.c.queue, _condition("listed.state = 'scheduled'"))
        .order_by(listed.c.run_at)
        .limit(most)
        .lateral("first")
    )
    # After the walk, because few jobs are put off, and only these are probed.
    is_paused = exists().where(paused_kind.c.queue == first.c.queue, paused_kind.c.kind == first.c.kind)
    return (
        select(
            first.c.queue,
            first.c.kind,
            count().label("jobs"),
            pg.min(first.c.run_at, type_=Instant()).label("next_look_at"),
        )
        .select_from(queues.join(first, true()))
        .where(first.c.parked > 0, not_(first.c.held_by.in_(running_transactions())), ~is_paused)
        .group_by(first.c.queue, first.c.kind)
        .order_by(first.c.queue, first.c.kind)
    )


def count_left(served: Sequence[str]) -> Executable:
    """Count the jobs left when a relay of these queues finds nothing to run, by the reason why it does not run them.

    A row each: `sort`, which is one of those of `admin.stats`, and `jobs`. Reads the whole table once; no locks.
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
    """Count the dead letters: one row per queue with any. Reads the index dead_job_queue once; no locks."""
    return select(dead_job.c.queue, count().label("dead")).group_by(dead_job.c.queue)


def parked_kinds() -> Executable:
    """Count the jobs that were postponed because no relay knew their kind, by queue and kind; without paused kinds.

    `next_look_at`: the time when the first of them is due. Index: job_scheduled, read once; no locks.
    """
    is_paused = exists().where(paused_kind.c.queue == listed.c.queue, paused_kind.c.kind == listed.c.kind)
    return (
        select(
            listed.c.queue,
            listed.c.kind,
            count().label("jobs"),
            pg.min(listed.c.run_at, type_=Instant()).label("next_look_at"),
        )
        .where(listed.c.state == "scheduled", listed.c.parked > 0, not_(xmax.in_(running_transactions())), ~is_paused)
        .group_by(listed.c.queue, listed.c.kind)
        .order_by(listed.c.queue, listed.c.kind)
    )


def paused_queues() -> Executable:
    """Select the paused queues. Reads the small table `queue`; no locks."""
    return select(queue.c.name, queue.c.paused_at).where(queue.c.paused_at.is_not(None))


def count_unknown_effects() -> Executable:
    """Count the effects of unknown outcome, which wait for an operator.

    Index: effect_unknown, which holds no others; no locks.
    """
    return select(count()).select_from(effect).where(effect.c.status == "unknown")


def count_first_unknown_effects(most: int) -> Executable:
    """Count the effects of unknown outcome, as `count_unknown_effects` does, but stop at `most` + 1."""
    first = select(effect.c.changed_at).where(_condition("effect.status = 'unknown'")).limit(most + 1).subquery("first")
    return select(count()).select_from(first)


def _count(name: str, *conditions: ColumnElement[bool]) -> ColumnElement[int]:
    return count().filter(*conditions).label(name)
