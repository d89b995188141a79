"""The result of a run, as JSON for programs and as a Markdown table for the README."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.figures import Better, Comparison, Run, Series, Unsupported, drift_percent

_HEAD = "| # | What | Ours | Limit | Ratio | Target |\n|---|---|---|---|---|---|"


def as_json(run: Run) -> str:
    """The whole run; every repeat is in it."""
    found: dict[str, Any] = {
        "surroundings": asdict(run.surroundings),
        "repeats": run.repeats,
        "seconds": round(run.seconds, 1),
        "drift": None if run.drift is None else _drift(run.drift),
        "lines": [_line(line) for line in run.sorted_lines()],
    }
    return json.dumps(found, indent=2) + "\n"


def as_markdown(run: Run) -> str:
    """The table, what surrounded it, and the notes below it."""
    around = run.surroundings
    lines = run.sorted_lines()
    settings = ", ".join(f"{name}={value}" for name, value in sorted(around.settings.items()))
    where = (
        f"outboxq {around.outboxq}, Python {around.python}, SQLAlchemy {around.sqlalchemy}, {around.server}, "
        f"{around.cores} cores. Medians of {run.repeats} repeats, with the lowest and the highest; a "
        f"ratio with these is the median of the repeats' own. Size {around.size}."
    )
    parts = [where, f"Server: {settings}.", "\n".join([_HEAD, *(_row(line) for line in lines)])]
    measured = [line for line in lines if isinstance(line, Comparison)]
    notes = [f"- {line.number} ({line.what}): {note}" for line in measured for note in _notes(line)]
    parts += ["\n".join(notes)] if notes else []
    parts += [_drift_sentence(run.drift)] if run.drift is not None else []
    return "\n\n".join([*parts, f"The run took {run.seconds:,.0f} s.\n"])


def shown(value: float) -> str:
    """A figure with as many digits as it deserves."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _row(line: Comparison | Unsupported) -> str:
    if isinstance(line, Unsupported):
        return f"| {line.number} | {line.what} | {line.reason} | | | |"
    limit = "" if line.limit is None else f"{_series(line.limit)}: {line.limit_name}"
    return f"| {line.number} | {line.what} | {_series(line.ours)} | {limit} | {_ratio(line)} | {_target(line)} |"


def _notes(line: Comparison) -> Sequence[str]:
    others = ", ".join(f"{name} {shown(series.median)}" for name, series in line.others)
    return (*line.notes, f"the others gave {others} {line.ours.unit}") if others else line.notes


def _series(series: Series) -> str:
    spread = f" ({shown(series.lowest)} to {shown(series.highest)})" if len(series.values) > 1 else ""
    return f"{shown(series.median)} {series.unit}{spread}"


def _ratio(line: Comparison) -> str:
    if line.ratio is None:
        return ""
    spread = f" ({min(line.ratios):.2f} to {max(line.ratios):.2f})" if len(line.ratios) > 1 else ""
    return f"{line.ratio:.2f}{spread}"


def _target(line: Comparison) -> str:
    if line.target is None:
        return ""
    sign = "at most" if line.better is Better.lower else "at least"
    verdict = {True: ", met", False: ", **missed**", None: ""}[line.is_met]
    return f"{sign} {line.target:g}{verdict}"


def _line(line: Comparison | Unsupported) -> dict[str, Any]:
    named = {"number": line.number, "scenario": line.scenario, "what": line.what}
    if isinstance(line, Unsupported):
        return {**named, "unsupported": line.reason}
    return {
        **named,
        "ours": _figures(line.ours),
        "limit": None if line.limit is None else {"name": line.limit_name, **_figures(line.limit)},
        "ratio": line.ratio,
        "ratios": list(line.ratios),
        "target": line.target,
        "better": line.better.value,
        "met": line.is_met,
        "notes": list(line.notes),
        "others": {name: _figures(series) for name, series in line.others},
    }


def _figures(series: Series) -> dict[str, Any]:
    return {
        "unit": series.unit,
        "median": series.median,
        "min": series.lowest,
        "max": series.highest,
        "values": list(series.values),
    }


def _drift(drift: tuple[Series, Series]) -> dict[str, Any]:
    return {"first": _figures(drift[0]), "last": _figures(drift[1]), "percent": drift_percent(drift)}


def _drift_sentence(drift: tuple[Series, Series]) -> str:
    first, last = drift
    return (
        f"Drift of the machine: the same limit gave {_series(first)} first and {_series(last)} last, "
        f"{drift_percent(drift):+.0f} %."
    )
