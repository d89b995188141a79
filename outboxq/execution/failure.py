"""What is remembered of a failed attempt: enough to find the fault, nothing of the payload.

Error texts of drivers quote parameters and row values: these parts are left out. In the rest of a message every value
of an argument is replaced by the argument's name, as it is stored and in Python's other spellings of it. Values of one
character stay, because they identify nothing, and so does what a handler makes of a value: a slice of it, its hash.
No message is kept of a handler with messages="withheld".
"""

import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, groupby
from operator import itemgetter
from pathlib import PurePath
from typing import TypeVar

import msgspec
import psycopg
from sqlalchemy.exc import StatementError

from outboxq.codec.text import MAX_MESSAGE_CHARACTERS, name_of, storable, storable_or_withheld
from outboxq.database.errors import sqlstate_of
from outboxq.errors import CallRefused, EffectFailed, OutboxqError, PermanentError
from outboxq.job import Job
from outboxq.outcomes import DeadLetter, Discard, Retry

R = TypeVar("R")

# How much of a text is read: replacing values may make it shorter.
_READ_CHARACTERS = 2 * MAX_MESSAGE_CHARACTERS
_LABEL_CHARACTERS = 63
KEPT_ERRORS = 25
_KEPT_FRAMES = 5

# Stands for the text of a handler with messages="withheld".
WITHHELD = "message withheld"

