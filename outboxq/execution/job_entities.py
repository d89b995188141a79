"""Entities of a job whose session is not open yet.

Many a handler changes the entities that it is given, and needs no session for that: the changed columns are read off
the entities. So these belong to a session that opens when anything looks at it, by the context or by an entity, and is
then begun and joined, with the entities in it.
"""

from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any, cast

from sqlalchemy import Connection
from sqlalchemy.orm import InstanceState
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.session import _sessions

from outboxq.database.direct import is_direct
from outboxq.database.session_listeners import Listeners, is_class_listened_to, is_listened_to
from outboxq.database.sessions import binds_of
from outboxq.execution.invoke import HandlerSession, JobSession, Watch
from outboxq.execution.read_rows import attach
from outboxq.execution.write_buffer import (
    FLUSH_EVENTS,
    RowChange,
    are_few,
    as_flushed,
    changes_of,
    commit_states,
    send_each,
)
from outboxq.handlers.set_based import FactsOf
from outboxq.handlers.unlocked import UnlockedChanges

# Users' listeners for these see a session begin, flush and end, and entities come into it and leave it.
_WHILE_OPEN: Listeners = attrgetter(
    *FLUSH_EVENTS, "before_attach", "after_attach", "detached_to_persistent", "persistent_to_detached"
)
# SQLAlchemy's own begin at 1.
_ids = count(-1, -1)


def put(opened: JobSession, entity: object) -> object:
    """Put an entity that was read into a job's session, and return it."""
    if opened.made is not None or is_class_listened_to(HandlerSession, _WHILE_OPEN):
        return attach(opened.session(), entity)
    if opened.entities is None:
        opened.entities = Entities(opened.reach)
    opened.entities.add(entity)
    return entity


def may_read(opened: JobSession, key: Any, events: Listeners) -> bool:
    """Return True if the row with this identity key is not in a job's session, and its loading shows nowhere else.

    Args:
        events: Those that tell users' code of loading.
    """
    session, entities = opened.made, cast("Entities | None", opened.entities)
    if session is None:
        is_here = entities is not None and entities.has(key)
        return not (is_here or is_class_listened_to(HandlerSession, events))
    has_changes = session._new or session._deleted or session.identity_map._modified  # noqa: SLF001  # the public names build sets
    is_known = has_changes or key in session.identity_map or binds_of(session)
    return not (is_known or is_listened_to(session, events))


def changes_before(opened: JobSession, facts_of: FactsOf) -> list[RowChange] | None:
    """Take the UPDATEs that a flush of a job's session would send; None if that is open, or a flush might do more.

    Once they are taken, nothing opens the session any more.
    """
    with opened.lock:
        found = _changes(opened, facts_of)
        opened.is_over |= found is not None and opened.entities is not None
    return found


def send_before(opened: JobSession, connection: Connection) -> bool:
    """Send the changes of a lone job's entities by themselves; return False if all is left to the session's flush.

    Raises:
        StaleDataError: a row does not exist any more.
        sqlalchemy.exc.DBAPIError: as SQLAlchemy raises it.
    """
    with opened.lock:
        found = _changes(opened, as_flushed)
        if found is None or not (are_few(found) and is_direct(connection)):
            return False
        opened.is_over = True
    send_each(connection, found)
    commit_states(opened.entities.modified())
    return True


def _changes(opened: JobSession, facts_of: FactsOf) -> list[RowChange] | None:
    if opened.failed is not None:
        # The handler may have swallowed it.
        raise opened.failed
    entities = cast("Entities | None", opened.entities)
    if opened.made is not None:
        return None
    return [] if entities is None else entities.changes(facts_of)


class Entities:
    """The entities of one job, in a session that is not open.

    Args:
        reach: Opens the session.
    """

    def __init__(self, reach: Callable[[], None]) -> None:
        self._watched: Watch | None = None
        self._entities: dict[InstanceState[Any], object] = {}
        self._id, self._unopened = next(_ids), _Unopened(reach)
        _sessions[self._id] = self._unopened

    def add(self, entity: object) -> None:
        """Add an entity that was read."""
        state = instance_state(entity)
        state.session_id, state._instance_dict = self._id, cast("Any", _no_map)  # noqa: SLF001  # as an identity map does
        self._entities[state] = entity

    def has(self, key: Any) -> bool:
        """Return True if the row with this identity key is here."""
        return any(state.key == key for state in self._entities)

    def watch(self, changes: UnlockedChanges, entities: Sequence[object]) -> None:
        """Check the changes of these entities before each flush, by `changes`."""
        if entities:
            self._watched = Watch(changes, entities)

    def modified(self) -> list[InstanceState[Any]]:
        """Return the states of changed entities."""
        return [state for state in self._entities if state.modified]

    def changes(self, facts_of: FactsOf) -> list[RowChange] | None:
        """Make the UPDATEs that a flush would send; None if a flush might do more."""
        # The handler may have added a listener.
        if is_class_listened_to(HandlerSession, _WHILE_OPEN):
            return None
        if self._watched is not None and not self._watched.look():
            self._watched = None
        return changes_of(self.modified(), facts_of)

    def make_session(self, **options: Any) -> HandlerSession:
        """Make an ordinary session of the one that is not open, with the arguments of its class."""
        made, other = self._unopened, HandlerSession(**options)
        values = vars(other)
        # At once, for other threads that look at it.
        _vars(made).update(values)
        _sessions[values["hash_key"]] = made
        object.__setattr__(made, "__class__", HandlerSession)
        return made

    def move_to(self, session: HandlerSession) -> None:
        """Put all into the session that was made."""
        for entity in self._entities.values():
            attach(session, entity)
        if self._watched is not None:
            session.watch(*self._watched)
        self._entities = {}
        del _sessions[self._id]

    def leave(self) -> None:
        """Detach all, as a session's close does."""
        if self._id in _sessions:
            for state in self._entities:
                state.session_id = state._strong_obj = None  # noqa: SLF001  # as SQLAlchemy detaches them
                state.__dict__.pop("_instance_dict", None)
            del _sessions[self._id]
        else:
            # The session was opened: they would be a circle of references.
            _vars(self._unopened).pop("outboxq_reach", None)


class _Unopened(HandlerSession):
    """A session that opens when any of its attributes is used, and is an ordinary one from then on."""

    def __init__(self, reach: Callable[[], None]) -> None:
        _vars(self)["outboxq_reach"] = reach

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            # What looks at all objects, as a logger does, opens none.
            return HandlerSession
        _vars(self)["outboxq_reach"]()
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        _vars(self)["outboxq_reach"]()
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        # An async session is found by that of the plain one.
        _vars(self)["outboxq_reach"]()
        return object.__hash__(self)


def _vars(unopened: _Unopened) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(unopened, "__dict__")
    return found


class _NoMap:
    """The identity map of all unopened sessions. It records nothing, and says that the session has begun."""

    def __init__(self) -> None:
        self._modified = self

    def add(self, state: object) -> None:
        """Do nothing."""

    def __call__(self) -> "_NoMap":
        """Return itself, as the weak reference does that an entity's state has."""
        return self


_no_map = _NoMap()
