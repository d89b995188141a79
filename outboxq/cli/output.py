"""Printing: tables for people, JSON for programs, and notices on standard error.

Columns and fields have the names of the JSON's keys, and times are always written as in RFC 3339, in UTC.

Names and reasons come from the database, and may be made to deceive: they never reach a terminal as control sequences
or as markup.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import msgspec
import typer

from outboxq.codec.text import printable

# Without a terminal, which sets a width, nothing is cut off: ids are there to be copied and grepped.
_WIDTH_WITHOUT_TERMINAL = 1_000
# Attributes of things that hold JSON as text.
_DOCUMENTS = ("args", "headers", "errors", "result")


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table on standard output; numbers stand at the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    found = [[cell(value, timespec="seconds") for value in row] for row in rows]
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


def print_rows(columns: Sequence[str], rows: Iterable[object], *, title: str | None = None) -> None:
    """A table of what the JSON has under the same names."""
    print_table(columns, ([_plain(name, getattr(row, name)) for name in columns] for row in rows), title=title)


def print_detail(detail: object, *, as_json: bool) -> None:
    """Print one thing in full: its fields, those of its summary, and what is stored of it as JSON text."""
    fields: dict[str, Any] = {}
    for name, value in asdict(detail).items():  # type: ignore[call-overload]  # a dataclass, whichever the command shows
        fields |= value if isinstance(value, dict) else {name: value}
    documents = {name: fields.pop(name) for name in _DOCUMENTS if name in fields}
    texts = {name: _with_our_times(text) if name == "errors" and text else text for name, text in documents.items()}
    if as_json:
        # The stored text itself: decoding it could change a number.
        raw = {name: None if text is None else msgspec.Raw(text.encode()) for name, text in texts.items()}
        print_json({**fields, **raw})
        return
    print_fields((name, _plain(name, value)) for name, value in fields.items())
    for name, text in texts.items():
        if text is not None:
            _print_document(name, text)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Names and values, a line each; those without a value are left out."""
    shown = [(name, cell(value)) for name, value in fields if value is not None]
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        typer.echo(f"{name:<{width}}  {value}")


def _print_document(name: str, json_text: str) -> None:
    formatted = msgspec.json.format(json_text, indent=2)
    typer.echo(f"{name}:")
    for line in formatted.split("\n"):
        typer.echo(f"  {printable(line)}")


def _plain(name: str, value: object) -> object:
    # A pid is a name: without separators of thousands.
    return str(value) if name == "pid" and value is not None else value


def _with_our_times(errors: str) -> str:
    """The records of failed attempts, whose times the database wrote in the zone of the relay's session."""
    try:
        records = msgspec.json.decode(errors, type=list[dict[str, object]])
    except (msgspec.DecodeError, RecursionError):
        return errors
    for record in records:
        written = record.get("at")
        if isinstance(written, str):
            with suppress(ValueError):
                record["at"] = moment(datetime.fromisoformat(written))
    return msgspec.json.encode(records).decode()


def notice(message: str) -> None:
    """A line on standard error."""
    typer.echo(printable(message), err=True)


def cell(value: object, *, timespec: str = "auto") -> str:
    """A value as people read it, a time as `isoformat` writes it with this `timespec`."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.1f}"
        case datetime():
            return moment(value, timespec)
        case _:
            return printable(str(value))


def moment(value: datetime, timespec: str = "auto") -> str:
    """A time in UTC, as the JSON has it: 2026-01-31T08:00:00.123456Z."""
    return value.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")
