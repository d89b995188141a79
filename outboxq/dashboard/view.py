"""The input of a screen, and its result: the same data for a page and for JSON."""

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

# Together, however many sections a page has.
_PAGE_SECONDS = 6.0


class Look:
    """One read of a database, in a READ ONLY transaction.

    Args:
        caller: The user; None for a page that many follow.
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
        """A section; None if the database refuses it or takes too long, which the page then says."""
        return self.sections.at(name, lambda: look(self.connection))

    @property
    def not_known(self) -> tuple[NotKnown, ...]:
        """The sections that the database refused."""
        return tuple(self.sections.refused)


@dataclass(frozen=True, slots=True)
class View:
    """The contents of a screen.

    Attributes:
        data: By the names that the command line's --json has. The template has them too.
        extra: For the template alone.
        later: Returns more of that; called after the transaction, for work that takes long and needs no database.
        title: Of the page.
    """

    template: str
    title: str
    data: Mapping[str, object]
    extra: Mapping[str, object] = field(default_factory=dict)
    later: Callable[[], Mapping[str, object]] | None = None

    @property
    def whole(self) -> "View":
        """The view with what `later` returns."""
        return self if self.later is None else replace(self, extra={**self.extra, **self.later()}, later=None)


def look_at(way: Way, desk: Desk, show: Callable[[Look], Shown], caller: Caller | None = None) -> tuple[Shown, Look]:
    """Run a screen in a transaction of its own."""
    with way.reading() as connection:
        look = Look(connection, way, desk, caller)
        shown = show(look)
    # The connection is free again.
    return (cast("Shown", shown.whole) if isinstance(shown, View) else shown), look


def flat(detail: object, **documents: Document | None) -> dict[str, object]:
    """A thing in full, as `show --json` has it: its fields, those of its summary, and its documents."""
    fields: dict[str, object] = {}
    for name, value in asdict(detail).items():  # type: ignore[call-overload]  # a dataclass, whichever it is
        if isinstance(value, dict) and is_dataclass(getattr(detail, name)):
            fields |= value
        elif name not in documents:
            fields[name] = value
    return fields | documents


def as_json(data: Mapping[str, object]) -> bytes:
    """The JSON of a view: its documents as they are."""
    # By hand: msgspec knows dataclasses, and calls no hook for them.
    whole = {
        name: msgspec.Raw(value.raw.encode()) if isinstance(value, Document) else value for name, value in data.items()
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)
