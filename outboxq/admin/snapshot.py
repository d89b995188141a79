"""A snapshot: the state of queues, kinds and relays at this moment, and recent causes of death, in one read.

It takes some milliseconds, however many jobs wait, locks no row, and gives up a part that takes longer than two
seconds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection

from outboxq.admin.history import HistoryRow, read_history
from outboxq.admin.relays import RelaySummary, list_relays
from outboxq.admin.sections import NotKnown as NotKnown
from outboxq.admin.sections import Sections
from outboxq.admin.stats import QueueStats, Stats, collect_stats
from outboxq.statements.dead_groups import group_newest
from outboxq.statements.paging import database_clock
from outboxq.statements.server import standby_delay_seconds
from outboxq.tables import mapped_schema

# Rates are those of the last five minutes that began, and of the one that goes on.
RATE_MINUTES = 5
# Dead letters are grouped among those of the newest jobs.
NEWEST_DEAD = 1_000
_MOST_GROUPS, _MOST_RELAYS = 100, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot(QueueStats):
    """One queue: its jobs by state, and their outcomes.

    Args:
        relays: How many relays that live serve it.
        done_per_minute: Jobs that were done, in the last five minutes.
        failed_per_minute: Attempts that failed, also the last ones of jobs that died, in the last five minutes.
    """

    relays: int = 0
    done_per_minute: float = 0.0
    failed_per_minute: float = 0.0


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Dead letters of the same cause.

    Args:
        error: The type of the last error, or the reason up to its first colon if there was none.
        line: The innermost line of the handler's own code, if it is known.
    """

    queue: str
    kind: str
    error: str
    line: str | None
    jobs: int
    first_died_at: datetime
    last_died_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The result of `take_snapshot`.

    Args:
        at: By the database's clock.
        kinds: The outcomes of the jobs of each kind in the last five minutes.
        dead_groups: Of the dead letters of the 1,000 newest jobs among them, the largest group first.
        not_known: Parts that the database refused or did not return in two seconds, and that therefore are empty.
        standby_delay_seconds: How old this is, if the server is a standby.
    """

    at: datetime
    queues: tuple[QueueSnapshot, ...]
    kinds: tuple[HistoryRow, ...]
    relays: tuple[RelaySummary, ...]
    dead_groups: tuple[DeadGroup, ...]
    unknown_effects: int
    not_known: tuple[NotKnown, ...] = ()
    standby_delay_seconds: float | None = None


def take_snapshot(connection: Connection, *, queue: str | None = None) -> Snapshot:
    """Read queues, kinds, relays and dead letters, in the caller's transaction, which it leaves as it was.

    Args:
        queue: Count the jobs of this queue alone, which costs less if there are many queues.
    """
    looks = Sections(connection)
    now = database_clock(connection)
    stats = looks.at("queues", lambda: collect_stats(connection, queue=queue)) or Stats((), (), 0)
    since = timedelta(minutes=RATE_MINUTES)
    kinds = looks.at("kinds", lambda: read_history(connection, by="kind", since=since)) or []
    relays = looks.at("relays", lambda: list_relays(connection, limit=_MOST_RELAYS)) or []
    groups = looks.at("dead letters", lambda: find_dead_groups(connection)) or []
    return Snapshot(
        at=now,
        queues=_queues(stats, kinds, relays, RATE_MINUTES + now.second / 60),
        kinds=tuple(kinds),
        relays=tuple(relays),
        dead_groups=tuple(groups),
        unknown_effects=stats.unknown_effects,
        not_known=tuple(looks.refused),
        standby_delay_seconds=standby_delay_seconds(connection),
    )


def find_dead_groups(connection: Connection, *, newest: int = NEWEST_DEAD) -> list[DeadGroup]:
    """The dead letters of the newest jobs grouped by their causes, the largest group first; 100 groups at most."""
    statement = group_newest(mapped_schema(connection), newest=newest, limit=_MOST_GROUPS)
    return [DeadGroup(*row) for row in connection.execute(statement)]


def _queues(
    stats: Stats, kinds: Sequence[HistoryRow], relays: Sequence[RelaySummary], minutes: float
) -> tuple[QueueSnapshot, ...]:
    """Each queue that has a job, a dead letter or a history, or that a relay serves, by name."""
    counted = {queue.queue: queue for queue in stats.queues}
    done: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for row in kinds:
        done[row.queue or ""] += row.done
        failed[row.queue or ""] += row.retried + row.died
    serving = Counter(name for relay in relays if relay.state != "dead" for name in relay.queues)
    return tuple(
        QueueSnapshot(
            **asdict(counted.get(name, QueueStats(queue=name))),
            relays=serving[name],
            done_per_minute=done[name] / minutes,
            failed_per_minute=failed[name] / minutes,
        )
        for name in sorted({*counted, *done, *serving})
    )
