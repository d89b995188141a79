"""Redaction: the texts of a failure without the payload.

Error texts of drivers quote parameters and row values, those of Pydantic their input: these parts are left out. In the
rest of a text every value of an argument is replaced by the argument's name, as it is stored and in Python's other
spellings of it. Not promised are values of one character, because they identify nothing, what a handler makes of a
value, such as a slice or a hash of it, and the rest of a value that the text repeats over its own end.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import msgspec
import psycopg
from sqlalchemy.exc import StatementError

from outboxq.codec.text import MAX_MESSAGE_CHARACTERS
from outboxq.database.errors import sqlstate_of
from outboxq.errors import CallRefused, EffectFailed, OutboxqError, PermanentError

# How much of a text is read: replacing values may make it shorter.
READ_CHARACTERS = 2 * MAX_MESSAGE_CHARACTERS
_LABEL_CHARACTERS = 63
# The SQLSTATE class whose texts quote the offending value.
_DATA_EXCEPTION = "22"
# DETAIL quotes rows, CONTEXT those of a COPY, LINE and QUERY statements with what was written into them, and SQLAlchemy
# the parameters.
_QUOTED_ROWS = re.compile(r"LINE \d+:|DETAIL:|CONTEXT:|QUERY:|\[SQL:|\[parameters:|Original exception was:")
# Fields of a server's report that quote rows and statements. In its text they have titles of the server's language.
_QUOTING_FIELDS = ("message_detail", "context", "internal_query")
# Pydantic quotes its input, and leaves out the middle of a long one, so that it is not found by its value.
_INPUT = re.compile(r"(?<=input_value=).*?(?=, input_type=|\Z)", re.DOTALL)
# Values of this length and longer are replaced inside other words, too.
_LONG_VALUE = 8
_ESCAPED = re.compile(r"""["'\\]""")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DATETIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?")
# How many values are searched for, counted in each of their spellings: a text of READ_CHARACTERS takes 4 µs for each.
MOST_VALUES = 10_000
_TOO_MANY = "(text withheld: there are too many values that it may quote)"


class Redactor:
    """Takes the payload out of the texts of one failure: of an exception, and of those that led to it.

    Its work is bounded: it reads READ_CHARACTERS of a text and of a value, and withholds all texts if there are more
    than MOST_VALUES.

    Args:
        args: The stored arguments, of all jobs of the call that failed.
        errors: The exceptions of the failure. The texts of some must not appear in the texts of others.
    """

    def __init__(self, args: Sequence[str], errors: Iterable[BaseException] = ()) -> None:
        values = (named for each in args for named in _named_values(each))
        withheld = ((text, "(text withheld)") for text in _quoting_texts(errors))
        pairs = chain(withheld, values)
        labels: dict[str, str] = {}
        for value, label in islice(pairs, MOST_VALUES):
            labels.setdefault(value[:READ_CHARACTERS], label)
        # The longest first: a short value is a word of its own also beside a longer one.
        self._labels = sorted(labels.items(), key=lambda pair: -len(pair[0]))
        self._has_too_many = next(pairs, None) is not None

    def redact(self, text: str, kept_characters: int = READ_CHARACTERS) -> str:
        """The beginning of a text without quoted rows, and with the names of arguments in place of their values."""
        if self._has_too_many:
            return _TOO_MANY
        quoted = _QUOTED_ROWS.search(text, 0, kept_characters)
        end = quoted.start() if quoted else kept_characters
        kept = _INPUT.sub("(withheld)", text[:end])
        # With as much after it as a value that the cut goes through may have.
        return _replaced(kept + text[end : end + READ_CHARACTERS], self._labels, len(kept)).rstrip()

    def message(self, error: BaseException, kept_characters: int = READ_CHARACTERS) -> str:
        """The text of an exception without the payload."""
        if isinstance(error, EffectFailed | CallRefused):
            return str(error).replace(error.reason, self.redact(error.reason)) if error.reason else str(error)
        kind = type(error)
        # Our own texts never quote a value. A PermanentError is raised by handlers, as are classes that they derive.
        is_ours = isinstance(error, OutboxqError) and kind.__module__.startswith("outboxq.")
        if is_ours and kind is not PermanentError:
            return str(error)
        return self._foreign_message(original_of(error), kept_characters)

    def _foreign_message(self, error: BaseException, kept_characters: int) -> str:
        sqlstate = sqlstate_of(error)
        if sqlstate is not None and sqlstate.startswith(_DATA_EXCEPTION):
            return f"SQLSTATE {sqlstate} (its text is withheld, because it may quote data)"
        if isinstance(error, psycopg.Error):
            if not sqlstate:
                return "the driver failed"
            return f"{self.redact(text_of(error.diag.message_primary), kept_characters)} (SQLSTATE {sqlstate})"
        return self.redact(text_of(error), kept_characters)


