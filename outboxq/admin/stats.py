"""Stats: how many jobs wait, run and died, per queue, and how many effects are unknown.

Counting reads the whole table of jobs, so its cost grows with the backlog: call it every few seconds, as for a
dashboard, and not for every request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from outboxq.statements import stats as statements


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """One queue. Every job is counted once, but for `parked`, which is a part of `scheduled` and `due`.

    Args:
        ready: Wait for a relay.
        grouped: Wait for their turn in their group, or behind a job that is put off.
        running: Held by a transaction that is open at this moment.
        scheduled: Wait for their time, a retry's included.
        due: Their time has come, and they wait for a relay.
        parked: Put off, because no relay that saw them knows their kind.
        leased: Held by a lease, of a relay that is alive.
        orphaned: Held by a lease of a relay that is not alive; another relay takes them back.
        suspect: Their claim died; they run alone, under a lease.
        dead: Among the dead letters.
        oldest_waiting_seconds: How long the oldest that is ready or due has waited; None if none does.
        paused_at: Since when relays do not claim from it.
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


@dataclass(frozen=True, slots=True)
class ParkedKind:
    """Jobs of a kind that no relay which saw them knows; relays look at them again from `next_look_at` on."""

    queue: str
    kind: str
    jobs: int
    next_look_at: datetime


@dataclass(frozen=True, slots=True)
class Stats:
    """What `collect_stats` found: queues by name, and kinds that wait for a relay that knows them.

    `unknown_effects` wait for an operator, who resolves them.
    """

    queues: tuple[QueueStats, ...]
    parked_kinds: tuple[ParkedKind, ...]
    unknown_effects: int


def count_left(connection: Connection, served: Sequence[str]) -> dict[str, int]:
    """How many jobs are left when a relay of these queues has nothing to run in them; each is counted once.

    Returns:
        Numbers above 0: `in_backoff` (the last attempt failed, and the next one has its time), `later`, `parked` (of
        kinds that no relay which saw them knows), `paused` (in queues of its own), `behind` (behind another job of
        their group), `elsewhere` (held by other relays or transactions, or new), `not_served` (in queues that are not
        its own).
    """
    return {row.sort: row.jobs for row in connection.execute(statements.count_left(served))}


def collect_stats(connection: Connection) -> Stats:
    """Count everything, in the caller's transaction."""
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
