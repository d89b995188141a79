"""The outcomes of jobs since the exporter began, added up from the history that relays write.

Rows of the history grow, are merged into hours, and are removed, but exported sums may only grow. So a minute that
relays no longer add to is added up here, once. Later minutes may still grow, and each poll reads them again.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from outboxq.observability.aggregate import OUTCOMES, Counts, KindCounts, Outcome
from outboxq.observability.metrics.reading import LabelCaps, Labels, Reading, add_kinds
from outboxq.statements import gauges as statements

# A relay adds to the minute in which its flush began, and a flush takes some seconds at the most.
_OPEN_MINUTES = 5


class MinuteSums:
    """The sums of jobs' outcomes over the minutes of the history since the first poll."""

    def __init__(self) -> None:
        self._closed: Counts = {}
        self._open: Counts = {}
        # Minutes before this one are included in `_closed`, or older than the exporter.
        self._since: datetime | None = None
        self._caps = LabelCaps()
        # The highest sum of each histogram so far.
        self._micros: dict[tuple[str, Labels], int] = {}

    def look(self, connection: Connection) -> None:
        """Bring the sums up to date, by queries for the minutes since the last poll, in the caller's transaction."""
        execute = connection.execute
        # At first the whole minute that has begun.
        since: datetime = self._since or execute(statements.minute(0)).scalar_one()
        before: datetime = execute(statements.minute(_OPEN_MINUTES)).scalar_one()
        if before > since:
            closed = execute(statements.sum_minutes(since, before)).all()
            opened = execute(statements.sum_minutes(before, None)).all()
            _add(self._closed, closed)
            since = before
        else:
            opened = execute(statements.sum_minutes(since, None)).all()
        self._since = since
        self._open = {}
        _add(self._open, opened)

    def read(self) -> Reading:
        """Return the sums as a reading. A label's values beyond a cap are counted under `_other`.

        All readings of this object agree on the values beyond the cap, so that no sum moves to another label.
        """
        reading = Reading(caps=self._caps)
        for counts in (self._closed, self._open):
            add_kinds(reading, counts)
        for name, histograms in reading.histograms.items():
            for labels, (buckets, micros) in histograms.items():
                # The server adds fractions up in another order when a minute is closed.
                most = self._micros[name, labels] = max(micros, self._micros.get((name, labels), 0))
                histograms[labels] = buckets, most
        return reading


def _add(total: Counts, rows: Sequence[Row[Any]]) -> None:
    for row in rows:
        outcomes: dict[Outcome, int] = {outcome: getattr(row, outcome) for outcome in OUTCOMES}
        counts = KindCounts(outcomes, row.wait_seconds, row.run_seconds, list(row.wait), list(row.run))
        total.setdefault((row.queue, row.kind), KindCounts()).add(counts)
