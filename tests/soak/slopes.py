"""Series of measurements, the straight line through each, and whether that is flat."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["flat", "grows", "noisy"]

HOUR = 3600.0
# Growth in an hour, of the mean, up to which a measure counts as flat. Memory has caches that fill up; the others are
# numbers of things, which a leak adds to for ever.
BOUNDS: Mapping[str, float] = {
    "resident_kb": 0.10,
    "anonymous_kb": 0.10,
    "descriptors": 0.05,
    "threads": 0.05,
    "connections": 0.05,
    "backend_kb": 0.10,
    "objects": 0.05,
}
# A number of things that is off by less than this at the end of an hour has not grown.
_LEAST_GROWTH = 1.0
_LEAST_POINTS = 5


@dataclass(frozen=True, slots=True)
class Subject:
    """A process's life, or the connections of one: what a series belongs to."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Slope:
    """The least-squares line through one series, without its warm-up.

    Attributes:
        seconds: From the first point to the last.
        quarters: The mean of each quarter of the points: a step shows, which a line takes for growth.
        an_hour: What the line gains in an hour; `error` is the standard error of that.
        bound: Up to what growth in an hour it counts as flat.
    """

    subject: str
    pid: int
    measure: str
    points: int
    seconds: float
    mean: float
    lowest: float
    highest: float
    quarters: list[float]
    an_hour: float
    error: float
    bound: float
    verdict: Verdict


class Series:
    """What was measured, by subject and measure: seconds since the start, and the value."""

    def __init__(self) -> None:
        self._points: defaultdict[tuple[Subject, str], list[tuple[float, float]]] = defaultdict(list)

    def add(self, seconds: float, subject: Subject, measured: Mapping[str, float]) -> None:
        for measure, value in measured.items():
            self._points[subject, measure].append((seconds, value))

    def slopes(self, *, warm_up_seconds: float, least_seconds: float) -> list[Slope]:
        """A line for each series that is long enough behind its warm-up, which each life has of its own."""
        lasting = {key: _after_warm_up(points, warm_up_seconds) for key, points in self._points.items()}
        return [
            fit(*key, points)
            for key, points in lasting.items()
            if len(points) >= _LEAST_POINTS and points[-1][0] - points[0][0] >= least_seconds
        ]


def _after_warm_up(points: Sequence[tuple[float, float]], seconds: float) -> list[tuple[float, float]]:
    begun = points[0][0]
    return [point for point in points if point[0] - begun >= seconds]


def fit(subject: Subject, measure: str, points: Sequence[tuple[float, float]]) -> Slope:
    """The line, with the error of its slope as if points were independent of one another."""
    values = [value for _, value in points]
    mean = sum(values) / len(values)
    an_hour, error = _slope(points)
    bound = max(BOUNDS[measure] * mean, _LEAST_GROWTH)
    seconds = round(points[-1][0] - points[0][0], 1)
    return Slope(
        subject.name, subject.pid, measure, len(points), seconds, round(mean, 1), min(values), max(values),
        _quarters(values), round(an_hour, 2), round(error, 2), round(bound, 1), _judge(an_hour, error, bound),
    )  # fmt: skip


def _quarters(values: Sequence[float]) -> list[float]:
    ends = [len(values) * number // 4 for number in range(5)]
    return [round(sum(values[start:end]) / (end - start), 1) for start, end in pairwise(ends)]


def _judge(an_hour: float, error: float, bound: float) -> Verdict:
    if an_hour < bound:
        return "flat"
    # A line that may well be one below the bound says nothing: run for longer.
    return "grows" if an_hour - 2 * error >= bound else "noisy"


def _slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares; the gain in an hour and its standard error."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residue = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope * HOUR, sqrt(residue / (count - 2) / spread) * HOUR


def in_lines(slopes: Iterable[Slope]) -> list[str]:
    """A table."""
    head = (
        "process",
        "pid",
        "measure",
        "points",
        "mean",
        "lowest",
        "highest",
        "by quarter",
        "an hour",
        "+-",
        "bound",
        "",
    )
    rows = [
        (
            slope.subject, f"{slope.pid}", slope.measure, f"{slope.points}", f"{slope.mean:,.1f}",
            f"{slope.lowest:,.0f}", f"{slope.highest:,.0f}",
            " ".join(f"{mean:,.1f}" for mean in slope.quarters), f"{slope.an_hour:+,.1f}", f"{slope.error:,.1f}",
            f"{slope.bound:,.1f}", slope.verdict,
        )
        for slope in slopes
    ]  # fmt: skip
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    left = {0, 2, 11}
    return [
        "  ".join(
            text.ljust(width) if place in left else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
