"""The measured values: repeats with their median, and a comparison of outboxq with its limit."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class Series:
    """The repeats of one measurement, in the order in which they were made.

    Raises:
        ValueError: there are none.
    """

    values: tuple[float, ...]
    unit: str

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a series takes at least one measurement")

    @property
    def median(self) -> float:
        """The middle one, or the mean of the two in the middle."""
        return statistics.median(self.values)

    @property
    def lowest(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def highest(self) -> float:
        """The largest."""
        return max(self.values)


class Better(Enum):
    """The direction in which a figure improves."""

    higher = "higher"
    lower = "lower"
    times_less = "times less"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table: ours beside its limit, and the ratio that we want.

    The ratio is ours / limit, to be at least the target if higher is better, otherwise at most. If ours is to be so
    many times less, it is limit / ours, to be at least the target. Without a limit ours itself is held against the
    target.

    Attributes:
        number: The scenario's, which sorts the table.
        scenario: Its name on the command line.
        what: The thing that was measured.
        limit_name: The limit in words; empty without one.
        notes: Facts that a reader must know: sizes that were run, settings, round trips that were seen.
        others: What else is like the limit, by name: other queues that were slower.
        plot: In which picture it is drawn, by default the scenario's.
        is_paired: True if each repeat of outboxq alternated with the limit's repeat of the same number.
    """

    number: int
    scenario: str
    what: str
    ours: Series
    limit: Series | None = None
    limit_name: str = ""
    target: float | None = None
    better: Better = Better.higher
    notes: tuple[str, ...] = ()
    others: tuple[tuple[str, Series], ...] = ()
    plot: str = ""
    is_paired: bool = False

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours by the limit: of each pair, else of the two medians; none without a limit, or with one of zero."""
        if self.limit is None:
            return ()
        above, below = (self.limit, self.ours) if self.better is Better.times_less else (self.ours, self.limit)
        if self.is_paired:
            return tuple(one / other for one, other in zip(above.values, below.values, strict=True))
        return (above.median / below.median,) if below.median else ()

    @property
    def ratio(self) -> float | None:
        """The median of the ratios, where there are any."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def is_met(self) -> bool | None:
        """True if the target is reached; None if there is nothing to compare."""
        compared = self.ours.median if self.limit is None else self.ratio
        if self.target is None or compared is None:
            return None
        return compared <= self.target if self.better is Better.lower else compared >= self.target


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A line that could not be measured, and why."""

    number: int
    scenario: str
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The place of a run: machine, server, versions."""

    outboxq: str
    python: str
    sqlalchemy: str
    server: str
    settings: dict[str, str]
    cores: int
    pgbench: str
    size: str


@dataclass(slots=True)
class Run:
    """All that one run found. `drift` is the reference limit, measured first and last."""

    surroundings: Surroundings
    repeats: int
    lines: list[Comparison | Unsupported] = field(default_factory=list)
    drift: tuple[Series, Series] | None = None
    seconds: float = 0.0

    def sorted_lines(self) -> Sequence[Comparison | Unsupported]:
        """By the number of the scenario; within one as they were measured."""
        return sorted(self.lines, key=lambda line: line.number)


def drift_percent(drift: tuple[Series, Series]) -> float:
    """Return by how many percent the machine was faster (positive) or slower at the end than at the beginning."""
    first, last = drift
    return (last.median / first.median - 1) * 100
