"""Redaction: the texts of a failure without the payload.

Error texts of drivers quote parameters and row values, those of Pydantic their input: these parts are left out. In the
rest of a text every value of an argument is replaced by the argument's name, as it is stored and in Python's other
spellings. Not promised: values of one character, which identify nothing; what a handler makes of a value, such as a
slice or a hash; and the rest of a value that the text repeats over its own end.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import date, datetime
from itertools import chain
from operator import itemgetter
from typing import Any

import msgspec
import psycopg
from sqlalchemy.exc import StatementError

from outboxq.codec.text import MAX_MESSAGE_CHARACTERS
from outboxq.database.errors import sqlstate_of
from outboxq.errors import CallRefused, EffectFailed, OutboxqError, PermanentError

# The part of a text that is read: replacing values may make it shorter.
READ_CHARACTERS = 2 * MAX_MESSAGE_CHARACTERS
_LABEL_CHARACTERS = 63
# The SQLSTATE class whose texts quote the offending value.
_DATA_EXCEPTION = "22"
# DETAIL quotes rows, CONTEXT those of a COPY, LINE and QUERY statements with their literals, SQLAlchemy the parameters.
_QUOTED_ROWS = re.compile(r"LINE \d+:|DETAIL:|CONTEXT:|QUERY:|\[SQL:|\[parameters:|Original exception was:")
# Fields of a server's report that quote rows and statements. Its text has their titles in the server's language.
_QUOTING_FIELDS = ("message_detail", "context", "internal_query")
# Pydantic quotes its input, without the middle of a long one, so that its value is not found.
_INPUT = re.compile(r"(?<=input_value=).*?(?=, input_type=|\Z)", re.DOTALL)
# Values of this length and longer are replaced inside other words, too.
_LONG_VALUE = 8
_ESCAPED = re.compile(r"""["'\\]""")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DATETIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?")
# The most values, counted in each spelling, to search for: a text of READ_CHARACTERS takes 4 µs for each.
MOST_VALUES = 10_000
_TOO_MANY = "(text withheld: there are too many values that it may quote)"


class Redactor:
    """Takes the payload out of the texts of one failure, unless its handler wants them whole.

    It reads READ_CHARACTERS of a text and of a value, and withholds all texts if there are more than MOST_VALUES.

    Args:
        args: The stored arguments, of all jobs of the call that failed; None if texts are kept whole.
        errors: The exceptions of the failure. The texts of some must not appear in the texts of others.
    """

    def __init__(self, args: Sequence[str] | None, errors: Iterable[BaseException] = ()) -> None:
        self._is_whole = args is None
        quoting = _quoting_texts(errors)
        self._labels, found = dict.fromkeys(quoting, "(text withheld)"), len(quoting)
        for value, name in chain.from_iterable(map(_leaves, args or ())):
            label = f"<{name[:_LABEL_CHARACTERS]}>"
            for spelling in _spellings(value):
                self._labels.setdefault(spelling[:READ_CHARACTERS], label)
                found += 1
            if found > MOST_VALUES:
                break
        self._has_too_many = found > MOST_VALUES
        # The longest first: a short value counts as a word next to a longer one.
        self._values = sorted(self._labels, key=len, reverse=True)

    def redact(self, text: str, kept_characters: int = READ_CHARACTERS) -> str:
        """The beginning of a text without quoted rows, and with the names of arguments in place of their values.

        All values are searched in the original text: none is hidden by an overlap, or found in a label. A value shorter
        than _LONG_VALUE counts only as a whole word: "order" is not replaced in "ordered".
        """
        if self._is_whole:
            return text[:kept_characters]
        if self._has_too_many:
            return _TOO_MANY
        quoted = _QUOTED_ROWS.search(text, 0, kept_characters)
        end = quoted.start() if quoted else kept_characters
        kept = _INPUT.sub("(withheld)", text[:end])
        # With as much after it as a value that is cut may have.
        read = kept + text[end : end + READ_CHARACTERS]
        is_word = bytearray([character.isalnum() or character == "_" for character in read]) + b"\0"
        found: list[tuple[int, int, str]] = []
        for value in self._values:
            last = len(kept) - 1 + len(value)
            start = read.find(value, 0, last)
            while start >= 0:
                end = start + len(value)
                is_replaced = len(value) >= _LONG_VALUE or not (is_word[start - 1] or is_word[end])
                if is_replaced:
                    found.append((start, end, self._labels[value]))
                    is_word[start:end] = bytes(len(value))
                start = read.find(value, end if is_replaced else start + 1, last)
        parts, reached = list[str](), 0
        # Of those that begin at one place, the longest is first: it was found first.
        for start, end, label in sorted(found, key=itemgetter(0)):
            if end > reached:
                parts += read[reached:start], label
                reached = end
        return "".join((*parts, read[reached : len(kept)])).rstrip()

    def message(self, error: BaseException, kept_characters: int = READ_CHARACTERS) -> str:
        """The text of an exception without the payload."""
        if self._is_whole:
            return text_of(original_of(error))[:kept_characters]
        if isinstance(error, EffectFailed | CallRefused):
            return str(error).replace(error.reason, self.redact(error.reason)) if error.reason else str(error)
        kind = type(error)
        # Our own texts never quote a value. A PermanentError is raised by handlers, as are classes that they derive.
        if isinstance(error, OutboxqError) and kind.__module__.startswith("outboxq.") and kind is not PermanentError:
            return str(error)
        original = original_of(error)
        sqlstate = sqlstate_of(original)
        if sqlstate is not None and sqlstate.startswith(_DATA_EXCEPTION):
            return f"SQLSTATE {sqlstate} (its text is withheld, because it may quote data)"
        if not isinstance(original, psycopg.Error):
            return self.redact(text_of(original), kept_characters)
        if not sqlstate:
            return "the driver failed"
        return f"{self.redact(text_of(original.diag.message_primary), kept_characters)} (SQLSTATE {sqlstate})"


