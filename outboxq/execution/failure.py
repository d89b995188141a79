"""What is remembered of a failed attempt: enough to find the fault, nothing of the payload.

The exception and all that led to it are kept with their types, tracebacks and redacted texts. Of a handler with
messages="withheld" no texts are kept; of one with messages="whole" they are kept as they are.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeAlias, TypeVar

import msgspec

from outboxq.codec.text import MAX_MESSAGE_CHARACTERS, name_of, storable, storable_or_withheld
from outboxq.database.errors import is_of_prepared, sqlstate_of
from outboxq.error_record import ErrorRecord, StoredException
from outboxq.errors import PermanentError
from outboxq.execution.frames import Frame, frames_of, shortened, stored_frames, where
from outboxq.execution.redaction import READ_CHARACTERS, Redactor, original_of, text_of
from outboxq.job import Job
from outboxq.outcomes import DeadLetter, Discard, Retry
from outboxq.statements.lease import INTERRUPTED, RELAY_DIED

R = TypeVar("R")
_Links: TypeAlias = list[tuple[BaseException, bool]]

KEPT_ERRORS = 25
# Stands for the text of a handler with messages="withheld".
WITHHELD = "message withheld"

TRANSIENT = ("40001", "40P01")

_CHAIN_BYTES = 8 * 1024
# Exceptions of a chain that are kept: the last that were raised, and the first.
_NEWEST, _OLDEST = 6, 4
_LONGEST_CHAIN = 1_000
_MEMBERS, _DEPTH, _MOST_EXCEPTIONS = 5, 3, 30
_FRAMES, _NOTES, _TEXT_CHARACTERS = 20, 5, 500
# What a chain is cut down to until it fits: frames of each exception, and characters of each text.
_SHORTER = ((10, 300), (5, 150), (2, 80))


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that raised.

    `transient`: a deadlock, a serialization failure or a statement that was `prepared` before its table was altered,
    for which no job is to blame. `permanent`: another attempt cannot help. `sqlstate`: that of a database error.
    `error`: the exception itself, for hooks.
    """

    record: ErrorRecord
    transient: bool = False
    prepared: bool = False
    permanent: bool = False
    sqlstate: str | None = None
    error: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Describing:
    """How a failure is described.

    Attributes:
        args: The stored arguments of all jobs of the call that failed; None if texts are kept whole.
        homes: The paths below which the application's code lies.
    """

    args: Sequence[str] | None
    homes: tuple[str, ...] = ()


def withheld(result: R) -> R:
    """The result of an attempt without the text that its error or its handler gave; type, place and SQLSTATE stay."""
    if isinstance(result, Failed):
        text = f"{WITHHELD} (SQLSTATE {result.sqlstate})" if result.sqlstate else WITHHELD
        chain = tuple(map(_without_text, result.record.chain))
        return replace(result, record=msgspec.structs.replace(result.record, message=text, chain=chain))
    return replace(result, reason=WITHHELD) if isinstance(result, Retry | DeadLetter | Discard) else result


def _without_text(error: StoredException) -> StoredException:
    members = tuple(tuple(map(_without_text, chain)) for chain in error.members)
    return msgspec.structs.replace(error, message=WITHHELD, notes=(), members=members)


def describe_failure(
    error: BaseException, job: Job, describing: Describing | None = None, stack: Sequence[Frame] | None = None
) -> Failed:
    """The record of an exception that ended an attempt of `job`.

    Args:
        describing: How; by default redacted by the job's own arguments.
        stack: The handler's call stack, if it did not raise the error itself.
    """
    how = describing or Describing([job.args])
    original, texts = original_of(error), _Texts(how.args, error)
    message = storable_or_withheld(lambda: texts.of(error, READ_CHARACTERS))
    frames = texts.frames(frames_of(error) if stack is None else stack)
    record = ErrorRecord(
        attempt=job.attempt,
        type=texts.type_of(original),
        message=message,
        where=where(frames, how.homes),
        chain=_stored_chain(error, texts, how.homes, message, frames),
    )
    sqlstate, permanent = sqlstate_of(original), issubclass(type(original), PermanentError)
    prepared = is_of_prepared(original)
    return Failed(record, prepared or sqlstate in TRANSIENT, prepared, permanent, sqlstate, error)


def describe_reason(reason: object, args: str | None) -> str:
    """The reason of a handler that asked for a retry, a dead letter or to discard a job; whole if `args` is None."""
    return storable_or_withheld(lambda: text_of(reason) if args is None else Redactor([args]).redact(text_of(reason)))


