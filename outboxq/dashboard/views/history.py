"""The periods that charts cover, and the numbers of these charts from the history of jobs."""

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
    """A period that ends now, which the charts of a page cover.

    Attributes:
        back: The length of the period.
        by: The time that one row of the history covers, `minute` or `hour`.
        step: The time that one bar of a chart covers.
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
    """Return the period of charts that a name such as `24h` means."""
    return _SPANS[period]


def series_in(rows: list[HistoryRow], now: datetime, span: Span) -> dict[str, list[Series]]:
    """Return the numbers for a page's charts of a period: `{chart: series}` for `outcomes`, `wait` and `run`.

    A minute or hour for which the history has no row counts as one without jobs.
    """
    last = now.replace(second=0, microsecond=0)
    if span.by == "hour":
        last = last.replace(minute=0)
    found = {row.at: row for row in rows}
    number = span.back // span.step
    return series_of([found.get(last - span.step * back, HistoryRow()) for back in range(number - 1, -1, -1)])


def failed(row: HistoryRow) -> float:
    """Return the share of attempts in a row of the history that failed, from 0 to 1."""
    attempts = row.done + row.retried + row.died + row.discarded
    return (row.retried + row.died) / attempts if attempts else 0.0
