"""Intents: previewed changes of many rows, signed, so that the same user can make exactly the change that was shown.

An intent is valid for five minutes. It has the filter of the rows and the moment of the preview, so rows that were
added later are not changed. It also has the id for the change's row in the audit, so a form that is sent twice begins
the change only once.
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
# Changes of more rows than this are confirmed by typing.
ASKED_ABOVE = 1_000
# Actions that cannot be undone, also on a few rows.
_GRAVE = ("dead.discard",)


@dataclass(frozen=True, slots=True)
class Caller:
    """The user of a request, the id of his session (`session`), and the path segment of the database (`database`)."""

    user: User
    session: str
    database: str


class Intent(msgspec.Struct, frozen=True):
    """A previewed change of many rows. The preview's form contains it as signed text, and sends it to make the change.

    Attributes:
        entry: The id that the change's row in the audit will have.
        name: The name of the action, such as `dead.retry`.
        filter: The filter of the rows as JSON, as the audit keeps it.
        change: The new values for these rows as JSON; None if the action, such as a discard, has none.
        count: The number of rows, up to 10,000.
        is_capped: True if there are more rows, which were not counted.
        until: The time at which the intent becomes too old, in seconds since 1970.
        user: The name of the only user who may make the change.
        session: The id of this user's session.
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
        """Return True if the preview is older than five minutes, so that the change must be previewed again."""
        return self.until < time.time()

    @property
    def expected(self) -> int | None:
        """The number of previewed rows, for the audit; None if not all of them were counted."""
        return None if self.is_capped else self.count

    @property
    def action(self) -> BulkAction:
        """The previewed action, made from the intent's name, filter and change."""
        found = read_action(self.name, self.filter, self.change, None)
        assert found is not None
        return found

    @property
    def needs(self) -> Role:
        """The lowest role with which a user may make the change."""
        return needed_for(self.name, self.expected)

    def words(self, *, is_production: bool) -> tuple[str, ...]:
        """Return the words that confirm the change: the user has to type one of them.

        The words are the number of rows and, if the filter names a queue, the queue's name. There are none for a change
        of up to 1,000 rows outside production: it needs no confirmation.
        """
        if self.count <= ASKED_ABOVE and not is_production:
            return ()
        queue = self.action.wanted.queue
        return (str(self.count), *([queue] if queue else []))

    def is_confirmed(self, typed: str | None, *, is_production: bool) -> bool:
        """Return True if `typed` confirms the change, or if no confirmation is needed."""
        words = self.words(is_production=is_production)
        given = (typed or "").strip()
        return not words or given in words or given.replace(",", "") == words[0]


class Intents:
    """Makes the signed texts of intents for the forms of previews, and verifies the texts that the forms send back."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def close(self, found: Preview, caller: Caller) -> tuple[Intent, str]:
        """Make the intent of a preview for this caller; return it, and the signed text that the form sends back."""
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
        """Verify the signed text that a form has sent, and return its intent, even if the intent is too old (`is_old`).

        Raises:
            Refused: this dashboard did not sign the text, or it is for another user, session or database.
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
    """Return the lowest role with which a user may make a change of many rows.

    Args:
        name: The name of the action.
        expected: The number of rows; None if not all of them were counted.
    """
    if name in _GRAVE or expected is None or expected > MAX_COUNT:
        return Role.ADMIN
    return Role.OPERATOR


def _json(fields: dict[str, object]) -> str:
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None}).decode()