TRANSIENT = ("40001", "40P01")
# The SQLSTATE class whose texts quote the offending value.
_DATA_EXCEPTION = "22"
_QUOTED_ROWS = re.compile(r"LINE \d+:|DETAIL:|\[SQL:|\[parameters:|Original exception was:")
# Values of this length and longer are replaced inside other words, too.
_LONG_VALUE = 8
_DATETIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?")


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """One failed attempt, as stored in `errors`: the exception's type, a redacted message, and where it was raised."""

    attempt: int
    type: str
    message: str
    where: tuple[str, ...] = ()

    def as_json(self) -> str:
        """The record as JSON text; the database adds `at`."""
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that raised.

    `transient`: a deadlock or a serialization failure, for which no job is to blame. `permanent`: another attempt
    cannot help. `sqlstate`: that of a database error.
    """

    record: ErrorRecord
    transient: bool = False
    permanent: bool = False
    sqlstate: str | None = None


def withheld(result: R) -> R:
    """The result of an attempt without the text that its error or its handler gave; type, place and SQLSTATE stay."""
    if isinstance(result, Failed):
        text = f"{WITHHELD} (SQLSTATE {result.sqlstate})" if result.sqlstate else WITHHELD
        return replace(result, record=replace(result.record, message=text))
    return replace(result, reason=WITHHELD) if isinstance(result, Retry | DeadLetter | Discard) else result


def describe_failure(error: BaseException, job: Job, stack: Iterable[traceback.FrameSummary] | None = None) -> Failed:
    """The redacted record of an exception that ended an attempt of `job`.

    Args:
        stack: The handler's call stack, if it did not raise the error itself.
    """
    original = _original(error)
    record = ErrorRecord(
        attempt=job.attempt,
        type=name_of(original),
        message=storable_or_withheld(lambda: _message(error, job.args)),
        where=tuple(_frames(traceback.extract_tb(error.__traceback__) if stack is None else stack)),
    )
    sqlstate = sqlstate_of(original)
    return Failed(record, sqlstate in TRANSIENT, isinstance(original, PermanentError), sqlstate)


def describe_reason(reason: object, job: Job) -> str:
    """The redacted reason of a handler that asked for a retry, a dead letter or to discard `job`."""
    return storable_or_withheld(lambda: redact(_text_of(reason), job.args))


def redact(message: str, args: str) -> str:
    """The beginning of `message`, with every value of the stored arguments replaced by the name of its argument."""
    return _covered(message, _named_values(args), _READ_CHARACTERS)


def _named_values(args: str) -> Iterator[tuple[str, str]]:
    for value, name in _leaves(args):
        label = f"<{name[:_LABEL_CHARACTERS]}>"
        yield from ((spelling, label) for spelling in _spellings(value))


def _covered(message: str, labels: Iterable[tuple[str, str]], kept_characters: int) -> str:
    """The beginning of a message, with a label in the place of each text; if two texts overlap, the longer one's label.

    Texts are looked for in the original message, if they begin in the part that is kept. So none is missed because the
    cut or another label went through it, and the work grows with the texts' length alone.
    """
    cover: list[str | None] = [None] * min(kept_characters, len(message))
    for text, label in sorted(set(labels), key=lambda pair: (-len(pair[0]), pair)):
        for start in _places(text, message, cover):
            for place in range(start, min(start + len(text), len(cover))):
                cover[place] = cover[place] or label
    runs = groupby(zip(cover, message, strict=False), key=itemgetter(0))
    return "".join(label or "".join(character for _, character in run) for label, run in runs)


def _places(text: str, message: str, cover: list[str | None]) -> Iterator[int]:
    """Where a text begins in the part of the message that is kept.

    A short text only as a word of its own: an argument "order" must not be replaced in "ordered".
    """
    last = len(cover) - 1 + len(text)
    start = message.find(text, 0, last)
    while start >= 0:
        end = start + len(text)
        found = len(text) >= _LONG_VALUE or not (_in_word(start - 1, message, cover) or _in_word(end, message, cover))
        if found:
            yield start
        start = message.find(text, end if found else start + 1, last)


def _in_word(place: int, message: str, cover: list[str | None]) -> bool:
    if not 0 <= place < len(message) or (place < len(cover) and cover[place]):
        return False
    return message[place].isalnum() or message[place] == "_"


def kept_errors(stored: str) -> str:
    """The newest of the stored records, one less than `KEPT_ERRORS`, so that one more can be added."""
    try:
        history = msgspec.json.decode(stored.encode(), type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return "[]"
    return msgspec.json.encode(history[-(KEPT_ERRORS - 1) :]).decode()


def _message(error: BaseException, args: str) -> str:
    if isinstance(error, EffectFailed | CallRefused):
        return str(error).replace(error.reason, redact(error.reason, args)) if error.reason else str(error)
    kind = type(error)
    # Our own texts never quote a value. A PermanentError is raised by handlers, as are classes that they derive.
    is_ours = isinstance(error, OutboxqError) and kind.__module__.startswith("outboxq.") and kind is not PermanentError
    return str(error) if is_ours else _foreign_message(error, args)


def _foreign_message(error: BaseException, args: str) -> str:
    original = _original(error)
    sqlstate = sqlstate_of(original)
    if sqlstate is not None and sqlstate.startswith(_DATA_EXCEPTION):
        return f"SQLSTATE {sqlstate} (its text is withheld, because it may quote data)"
    if isinstance(original, psycopg.Error):
        return (
            redact(f"{original.diag.message_primary} (SQLSTATE {sqlstate})", args) if sqlstate else "the driver failed"
        )
    return _without_quoted_rows(original, args)


def _without_quoted_rows(error: BaseException, args: str) -> str:
    """The text of an error that may contain the text of a database error.

    DETAIL quotes rows, LINE the statement with what a driver wrote into it, and SQLAlchemy the parameters.
    """
    text = _text_of(error)
    quoted = _QUOTED_ROWS.search(text, 0, _READ_CHARACTERS)
    labels = chain(_named_values(args), ((primary, "(text withheld)") for primary in _quoting_texts(error)))
    return _covered(text, labels, quoted.start() if quoted else _READ_CHARACTERS).rstrip()


def _quoting_texts(error: BaseException) -> Iterator[str]:
    for inner in _chain(error):
        if (sqlstate_of(inner) or "").startswith(_DATA_EXCEPTION):
            primary = inner.diag.message_primary if isinstance(inner, psycopg.Error) else _text_of(inner)
            if primary:
                yield primary


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        yield _original(inner)
        inner = inner.__cause__ or inner.__context__


def _original(error: BaseException) -> BaseException:
    return error.orig if isinstance(error, StatementError) and error.orig is not None else error


def _text_of(value: object) -> str:
    try:
        return str(value)
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
    # As repr(), ascii() and JSON write it, with quotes, backslashes and newlines escaped.
    yield repr(value)[1:-1]
    yield ascii(value)[1:-1]
    yield msgspec.json.encode(value).decode()[1:-1]
    if _DATETIME.fullmatch(value):
        # A text may look like a time without being one: 30 February.
        with suppress(ValueError):
            written = datetime.fromisoformat(value)
            yield from (str(written), repr(written), written.isoformat())


def _frames(stack: Iterable[traceback.FrameSummary]) -> Iterator[str]:
    """The innermost frames of users' code, without ours and those of libraries: `app/jobs.py:12 in credit`."""
    own = str(PurePath(__file__).parent.parent)
    frames = [
        frame
        for frame in stack
        if not frame.filename.startswith(own) and "site-packages" not in PurePath(frame.filename).parts
    ]
    for frame in frames[-_KEPT_FRAMES:]:
        yield storable(f"{'/'.join(PurePath(frame.filename).parts[-3:])}:{frame.lineno} in {frame.name}")