def kept_errors(stored: str) -> str:
    """The newest of the stored records, one less than `KEPT_ERRORS`, so that one more can be added."""
    try:
        history = msgspec.json.decode(stored.encode(), type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return "[]"
    return msgspec.json.encode(history[-(KEPT_ERRORS - 1) :]).decode()


def count_unfinished(stored: str) -> int:
    """Count the stored records of runs that were interrupted, or died with their relay."""
    types = (INTERRUPTED, RELAY_DIED)
    try:
        return sum(record.type in types for record in msgspec.json.decode(stored.encode(), type=list[_Typed]))
    except (msgspec.MsgspecError, RecursionError):
        return 0


class _Typed(msgspec.Struct):
    type: str


class _Texts:
    """The texts of a failure, as its handler wants them kept."""

    def __init__(self, args: Sequence[str] | None, error: BaseException) -> None:
        self._redactor = None if args is None else Redactor(args, _reachable(error))

    def of(self, error: BaseException, characters: int) -> str:
        """The message of an exception."""
        if self._redactor is None:
            return text_of(original_of(error))[:characters]
        return self._redactor.message(error, characters)

    def type_of(self, error: BaseException) -> str:
        """The name of an exception's class, which can be made from values."""
        name, redactor = name_of(error), self._redactor
        return name if redactor is None or _is_declared(type(error)) else storable(redactor.redact(name))

    def frames(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Frames, without the values that names of generated code can be made from."""
        redactor = self._redactor
        if redactor is None or not any(frame.is_made for frame in frames):
            return frames
        return [
            frame._replace(path=redactor.redact(frame.path), name=redactor.redact(frame.name))
            if frame.is_made
            else frame
            for frame in frames
        ]

    def notes(self, error: BaseException) -> tuple[str, ...]:
        """What `add_note` added to an exception; anything may stand in that attribute."""
        kept: list[str] = []
        with suppress(BaseException):
            notes = getattr(error, "__notes__", ())
            for note in notes[:_NOTES] if isinstance(notes, list | tuple) else ():
                text = text_of(note)
                redacted = text if self._redactor is None else self._redactor.redact(text, _TEXT_CHARACTERS)
                kept.append(storable(redacted[:_TEXT_CHARACTERS]))
        return tuple(kept)


def _is_declared(kind: type) -> bool:
    """Whether a class is found in its module under its name, and was not made while a job ran."""
    with suppress(BaseException):
        return attrgetter(kind.__qualname__)(sys.modules[kind.__module__]) is kind
    return False


def _cause(error: BaseException) -> BaseException | None:
    # This and the next three are read as Python does: users' classes can give the attributes other meanings.
    cause: BaseException | None = vars(BaseException)["__cause__"].__get__(error)
    return cause


def _context(error: BaseException) -> BaseException | None:
    context: BaseException | None = vars(BaseException)["__context__"].__get__(error)
    return context


def _suppresses_context(error: BaseException) -> bool:
    suppresses: bool = vars(BaseException)["__suppress_context__"].__get__(error)
    return suppresses


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """The exceptions of a group; none of any other."""
    if not issubclass(type(error), BaseExceptionGroup):
        return ()
    members: tuple[BaseException, ...] = vars(BaseExceptionGroup)["exceptions"].__get__(error)
    return members


def _links(error: BaseException) -> _Links:
    """The exceptions of a chain, the last that was raised first, and whether each is the context of the one before."""
    found, seen = [(error, False)], {id(error)}
    while len(found) < _LONGEST_CHAIN:
        last = original_of(found[-1][0])
        seen.add(id(last))
        cause = _cause(last)
        before = cause if cause is not None or _suppresses_context(last) else _context(last)
        if before is None or id(before) in seen:
            break
        seen.add(id(before))
        found.append((before, cause is None))
    return found


def _reachable(error: BaseException) -> Iterator[BaseException]:
    """All exceptions that led to an error, up to a number: also those that its chain does not show."""
    pending, seen = deque([error]), {id(error)}
    while pending:
        each = pending.popleft()
        yield each
        for before in (original_of(each), _cause(each), _context(each), *_members(each)[:_LONGEST_CHAIN]):
            if before is not None and id(before) not in seen and len(seen) < _LONGEST_CHAIN:
                seen.add(id(before))
                pending.append(before)


def _stored_chain(
    error: BaseException, texts: _Texts, homes: tuple[str, ...], message: str, frames: Sequence[Frame]
) -> tuple[StoredException, ...]:
    try:
        chain = _Describer(texts, homes).chain(_links(error), _DEPTH)
        first = msgspec.structs.replace(chain[0], message=message, frames=stored_frames(frames, homes, _FRAMES))
        return _fitting((first, *chain[1:]))
    except BaseException:  # noqa: BLE001  # users' classes; the attempt is recorded all the same
        return ()


class _Describer:
    """Describes the exceptions of one failure, up to a number of them."""

    def __init__(self, texts: _Texts, homes: tuple[str, ...]) -> None:
        self._texts = texts
        self._homes = homes
        self._left = _MOST_EXCEPTIONS

    def chain(self, links: _Links, depth: int) -> list[StoredException]:
        """A chain of exceptions, without those in the middle of a long one."""
        gap = max(0, len(links) - _NEWEST - _OLDEST)
        kept = links if not gap else links[:_NEWEST] + links[-_OLDEST:]
        stored = [self._exception(error, is_context, depth) for error, is_context in kept]
        if gap:
            stored[_NEWEST] = msgspec.structs.replace(stored[_NEWEST], left_out=gap)
        return stored

    def _exception(self, error: BaseException, is_context: bool, depth: int) -> StoredException:
        self._left -= 1
        members = _members(error)
        shown = members[: min(_MEMBERS, max(0, self._left))] if depth else ()
        return StoredException(
            type=self._texts.type_of(original_of(error)),
            message=storable_or_withheld(lambda: self._texts.of(error, _TEXT_CHARACTERS)[:_TEXT_CHARACTERS]),
            notes=self._texts.notes(error),
            frames=stored_frames(self._texts.frames(frames_of(error)), self._homes, _FRAMES),
            members=tuple(tuple(self.chain(_links(member), depth - 1)) for member in shown),
            more_members=len(members) - len(shown),
            is_context=is_context,
        )


def _fitting(chain: tuple[StoredException, ...]) -> tuple[StoredException, ...]:
    """The chain, cut down until it fits into what is stored of an attempt."""
    for most_frames, characters in ((_FRAMES, MAX_MESSAGE_CHARACTERS), *_SHORTER):
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
