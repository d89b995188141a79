"""A snapshot: the state of queues, kinds and relays at this moment, and recent causes of dead letters, in one read.

Taking one needs some milliseconds, however many jobs wait, and locks no row. A part that takes longer than two seconds
is left out.
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

# Rates cover the last five full minutes, and the minute that goes on.
RATE_MINUTES = 5
# Dead letters are grouped among those of this many newest jobs.
NEWEST_DEAD = 1_000
_MOST_GROUPS, _MOST_RELAYS = 100, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot(QueueStats):
    """One queue: the number of its jobs in each state, its relays, and its rates over the last five minutes.

    Args:
        relays: The number of living relays that serve the queue.
        done_per_minute: Jobs done per minute.
        failed_per_minute: Attempts that failed per minute, including the last attempts of jobs that became dead
            letters.
    """

    relays: int = 0
    done_per_minute: float = 0.0
    failed_per_minute: float = 0.0


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Dead letters with the same cause: queue, kind, error and line.

    Args:
        error: The type of the last error; if there was none, the dead letter's reason up to its first colon.
        line: The innermost line of the handler's own code in the error's traceback; None if not known.
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
    """The state of queues, kinds and relays at a moment: the result of `take_snapshot`.

    Args:
        at: The time of the snapshot, by the database's clock.
        kinds: The outcomes of the jobs of each kind in the last five minutes.
        dead_groups: Dead letters, the 1,000 whose jobs were added last, grouped by cause, the largest group first.
        not_known: Parts that are empty because the database refused them or took longer than two seconds.
        standby_delay_seconds: The age of the data, if the server is a standby; None for a primary.
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
    """Read the state of queues, kinds, relays and dead letters, in the caller's transaction, which stays as it was.

    Args:
        queue: If given, only the jobs of this queue are counted, which costs less if there are many queues.
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
    """Group the dead letters of the `newest` jobs that were added last by cause; return up to 100 groups.

    The largest group comes first.
    """
    statement = group_newest(mapped_schema(connection), newest=newest, limit=_MOST_GROUPS)
    return [DeadGroup(*row) for row in connection.execute(statement)]


def _queues(
    stats: Stats, kinds: Sequence[HistoryRow], relays: Sequence[RelaySummary], minutes: float
) -> tuple[QueueSnapshot, ...]:
    """Return the queues, ordered by name: all that have a job, a dead letter, a recent outcome or a living relay.

    `minutes`: the length of the time that the outcomes in `kinds` are from.
    """
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
