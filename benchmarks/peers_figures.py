"""The output of `python -m benchmarks.peers --json FILE`, read for the comparison with outboxq."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.exactly_once import Effects
from benchmarks.figures import Series


@dataclass(frozen=True, slots=True)
class Figure:
    """A peer in something, with so many jobs enqueued before."""

    name: str
    series: Series
    jobs: int


class Peers:
    """The peers' figures of this run; empty where none were measured."""

    def __init__(self, figures: list[dict[str, Any]]) -> None:
        self._figures = figures

    @classmethod
    def read(cls, path: Path) -> "Peers":
        """From a file: a list, or an object whose `figures` is one."""
        found = json.loads(path.read_text())
        return cls(found if isinstance(found, list) else found["figures"])

    def __bool__(self) -> bool:
        return bool(self._figures)

    def best_rate(self, scenario: str, processes: int, language: str | None = None) -> Figure | None:
        """The most jobs a second."""
        rates = self.rates(scenario, processes, language)
        return max(rates, key=lambda each: each.series.median, default=None)

    def rates(self, scenario: str, processes: int, language: str | None = None) -> list[Figure]:
        """Jobs a second of each: median, lowest and highest."""
        return [
            _figure(figure, Series(tuple(float(value) for value in figure["jobs_per_second"].values()), "jobs/s"))
            for figure in self._of(scenario, "jobs_per_second")
            if figure["processes"] == processes and language in (None, figure["language"])
        ]

    def costs(self, scenario: str) -> list[Figure]:
        """The processor time of a job of each: median, lowest and highest."""
        return [
            _figure(figure, Series(tuple(float(value) for value in figure["cpu_us"].values()), "µs"))
            for figure in self._of(scenario, "cpu_us")
        ]

    def effects(self) -> list[str]:
        """A sentence for each peer: the effects of its jobs after its workers were killed."""
        return [f"{_name(figure)}: {Effects(**figure['effects'])}" for figure in self._of("kill", "effects")]

    def best_latency(self, percent: int) -> Figure | None:
        """The smallest percentile, in milliseconds."""
        return min(self.latencies(percent), key=lambda each: each.series.median, default=None)

    def latencies(self, percent: int) -> list[Figure]:
        """A percentile of each, in milliseconds."""
        return [
            _figure(figure, Series((float(figure["latency"][f"p{percent}_ms"]),), "ms"))
            for figure in self._of("latency", "latency")
        ]

    def _of(self, scenario: str, key: str) -> list[dict[str, Any]]:
        return [each for each in self._figures if each["scenario"] == scenario and each.get(key) is not None]


def _figure(figure: dict[str, Any], series: Series) -> Figure:
    return Figure(_name(figure), series, int(figure["jobs"]))


def _name(figure: dict[str, Any]) -> str:
    return f"{figure['peer']} {figure['version']}"
