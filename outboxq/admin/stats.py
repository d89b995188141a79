"""Stats: for each queue the number of jobs in each state and of dead letters; and the number of unknown effects.

By default at most 10,000 jobs of a queue are counted in each state; a higher number is an estimate from PostgreSQL's
statistics of the table. So this takes some milliseconds, however many jobs wait.
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
# A walk's jobs are in the state of its name, except for these walks.
_STATES_OF_WALKS = {"group_waiting": "scheduled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """The number of a queue's jobs in each state, and of its dead letters.

    Every job is counted once, except that `parked` jobs are also in `scheduled` or `due`.

    Args:
        ready: Jobs that wait for a relay.
        grouped: Jobs that wait for another job of their group to end.
        running: Jobs that are run by a transaction that is open at this moment.
        scheduled: Jobs that wait for their time, such as that of a retry.
        due: Scheduled jobs whose time has come, and that wait for a relay.
        parked: Jobs that were put off, because no relay that claimed them knows their kind.
        leased: Jobs that a living relay runs in lease mode.
        orphaned: Jobs in lease mode whose relay is not alive any more; another relay puts them back into the queue.
        suspect: Jobs that a relay had when it or its transaction died; they run alone or with few others the next time,
            to find out which of them caused that.
        dead: Dead letters.
        oldest_waiting_seconds: The time that the oldest ready or due job has waited; None if there is none.
        paused_at: The time since which relays do not claim from the queue; None if it is not paused.
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
    """A kind whose jobs relays have put off until later, because no relay that claimed them has a handler for it.

    `next_look_at`: the time at which relays claim the first of these jobs again.
    """

    queue: str
    kind: str
    jobs: int
    next_look_at: datetime


@dataclass(frozen=True, slots=True)
class Stats:
    """The result of `collect_stats`.

    `queues`: the numbers of each queue, by name. `parked_kinds`: kinds that wait for a relay with a handler for them.
    `unknown_effects`: the number of calls with an unknown outcome, which an operator has to resolve.
    `standby_delay_seconds`: the age of the data, if the server is a standby.
    """

    queues: tuple[QueueStats, ...]
    parked_kinds: tuple[ParkedKind, ...]
    unknown_effects: int
    standby_delay_seconds: float | None = None


def count_left(connection: Connection, served: Sequence[str]) -> dict[str, int]:
    """Count the jobs that are left, by reason, after a relay of the queues `served` has run all that it could.

    Each job is counted once.

    Returns:
        The number of jobs for each reason that occurs: `in_backoff` (the last attempt failed, and the time of the next
        one has not come), `later` (the time of the first attempt has not come), `parked` (put off, because no relay
        that claimed them knows their kind), `paused` (in a served queue that is paused), `behind` (they wait for
        another job of their group), `elsewhere` (run by other relays or locked by transactions, or added since),
        `not_served` (in other queues).
    """
    return {row.sort: row.jobs for row in connection.execute(statements.count_left(served))}


def collect_stats(connection: Connection, *, exact: bool = False, queue: str | None = None) -> Stats:
    """Count the jobs of each queue by state, in the caller's transaction.

    Unless `exact`, oldest, parked and running jobs are searched among the first 10,000 jobs of a queue, in the orders
    in which relays claim them.

    Args:
        exact: True to count every job, which reads the whole tables.
        queue: Count only the jobs of this queue; ignored if `exact`.
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
    """Estimate how many jobs one index walk would count without its limit, for each queue where it reached the limit.

    A walk reads up to `COUNTED_MOST` jobs of each queue, in one of the orders in which relays claim them. PostgreSQL's
    planner estimates the walk's jobs in all queues. The jobs that were counted in other queues are subtracted; the rest
    is divided in proportion to the planner's estimates for single queues.

    Args:
        walked: By queue and walk, the number of counted jobs.
        only: The one queue that was counted; None for all.
    """
    full = [name for name, counts in walked.items() if counts[walk] > COUNTED_MOST]
    if not full:
        return {}
    schema = mapped_schema(connection)
    if only is not None:
        # The other queues were not counted, so that nothing can be subtracted.
        return {only: _plan_rows(connection, statements.estimate_jobs(schema, only, walk))}
    counted = sum(counts[walk] for name, counts in walked.items() if name not in full)
    left = _plan_rows(connection, statements.estimate_jobs(schema, None, walk)) - counted
    shares = {name: _plan_rows(connection, statements.estimate_jobs(schema, name, walk)) for name in full}
    return {name: left * share // max(1, sum(shares.values())) for name, share in shares.items()}


def _with_estimates(counts: QueueStats, more: Mapping[str, int]) -> QueueStats:
    """Return a queue's numbers with estimates in place of counts that reached their limit.

    Jobs are counted by walks over indexes, each up to a limit.

    Args:
        more: By the name of each walk that reached its limit, the estimated number of all its jobs. If these can be in
            several states, the estimate replaces the count of the state that most of them are in.
    """
    found: dict[str, Any] = {}
    for walk, estimate in more.items():
        state = _STATES_OF_WALKS.get(walk, walk)
        if walk == "scheduled" and not counts.scheduled:
            # This walk goes in the order of the jobs' times: all counted jobs are due.
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