def _quoting_texts(errors: Iterable[BaseException]) -> list[str]:
    """The texts of the failure that quote rows and data, which other texts may repeat."""
    quoting: list[object] = []
    for error in errors:
        # Users' classes can have another such attribute, which may raise.
        with suppress(BaseException):
            # The server's report, of psycopg; other drivers have the same fields in their text, with English titles.
            report: Any = getattr(error, "diag", None)
            for name in _QUOTING_FIELDS:
                quoting.append(getattr(report, name, None))  # noqa: PERF401  # kept if the next one raises
            if (sqlstate_of(error) or "").startswith(_DATA_EXCEPTION):
                quoting.append(report.message_primary if isinstance(error, psycopg.Error) else text_of(error))
    return [text[:READ_CHARACTERS] for text in quoting if type(text) is str and text]


def original_of(error: BaseException) -> BaseException:
    """The driver's error that SQLAlchemy has wrapped, or the error itself."""
    # By its type: users' classes can have another `__class__`, or none.
    original = None
    with suppress(BaseException):
        original = error.orig if issubclass(type(error), StatementError) else None  # type: ignore[attr-defined]
    return original if original is not None and issubclass(type(original), BaseException) else error


def text_of(value: object) -> str:
    """The text of any object, even if its class raises."""
    try:
        # An exact str: a class derived from it could do anything when it is read.
        return str.__str__(str(value))
    except BaseException:  # noqa: BLE001  # users' code; a broken __str__ must not take the job's record with it
        return f"(the text of this {type(value).__name__} cannot be read)"


def _leaves(args: str) -> list[tuple[str, str]]:
    """The values in the stored arguments that can identify anything, each with its argument's name."""
    try:
        fields = msgspec.json.decode(args.encode(), type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return []
    pending, found = list(fields.items()), list[tuple[str, str]]()
    while pending and len(found) <= MOST_VALUES:
        name, value = pending.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                pending += (name, key), (name, item)
        elif isinstance(value, list):
            for item in value:
                pending.append((name, item))
        elif isinstance(value, str | int | float) and not isinstance(value, bool) and len(str(value)) >= 2:
            found.append((str(value), name))
    return found


def _spellings(value: str) -> set[str]:
    """The value as it is stored, and as Python and JSON write it in a longer text."""
    found = {value}
    if not (value.isascii() and value.isprintable()) or _ESCAPED.search(value):
        # As repr(), ascii() and JSON write it, with quotes, backslashes and newlines escaped.
        found |= {repr(value)[1:-1], ascii(value)[1:-1], msgspec.json.encode(value).decode()[1:-1]}
    # A text may look like a time and be none: 30 February.
    with suppress(ValueError):
        if _DATE.fullmatch(value):
            found.add(repr(date.fromisoformat(value)))
        if _DATETIME.fullmatch(value):
            written = datetime.fromisoformat(value)
            found |= {str(written), repr(written), written.isoformat()}
    return found
