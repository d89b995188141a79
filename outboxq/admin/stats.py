"""Stats: the number of jobs that wait, run and died, per queue, and of unknown effects.

By default at most 10,000 jobs of a queue are counted in each state; what is more is estimated, by the statistics of the
planner. So it takes some milliseconds, however many jobs wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from outboxq.database.settings import our_settings
from outboxq.statements import stats as statements
from outboxq.statements.server import standby_delay_seconds
from outboxq.tables import mapped_schema

COUNTED_MOST = 10_000
# A walk's jobs are usually in the state of its name, but for these.
_STATES_OF_WALKS = {"group_waiting": "scheduled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """One queue. Every job is counted once, but for `parked`, which is a part of `scheduled` and `due`.

    Args:
        ready: Wait for a relay.
        grouped: Wait for their turn in their group, or for a job that is put off.
        running: Held by a transaction that is open at this moment.
        scheduled: Wait for their time, a retry's included.
        due: Their time has come, and they wait for a relay.
        parked: Put off, because no relay that saw them knows their kind.
        leased: Held by a lease, of a relay that is alive.
        orphaned: Held by a lease of a relay that is not alive; another relay takes them back.
        suspect: Their claim, or their relay, died; they run alone or in company, under a lease.
        dead: Among the dead letters.
        oldest_waiting_seconds: How long the oldest that is ready or due has waited; None if none does.
        paused_at: Since when relays do not claim from it.
        exact: True if all jobs were counted. If not, `estimated` names the states whose number is an estimate.
    """

    queue: str
    ready: int = 0
    grouped: int = 0
    running: int = 0
    scheduled: int = 0
    due: int = 0
    parked: int = 0
    leased: int = 0
    orphaned: int = 0
    suspect: int = 0
    dead: int = 0
    oldest_waiting_seconds: float | None = None
    paused_at: datetime | None = None
    exact: bool = True
    estimated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParkedKind:
    """Jobs of a kind that no relay which saw them knows; relays claim them again from `next_look_at` on."""

    queue: str
    kind: str
    jobs: int
    next_look_at: datetime


@dataclass(frozen=True, slots=True)
class Stats:
    """The result of `collect_stats`: queues by name, and kinds that wait for a relay that knows them.

    `unknown_effects` wait for an operator, who resolves them. `standby_delay_seconds` says how old this is, if the
    server is a standby.
    """

    queues: tuple[QueueStats, ...]
    parked_kinds: tuple[ParkedKind, ...]
    unknown_effects: int
    standby_delay_seconds: float | None = None


def count_left(connection: Connection, served: Sequence[str]) -> dict[str, int]:
    """Count the jobs that are left when a relay of these queues has nothing to run in them, each once.

    Returns:
        Numbers above 0: `in_backoff` (the last attempt failed, and the next one has its time), `later`, `parked` (of
        kinds that no relay which saw them knows), `paused` (in queues of its own), `behind` (after another job of their
        group), `elsewhere` (held by other relays or transactions, or new), `not_served` (in queues that are not its
        own).
    """
    return {row.sort: row.jobs for row in connection.execute(statements.count_left(served))}


def collect_stats(connection: Connection, *, exact: bool = False, queue: str | None = None) -> Stats:
    """Count the jobs, in the caller's transaction.

    The oldest job, the parked ones and those that run are searched among the first 10,000 that relays would claim.

    Args:
        exact: Count every job. That reads the whole tables, so its cost grows with the backlog.
        queue: Count those of this queue alone, if they are not all counted.
    """
    with our_settings(connection):
        found = _count_all(connection) if exact else _count_first(connection, queue)
        return replace(found, standby_delay_seconds=standby_delay_seconds(connection))


def _count_first(connection: Connection, only: str | None) -> Stats:
    jobs = connection.execute(statements.count_first_jobs(COUNTED_MOST, only))
    found = {row.queue: row._asdict() for row in jobs}
    dead = {row.queue: row.dead for row in connection.execute(statements.count_first_dead(COUNTED_MOST, only))}
    paused = {row.name: row.paused_at for row in connection.execute(statements.paused_queues())}
    if only is not None:
        paused = {name: at for name, at in paused.items() if name == only}
    walked = {name: {walk: row.pop(f"walked_{walk}") for walk in statements.WALKS} for name, row in found.items()}
    estimates = {walk: _estimate(connection, walk, walked, only) for walk in statements.WALKS}
    queues: list[QueueStats] = []
    for name in sorted({*found, *dead, *paused}):
        counts = QueueStats(
            **{"queue": name, **found.get(name, {})}, dead=dead.get(name, 0), paused_at=paused.get(name)
        )
        more = {walk: numbers[name] for walk, numbers in estimates.items() if name in numbers}
        if counts.dead > COUNTED_MOST:
            more["dead"] = _plan_rows(connection, statements.estimate_dead(mapped_schema(connection), name))
        queues.append(_with_estimates(counts, more))
    parked = tuple(ParkedKind(*row) for row in connection.execute(statements.first_parked_kinds(COUNTED_MOST, only)))
    unknown: int = connection.execute(statements.count_first_unknown_effects(COUNTED_MOST)).scalar_one()
    return Stats(tuple(queues), parked, unknown)


def _estimate(
    connection: Connection, walk: str, walked: Mapping[str, Mapping[str, int]], only: str | None
) -> dict[str, int]:
    """Estimate the number of jobs of a walk in those queues of which it has not counted all.

    The planner knows how many jobs of all queues have a state, and how the queues share the table. The counted jobs of
    the other queues are taken off first.
    """
    full = [name for name, counts in walked.items() if counts[walk] > COUNTED_MOST]
    if not full:
        return {}
    schema = mapped_schema(connection)
    if only is not None:
        # The others were not counted, so that nothing can be taken off.
        return {only: _plan_rows(connection, statements.estimate_jobs(schema, only, walk))}
    counted = sum(counts[walk] for name, counts in walked.items() if name not in full)
    left = _plan_rows(connection, statements.estimate_jobs(schema, None, walk)) - counted
    shares = {name: _plan_rows(connection, statements.estimate_jobs(schema, name, walk)) for name in full}
    return {name: left * share // max(1, sum(shares.values())) for name, share in shares.items()}


def _with_estimates(counts: QueueStats, more: Mapping[str, int]) -> QueueStats:
    """The numbers of a queue with the estimates of walks; the state that most jobs of a walk are in takes the rest."""
    found: dict[str, Any] = {}
    for walk, estimate in more.items():
        state = _STATES_OF_WALKS.get(walk, walk)
        if walk == "scheduled" and not counts.scheduled:
            # Walked in the order of their times: all that were counted are due.
            state = "due"
        others = COUNTED_MOST + 1 - getattr(counts, state) if walk != "dead" else 0
        found[state] = max(getattr(counts, state), estimate - max(0, others))
    return replace(counts, **found, exact=not found, estimated=tuple(found))


def _plan_rows(connection: Connection, statement: str) -> int:
    (plan,) = connection.exec_driver_sql(statement).scalar_one()
    return int(plan["Plan"]["Plan Rows"])


def _count_all(connection: Connection) -> Stats:
    jobs = {row.queue: row._asdict() for row in connection.execute(statements.count_jobs())}
    dead = {row.queue: row.dead for row in connection.execute(statements.count_dead())}
    paused = {row.name: row.paused_at for row in connection.execute(statements.paused_queues())}
    queues = tuple(
        QueueStats(**{"queue": name, **jobs.get(name, {})}, dead=dead.get(name, 0), paused_at=paused.get(name))
        for name in sorted({*jobs, *dead, *paused})
    )
    parked = tuple(ParkedKind(*row) for row in connection.execute(statements.parked_kinds()))
    unknown: int = connection.execute(statements.count_unknown_effects()).scalar_one()
    return Stats(queues, parked, unknown)
