"""The time that charts show: how far back, in which steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from outboxq.admin.history import HistoryRow
from outboxq.dashboard.charts import Series
from outboxq.dashboard.parameters import Period
from outboxq.dashboard.views.overview import series_of


@dataclass(frozen=True, slots=True)
class Span:
    """A time back from now.

    Attributes:
        step: The width of a bar: several minutes or hours are drawn as one.
    """

    back: timedelta
    by: Literal["minute", "hour"]
    step: timedelta


_SPANS: Mapping[Period, Span] = {
    "1h": Span(timedelta(hours=1), "minute", timedelta(minutes=1)),
    "6h": Span(timedelta(hours=6), "minute", timedelta(minutes=1)),
    "24h": Span(timedelta(hours=24), "hour", timedelta(hours=1)),
    "7d": Span(timedelta(days=7), "hour", timedelta(hours=1)),
    "30d": Span(timedelta(days=30), "hour", timedelta(hours=1)),
}
PERIODS = tuple(_SPANS)


def span_of(period: Period) -> Span:
    """The time that a period means."""
    return _SPANS[period]


def series_in(rows: list[HistoryRow], now: datetime, span: Span) -> dict[str, list[Series]]:
    """The outcomes, waits and runs of each step, also of those in which nothing was done."""
    last = now.replace(second=0, microsecond=0)
    if span.by == "hour":
        last = last.replace(minute=0)
    found = {row.at: row for row in rows}
    number = span.back // span.step
    return series_of([found.get(last - span.step * back, HistoryRow()) for back in range(number - 1, -1, -1)])


def failed(row: HistoryRow) -> float:
    """The part of the attempts that failed."""
    attempts = row.done + row.retried + row.died + row.discarded
    return (row.retried + row.died) / attempts if attempts else 0.0
