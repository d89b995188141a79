"""The record of a failed attempt that is stored with its job: enough to find the fault, without the job's arguments.

The exception, its causes and its contexts are kept with their types, tracebacks and redacted texts. For a handler with
messages="withheld" no texts are kept; with messages="whole" they are kept as they are. Frames of the user's own code
are kept, all others are folded.

Error texts of drivers quote parameters and row values, those of Pydantic their input: these parts are left out. In the
remaining text, the name of an argument replaces its value, as stored and in Python's other spellings. Not replaced are
values of one character, values derived by a handler, such as a slice or a hash, and the remainder of a value where two
copies of it overlap in the text.
"""

import functools
import importlib.metadata
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from itertools import chain as joined
from itertools import groupby
from operator import attrgetter, itemgetter
from os import path
from pathlib import PurePath
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import psycopg
from sqlalchemy.exc import StatementError

from outboxq.codec.text import MAX_MESSAGE_CHARACTERS, name_of, storable, storable_or_withheld
from outboxq.database.errors import DEADLOCK, is_of_prepared, sqlstate_of
from outboxq.error_record import ErrorRecord, StoredException, StoredFrame
from outboxq.errors import CallRefused, EffectFailed, OutboxqError, PermanentError
from outboxq.execution.errors import Abandoned, ConnectionLost
from outboxq.handlers.resolved import Registry
from outboxq.job import Job
from outboxq.outcomes import DeadLetter, Discard, Retry
from outboxq.statements.lease import INTERRUPTED, RELAY_DIED

R = TypeVar("R")
_Chain: TypeAlias = tuple[StoredException, ...]

KEPT_ERRORS = 25
# Replaces the texts of a handler with messages="withheld".
WITHHELD = "message withheld"

TRANSIENT = ("40001", DEADLOCK)

_CHAIN_BYTES = 8 * 1024
# The exceptions of a chain that are kept: the last that were raised, and the first ones.
_NEWEST, _OLDEST = 6, 4
_LONGEST_CHAIN = 1_000
_MEMBERS, _DEPTH, _MOST_EXCEPTIONS = 5, 3, 30
_FRAMES, _NOTES, _TEXT_CHARACTERS = 20, 5, 500
# Limits for a chain that does not fit: the frames of each exception, and the characters of each text.
_SHORTER = ((10, 300), (5, 150), (2, 80))
# Attributes of exceptions, read as Python does, because users' classes can redefine them.
_CAUSE, _CONTEXT = vars(BaseException)["__cause__"], vars(BaseException)["__context__"]
_SUPPRESSES_CONTEXT = vars(BaseException)["__suppress_context__"]
_FOLDED = ("outboxq", "the standard library")

