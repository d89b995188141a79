"""Progress notes of a handler: checked here, and written by its relay, for which the handler never waits."""

from collections.abc import Collection
from typing import Protocol
from uuid import UUID

from outboxq.codec.text import storable
from outboxq.errors import ArgumentError
from outboxq.job import Job

MAX_NOTE_CHARACTERS = 200


class ProgressNotes(Protocol):
    """The part of a relay that writes handlers' progress notes; both methods return at once, and raise no errors."""

    def note(self, job: Job, fraction: float, note: str) -> None:
        """Write this note of a job soon, unless a newer one of the same job arrives first."""
        ...

    def clear(self, job_ids: Collection[UUID]) -> None:
        """Delete the notes of these jobs soon: their handler has ended."""
        ...


def checked_note(fraction: object, note: object) -> tuple[float, str]:
    """Check a fraction from 0 to 1 and a text; returns both, the text storable and cut to 200 characters.

    Raises:
        ArgumentError: one is of another type, or the fraction is out of its range.
    """
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 <= fraction <= 1:
        raise ArgumentError(f"ctx.progress takes a fraction from 0 to 1, got {fraction!r}")
    if not isinstance(note, str):
        raise ArgumentError(f"ctx.progress takes a text, got {type(note).__name__}")
    return float(fraction), storable(note[:MAX_NOTE_CHARACTERS])