def redact(message: str, args: str) -> str:
    """The beginning of `message`, with every value of the stored arguments replaced by the name of its argument."""
    return Redactor([args]).redact(message)


def _named_values(args: str) -> Iterator[tuple[str, str]]:
    for value, name in _leaves(args):
        label = f"<{name[:_LABEL_CHARACTERS]}>"
        yield from ((spelling, label) for spelling in set(_spellings(value)))


def _replaced(text: str, labels: Iterable[tuple[str, str]], kept_characters: int) -> str:
    """The first `kept_characters` of a text, with a label in place of every value that begins there.

    All values are found in the original text, so no value is missed because another one overlaps it, or in a label.
    A value that is shorter than _LONG_VALUE counts as a word of its own only: "order" is not replaced in "ordered".
    """
    is_word = bytearray(character.isalnum() or character == "_" for character in text) + b"\0"
    found: list[tuple[int, int, str]] = []
    for value, label in labels:
        last = kept_characters - 1 + len(value)
        start = text.find(value, 0, last)
        while start >= 0:
            end = start + len(value)
            is_replaced = len(value) >= _LONG_VALUE or not (is_word[start - 1] or is_word[end])
            if is_replaced:
                found.append((start, end, label))
                is_word[start:end] = bytes(len(value))
            start = text.find(value, end if is_replaced else start + 1, last)
    parts, reached = list[str](), 0
    # Of those that begin at one place, the longest is first, as it was found first.
    for start, end, label in sorted(found, key=itemgetter(0)):
        if end > reached:
            parts += text[reached:start], label
            reached = end
    return "".join((*parts, text[reached:kept_characters]))


def _quoting_texts(errors: Iterable[BaseException]) -> Iterator[str]:
    for error in errors:
        quoting: list[object] = []
        # Users' classes can call something else so, and raise when it is looked at.
        with suppress(BaseException):
            # The server's report, of psycopg; other drivers have the same fields in their text, with English titles.
            report: Any = getattr(error, "diag", None)
            quoting.extend(getattr(report, name, None) for name in _QUOTING_FIELDS)
            if (sqlstate_of(error) or "").startswith(_DATA_EXCEPTION):
                quoting.append(report.message_primary if isinstance(error, psycopg.Error) else text_of(error))
        yield from (text for text in quoting if type(text) is str and text)


def original_of(error: BaseException) -> BaseException:
    """The driver's error that SQLAlchemy has wrapped, or the error itself."""
    # By its type: users' classes can have a `__class__` that says something else, or none.
    original = None
    with suppress(BaseException):
        original = error.orig if issubclass(type(error), StatementError) else None  # type: ignore[attr-defined]
    return original if original is not None and issubclass(type(original), BaseException) else error


def text_of(value: object) -> str:
    """The text of any object, whatever its class does."""
    try:
        # An exact str: a class derived from it could do anything when it is looked through.
        return str.__str__(str(value))
    except BaseException:  # noqa: BLE001  # users' code; a broken __str__ must not take the job's record with it
        return f"(the text of this {type(value).__name__} cannot be read)"


def _leaves(args: str) -> Iterator[tuple[str, str]]:
    """The values in the stored arguments that can identify anything, each with its argument's name."""
    try:
        fields = msgspec.json.decode(args.encode(), type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return
    pending = list(fields.items())
    while pending:
        name, value = pending.pop()
        if isinstance(value, str) and len(value) >= 2:
            yield value, name
        elif isinstance(value, int | float) and not isinstance(value, bool) and len(str(value)) >= 2:
            yield str(value), name
        elif isinstance(value, dict):
            pending.extend((name, item) for pair in value.items() for item in pair)
        elif isinstance(value, list):
            pending.extend((name, item) for item in value)


def _spellings(value: str) -> Iterator[str]:
    yield value
    if not (value.isascii() and value.isprintable()) or _ESCAPED.search(value):
        # As repr(), ascii() and JSON write it, with quotes, backslashes and newlines escaped.
        yield repr(value)[1:-1]
        yield ascii(value)[1:-1]
        yield msgspec.json.encode(value).decode()[1:-1]
    if _DATE.fullmatch(value):
        with suppress(ValueError):
            yield repr(date.fromisoformat(value))
    if _DATETIME.fullmatch(value):
        # A text may look like a time without being one: 30 February.
        with suppress(ValueError):
            written = datetime.fromisoformat(value)
            yield from (str(written), repr(written), written.isoformat())
