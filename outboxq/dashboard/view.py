"""The input and the result of the functions that make pages: `Look` reads the database, `View` has the contents."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import TypeVar, cast

import msgspec
from sqlalchemy import Connection

from outboxq.admin.browse import read_moment
from outboxq.admin.sections import BY_INDEX, NotKnown, Sections
from outboxq.dashboard.databases import Way
from outboxq.dashboard.desk import Desk
from outboxq.dashboard.intents import Caller
from outboxq.dashboard.payloads import Document

Part = TypeVar("Part")
Shown = TypeVar("Shown")

# The limit for all sections of a page together.
_PAGE_SECONDS = 6.0


class Look:
    """The access of a page's function to a database: one READ ONLY transaction, with the settings and known kinds.

    Args:
        caller: The user; None for a live page, which many users see.
    """

    def __init__(self, connection: Connection, way: Way, desk: Desk, caller: Caller | None = None) -> None:
        self.connection = connection
        self.connect = way.connect
        self.schema = way.schema
        self.findings = way.findings
        self.desk = desk
        self.payloads = desk.payloads
        self.kinds = desk.kinds
        self.caller = caller
        moment = read_moment(connection)
        self.now = moment.now
        self.standby_delay_seconds = moment.standby_delay_seconds
        # All users are readers there, unless changes go to another server.
        self.is_read_only = moment.is_read_only and way.replica is None
        self.sections = Sections(connection, settings=BY_INDEX, seconds=_PAGE_SECONDS)

    def at(self, name: str, look: Callable[[Connection], Part]) -> Part | None:
        """Return the result of `look`, which reads one section of the page.

        Return None if the section cannot be read, or not in time: the page then says that the section is not known.

        Args:
            name: The section's name on the page.
        """
        return self.sections.at(name, lambda: look(self.connection))

    @property
    def not_known(self) -> tuple[NotKnown, ...]:
        """The sections that could not be read, each with the reason."""
        return tuple(self.sections.refused)


@dataclass(frozen=True, slots=True)
class View:
    """The contents of a page, as its function returns them.

    Attributes:
        template: The file name of the page's template.
        data: The contents, named as in the command line's --json; the template receives them too.
        extra: More contents, for the template only.
        later: Returns further entries of `extra`; called after the transaction, for slow work that needs no database.
        title: The title of the page.
    """

    template: str
    title: str
    data: Mapping[str, object]
    extra: Mapping[str, object] = field(default_factory=dict)
    later: Callable[[], Mapping[str, object]] | None = None

    @property
    def whole(self) -> "View":
        """This view with the entries that `later` returns added to `extra`."""
        return self if self.later is None else replace(self, extra={**self.extra, **self.later()}, later=None)


def look_at(way: Way, desk: Desk, show: Callable[[Look], Shown], caller: Caller | None = None) -> tuple[Shown, Look]:
    """Call `show` with a `Look` at the database, in a READ ONLY transaction; return its result and the `Look`."""
    with way.reading() as connection:
        look = Look(connection, way, desk, caller)
        shown = show(look)
    # The connection has been released.
    return (cast("Shown", shown.whole) if isinstance(shown, View) else shown), look


def flat(detail: object, **documents: Document | None) -> dict[str, object]:
    """Return a detail such as `JobDetail` as one flat dict, as `show --json` prints it.

    The dict has the detail's fields, and the fields of the summary in the detail. `documents` replace fields of the
    same name.
    """
    fields: dict[str, object] = {}
    for name, value in asdict(detail).items():  # type: ignore[call-overload]  # a dataclass, whichever it is
        if isinstance(value, dict) and is_dataclass(getattr(detail, name)):
            fields |= value
        elif name not in documents:
            fields[name] = value
    return fields | documents


def as_json(data: Mapping[str, object]) -> bytes:
    """Return the data of a view as JSON; the JSON text of each `Document` is not changed."""
    # Written by hand: msgspec encodes dataclasses itself, without calling a hook.
    whole = {
        name: msgspec.Raw(value.raw.encode()) if isinstance(value, Document) else value for name, value in data.items()
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)