_OURS = str(PurePath(__file__).parent.parent) + path.sep
_STANDARD = tuple({sysconfig.get_path(name) + path.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# The number of frames that `where` names.
_NAMED_FRAMES = 5
# The number of frames that are read at each end of an endless recursion's stack.
_OUTER_FRAMES, _INNER_FRAMES = 50, 100
_PATH_CHARACTERS = 200

# The part of a text that is read: replacing values may shorten it.
READ_CHARACTERS = 2 * MAX_MESSAGE_CHARACTERS
_LABEL_CHARACTERS = 63
# The SQLSTATE class whose texts quote the offending value.
_DATA_EXCEPTION = "22"
# DETAIL quotes rows, CONTEXT the rows of a COPY, LINE and QUERY statements with their literals, SQLAlchemy the
# parameters.
_QUOTED_ROWS = re.compile(r"LINE \d+:|DETAIL:|CONTEXT:|QUERY:|\[SQL:|\[parameters:|Original exception was:")
# Fields of a server's report that quote rows and statements. The error's text has their titles in the server's
# language.
_QUOTING_FIELDS = ("message_detail", "context", "internal_query")
# Pydantic quotes its input, and cuts the middle out of a long one, so that its value cannot be found.
_INPUT = re.compile(r"(?<=input_value=).*?(?=, input_type=|\Z)", re.DOTALL)
# Values of this length and longer are replaced even inside other words.
_LONG_VALUE = 8
_ESCAPED = re.compile(r"""["'\\]""")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DATETIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?")
# The most values to search for, counted in each spelling: a text of READ_CHARACTERS takes 4 µs for each.
MOST_VALUES = 10_000
_TOO_MANY = "(text withheld: there are too many values that it may quote)"


class Frame(NamedTuple):
    """A frame of a call stack: file, line and function. An entry without a path replaces frames that were left out.

    Attributes:
        line: The line; without a path, the number of frames left out.
        is_made: True if the code was generated at run time and is in no module's file, so its names may contain values.
    """

    path: str
    line: int
    name: str
    is_made: bool = False


def frames_of(error: BaseException) -> list[Frame]:
    """Return the frames of an exception's traceback, the innermost last."""
    # Read as Python does: users' classes can redefine the attribute.
    return _ends([*walk_tb(vars(BaseException)["__traceback__"].__get__(error))])


def frames_of_stack(innermost: FrameType) -> list[Frame]:
    """Return the frames of a call stack that is still running, the innermost last.

    Args:
        innermost: The stack's innermost frame.
    """
    return _ends([*walk_stack(innermost)][::-1])


def _ends(steps: list[tuple[FrameType, int]]) -> list[Frame]:
    """Return the frames of a stack; of a long one, only the first `_OUTER_FRAMES` and the last `_INNER_FRAMES`.

    Between these is a frame without a path, with the number of omitted ones as its line.

    Args:
        steps: Python's frames, each with its line, the outermost first.
    """
    left_out = len(steps) - _OUTER_FRAMES - _INNER_FRAMES
    found: list[Frame] = []
    for frame, line in steps if left_out <= 0 else (*steps[:_OUTER_FRAMES], *steps[-_INNER_FRAMES:]):
        code, file, module = frame.f_code, frame.f_globals.get("__file__"), frame.f_globals.get("__name__")
        is_of_module = type(file) is type(module) is str and file == code.co_filename and module in sys.modules
        found.append(Frame(code.co_filename or "?", line or 0, code.co_name, not is_of_module))
    if left_out > 0:
        found.insert(_OUTER_FRAMES, Frame("", left_out, ""))
    return found


def where(frames: Sequence[Frame], homes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the places where an error occurred, as `app/jobs.py:12 in credit`: at most `_NAMED_FRAMES` frames.

    These are the innermost frames of users' code, or of libraries if there are none; the innermost is the last.

    Args:
        homes: The paths of the application's code.
    """
    own = [frame for frame in frames if _owner(frame.path, homes) == "user"]
    named = own or [frame for frame in frames if _owner(frame.path, homes) not in ("outboxq", "")]
    found: list[str] = []
    for frame in named[-_NAMED_FRAMES:]:
        file = "/".join(PurePath(frame.path).parts[-3:])
        found.append(storable(f"{file}:{frame.line} in {frame.name}"))
    return tuple(found)


def stored_frames(frames: Sequence[Frame], homes: tuple[str, ...], most: int) -> tuple[StoredFrame, ...]:
    """Return the frames of a failure that are stored with its job, from the handler's own frame inwards.

    All frames of users' code are kept. Consecutive frames of outboxq or of the standard library become one entry with
    their number; of those of a library, the first and the last are kept.

    Args:
        homes: The paths of the application's code.
        most: The most frames that are kept, two thirds of them at the inner end.
    """
    owners = [_owner(frame.path, homes) for frame in frames]
    start = owners.index("user") if "user" in owners else 0
    while start < len(owners) and owners[start] in _FOLDED:
        start += 1
    found: list[StoredFrame] = []
    for owner, of_owner in groupby(zip(owners[start:], frames[start:], strict=True), key=itemgetter(0)):
        some = [frame for _, frame in of_owner]
        ends = some if owner in ("user", "") or len(some) <= 2 else [some[0], some[-1]]
        kept = [
            StoredFrame(storable(frame.path[-_PATH_CHARACTERS:]), frame.line, storable(frame.name)[:_PATH_CHARACTERS])
            for frame in (() if owner in _FOLDED else ends)
        ]
        if len(kept) < len(some):
            kept.insert(1, StoredFrame("", len(some) - len(kept), owner))
        found += kept
    return shortened(tuple(found), most)


def shortened(frames: tuple[StoredFrame, ...], most: int) -> tuple[StoredFrame, ...]:
    """Return the frames; of more than `most`, only a third of `most` at the outer end, and the rest at the inner end.

    Between the two is an entry with the number of omitted frames.
    """
    if len(frames) <= most:
        return frames
    outer = most // 3
    gap = frames[outer : outer - most]
    left_out = StoredFrame("", sum(1 if frame.path else frame.line for frame in gap), "")
    return (*frames[:outer], left_out, *frames[outer - most :])


@functools.lru_cache(maxsize=1_000)
def _owner(file: str, homes: tuple[str, ...]) -> str:
    """Return the owner of a source file: "user", one of `_FOLDED`, or an installed package; "" if there is no file."""
    if not file:
        return ""
    if file.startswith(_OURS):
        return "outboxq"
    if file.startswith(homes):
        return "user"
    parts = PurePath(file).parts
    if not _INSTALLED.isdisjoint(parts):
        below = max(number for number, part in enumerate(parts) if part in _INSTALLED) + 1
        return parts[below].removesuffix(".py") if below < len(parts) else "a library"
    # Generated code has file names such as `<string>`, `<frozen importlib._bootstrap>` or `<attrs generated init
    # Order>`.
    return "the standard library" if file.startswith((*_STANDARD, "<")) else "user"


def homes_of(module: str | None) -> tuple[str, ...]:
    """Return the paths of a handler's application: its top-level package, and others of the same distribution.

    Frames of code there count as users' code. The paths are first read when a relay starts, because that takes a while.

    Args:
        module: The name of the handler's module; None if it has none.
    """
    if module is None:
        return ()
    named = module
    if module == "__main__":
        # `python -m shop.relay`: the spec has the module's own name.
        named = getattr(getattr(sys.modules[module], "__spec__", None), "name", module)
    return _homes_of_top(named.partition(".")[0])


@functools.cache
def _homes_of_top(top: str) -> tuple[str, ...]:
    found = sys.modules.get(top)
    own = [str(folder) + path.sep for folder in getattr(found, "__path__", ())]
    file = getattr(found, "__file__", None)
    if isinstance(file, str) and not hasattr(found, "__path__"):
        own.append(file)
    folders = {path.dirname(each.rstrip(path.sep)) for each in own}
    beside: list[str] = []
    # Importers and packages' metadata may raise anything; then only the top-level package is known.
    with suppress(Exception):
        for folder in sorted(each for each in folders if not _INSTALLED.isdisjoint(PurePath(each).parts)):
            for name in sorted(_names_beside(top, folder)):
                beside += path.join(folder, name) + path.sep, path.join(folder, f"{name}.py")
    return (*own, *beside)


def _names_beside(top: str, folder: str) -> set[str]:
    """Return the top-level names, except `top`, of the distributions in this folder that contain the package `top`."""
    beside: set[str] = set()
    for distribution in importlib.metadata.distributions(path=[folder]):
        # The list of files is searched as text: parsing it would take a second. Debian's packages only have
        # top_level.txt.
        written = distribution.read_text("RECORD") or distribution.read_text("top_level.txt") or ""
        if re.search(rf"^{re.escape(top)}(/|\.py,|$)", written, re.MULTILINE):
            names = {re.split(r"[/,]", line)[0].removesuffix(".py") for line in written.splitlines()}
            beside |= {name for name in names - {top} if name.isidentifier() and not name.startswith("__")}
    return beside


@dataclass(frozen=True, slots=True)
class Failed:
    """The result of an attempt that raised an error, from which `settle` decides on a retry or a dead letter.

    Attributes:
        record: The description to store with the job.
        transient: True if no job is to blame: the error was a deadlock, a serialization failure, or the failure of a
            prepared statement whose table was altered since.
        prepared: True if it was such a statement's failure.
        permanent: True if another attempt cannot help.
        sqlstate: The SQLSTATE of a database error.
        error: The exception itself, for hooks.
    """

    record: ErrorRecord
    transient: bool = False
    prepared: bool = False
    permanent: bool = False
    sqlstate: str | None = None
    error: BaseException | None = field(default=None, repr=False, compare=False)


def withheld(result: R) -> R:
    """Return an attempt's result without the texts of its error or handler; the error's type, places and SQLSTATE stay.

    For handlers with `messages="withheld"`.
    """
    if isinstance(result, Failed):
        text = f"{WITHHELD} (SQLSTATE {result.sqlstate})" if result.sqlstate else WITHHELD
        chain = tuple(map(_without_text, result.record.chain))
        return replace(result, record=msgspec.structs.replace(result.record, message=text, chain=chain))
    return replace(result, reason=WITHHELD) if isinstance(result, Retry | DeadLetter | Discard) else result


def _without_text(error: StoredException) -> StoredException:
    members = tuple(tuple(map(_without_text, chain)) for chain in error.members)
    return msgspec.structs.replace(error, message=WITHHELD, notes=(), members=members)


def describe_failure(
    error: BaseException,
    job: Job,
    *,
    args: Sequence[str] = (),
    is_whole: bool = False,
    homes: tuple[str, ...] = (),
    stack: Sequence[Frame] | None = None,
) -> Failed:
    """Describe an exception that ended an attempt of `job`: return the failed attempt with the record to store.

    Args:
        args: The stored arguments of all jobs of the call that failed; by default the job's own.
        is_whole: True if texts are kept whole, and not redacted by the arguments.
        homes: The paths of the application's code.
        stack: The handler's call stack, if it did not raise the error itself.
    """
    original = original_of(error)
    describer = _Describer(None if is_whole else args or [job.args], homes, error)
    frames = describer.frames(frames_of(error) if stack is None else stack)
    kind, message = describer.type_of(original), describer.message(error, READ_CHARACTERS)
    chain: tuple[StoredException, ...] = ()
    # If users' classes raise an error here, the attempt is still recorded.
    with suppress(BaseException):
        first = StoredException(type=kind, message=message, frames=stored_frames(frames, homes, _FRAMES))
        chain = _fitting(describer.chain(error, _DEPTH, first))
    record = ErrorRecord(job.attempt, kind, message, where(frames, homes), chain)
    sqlstate, permanent = sqlstate_of(original), issubclass(type(original), PermanentError)
    prepared = is_of_prepared(original)
    return Failed(record, prepared or sqlstate in TRANSIENT, prepared, permanent, sqlstate, error)


def describe_reason(reason: object, args: str | None) -> str:
    """Return a handler's reason for a retry, a dead letter or a discarded job, with the job's payload removed from it.

    Args:
        args: The job's stored arguments, whose values are removed; None to return the whole text.
    """
    return storable_or_withheld(lambda: Redactor(None if args is None else [args]).redact(text_of(reason)))


def kept_errors(stored: str) -> str:
    """Return, as JSON, the newest `KEPT_ERRORS` - 1 of a job's stored error records, to make room for a new one.

    If the stored ones cannot be read, return an empty list.
    """
    try:
        history = msgspec.json.decode(stored.encode(), type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return "[]"
    return msgspec.json.encode(history[-(KEPT_ERRORS - 1) :]).decode()


def count_unfinished(stored: str) -> int:
    """Return the number of a job's stored error records that report a run interrupted by its relay, or lost with it.

    After too many of these runs, a job is treated as one that blocks its relay.
    """
    types = (INTERRUPTED, RELAY_DIED)
    try:
        return sum(record.type in types for record in msgspec.json.decode(stored.encode(), type=list[_Typed]))
    except (msgspec.MsgspecError, RecursionError):
        return 0


class JudgesFailures:
    """The base of `Runtime`: separates failed attempts from the relay's own errors, and describes failed attempts.

    The setting `messages` of each handler decides which texts a description contains.
    """

    __slots__ = ()
    registry: Registry
    is_interruption: Callable[[BaseException], bool]

    def is_failure(self, error: BaseException) -> bool:
        """Return True if an error that a handler raised is a failed attempt of its job.

        That is so for every error, also KeyboardInterrupt and other BaseExceptions, because a job must not end its
        relay. It is not so for a lost connection, for the relay's own interruption of the handler, and if the relay has
        taken the batch away.
        """
        # Compared by the exact type, which users' classes cannot redefine.
        return not (issubclass(type(error), Abandoned | ConnectionLost) or self.is_interruption(error))

    def describe(self, error: BaseException, job: Job, *, stack: Sequence[Frame] | None = None) -> Failed:
        """Describe an exception that ended an attempt, by the `messages` setting of the job's handler.

        Args:
            stack: The handler's call stack, if it did not raise the error itself.
        """
        handler = self.registry.handlers.get(job.kind)
        homes = () if handler is None else homes_of(handler.__module__)
        return describe_failure(error, job, is_whole=self._keeps_whole(job), homes=homes, stack=stack)

    def reason(self, reason: object, job: Job) -> str:
        """Return the reason that a handler gave for its outcome, redacted unless the handler keeps its texts whole."""
        return describe_reason(reason, None if self._keeps_whole(job) else job.args)

    def _keeps_whole(self, job: Job) -> bool:
        handler = self.registry.handlers.get(job.kind)
        return handler is not None and handler.messages == "whole"

    def redacted(self, job: Job, result: R) -> R:
        """Return an attempt's result, without its texts if the job's handler withholds them."""
        handler = self.registry.handlers.get(job.kind)
        return withheld(result) if handler is not None and handler.messages == "withheld" else result


class _Typed(msgspec.Struct):
    type: str


class _Describer:
    """Describes the exceptions of one failure, up to `_MOST_EXCEPTIONS`, with payload removed from their texts."""

    def __init__(self, args: Sequence[str] | None, homes: tuple[str, ...], error: BaseException) -> None:
        self._redactor = Redactor(args, () if args is None else _reachable(error))
        self._homes = homes
        self._left = _MOST_EXCEPTIONS

    def type_of(self, error: BaseException) -> str:
        """Return the name of an exception's class, redacted if it may contain values."""
        kind, name = type(error), name_of(error)
        with suppress(BaseException):
            # The class is in its module under its name, so it was not made while a job ran.
            if attrgetter(kind.__qualname__)(sys.modules[kind.__module__]) is kind:
                return name
        return storable(self._redactor.redact(name))

    def message(self, error: BaseException, characters: int) -> str:
        """Return the redacted text of an exception, at most `characters` long."""
        return storable_or_withheld(self._redactor.message, error, characters)[:characters]

    def frames(self, frames: Sequence[Frame]) -> list[Frame]:
        """Return the frames; names and paths of generated code are redacted, because they may contain values."""
        redact = self._redactor.redact
        return [
            frame._replace(path=redact(frame.path), name=redact(frame.name)) if frame.is_made else frame
            for frame in frames
        ]

    def notes(self, error: BaseException) -> tuple[str, ...]:
        """Return the first `_NOTES` notes of an exception (`add_note`), redacted; users may have put anything there."""
        kept: list[str] = []
        with suppress(BaseException):
            notes = getattr(error, "__notes__", ())
            for note in notes[:_NOTES] if isinstance(notes, list | tuple) else ():
                text = self._redactor.redact(text_of(note), _TEXT_CHARACTERS)
                kept.append(storable(text[:_TEXT_CHARACTERS]))
        return tuple(kept)

    def chain(self, error: BaseException, depth: int, first: StoredException | None = None) -> _Chain:
        """Describe an exception with its causes and contexts, without the middle of a long chain.

        Args:
            depth: The number of nested levels of exception groups whose members are described too.
            first: The type, message and frames of the exception itself, if they are known.
        """
        links = _links(error)
        gap = max(0, len(links) - _NEWEST - _OLDEST)
        kept = links if not gap else links[:_NEWEST] + links[-_OLDEST:]
        stored: list[StoredException] = []
        for each, is_context in kept:
            self._left -= 1
            members = _members(each)
            shown = members[: min(_MEMBERS, max(0, self._left))] if depth else ()
            alone = first
            if stored or alone is None:
                kind, message = self.type_of(original_of(each)), self.message(each, _TEXT_CHARACTERS)
                frames = stored_frames(self.frames(frames_of(each)), self._homes, _FRAMES)
                alone = StoredException(type=kind, message=message, frames=frames)
            stored.append(
                msgspec.structs.replace(
                    alone,
                    notes=self.notes(each),
                    members=tuple(self.chain(member, depth - 1) for member in shown),
                    more_members=len(members) - len(shown),
                    is_context=is_context,
                    left_out=gap if len(stored) == _NEWEST else 0,
                )
            )
        return tuple(stored)


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the exceptions of a group; none for any other exception."""
    if not issubclass(type(error), BaseExceptionGroup):
        return ()
    members: tuple[BaseException, ...] = vars(BaseExceptionGroup)["exceptions"].__get__(error)
    return members


def _links(error: BaseException) -> list[tuple[BaseException, bool]]:
    """Return an exception and those that led to it: its cause or context, the cause or context of that one, and so on.

    Each comes with a flag: True if it is the implicit context (`__context__`) of the exception before it in the list,
    and False if it is the explicit cause (`__cause__`), or the first of all.
    """
    found, seen = [(error, False)], {id(error)}
    while len(found) < _LONGEST_CHAIN:
        last = original_of(found[-1][0])
        seen.add(id(last))
        before: BaseException | None = _CAUSE.__get__(last)
        is_context = before is None
        if is_context and not _SUPPRESSES_CONTEXT.__get__(last):
            before = _CONTEXT.__get__(last)
        if before is None or id(before) in seen:
            break
        seen.add(id(before))
        found.append((before, is_context))
    return found


def _reachable(error: BaseException) -> list[BaseException]:
    """Return an error and all exceptions that led to it, up to `_LONGEST_CHAIN`, even if Python would not print them.

    Their texts are searched for quoted rows, which the error's own text may repeat.
    """
    found, seen = [error], {id(error)}
    for each in found:
        nearest = (original_of(each), _CAUSE.__get__(each), _CONTEXT.__get__(each), *_members(each)[:_LONGEST_CHAIN])
        for before in nearest:
            if before is not None and id(before) not in seen and len(found) < _LONGEST_CHAIN:
                seen.add(id(before))
                found.append(before)
    return found


def _fitting(chain: _Chain) -> _Chain:
    """Shorten a chain of exceptions until its JSON has at most `_CHAIN_BYTES` bytes; empty if that is not possible."""
    if len(msgspec.json.encode(chain)) <= _CHAIN_BYTES:
        return chain
    for most_frames, characters in _SHORTER:
        shorter = tuple(_shorter(error, most_frames, characters) for error in chain)
        if len(msgspec.json.encode(shorter)) <= _CHAIN_BYTES:
            return shorter
    alone = _shorter(msgspec.structs.replace(chain[0], members=(), notes=()), *_SHORTER[-1])
    return (alone,) if len(msgspec.json.encode(alone)) <= _CHAIN_BYTES else ()


def _shorter(error: StoredException, most_frames: int, characters: int) -> StoredException:
    return msgspec.structs.replace(
        error,
        message=error.message[:characters],
        notes=tuple(note[:characters] for note in error.notes),
        frames=shortened(error.frames, most_frames),
        members=tuple(tuple(_shorter(each, most_frames, characters) for each in chain) for chain in error.members),
    )


class Redactor:
    """Removes the payload from the texts of one failure, unless its handler keeps them whole.

    It reads the first READ_CHARACTERS of each text and value, and withholds all texts if the arguments have more than
    MOST_VALUES values.

    Args:
        args: The stored arguments, of all jobs of the call that failed; None if texts are kept whole.
        errors: The exceptions of the failure. Rows that one exception quotes may appear in the text of another.
    """

    def __init__(self, args: Sequence[str] | None, errors: Iterable[BaseException] = ()) -> None:
        self._is_whole = args is None
        quoting = _quoting_texts(errors)
        self._labels, found = dict.fromkeys(quoting, "(text withheld)"), len(quoting)
        for value, name in joined.from_iterable(map(_leaves, args or ())):
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
        """Return the beginning of a text without quoted rows, and with arguments' names in place of their values.

        Every value is searched for in the original text. So a value is also found if it overlaps another one, and an
        inserted name is never searched. A value shorter than _LONG_VALUE counts only as a whole word: "order" is not
        replaced in "ordered".
        """
        if self._is_whole:
            return text[:kept_characters]
        if self._has_too_many:
            return _TOO_MANY
        quoted = _QUOTED_ROWS.search(text, 0, kept_characters)
        end = quoted.start() if quoted else kept_characters
        kept = _INPUT.sub("(withheld)", text[:end])
        # The text includes as much after the cut as a cut value may have.
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
        # Of matches that begin at the same place, the longest one counts, because it was searched for first.
        for start, end, label in sorted(found, key=itemgetter(0)):
            if end > reached:
                parts += read[reached:start], label
                reached = end
        return "".join((*parts, read[reached : len(kept)])).rstrip()

    def message(self, error: BaseException, kept_characters: int = READ_CHARACTERS) -> str:
        """Return the redacted text of an exception; for a database error that quotes data, only its SQLSTATE."""
        if self._is_whole:
            return text_of(original_of(error))[:kept_characters]
        if isinstance(error, EffectFailed | CallRefused):
            return str(error).replace(error.reason, self.redact(error.reason)) if error.reason else str(error)
        kind = type(error)
        # Outboxq's own texts never quote a value. Handlers raise PermanentError and classes that they derive.
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
    """Return those parts of the exceptions' texts that quote rows and data, and that other texts may repeat."""
    quoting: list[object] = []
    for error in errors:
        # Users' classes may have an attribute of the same name, which may raise.
        with suppress(BaseException):
            # The server's report, as psycopg has it; other drivers have the same fields in their text, with English
            # titles.
            report: Any = getattr(error, "diag", None)
            for name in _QUOTING_FIELDS:
                quoting.append(getattr(report, name, None))  # noqa: PERF401  # kept if the next one raises
            if (sqlstate_of(error) or "").startswith(_DATA_EXCEPTION):
                quoting.append(report.message_primary if isinstance(error, psycopg.Error) else text_of(error))
    return [text[:READ_CHARACTERS] for text in quoting if type(text) is str and text]


def original_of(error: BaseException) -> BaseException:
    """Return the driver's error that SQLAlchemy has wrapped, or the error itself."""
    # By the exact type: users' classes may have another `__class__`, or none.
    original = None
    with suppress(BaseException):
        original = error.orig if issubclass(type(error), StatementError) else None  # type: ignore[attr-defined]  # it has one
    return original if original is not None and issubclass(type(original), BaseException) else error


def text_of(value: object) -> str:
    """Return the text of any object; if its class raises an error, a text that says so."""
    try:
        # An exact str: a derived class could do anything when it is read.
        return str.__str__(str(value))
    except BaseException:  # noqa: BLE001  # users' code; a broken __str__ must not take the job's record with it
        return f"(the text of this {type(value).__name__} cannot be read)"


def _leaves(args: str) -> list[tuple[str, str]]:
    """Return the texts and numbers of two or more characters in the stored arguments, each with its argument's name."""
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
    """Return a value as it is stored, and as Python and JSON write it inside a longer text."""
    found = {value}
    if not (value.isascii() and value.isprintable()) or _ESCAPED.search(value):
        # As repr(), ascii() and JSON write it, with quotes, backslashes and newlines escaped.
        found |= {repr(value)[1:-1], ascii(value)[1:-1], msgspec.json.encode(value).decode()[1:-1]}
    # A text may look like a time without being one: 30 February.
    with suppress(ValueError):
        if _DATE.fullmatch(value):
            found.add(repr(date.fromisoformat(value)))
        if _DATETIME.fullmatch(value):
            written = datetime.fromisoformat(value)
            found |= {str(written), repr(written), written.isoformat()}
    return found
