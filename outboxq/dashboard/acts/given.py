"""Values that forms give as text: arguments, and times."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from outboxq.dashboard.desk import KnownKinds
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.forms import Field
from outboxq.dashboard.payloads import Document
from outboxq.dashboard.view import Look
from outboxq.errors import UnknownKind

if TYPE_CHECKING:
    from outboxq.admin.bulk import CheckArgs

ARGS = Field(name="args", label="Arguments", kind="lines", is_required=True, help="All of them, as a JSON object.")
UNCHECKED = Field(
    name="unchecked",
    label="Take them as they are",
    kind="check",
    is_required=True,
    help="This dashboard does not know the handlers: what does not fit them fails when the job runs.",
)


def checked_args(args: str, kinds: KnownKinds, *, unchecked: bool) -> "CheckArgs | None":
    """The function that checks arguments against the handler of a kind; None without a registry, if that was confirmed.

    Raises:
        Refused: they are not a JSON object, or it was not confirmed that nothing checks them.
    """
    try:
        msgspec.json.decode(args.encode(), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise Refused(400, 'Arguments are a JSON object, such as {"user_id": 7}.') from None
    if not kinds.is_given and not unchecked:
        raise Refused(
            400, "This dashboard does not know the handlers: confirm that the arguments are taken as they are."
        )
    return kinds.check


def args_notes(kinds: KnownKinds, kind: str) -> tuple[str, ...]:
    """The notes to read before a job of a kind is given arguments."""
    if kinds.lacks(kind):
        return (str(UnknownKind(kind, kinds.names)),)
    return ()


def args_to_edit(look: Look, document: Document, stored: str) -> str:
    """The initial arguments of a form; none if some are hidden, as their masks would be written back."""
    shown = look.payloads.mode == "shown" and look.payloads.redact is None
    is_whole = shown or document.raw == stored
    return document.pretty if is_whole and document.why is None else ""


def moment_in(text: str) -> datetime:
    """A time in ISO 8601, in UTC without an offset.

    Raises:
        Refused: it is not a time.
    """
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise Refused(400, "A time is written as 2026-01-31T08:00:00Z, or with another offset than Z.") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
