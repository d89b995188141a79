"""Printing: tables for people, JSON for programs, and notices on standard error.

Names and reasons come from the database, where anybody may have written them: they never reach a terminal as control
sequences or as markup.
"""

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec
import typer

from outboxq.printable import printable

# Nothing is cut off where no terminal sets a width: ids are there to be copied and grepped.
_WIDTH_WITHOUT_TERMINAL = 1_000


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table on standard output; numbers stand at the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    found = [[cell(value) for value in row] for row in rows]
    table = Table(
        title=None if title is None else Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False
    )
    for number, name in enumerate(columns):
        numeric = bool(found) and all(row[number].replace(",", "").isdecimal() or not row[number] for row in found)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in found:
        table.add_row(*(Text(value) for value in row))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL, highlight=False)
    console.print(table)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Names and values, a line each; those without a value are left out."""
    shown = [(name, cell(value)) for name, value in fields if value is not None]
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        typer.echo(f"{name:<{width}}  {value}")


def print_document(name: str, json_text: str) -> None:
    """A stored JSON value below its name."""
    formatted = msgspec.json.format(json_text, indent=2)
    typer.echo(f"{name}:")
    for line in formatted.split("\n"):
        typer.echo(f"  {printable(line)}")


def notice(message: str) -> None:
    """A line on standard error."""
    typer.echo(printable(message), err=True)


def cell(value: object) -> str:
    """A value as people read it."""
    match value:
        case None:
            return ""
        case int():
            return f"{value:,}"
        case float():
            return duration(value)
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M:%S")
        case _:
            return printable(str(value))


def duration(seconds: float) -> str:
    """Seconds as `0.4s`, `12s`, `3m 05s`, `2h 10m` or `4d 03h`."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f}s"
    whole = int(seconds)
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // smaller_size:02}{smaller}"
    return f"{whole}s"


def count(number: int, one: str, many: str) -> str:
    """`1 job`, `3,000 jobs`."""
    return f"{number:,} {one if number == 1 else many}"
