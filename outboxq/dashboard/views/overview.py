"""The overview: the state of everything, and the work that waits for an operator."""

from dataclasses import asdict, fields
from datetime import datetime, timedelta

from outboxq.admin.history import HistoryRow, read_history
from outboxq.admin.snapshot import Snapshot, take_snapshot
from outboxq.dashboard.charts import Series
from outboxq.dashboard.parameters import Nothing
from outboxq.dashboard.view import Look, View
from outboxq.dashboard.views.seen import seen_groups, seen_relays

_HOUR = timedelta(hours=1)


def show_overview(look: Look, asked: Nothing) -> View:  # noqa: ARG001  # as every screen has it
    """Return the overview: queues, relays, dead letters, the last hour, and findings that need attention."""
    snapshot = take_snapshot(look.connection)
    look.sections.refused += snapshot.not_known
    history = look.at("the last hour", lambda connection: read_history(connection, since=_HOUR)) or []
    grave = [each for each in look.findings or () if each.needs_attention]
    minutes = by_minute(history, snapshot.at, 60)
    data = {each.name: getattr(snapshot, each.name) for each in fields(Snapshot) if each.name != "not_known"}
    data |= {
        "relays": seen_relays(look, snapshot.relays),
        "dead_groups": seen_groups(look, snapshot.dead_groups),
    }
    return View(
        "overview.html", "Overview", {**data, "history": history}, _sums(snapshot) | {"series": minutes, "grave": grave}
    )


def by_minute(rows: list[HistoryRow], now: datetime, minutes: int) -> dict[str, list[Series]]:
    """Return the numbers for charts of the last `minutes`: `{chart: series}` for `outcomes`, `wait` and `run`.

    A minute for which the history has no row counts as one without jobs.
    """
    last = now.replace(second=0, microsecond=0)
    found = {row.at: row for row in rows}
    each = [found.get(last - timedelta(minutes=back), HistoryRow()) for back in range(minutes - 1, -1, -1)]
    return series_of(each)


def series_of(rows: list[HistoryRow]) -> dict[str, list[Series]]:
    """Return the numbers for charts of rows of the history: `{chart: series}` for `outcomes`, `wait` and `run`."""
    outcomes = [
        Series("done", [row.done for row in rows], "a"),
        Series("retried", [row.retried + row.snoozed for row in rows], "c"),
        Series("died or lost", [row.died + row.crashed + row.lost for row in rows], "d"),
    ]
    return {"outcomes": outcomes, "wait": _quantiles(rows, "wait"), "run": _quantiles(rows, "run")}


def _quantiles(rows: list[HistoryRow], name: str) -> list[Series]:
    tones = {50: "a", 95: "b", 99: "c"}
    return [
        Series(f"p{part}", [getattr(row, f"{name}_p{part}_seconds") for row in rows], tone)
        for part, tone in tones.items()
    ]


def _sums(snapshot: Snapshot) -> dict[str, object]:
    alive = [relay for relay in snapshot.relays if relay.state != "dead"]
    queues = [asdict(queue) for queue in snapshot.queues]
    oldest = [queue.oldest_waiting_seconds for queue in snapshot.queues if queue.oldest_waiting_seconds is not None]
    return {
        "waiting": sum(queue["ready"] + queue["due"] + queue["grouped"] for queue in queues),
        "is_estimated": not all(queue.exact for queue in snapshot.queues),
        "scheduled": sum(queue["scheduled"] for queue in queues),
        "dead": sum(queue["dead"] for queue in queues),
        "suspect": sum(queue["suspect"] + queue["orphaned"] for queue in queues),
        "oldest": max(oldest, default=None),
        "done_per_minute": sum(queue.done_per_minute for queue in snapshot.queues),
        "failed_per_minute": sum(queue.failed_per_minute for queue in snapshot.queues),
        "alive": len(alive),
        "lost": len(snapshot.relays) - len(alive),
        "slots": sum(relay.slots for relay in alive),
        "busy": sum(relay.busy for relay in alive),
        "waiting_calls": sum(relay.waiting for relay in alive),
    }
