"""Printing: details for people, JSON for programs, and notices on standard error.

Details name each field by its key in the JSON. Texts from the database may be crafted to deceive, so no control
sequence or markup in them reaches the terminal.
"""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict
from datetime import datetime
from typing import Any, TextIO

import msgspec
import typer

from outboxq.codec.display import in_full, moment
from outboxq.codec.text import escaped_json, printable
from outboxq.error_record import read_attempts

# Attributes that hold JSON as text.
_DOCUMENTS = ("args", "options", "headers", "errors", "result", "filter", "change")
# Long texts, which are printed after the short fields.
_LONG = ("reason", "error")
_with_json = ContextVar("with_json", default=False)


@contextmanager
def speaking_json(wanted: bool) -> Iterator[None]:
    """Print notices and errors in the block as JSON if `wanted`: one object on each line, as `{"notice": "..."}`."""
    token = _with_json.set(wanted)
    try:
        yield
    finally:
        _with_json.reset(token)


def notice(message: str) -> None:
    """Print a message on standard error: as JSON with --json; at a terminal, a long one is broken between words."""
    shown = _one_line({"notice": message}) if _with_json.get() else _broken(printable(message), sys.stderr, "", "  ")
    typer.echo(shown, err=True)


def fail(message: str, exit_code: int, kind: str) -> None:
    """Print an error on standard error, as JSON if the command was called with --json.

    Args:
        kind: The name of the error's class.
    """
    if _with_json.get():
        text = _one_line({"error": message, "type": kind, "exit_code": exit_code})
    else:
        text = "\n".join(map(printable, f"Error: {message}".split("\n")))
    sys.stderr.write(f"{text}\n")


def _one_line(value: object) -> str:
    return escaped_json(msgspec.json.encode(value).decode())


def print_json(value: object) -> None:
    """Print a JSON document on standard output."""
    typer.echo(escaped_json(_indented(msgspec.json.encode(value).decode())))


def print_json_line(value: object) -> None:
    """Print a JSON value on one line of standard output, and flush it."""
    typer.echo(_one_line(value))
    sys.stdout.flush()


def print_wrapped(text: str, indent: str = "", hanging: str | None = None) -> None:
    """Print a line on standard output; at a terminal, a long one is broken between words.

    Args:
        indent: The text before the first line.
        hanging: The text before the other lines; by default `indent`.
    """
    typer.echo(_broken(text, sys.stdout, indent, indent if hanging is None else hanging))


def _broken(text: str, stream: TextIO, indent: str, hanging: str) -> str:
    """Return the text, with line breaks between words if `stream` is a terminal. Words stay whole: they may be ids."""
    if not stream.isatty():
        return f"{indent}{text}"
    lines = textwrap.wrap(
        text,
        shutil.get_terminal_size().columns,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) or indent.rstrip()


def print_detail(detail: object, *, as_json: bool) -> None:
    """Print one thing, such as a `JobDetail`, in full: its fields and those of a nested object, then its documents.

    Documents are the parts that are stored as JSON text, such as arguments.
    """
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
    print_fields(sorted(fields.items(), key=lambda field: field[0] in _LONG))
    for name, text in texts.items():
        if text is not None and not (name == "errors" and _print_attempts(text)):
            _print_document(name, text)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print names and values, one pair on each line; names without a value are left out."""
    shown = [(name, in_full(value)) for name, value in fields if value is not None]
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        print_wrapped(value, f"{name:<{width}}  ", " " * (width + 2))


def _print_document(name: str, json_text: str) -> None:
    typer.echo(f"{name}:")
    for line in _indented(json_text).split("\n"):
        typer.echo(f"  {printable(line)}")


def _indented(json_text: str) -> str:
    """Return JSON over several lines. A document that is nested too deeply to be read stays as it is."""
    try:
        return msgspec.json.format(json_text, indent=2)
    except RecursionError:
        return json_text


def _print_attempts(errors: str) -> bool:
    """Print a job's failed attempts (JSON in `errors`), each with its traceback as Python prints it.

    Return False if no attempt can be read from the JSON.
    """
    attempts = read_attempts(errors)
    if attempts:
        typer.echo("errors:")
    for attempt in attempts:
        typer.echo(printable(f"  attempt {attempt.attempt}, {attempt.at}"))
        for line in (attempt.traceback() or f"{attempt.type}: {attempt.message}").split("\n"):
            depth = "    " + " " * (len(line) - len(line.lstrip()))
            if 'File "' in line:
                # In one piece, as Python prints it: so it can be copied, and editors find the place.
                typer.echo(printable(f"    {line}"))
                continue
            print_wrapped(printable(line.strip()), depth if line.strip() else "", f"{depth}  ")
    return bool(attempts)


def _with_our_times(errors: str) -> str:
    """Return the JSON of failed attempts with their times in UTC.

    The database wrote them in the time zone of the relay's session.
    """
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
