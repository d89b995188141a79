"""The record of a failed attempt: its exception and the causes of it, as they are stored, reported and printed."""

from collections.abc import Iterator
from typing import Any

import msgspec


class StoredFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One frame of a stored traceback, or an entry for several frames that were left out.

    If `path` is empty, `line` is the number of frames that were left out, and `name` their package, if they have one.
    """

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        if not self.path:
            frames = "1 frame" if self.line == 1 else f"{self.line:,} frames"
            return f"  [{frames} of {self.name}]" if self.name else f"  [{frames} left out]"
        return f'  File "{self.path}", line {self.line}, in {self.name}'


class StoredException(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exception as it is stored: names, texts and frames, without references to objects.

    Attributes:
        notes: The notes of `add_note`, redacted like the message.
        frames: Its traceback, the innermost frame last.
        members: If it is a group, its first exceptions, each with its causes.
        more_members: How many exceptions of the group were left out.
        is_context: True if the exception before it in the chain was raised while this one was handled, and not `from`
            it.
        left_out: How many exceptions of the chain were left out between the previous one and this one.
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
    """One failed attempt, as stored in the column `errors` of its job or dead letter.

    Attributes:
        attempt: The number of the attempt, from 1.
        type: The name of the exception's type.
        message: The exception's text, as far as the handler's setting `messages` lets it be stored.
        where: The innermost frames of the handler's own code.
        chain: The exception, which was raised last, and then its causes.
    """

    attempt: int
    type: str
    message: str
    where: tuple[str, ...] = ()
    chain: tuple[StoredException, ...] = ()

    def as_json(self) -> str:
        """Return the record as JSON text, to be stored; the database adds the time, `at`."""
        return msgspec.json.encode(self).decode()

    def traceback(self) -> str:
        """The traceback as Python prints it, without the lines of the sources; empty if nothing was raised."""
        return "\n".join(_lines_of(self.chain))


class StoredAttempt(ErrorRecord, frozen=True, omit_defaults=True):
    """The record of a failed attempt, as read from the database: `at` is the time, as text, at which it was stored."""

    at: str = ""


_HEADER = "Traceback (most recent call last):"
_FROM = "The above exception was the direct cause of the following exception:"
_WHILE = "During handling of the above exception, another exception occurred:"


def _lines_of(chain: tuple[StoredException, ...]) -> list[str]:
    lines: list[str] = []
    for number in range(len(chain) - 1, -1, -1):
        error = chain[number]
        bar = "  | " if error.members else ""
        if error.frames:
            lines.append(f"  + Exception Group {_HEADER}" if error.members else _HEADER)
        texts = "\n".join((f"{error.type}: {error.message}" if error.message else error.type, *error.notes))
        lines += [f"{bar}{line}" for line in (*error.frames, *texts.split("\n"))]
        for place, member in enumerate(error.members, start=1):
            lines.append(f"{'  +-+' if place == 1 else '    +'}---------------- {place} ----------------")
            lines += [f"    | {line}" for line in _lines_of(member)]
        if error.members:
            if error.more_members:
                lines.append(f"    | and {error.more_members:,} more exceptions")
            lines.append("    +------------------------------------")
        if number:
            if error.left_out:
                several = "1 exception" if error.left_out == 1 else f"{error.left_out:,} exceptions"
                lines += "", f"[{several} between the one above and the one below left out]"
            lines += "", _WHILE if error.is_context else _FROM, ""
    return lines


def read_attempts(errors: str) -> list[StoredAttempt]:
    """Read the records of a job's failed attempts, the oldest first; records that cannot be read are left out."""
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
