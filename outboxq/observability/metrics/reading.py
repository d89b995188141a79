"""A reading: the values of metrics at one moment, which can be added to others and sent to another process.

The number of series is bounded: values beyond a label's cap are counted under `_other`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from outboxq.observability.aggregate import OTHER, Counts, Outcome
from outboxq.observability.metrics.families import FAMILIES, JOBS, RUN, WAIT, Family

Labels: TypeAlias = tuple[str, ...]
# The count of each single bucket, and the sum in microseconds. Whole numbers, because sums of the same fractions in
# another order may be slightly lower, which Prometheus takes for a restarted counter.
Buckets: TypeAlias = tuple[list[int], int]
_Rows: TypeAlias = tuple[list[tuple[str, Labels, float]], list[tuple[str, Labels, list[int], int]]]

# The number of values of a label that have series of their own. Kinds are counted by queue and kind, as in the history.
MOST: Mapping[str, int] = {
    "queue": 100, "kind": 200, "error_type": 50, "scope": 100, "consumer": 100, "schedule": 200, "code": 200,
}  # fmt: skip


@dataclass(slots=True)
class LabelCaps:
    """Limits the number of series of a metric.

    The first values of a label get series of their own. Values beyond the label's cap share the series `_other`.

    Args:
        most: The cap of each label: its most values. A label that is not named has no cap.
    """

    most: Mapping[str, int] = field(default_factory=lambda: MOST)
    _seen: dict[str, set[Labels]] = field(default_factory=dict)

    def fit(self, family: Family, labels: Labels) -> Labels:
        """Return the labels of the series to count under, with `_other` in place of each value beyond its cap."""
        fitted: list[str] = []
        for name, value in zip(family.labels, labels, strict=True):
            # A lone surrogate, in the name of a class, cannot be encoded in UTF-8.
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
    """The values of metrics at one moment, by the metrics' names and the labels of each series.

    `values` has the counters and gauges. `histograms` has counts by bucket, and a sum in microseconds. `caps` limits
    the number of series.
    """

    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    histograms: dict[str, dict[Labels, Buckets]] = field(default_factory=dict)
    caps: LabelCaps = field(default_factory=LabelCaps)

    @classmethod
    def without_caps(cls) -> "Reading":
        """Return an empty reading without caps, to merge readings that have caps."""
        return cls(caps=LabelCaps({}))

    def add(self, name: str, labels: Labels, amount: float) -> None:
        """Add an amount to the series of a counter or gauge that has these labels; a new series begins with 0."""
        series = self.values.setdefault(name, {})
        fitted = self.caps.fit(FAMILIES[name], labels)
        series[fitted] = series.get(fitted, 0) + amount

    def highest(self, name: str, labels: Labels, value: float) -> None:
        """Set a gauge to `value`, unless it is higher already, because another value may share the series `_other`."""
        series = self.values.setdefault(name, {})
        fitted = self.caps.fit(FAMILIES[name], labels)
        series[fitted] = max(series.get(fitted, value), value)

    def add_buckets(self, name: str, labels: Labels, counts: Sequence[int], seconds: float) -> None:
        """Add values to a histogram: their counts by bucket, and their sum in seconds."""
        self.add_micros(name, labels, counts, round(seconds * 1e6))

    def add_micros(self, name: str, labels: Labels, counts: Sequence[int], micros: int) -> None:
        """Add values to a histogram: their counts by bucket, and their sum in microseconds."""
        series = self.histograms.setdefault(name, {})
        fitted = self.caps.fit(FAMILIES[name], labels)
        before, sum_before = series.get(fitted, ([0] * len(counts), 0))
        series[fitted] = [one + other for one, other in zip(before, counts, strict=True)], sum_before + micros

    def merge(self, other: "Reading", *, without_gauges: bool = False) -> None:
        """Add another reading to this one. `without_gauges`: leave out its gauges, if its process has ended."""
        for name, series in other.values.items():
            if not (without_gauges and FAMILIES[name].type == "gauge"):
                for labels, value in series.items():
                    self.add(name, labels, value)
        for name, histograms in other.histograms.items():
            for labels, (counts, micros) in histograms.items():
                self.add_micros(name, labels, counts, micros)

    def encoded(self) -> bytes:
        """Return the reading as bytes, for another process of the same version."""
        values = [(name, *each) for name, series in self.values.items() for each in series.items()]
        histograms = [
            (name, labels, counts, micros)
            for name, series in self.histograms.items()
            for labels, (counts, micros) in series.items()
        ]
        return msgspec.msgpack.encode((values, histograms))

    @classmethod
    def decoded(cls, data: bytes) -> "Reading":
        """Return the reading that `encoded` has converted into these bytes.

        Raises:
            msgspec.DecodeError: the bytes are something else.
        """
        values, histograms = msgspec.msgpack.decode(data, type=_Rows)
        found = cls()
        for name, labels, value in values:
            found.values.setdefault(name, {})[labels] = value
        for name, labels, counts, micros in histograms:
            found.histograms.setdefault(name, {})[labels] = (counts, micros)
        return found


def without_kinds(reading: Reading) -> Reading:
    """Return a reading in which the values of all kinds of a queue are added up.

    Its label `kind` is empty, which Prometheus treats as no label.
    """
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


# The history's names of outcomes, with the metric's names.
OUTCOMES: Mapping[Outcome, str] = {
    "done": "done", "retried": "retried", "died": "dead", "snoozed": "snoozed", "discarded": "discarded",
    "crashed": "crashed", "lost": "lease_lost",
}  # fmt: skip


def add_kinds(reading: Reading, counts: Counts) -> None:
    """Add the outcomes of jobs, and the times that the jobs waited and ran, to a reading."""
    for (queue, kind), each in counts.items():
        for outcome, count in each.outcomes.items():
            reading.add(JOBS, (queue, kind, OUTCOMES[outcome]), count)
        reading.add_buckets(WAIT, (queue, kind), each.wait, each.wait_seconds)
        reading.add_buckets(RUN, (queue, kind), each.run, each.run_seconds)
