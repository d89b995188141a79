"""Texts from any source, made safe to show in a terminal or a log, or to store in PostgreSQL; names of types."""

import sys
from collections.abc import Callable
from pathlib import PurePath
from types import TracebackType
from typing import ParamSpec

P = ParamSpec("P")

MAX_MESSAGE_CHARACTERS = 2_000


def printable(text: str) -> str:
    """Return `text` with an escape in place of each character that is not printable, such as a newline."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def escaped_json(json: str) -> str:
    """Return the same JSON with an escape for each character that is not printable, except for line breaks."""
    if json.isprintable():
        return json
    return "".join(each if each.isprintable() or each == "\n" else _json_escape(each) for each in json)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def several(number: int, one: str, many: str) -> str:
    """Format a number with its noun: `1 job`, `3,000 jobs`."""
    return f"{number:,} {one if number == 1 else many}"


def duration(seconds: float) -> str:
    """Format seconds as `42 s`, `12 min`, `3 h` or `4 days`: the largest unit of which there are at least two."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def storable(text: str) -> str:
    """Return a text that PostgreSQL can store: without NUL and lone surrogates, and cut after 2,000 characters."""
    kept = text[:MAX_MESSAGE_CHARACTERS].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return kept.encode(errors="replace").decode()


def storable_or_withheld(describe: Callable[P, str], /, *args: P.args, **kwargs: P.kwargs) -> str:
    """Return the text that `describe` returns, made storable; if `describe` raises, a text that says so.

    `describe` may call users' code, such as the `__str__` of an error; if that fails, the job's outcome has to be
    stored all the same.
    """
    try:
        return storable(describe(*args, **kwargs))
    except BaseException:  # noqa: BLE001  # the error is still recorded, by its type and place
        return "(text withheld: it could not be redacted)"


def type_name(annotation: object) -> str:
    """Return the name under which a class is documented: with its module, except for builtins.

    Annotations that are no classes are returned as written. Private modules are left out: Python 3.13 defines
    `pathlib.Path` in `pathlib._local`.
    """
    if not isinstance(annotation, type):
        return repr(annotation)
    module, name = annotation.__module__, annotation.__qualname__
    if not isinstance(module, str) or module == "builtins":
        return name
    before, _, private = f".{module}".partition("._")
    public = before[1:] or private
    is_public = private and public in sys.modules and vars(sys.modules[public]).get(name) is annotation
    return f"{public if is_public else module}.{name}"


def name_of(error: BaseException) -> str:
    """Return the name of an exception's class, as a text that PostgreSQL can store."""
    return storable_or_withheld(type_name, type(error))


def name_and_line(error: BaseException) -> str:
    """Return an exception's class and the traceback's innermost line, but not its message, which may quote secrets."""
    line: TracebackType | None = error.__traceback__
    while line is not None and line.tb_next is not None:
        line = line.tb_next
    if line is None:
        return name_of(error)
    code = line.tb_frame.f_code
    return storable(f"{name_of(error)} ({'/'.join(PurePath(code.co_filename).parts[-3:])}:{line.tb_lineno})")
