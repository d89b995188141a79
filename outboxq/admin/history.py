"""The history: outcomes of jobs by minutes, by hours or by kinds, with how long they waited and ran."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

from sqlalchemy import Connection

from outboxq.database.errors import missing_tables_explained
from outboxq.statements import read_history as statements
from outboxq.statements.history import BOUNDS, BUCKETS

By: TypeAlias = Literal["minute", "hour", "kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """The outcomes of the jobs of a minute or an hour, or of a kind.

    Args:
        at: When the minute or the hour began; None by kinds.
        kind: None by minutes and hours, `queue` too.
        retried: Attempts that failed, or whose handler requested another one.
        discarded: Also those that were cancelled, or had expired.
        crashed: Times that a relay died or stalled while it ran the job.
        lost: Runs that did not count, because the lease was lost.
        wait_p50_seconds: Half of the jobs had waited up to so long when they were claimed; None without any.
        run_p50_seconds: Half of the attempts ran for up to so long.
    """

    at: datetime | None = None
    queue: str | None = None
    kind: str | None = None
    done: int = 0
    retried: int = 0
    died: int = 0
    snoozed: int = 0
    discarded: int = 0
    crashed: int = 0
    lost: int = 0
    wait_p50_seconds: float | None = None
    wait_p95_seconds: float | None = None
    wait_p99_seconds: float | None = None
    run_p50_seconds: float | None = None
    run_p95_seconds: float | None = None
    run_p99_seconds: float | None = None


def read_history(
    connection: Connection,
    *,
    queue: str | None = None,
    kind: str | None = None,
    since: timedelta = timedelta(hours=1),
    by: By = "minute",
) -> list[HistoryRow]:
    """The outcomes of jobs since `since`, the oldest first, or by queue and kind.

    Minutes are kept for two days, then hours for 35 days: by minutes, an older hour is counted in its first minute.

    Raises:
        SchemaError: the tables of the history are missing.
    """
    with missing_tables_explained():
        rows = connection.execute(statements.select_history(queue=queue, kind=kind, since=since, by=by)).all()
    return [_row(row._asdict()) for row in rows]


def _row(found: dict[str, object]) -> HistoryRow:
    wait, run = (_buckets(found, name) for name in ("wait", "run"))
    shown = {name: value for name, value in found.items() if name in HistoryRow.__slots__}
    for name, buckets in (("wait", wait), ("run", run)):
        shown |= {f"{name}_p{percent}_seconds": quantile(buckets, percent / 100) for percent in (50, 95, 99)}
    return HistoryRow(**shown)  # type: ignore[arg-type]  # the columns have the names and types of the fields


def _buckets(found: dict[str, object], name: str) -> list[int]:
    return [int(str(found[f"{name}_{place}"])) for place in range(1, BUCKETS + 1)]


def quantile(buckets: Sequence[int], part: float) -> float | None:
    """The seconds within which this part of the jobs was done, as far as the buckets show; None without any.

    Within a bucket times are taken to be spread evenly, as Prometheus does. Of a time beyond the last bound only that
    is known.
    """
    total = sum(buckets)
    if not total:
        return None
    rank, below, lower = part * total, 0, 0.0
    for count, upper in zip(buckets, BOUNDS, strict=False):
        if below + count >= rank and count:
            return lower + (upper - lower) * (rank - below) / count
        below, lower = below + count, upper
    return lower
