"""Entities of a job whose session is not open yet.

Many handlers only change the entities that they receive, and need no session for that: the changed columns are read
from the entities. These entities belong to a placeholder. It becomes an open session, which joins the transaction with
the entities in it, as soon as code uses the session through the context or an entity.
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

# Users' listeners for these events see a session begin, flush and end, and see entities enter and leave it.
_WHILE_OPEN: Listeners = attrgetter(
    *FLUSH_EVENTS, "before_attach", "after_attach", "detached_to_persistent", "persistent_to_detached"
)
# SQLAlchemy's own begin at 1.
_ids = count(-1, -1)


def put(opened: JobSession, entity: object) -> object:
    """Put an entity into the job's session or, if that is not open, among those that wait for it; return the entity."""
    if opened.made is not None or is_class_listened_to(HandlerSession, _WHILE_OPEN):
        return attach(opened.session(), entity)
    if opened.entities is None:
        opened.entities = Entities(opened.reach)
    opened.entities.add(entity)
    return entity


def may_read(opened: JobSession, key: Any, events: Listeners) -> bool:
    """Return True if a row may be read without the job's session.

    That is so if the session neither holds the row nor has unsent changes, and no user's listener would notice the
    loading.

    Args:
        key: The identity key of the row.
        events: The events by which SQLAlchemy notifies users' code of loading.
    """
    session, entities = opened.made, cast("Entities | None", opened.entities)
    if session is None:
        is_here = entities is not None and entities.has(key)
        return not (is_here or is_class_listened_to(HandlerSession, events))
    has_changes = session._new or session._deleted or session.identity_map._modified  # noqa: SLF001  # the public names build sets
    is_known = has_changes or key in session.identity_map or binds_of(session)
    return not (is_known or is_listened_to(session, events))


def changes_before(opened: JobSession, facts_of: FactsOf) -> list[RowChange] | None:
    """Return the UPDATEs for the changed entities of a job whose session is not open, for the caller to send.

    A flush would send the same UPDATEs; after this call the session can no longer be opened. Return None if the session
    is open already, or if a flush might do more than these UPDATEs.
    """
    with opened.lock:
        found = _changes(opened, facts_of)
        opened.is_over |= found is not None and opened.entities is not None
    return found


def send_before(opened: JobSession, connection: Connection) -> bool:
    """Send the changes of a lone job's entities directly, which is faster than opening a session for them; return True.

    Return False, and send nothing, if the changes must be left to the session's flush.

    Raises:
        StaleDataError: a row does not exist any more.
        sqlalchemy.exc.DBAPIError: as SQLAlchemy would raise it.
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
        # The handler may have swallowed the error.
        raise opened.failed
    entities = cast("Entities | None", opened.entities)
    if opened.made is not None:
        return None
    return [] if entities is None else entities.changes(facts_of)


class Entities:
    """The entities of one job whose session is not open yet.

    SQLAlchemy sees a placeholder as their session; any use of it opens the job's real session.

    Args:
        reach: Opens the session.
    """

    def __init__(self, reach: Callable[[], None]) -> None:
        self._watched: Watch | None = None
        self._entities: dict[InstanceState[Any], object] = {}
        self._id, self._unopened = next(_ids), _Unopened(reach)
        _sessions[self._id] = self._unopened

    def add(self, entity: object) -> None:
        """Add an entity; for SQLAlchemy, the placeholder is now the entity's session."""
        state = instance_state(entity)
        state.session_id, state._instance_dict = self._id, cast("Any", _no_map)  # noqa: SLF001  # as an identity map does
        self._entities[state] = entity

    def has(self, key: Any) -> bool:
        """Return True if the row with this identity key is among these entities."""
        return any(state.key == key for state in self._entities)

    def watch(self, changes: UnlockedChanges, entities: Sequence[object]) -> None:
        """Check, before changes are sent, if the handler changed these unlocked entities; `changes` logs it."""
        if entities:
            self._watched = Watch(changes, entities)

    def modified(self) -> list[InstanceState[Any]]:
        """Return SQLAlchemy's states of the entities that were changed."""
        return [state for state in self._entities if state.modified]

    def changes(self, facts_of: FactsOf) -> list[RowChange] | None:
        """Return the UPDATEs that a flush would send; None if a flush might do more."""
        # The handler may have added a listener.
        if is_class_listened_to(HandlerSession, _WHILE_OPEN):
            return None
        if self._watched is not None and not self._watched.look():
            self._watched = None
        return changes_of(self.modified(), facts_of)

    def make_session(self, **options: Any) -> HandlerSession:
        """Turn the placeholder into an ordinary session with these options, and return it."""
        made, other = self._unopened, HandlerSession(**options)
        values = vars(other)
        # Published at once, for other threads that look at it.
        _vars(made).update(values)
        _sessions[values["hash_key"]] = made
        object.__setattr__(made, "__class__", HandlerSession)
        return made

    def move_to(self, session: HandlerSession) -> None:
        """Move all entities into the session that was opened for them; it also goes on checking unlocked entities."""
        for entity in self._entities.values():
            attach(session, entity)
        if self._watched is not None:
            session.watch(*self._watched)
        self._entities = {}
        del _sessions[self._id]

    def leave(self) -> None:
        """Detach all entities from the placeholder, as closing a session does."""
        if self._id in _sessions:
            for state in self._entities:
                state.session_id = state._strong_obj = None  # noqa: SLF001  # as SQLAlchemy detaches them
                state.__dict__.pop("_instance_dict", None)
            del _sessions[self._id]
        else:
            # The session was opened: the entities would form a reference cycle.
            _vars(self._unopened).pop("outboxq_reach", None)


class _Unopened(HandlerSession):
    """A session that opens when any of its attributes is used, and then becomes an ordinary session."""

    def __init__(self, reach: Callable[[], None]) -> None:
        _vars(self)["outboxq_reach"] = reach

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            # Attributes that code reads from any object, as a logger does, do not open it.
            return HandlerSession
        _vars(self)["outboxq_reach"]()
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        _vars(self)["outboxq_reach"]()
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        # An async session is found through the attribute of the plain session.
        _vars(self)["outboxq_reach"]()
        return object.__hash__(self)


def _vars(unopened: _Unopened) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(unopened, "__dict__")
    return found


class _NoMap:
    """The identity map of all placeholders for sessions, which records nothing.

    It reports changes at once, or SQLAlchemy would begin the session at an entity's first change.
    """

    def __init__(self) -> None:
        self._modified = self

    def add(self, state: object) -> None:
        """Do nothing: nothing is recorded."""

    def __call__(self) -> "_NoMap":
        """Return the map itself: an entity's state calls its reference to the map, which is usually a weak one."""
        return self


_no_map = _NoMap()
