"""The findings of a run of the peers, as JSON and as a Markdown table."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.exactly_once import Effects
from benchmarks.peers.definitions import Peer, Scenario
from benchmarks.peers.statistics import Percentiles


@dataclass(frozen=True, slots=True)
class Spread:
    """The repeats of one measurement."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One peer, one scenario, one number of processes.

    Attributes:
        cpu_us: Processor time of a job in µs, of `orm` alone.
        effects: Of `kill` alone, as `latency` of the scenario of that name.
    """

    peer: Peer
    scenario: Scenario
    processes: int
    jobs: int
    jobs_per_second: Spread | None = None
    latency: Percentiles | None = None
    cpu_us: Spread | None = None
    effects: Effects | None = None


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("a spread takes at least one value")
    return Spread(*(round(value, 1) for value in (statistics.median(values), min(values), max(values))))


def as_json(findings: Sequence[Finding]) -> str:
    """A list with an object for each finding."""
    return json.dumps([_record(finding) for finding in findings], indent=2) + "\n"


def as_markdown(findings: Sequence[Finding]) -> str:
    """A table with a line for each finding, and what the peers were set to under it."""
    lines = ["| Peer | Scenario | Processes | Jobs | Median | Min | Max |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {' | '.join(_cells(finding))} |" for finding in findings]
    peers = {finding.peer.name: finding.peer for finding in findings}
    lines += ["", *(f"- {peer.name} {peer.version} ({peer.language}): {_settings(peer)}" for peer in peers.values())]
    return "\n".join(lines) + "\n"


def describe(finding: Finding) -> str:
    """One line for a terminal."""
    peer, scenario, processes, *figures = _cells(finding)
    return f"{peer:<28}{scenario:<10}{processes} process(es)  {'  '.join(figures[1:])}".rstrip()


def _record(finding: Finding) -> dict[str, object]:
    peer = finding.peer
    record: dict[str, object] = {
        "peer": peer.name,
        "version": peer.version,
        "language": peer.language,
        "settings": dict(peer.settings),
        "scenario": finding.scenario,
        "processes": finding.processes,
        "jobs": finding.jobs,
    }
    for name in ("jobs_per_second", "latency", "cpu_us", "effects"):
        if (figures := getattr(finding, name)) is not None:
            record[name] = asdict(figures)
    return record


def _cells(finding: Finding) -> list[str]:
    head = [finding.peer.name, finding.scenario.value, str(finding.processes), f"{finding.jobs:,}"]
    if finding.latency is not None:
        return [*head, f"p50 {finding.latency.p50_ms:.1f} ms", "", f"p99 {finding.latency.p99_ms:.1f} ms"]
    if finding.effects is not None:
        return [*head, str(finding.effects), "", ""]
    rate, cpu_us = finding.jobs_per_second, finding.cpu_us
    cells = () if rate is None else tuple(f"{value:,.0f}/s" for value in (rate.median, rate.min, rate.max))
    if cpu_us is not None:
        cpu = (f", {value:,.0f} µs" for value in (cpu_us.median, cpu_us.min, cpu_us.max))
        cells = tuple(map("".join, zip(cells, cpu, strict=True)))
    return [*head, *cells]


def _settings(peer: Peer) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in peer.settings.items())
