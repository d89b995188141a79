"""The parameters of requests, from a path, a query or a form: their dataclasses, and the function that reads them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, TypeVar
from uuid import UUID

import msgspec
from msgspec import Meta

from outboxq.errors import OutboxqError

Parameters = TypeVar("Parameters")

MAX_LIMIT, DEFAULT_LIMIT = 200, 50
# The longest names of queues and kinds; scopes, consumers and schedules; keys and ids of messages; search texts.
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=63)]
Scope: TypeAlias = Annotated[str, Meta(min_length=1, max_length=255)]
Key: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
SearchText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200)]
ErrorText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=2_500)]
Reason: TypeAlias = Annotated[str, Meta(max_length=500)]
RequiredReason: TypeAlias = Annotated[str, Meta(min_length=3, max_length=500, pattern=r"\S")]
# JSON texts; the database functions limit the size of a job's arguments.
Document: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1_200_000)]
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]
Period: TypeAlias = Literal["1h", "6h", "24h", "7d", "30d"]
# The selected rows of a page.
Selected: TypeAlias = Annotated[tuple[UUID, ...], Meta(max_length=MAX_LIMIT)]
_MAX_FIELDS = 50
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
# Messages of msgspec, and their meaning for the user of a form.
_RULES = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Expected `str` of length <= (\d+)", r"takes up to \1 characters"),
        (r"Expected `int(?: \| null)?`, got", r"takes a whole number"),
        (r"Expected `str` of length >= (\d+)", r"takes \1 characters or more"),
        (r"Expected `int` >= (-?\d+)", r"takes a number from \1 on"),
        (r"Expected `int` <= (-?\d+)", r"takes a number up to \1"),
        (r"Expected `bool`, got", r"takes true or false"),
        (r"Expected `datetime`|Invalid RFC3339", r"takes a time such as 2026-01-31T08:00:00Z"),
        (r"Invalid UUID", r"takes an id"),
        (r"Invalid enum value ('.*')", r"does not know \1"),
    )
)
_WRONG = re.compile(r"(?P<what>.+) - at `\$\.(?P<name>\w+)(?:\[\d+\])?`", re.DOTALL)


class BadRequest(OutboxqError):
    """Raised for a missing or invalid parameter of a request; answered with status 400."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nothing:
    """The empty parameters of a page or action that takes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfQueue:
    """The parameters in the path of a route about one queue."""

    queue: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class OfJob:
    """The parameters in the path of a route about one job."""

    job_id: UUID


@dataclass(frozen=True, kw_only=True, slots=True)
class OfKind:
    """The parameters in the path of a route about one kind."""

    kind: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class OfSchedule:
    """The parameters in the path of a route about one schedule."""

    name: Scope


@dataclass(frozen=True, kw_only=True, slots=True)
class OfEffect:
    """The parameters in the path of a route about one effect."""

    scope: Scope
    key: Key


@dataclass(frozen=True, kw_only=True, slots=True)
class OfMessage:
    """The parameters in the path of a route about one accepted message."""

    consumer: Scope
    message_id: Key


@dataclass(frozen=True, kw_only=True, slots=True)
class OfEntry:
    """The parameters in the path of a route about one operator's action in the audit."""

    entry: UUID


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonedJob(OfJob):
    """The fields of a form about one job: the job, and the reason for the change."""

    reason: Reason = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonedSchedule(OfSchedule):
    """The fields of a form about one schedule: the schedule, and the reason for the change."""

    reason: Reason = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonedEntry(OfEntry):
    """The fields of a form that stops or resumes a change of many rows: its id in the audit, and the reason."""

    reason: Reason = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paged:
    """The parameters of a list that is read in pages, the newest rows first.

    Attributes:
        limit: The most rows of a page.
        before: The id of the last row of the previous page, after which this page begins; None for the first page.
    """

    limit: Limit = DEFAULT_LIMIT
    before: UUID | None = None


def read_parameters(
    kind: type[Parameters], given: Mapping[str, str], several: Mapping[str, Sequence[str]] | None = None
) -> Parameters:
    """Return the parameters of one page or action as an object of the dataclass `kind`.

    An empty value counts as not given, and unknown names are ignored.

    Args:
        given: The parameters of the path, query or form, as texts.
        several: The parameters that may be given more than once, each with all of its values.

    Raises:
        BadRequest: a parameter is missing or invalid; the text names it.
    """
    if len(given) > _MAX_FIELDS:
        raise BadRequest(f"a request has up to {_MAX_FIELDS} parameters, this one has {len(given)}")
    values = {name: value for name, value in given.items() if value != ""}
    for name, value in values.items():
        if any((ord(character) < 32 and character not in "\t\r\n") or ord(character) == 127 for character in value):
            raise BadRequest(f"{name[:63]!r} holds a control character")
    try:
        return msgspec.convert({**values, **(several or {})}, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(_in_words(str(error))) from None


def _in_words(problem: str) -> str:
    """Turn an error message of msgspec about a parameter into a sentence that begins with the parameter's name."""
    missing = _MISSING.fullmatch(problem)
    if missing is not None:
        return f"{missing['name']} is missing: fill it in"
    wrong = _WRONG.fullmatch(problem)
    if wrong is None:
        return problem
    name, what = wrong["name"], wrong["what"]
    for pattern, words in _RULES:
        if (broken := pattern.match(what)) is not None:
            return f"{name} {broken.expand(words)}"
    return f"{name}: {what[:1].lower()}{what[1:]}"
