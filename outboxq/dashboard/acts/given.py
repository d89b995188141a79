"""Functions that check and convert what users type into forms: arguments of jobs, and times."""

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
    """Check that `args` is a JSON object; return a function that checks such arguments against the handler of a kind.

    Without a registry the dashboard knows no handlers. The function then returns None, and the user has to confirm by
    `unchecked` that the arguments are not checked.

    Raises:
        Refused: `args` is not a JSON object, or there is no registry and `unchecked` is False.
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
    """Return a warning to show in a job's form if the application's registry has no handler of the job's kind.

    Return an empty tuple if there is a handler, or no registry.
    """
    if kinds.lacks(kind):
        return (str(UnknownKind(kind, kinds.names)),)
    return ()


def args_to_edit(look: Look, document: Document, stored: str) -> str:
    """Return the initial text of a form's field for a job's arguments: `stored` as JSON over several lines.

    The text is empty if the page hides some arguments: otherwise the form would save masks as arguments.

    Args:
        document: The part of the arguments that may be shown.
    """
    shown = look.payloads.mode == "shown" and look.payloads.redact is None
    is_whole = shown or document.raw == stored
    return document.pretty if is_whole and document.why is None else ""


def moment_in(text: str) -> datetime:
    """Return the time that a form's field gives in ISO 8601. A text without an offset is in UTC.

    Raises:
        Refused: the text is not a time.
    """
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise Refused(400, "A time is written as 2026-01-31T08:00:00Z, or with another offset than Z.") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
