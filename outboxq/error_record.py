"""The record of a failed attempt: its exception with all that led to it, as it is stored, reported and printed."""

from collections.abc import Iterator
from typing import Any

import msgspec


class StoredFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A line of a traceback, or `line` frames that were left out, which then have no `path`; `name` says whose."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        if not self.path:
            frames = "1 frame" if self.line == 1 else f"{self.line:,} frames"
            return f"  [{frames} of {self.name}]" if self.name else f"  [{frames} left out]"
        return f'  File "{self.path}", line {self.line}, in {self.name}'


class StoredException(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exception without its objects.

    Attributes:
        notes: The notes of `add_note`, redacted like the message.
        frames: Its traceback, the innermost frame last.
        members: If it is a group, its first exceptions, each with those that led to it.
        more_members: How many exceptions of the group were left out.
        is_context: The exception before it in a chain was raised while this one was handled, not from it.
        left_out: How many exceptions of the chain between this one and the one before it were left out.
    """

    type: str
    message: str
    notes: tuple[str, ...] = ()
    frames: tuple[StoredFrame, ...] = ()
    members: tuple[tuple["StoredException", ...], ...] = ()
    more_members: int = 0
    is_context: bool = False
    left_out: int = 0


class ErrorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One failed attempt, as stored in `errors`.

    Attributes:
        type: The exception's type; `message`: its text, redacted as the handler's `messages` says.
        where: The innermost frames of the handler's own code.
        chain: The exception, and those that led to it, the last that was raised first.
    """

    attempt: int
    type: str
    message: str
    where: tuple[str, ...] = ()
    chain: tuple[StoredException, ...] = ()

    def as_json(self) -> str:
        """The record as JSON text; the database adds `at`."""
        return msgspec.json.encode(self).decode()

    def traceback(self) -> str:
        """The traceback as Python prints it, without the lines of the sources; empty if nothing was raised."""
        return "\n".join(_lines_of(self.chain))


class StoredAttempt(ErrorRecord, frozen=True, omit_defaults=True):
    """A record as it is read back: `at` is when the attempt was settled."""

    at: str = ""


_HEADER = "Traceback (most recent call last):"
_FROM = "The above exception was the direct cause of the following exception:"
_WHILE = "During handling of the above exception, another exception occurred:"


def _lines_of(chain: tuple[StoredException, ...]) -> Iterator[str]:
    for number in range(len(chain) - 1, -1, -1):
        error = chain[number]
        yield from _exception_lines(error)
        if number:
            if error.left_out:
                several = "1 exception" if error.left_out == 1 else f"{error.left_out:,} exceptions"
                yield from ("", f"[{several} between the one above and the one below left out]")
            yield from ("", _WHILE if error.is_context else _FROM, "")


def _exception_lines(error: StoredException) -> Iterator[str]:
    bar = "  | " if error.members else ""
    if error.frames:
        yield f"  + Exception Group {_HEADER}" if error.members else _HEADER
    for frame in error.frames:
        yield f"{bar}{frame}"
    message = error.message.split("\n")
    yield f"{bar}{error.type}: {message[0]}" if error.message else f"{bar}{error.type}"
    for line in [*message[1:], *(line for note in error.notes for line in note.split("\n"))]:
        yield f"{bar}{line}"
    for number, member in enumerate(error.members, start=1):
        yield f"{'  +-+' if number == 1 else '    +'}---------------- {number} ----------------"
        for line in _lines_of(member):
            yield f"    | {line}"
    if error.members:
        if error.more_members:
            yield f"    | and {error.more_members:,} more exceptions"
        yield "    +------------------------------------"


def read_attempts(errors: str) -> list[StoredAttempt]:
    """The stored records of a job's failed attempts, the oldest first; those that cannot be read are left out."""
    try:
        found = msgspec.json.decode(errors.encode(), type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return []
    return [record for raw in found for record in _read(raw)]


def _read(raw: Any) -> Iterator[StoredAttempt]:
    try:
        yield msgspec.json.decode(raw, type=StoredAttempt)
    except (msgspec.DecodeError, RecursionError):
        return
