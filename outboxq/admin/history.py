"""The history: how many jobs had each outcome, and how long jobs waited and ran, by minute, by hour or by kind."""

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
    """The numbers of jobs' outcomes in a minute or an hour, or of one kind, as `read_history` returns them.

    Args:
        at: The beginning of the minute or hour; None in a row of a kind.
        queue: The queue of the kind; None in a row of a minute or an hour.
        kind: The kind; None in a row of a minute or an hour.
        retried: Attempts after which the job runs again, because they failed or their handler requested it.
        discarded: Jobs that ended without being done or dead, cancelled and expired ones included.
        crashed: Times that a relay died or stalled while it ran the job.
        lost: Runs of leased jobs that did not count, because the relay had lost the lease.
        wait_p50_seconds: Half of the jobs had waited at most this long when they were claimed; None without any job.
            The fields with p95 and p99 are for 95 and 99 percent.
        run_p50_seconds: Half of the attempts ran for at most this long.
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
    """Return the outcomes of the jobs of the last `since`: by minute or hour, the oldest first, or by queue and kind.

    Rows of minutes are kept for two days, rows of hours for 35 days; in a history by minutes, an older hour is one row,
    at its first minute.

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
    """Estimate the time in seconds within which a part (0 to 1) of the counted jobs was done; None if none was counted.

    `buckets`: the number of jobs in each range of times (up to the bounds `BOUNDS`, and beyond). Within a range, times
    are assumed to be spread evenly, as Prometheus does. For a time beyond the last bound, that bound is returned.
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
