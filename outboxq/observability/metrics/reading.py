"""A reading: the values of metrics at one moment, which can be added up and sent to another process.

The number of series is bounded: values beyond a label's cap are counted under `_other`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from outboxq.observability.aggregate import OTHER, Counts, Outcome
from outboxq.observability.metrics.families import FAMILIES, JOBS, RUN, WAIT, Family

Labels: TypeAlias = tuple[str, ...]
# The counts of each bucket, not added up, and the sum in microseconds. Whole numbers: the sums of the same fractions,
# in another order, may be a little less, which Prometheus takes for a counter that begins again.
Buckets: TypeAlias = tuple[list[int], int]
_Rows: TypeAlias = tuple[list[tuple[str, Labels, float]], list[tuple[str, Labels, list[int], int]]]

# How many values of a label have series of their own. Kinds are counted by queue and kind, as the history does.
MOST: Mapping[str, int] = {
    "queue": 100, "kind": 200, "error_type": 50, "scope": 100, "consumer": 100, "schedule": 200, "code": 200,
}  # fmt: skip


@dataclass(slots=True)
class LabelCaps:
    """The values of labels that were seen first, and so have series of their own.

    Args:
        most: How many values of each label; one that is not named has no cap.
    """

    most: Mapping[str, int] = field(default_factory=lambda: MOST)
    _seen: dict[str, set[Labels]] = field(default_factory=dict)

    def fit(self, family: Family, labels: Labels) -> Labels:
        """The labels under which to count: those given, or with `_other` for values that came too late."""
        fitted: list[str] = []
        for name, value in zip(family.labels, labels, strict=True):
            # A lone surrogate, of the name of a class, has no UTF-8.
            text = value.encode(errors="replace").decode()
            key = (fitted[0], text) if name == "kind" else (text,)
            fitted.append(text if self._has_room(name, key) else OTHER)
        return tuple(fitted)

    def _has_room(self, name: str, key: Labels) -> bool:
        most = self.most.get(name)
        if most is None or key[-1] == OTHER:
            return True
        seen = self._seen.setdefault(name, set())
        if key not in seen and len(seen) < most:
            seen.add(key)
        return key in seen


@dataclass(slots=True)
class Reading:
    """The values of metrics, by their names and labels."""

    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    histograms: dict[str, dict[Labels, Buckets]] = field(default_factory=dict)
    caps: LabelCaps = field(default_factory=LabelCaps)

    @classmethod
    def without_caps(cls) -> "Reading":
        """An empty one, for the values of readings that have caps."""
        return cls(caps=LabelCaps({}))

    def add(self, name: str, labels: Labels, amount: float) -> None:
        """Add to a counter or a gauge, which begins with 0."""
        series = self.values.setdefault(name, {})
        fitted = self.caps.fit(FAMILIES[name], labels)
        series[fitted] = series.get(fitted, 0) + amount

    def highest(self, name: str, labels: Labels, value: float) -> None:
        """Set a gauge, unless it is higher already: several series may be one under `_other`."""
        series = self.values.setdefault(name, {})
        fitted = self.caps.fit(FAMILIES[name], labels)
        series[fitted] = max(series.get(fitted, value), value)

    def add_buckets(self, name: str, labels: Labels, counts: Sequence[int], seconds: float) -> None:
        """Add to a histogram, with the sum in seconds."""
        self.add_micros(name, labels, counts, round(seconds * 1e6))

    def add_micros(self, name: str, labels: Labels, counts: Sequence[int], micros: int) -> None:
        """Add to a histogram, with the sum in microseconds."""
        series = self.histograms.setdefault(name, {})
        fitted = self.caps.fit(FAMILIES[name], labels)
        before, sum_before = series.get(fitted, ([0] * len(counts), 0))
        series[fitted] = [one + other for one, other in zip(before, counts, strict=True)], sum_before + micros

    def merge(self, other: "Reading", *, without_gauges: bool = False) -> None:
        """Add another reading. `without_gauges`: that of a process which has ended."""
        for name, series in other.values.items():
            if not (without_gauges and FAMILIES[name].type == "gauge"):
                for labels, value in series.items():
                    self.add(name, labels, value)
        for name, histograms in other.histograms.items():
            for labels, (counts, micros) in histograms.items():
                self.add_micros(name, labels, counts, micros)

    def encoded(self) -> bytes:
        """The reading for another process of the same version."""
        values = [(name, *each) for name, series in self.values.items() for each in series.items()]
        histograms = [
            (name, labels, counts, micros)
            for name, series in self.histograms.items()
            for labels, (counts, micros) in series.items()
        ]
        return msgspec.msgpack.encode((values, histograms))

    @classmethod
    def decoded(cls, data: bytes) -> "Reading":
        """The reading that `encoded` wrote.

        Raises:
            msgspec.DecodeError: it is something else.
        """
        values, histograms = msgspec.msgpack.decode(data, type=_Rows)
        found = cls()
        for name, labels, value in values:
            found.values.setdefault(name, {})[labels] = value
        for name, labels, counts, micros in histograms:
            found.histograms.setdefault(name, {})[labels] = (counts, micros)
        return found


def without_kinds(reading: Reading) -> Reading:
    """The same, with the kinds of each queue added up, under an empty label, which Prometheus takes for none."""
    plain = Reading.without_caps()
    for name, series in reading.values.items():
        for labels, value in series.items():
            plain.add(name, _without_kind(FAMILIES[name], labels), value)
    for name, histograms in reading.histograms.items():
        for labels, (counts, micros) in histograms.items():
            plain.add_micros(name, _without_kind(FAMILIES[name], labels), counts, micros)
    return plain


def _without_kind(family: Family, labels: Labels) -> Labels:
    return tuple("" if name == "kind" else value for name, value in zip(family.labels, labels, strict=True))


# By the names of the history, those of the metric.
OUTCOMES: Mapping[Outcome, str] = {
    "done": "done", "retried": "retried", "died": "dead", "snoozed": "snoozed", "discarded": "discarded",
    "crashed": "crashed", "lost": "lease_lost",
}  # fmt: skip


def add_kinds(reading: Reading, counts: Counts) -> None:
    """Add the outcomes of jobs."""
    for (queue, kind), each in counts.items():
        for outcome, count in each.outcomes.items():
            reading.add(JOBS, (queue, kind, OUTCOMES[outcome]), count)
        reading.add_buckets(WAIT, (queue, kind), each.wait, each.wait_seconds)
        reading.add_buckets(RUN, (queue, kind), each.run, each.run_seconds)
