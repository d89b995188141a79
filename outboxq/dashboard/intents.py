"""A previewed change, signed, so that it can be done as it was shown: by the same user, within five minutes.

An intent has the filter with the moment of its preview, so nothing newer is touched; and the id that its row in the
audit will have, so it is begun once, however often its form is sent.
"""

import secrets
import time
from dataclasses import dataclass
from uuid import UUID

import msgspec

from outboxq.admin.actions import BulkAction, Preview
from outboxq.admin.audit import new_entry_id
from outboxq.admin.bulk import MAX_COUNT
from outboxq.admin.bulk_actions import fields_of, read_action
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.roles import Role, User
from outboxq.dashboard.seals import Seal

LIFE_SECONDS = 300.0
# More than this is confirmed by typing.
ASKED_ABOVE = 1_000
# Actions that cannot be undone, also on a few rows.
_GRAVE = ("dead.discard",)


@dataclass(frozen=True, slots=True)
class Caller:
    """The user of a request, the session, and the database."""

    user: User
    session: str
    database: str


class Intent(msgspec.Struct, frozen=True):
    """A change of many rows that was previewed.

    Attributes:
        filter: The rows that are meant, as the audit keeps it; `change`, the change of them.
        count: How many there were, up to 10,000.
        until: The time from which on it is too old, in seconds since 1970.
    """

    entry: UUID
    name: str
    filter: str
    change: str | None
    count: int
    is_capped: bool
    until: float
    user: str
    session: str
    database: str

    @property
    def is_old(self) -> bool:
        """Return True if it has to be previewed again."""
        return self.until < time.time()

    @property
    def expected(self) -> int | None:
        """The number of rows that the audit expects."""
        return None if self.is_capped else self.count

    @property
    def action(self) -> BulkAction:
        """The action as it was previewed."""
        found = read_action(self.name, self.filter, self.change, None)
        assert found is not None
        return found

    @property
    def needs(self) -> Role:
        """The role that it takes."""
        return needed_for(self.name, self.expected)

    def words(self, *, is_production: bool) -> tuple[str, ...]:
        """The words that confirm it when typed; none if it need not be confirmed."""
        if self.count <= ASKED_ABOVE and not is_production:
            return ()
        queue = self.action.wanted.queue
        return (str(self.count), *([queue] if queue else []))

    def is_confirmed(self, typed: str | None, *, is_production: bool) -> bool:
        """Return True if `typed` confirms it."""
        words = self.words(is_production=is_production)
        given = (typed or "").strip()
        return not words or given in words or given.replace(",", "") == words[0]


class Intents:
    """Signs intents, and verifies them."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def close(self, found: Preview, caller: Caller) -> tuple[Intent, str]:
        """The intent of a preview, and the text that its form sends back."""
        action = found.action
        change = None if action.change is None else _json(action.change)
        intent = Intent(
            entry=new_entry_id(),
            name=action.name,
            filter=_json(fields_of(action.wanted)),
            change=change,
            count=min(found.count, MAX_COUNT),
            is_capped=found.is_capped,
            until=time.time() + LIFE_SECONDS,
            user=caller.user.name,
            session=caller.session,
            database=caller.database,
        )
        return intent, self._seal.close("intent", intent)

    def open(self, sealed: str, caller: Caller) -> Intent:
        """The intent that a form has sent back; it may be too old.

        Raises:
            Refused: it is not ours, or another's.
        """
        found = self._seal.open("intent", sealed, Intent)
        if not isinstance(found, Intent):
            raise Refused(400, "This is no preview of this dashboard, or was changed: look at what is meant once more.")
        given = (found.user, found.session, found.database)
        mine = (caller.user.name, caller.session, caller.database)
        if not all(
            secrets.compare_digest(one.encode(), other.encode()) for one, other in zip(given, mine, strict=True)
        ):
            raise Refused(403, "This preview was made for another user, or another database.")
        return found


def needed_for(name: str, expected: int | None) -> Role:
    """The role that a change of so many rows takes; None if they were not all counted."""
    if name in _GRAVE or expected is None or expected > MAX_COUNT:
        return Role.ADMIN
    return Role.OPERATOR


def _json(fields: dict[str, object]) -> str:
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None}).decode()
