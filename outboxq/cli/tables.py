"""Printing of tables: fitted to the width of a terminal, or tab-separated in a pipe.

A terminal gets no columns without a value, and fewer columns if it is narrow. Ids are never cut, and times are printed
as ages. A pipe gets every column with its full value, a line for each row, so that `cut -f 1` works.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import typer

from outboxq.cli.output import print_wrapped
from outboxq.codec.display import in_full, in_short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Sort: TypeAlias = Literal["id", "name", "text", "plain"]

_GAP = "  "
# A text with less room than this gets a line of its own.
_TEXT_ROOM = 40
_LEAST_NAME = 10
# A longer id moves the rest of its own line to the right, and not that of all lines.
_LONGEST_PADDING = 48
_ALARMING = ("orphaned", "suspect", "unknown")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a list, such as that of `outboxq jobs list`.

    Args:
        name: The attribute of a row that the column shows, and its key in the JSON.
        sort: The sort of its values. A `name` is cut only if nothing else makes room. A `text` is cut to one line;
            `show` prints all of it. Other values are never cut.
        rank: 0: the column is always shown. 1: it is left out only if even shortened names leave no room. From 2 on:
            columns of the highest rank are left out first.
        if_empty: True if the column is shown even if no row has a value.
    """

    name: str
    sort: Sort = "plain"
    rank: int = 0
    if_empty: bool = False

    @property
    def heading(self) -> str:
        """The column's title: its name without `_at` or a unit, which the printed values show, as in `run: in 5 m`."""
        return self.name.removesuffix("_at").removesuffix("_seconds").replace("_per_minute", "/min")

    def cell(self, value: object, now: datetime | None) -> str:
        """Return a value as text for a table. An id that is a number, such as a pid, has no separators."""
        return in_full(value) if self.sort == "id" else in_short(value, now)


@dataclass(slots=True)
class _Shown:
    """A column of a table that is being printed: the texts of its cells, its width, and if it is aligned right."""

    column: Column
    cells: list[str]
    to_the_right: bool
    width: int = field(init=False)

    def __post_init__(self) -> None:
        natural = max(map(_width_of, (self.column.heading, *self.cells)))
        self.width = min(natural, _LONGEST_PADDING) if self.column.sort == "id" else natural


def print_table(
    columns: Sequence[Column],
    rows: Iterable[object],
    *,
    now: datetime | None = None,
    wide: bool = False,
    title: str | None = None,
    in_words: Callable[[Any], str] | None = None,
) -> None:
    """Print a table on standard output.

    Args:
        rows: Things with an attribute for each column.
        now: The database's time, from which ages count; without it, times are printed in full.
        wide: Print every column, and every value whole, also if the terminal is too narrow.
        title: A line to print above the table.
        in_words: Formats a row as a sentence; used for all rows if the terminal is too narrow for the required columns.
    """
    rows = list(rows)
    found = [[getattr(row, column.name) for column in columns] for row in rows]
    if title is not None:
        typer.echo(f"\n{title}")
    if not sys.stdout.isatty():
        _print_tabbed(columns, found)
        return
    if not found:
        return
    from rich.console import Console

    console = Console(highlight=False)
    shown = [
        _shown(column, values, now)
        for column, values in zip(columns, _transposed(found, len(columns)), strict=True)
        if wide or column.if_empty or any(values)
    ]
    if in_words is not None and not wide and _total(shown) > console.width:
        for row in rows:
            print_wrapped(in_words(row), hanging=_GAP)
        return
    _print(console, shown, None if wide else _fit(shown, console.width), len(found))


def _print_tabbed(columns: Sequence[Column], found: Sequence[Sequence[object]]) -> None:
    typer.echo("\t".join(column.name for column in columns))
    for values in found:
        typer.echo("\t".join(map(in_full, values)))


def _shown(column: Column, values: Sequence[object], now: datetime | None) -> _Shown:
    return _Shown(column, [column.cell(value, now) for value in values], is_number(values))


def _transposed(rows: Sequence[Sequence[object]], width: int) -> list[list[object]]:
    return [[row[number] for row in rows] for number in range(width)]


def is_number(values: Sequence[object]) -> bool:
    """Return True if all values of a column are numbers or None; such a column is aligned right."""
    return all(value is None or isinstance(value, int | float) for value in values)


def _fit(shown: list[_Shown], width: int) -> _Shown | None:
    """Make a table fit the width: remove columns from the list `shown`, and make others narrower.

    Return the column whose text is to be printed on a line of its own below each row; None if there is none.
    """
    text = next((each for each in shown if each.column.sort == "text"), None)
    if text is not None:
        shown.remove(text)
        needed = min(text.width, _TEXT_ROOM)
        if _total([each for each in shown if each.column.rank <= 1]) + len(_GAP) + needed <= width:
            _drop(shown, width - needed - len(_GAP), least_rank=2)
            text.width = min(text.width, width - _total(shown) - len(_GAP))
            shown.append(text)
            return None
    _drop(shown, width, least_rank=2)
    names = [each for each in shown if each.column.sort == "name"]
    while _total(shown) > width and any(each.width > _LEAST_NAME for each in names):
        max(names, key=lambda each: each.width).width -= 1
    _drop(shown, width, least_rank=1)
    if text is not None:
        text.width = width - len(_GAP)
    return text


def _drop(shown: list[_Shown], width: int, least_rank: int) -> None:
    """Remove columns from the list `shown`, the highest rank first, until the table fits the width.

    Columns of a rank below `least_rank` stay.
    """
    can_go = [each for each in shown if each.column.rank >= least_rank]
    for each in sorted(can_go, key=lambda each: -each.column.rank):
        if _total(shown) <= width:
            return
        shown.remove(each)


def _total(shown: Sequence[_Shown]) -> int:
    return sum(each.width for each in shown) + len(_GAP) * max(0, len(shown) - 1)


def _print(console: "Console", shown: Sequence[_Shown], below: _Shown | None, number: int) -> None:
    _print_line(console, [(each, each.column.heading) for each in shown], style="bold")
    if below is not None:
        _print_line(console, [(below, f"{_GAP}{below.column.heading}")], style="bold")
    for row in range(number):
        _print_line(console, [(each, each.cells[row]) for each in shown])
        if below is not None and below.cells[row]:
            console.print(_GAP + _cut(below.cells[row], below.width), markup=False, soft_wrap=True)


def _print_line(console: "Console", cells: Sequence[tuple[_Shown, str]], style: str = "") -> None:
    from rich.text import Text

    line = Text(style=style)
    for number, (each, value) in enumerate(cells):
        is_last = number == len(cells) - 1
        line.append_text(_padded(each, value, is_last=is_last))
        if not is_last:
            line.append(_GAP)
    line.rstrip()
    console.print(line, soft_wrap=True)


def _padded(each: _Shown, value: str, *, is_last: bool) -> "Text":
    from rich.text import Text

    value = value if each.column.sort == "id" else _cut(value, each.width)
    padding = " " * (each.width - _width_of(value))
    cell = Text(value, style="red" if value in _ALARMING else "")
    if each.to_the_right:
        return Text(padding).append_text(cell)
    return cell if is_last else cell.append(padding)


def _width_of(text: str) -> int:
    """Return the number of terminal columns that a text takes: a wide character takes two."""
    from rich.cells import cell_len

    return cell_len(text)


def _cut(text: str, width: int) -> str:
    if _width_of(text) <= width:
        return text
    kept = text[:width]
    while kept and _width_of(kept) >= width:
        kept = kept[:-1]
    return f"{kept.rstrip()}…"
