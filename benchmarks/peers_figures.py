"""What `python -m benchmarks.peers --json FILE` found, read for the comparison with ours."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Series


@dataclass(frozen=True, slots=True)
class Best:
    """The best peer in something."""

    name: str
    series: Series


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

    def best_rate(self, scenario: str, processes: int, language: str | None = None) -> Best | None:
        """The most jobs a second."""
        wanted = [
            figure
            for figure in self._of(scenario, "jobs_per_second")
            if figure["processes"] == processes and language in (None, figure["language"].lower())
        ]
        best = max(wanted, key=lambda figure: float(figure["jobs_per_second"]), default=None)
        return None if best is None else Best(_name(best), _series(best["jobs_per_second"], "jobs/s"))

    def best_latency(self, percent: int) -> Best | None:
        """The smallest percentile, in milliseconds."""
        key = f"p{percent}_ms"
        best = min(self._of("latency", key), key=lambda figure: float(figure[key]), default=None)
        return None if best is None else Best(_name(best), _series(best[key], "ms"))

    def _of(self, scenario: str, key: str) -> list[dict[str, Any]]:
        return [each for each in self._figures if each["scenario"] == scenario and each.get(key) is not None]


def _name(figure: dict[str, Any]) -> str:
    return f"{figure['peer']} {figure['version']}"


def _series(value: float, unit: str) -> Series:
    return Series((float(value),), unit)
