"""Plots: one SVG per scenario, a bar for each figure, drawn by hand so that they need no library."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.figures import Comparison, Run, Series
from benchmarks.report import shown

_WIDTH, _BAR, _GAP, _TEXT = 860, 18, 26, 11
_OURS, _LIMIT = "#2563eb", "#9ca3af"


def write_plots(run: Run, directory: Path) -> list[Path]:
    """One file per scenario that has figures, by its name, or per picture that its lines name."""
    directory.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, list[Comparison]] = {}
    for line in run.sorted_lines():
        if isinstance(line, Comparison):
            pictures.setdefault(line.plot or line.scenario, []).append(line)
    written: list[Path] = []
    for name, lines in pictures.items():
        path = directory / f"{name}.svg"
        path.write_text(plot(_bars(lines)))
        written.append(path)
    return written


def plot(bars: Mapping[str, tuple[Series, str]]) -> str:
    """Bars of the medians, with a line from the lowest to the highest; each unit has a scale of its own."""
    tops = {unit: max(bar.highest for bar, _ in bars.values() if bar.unit == unit) for unit in _units(bars)}
    drawn = [_bar(place, name, *bars[name], tops[bars[name][0].unit]) for place, name in enumerate(bars)]
    height = len(bars) * (_BAR + _GAP) + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="{_TEXT}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{"".join(drawn)}</svg>\n'
    )


def _units(bars: Mapping[str, tuple[Series, str]]) -> Iterable[str]:
    return {series.unit for series, _ in bars.values()}


def _bars(lines: Sequence[Comparison]) -> dict[str, tuple[Series, str]]:
    """Ours first, then everything that it is held against, the largest first."""
    bars = {line.what: (line.ours, _OURS) for line in lines}
    others = [(line.limit_name, line.limit) for line in lines if line.limit is not None]
    others += [other for line in lines for other in line.others]
    for name, series in sorted(others, key=lambda other: -other[1].median):
        bars.setdefault(name, (series, _LIMIT))
    return bars


def _bar(place: int, name: str, series: Series, color: str, top: float) -> str:
    scale = (_WIDTH - 40) / (top if top > 0 else 1.0)
    y = place * (_BAR + _GAP) + _GAP
    # A difference may be below zero: then there is no bar.
    low, middle, high = (10 + max(value, 0.0) * scale for value in (series.lowest, series.median, series.highest))
    label = escape(f"{name}: {shown(series.median)} {series.unit}")
    return (
        f'<text x="10" y="{y - 5}">{label}</text>\n'
        f'<rect x="10" y="{y}" width="{max(middle - 10, 1):.1f}" height="{_BAR}" fill="{color}"/>\n'
        f'<path d="M{low:.1f} {y + _BAR / 2}H{high:.1f}" stroke="black"/>\n'
    )
