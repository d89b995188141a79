"""Small charts as SVG, made on the server: lines of numbers, and stacked bars. They need no script and no style."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

_TONES = ("a", "b", "c", "d")


@dataclass(frozen=True, slots=True)
class Series:
    """The numbers of one line of a chart, or of all parts of one colour in stacked bars.

    Attributes:
        label: The name of the series.
        values: The numbers, the oldest first. None means that the number at that time is not known: nothing is drawn.
        tone: The colour: `a` is calm, `b` a second calm one, `c` a warning, `d` an alarm.
    """

    label: str
    values: Sequence[float | None]
    tone: str = "a"


def bars(series: Sequence[Series], *, label: str, width: int = 600, height: int = 120) -> Markup:
    """Return a chart of stacked bars as SVG: one bar for each point in time, with a part for each series."""
    number = max((len(each.values) for each in series), default=0)
    most = highest(series, stacked=True) or 1
    step = width / max(number, 1)
    drawn: list[Markup] = []
    for place in range(number):
        top = float(height)
        for each in series:
            value = each.values[place] or 0
            if not value:
                continue
            # A bar that exists can be seen, however large the others are.
            size = max(1.5, value / most * (height - 4))
            top -= size
            drawn.append(
                Markup('<rect class="tone-{tone}" x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}"/>').format(
                    tone=each.tone, x=place * step + 0.5, y=max(top, 0), w=max(step - 1, 0.5), h=size
                )
            )
    return _frame(label, width, height, Markup("").join(drawn))


def lines(series: Sequence[Series], *, label: str, width: int = 600, height: int = 120) -> Markup:
    """Return a chart of lines as SVG: one line for each series, all on one scale that begins at zero."""
    most = max((each for one in series for each in one.values if each is not None), default=0)
    drawn = [
        Markup('<polyline class="line tone-{tone}" points="{points}"/>').format(
            tone=each.tone, points=_points(each.values, width, height, most)
        )
        for each in series
    ]
    return _frame(label, width, height, Markup("").join(drawn))


def highest(series: Sequence[Series], *, stacked: bool) -> float:
    """Return the largest value that a chart has to show: the largest number or, for stacked bars, the largest sum.

    Return 0 if there are no numbers.
    """
    if not stacked:
        return max((each for one in series for each in one.values if each is not None), default=0)
    number = max((len(each.values) for each in series), default=0)
    return max((sum(each.values[place] or 0 for each in series) for place in range(number)), default=0)


def _frame(label: str, width: int, height: int, inside: Markup) -> Markup:
    return Markup(
        '<svg class="chart" viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        '<path class="base" d="M0 {base}H{w}"/>{inside}</svg>'
    ).format(w=width, h=height, base=height - 0.5, label=label, inside=inside)


def _points(values: Sequence[float | None], width: int, height: int, most: float) -> str:
    step = width / max(len(values) - 1, 1)
    scale = (height - 3) / (most or 1)
    return " ".join(
        f"{place * step:.1f},{height - 1.5 - value * scale:.1f}"
        for place, value in enumerate(values)
        if value is not None
    )
