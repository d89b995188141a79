"""Finds out if users' code listens to events of a session: then outboxq takes no shortcut that skips the events."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

from sqlalchemy.orm import Session

# Returns the listeners of several events from a dispatch: an `attrgetter` of their names.
Listeners: TypeAlias = Callable[[object], tuple[Iterable[object], ...]]


def is_ours(listener: object) -> bool:
    """Return True if a listener is outboxq's own function, and not users' code."""
    return str(getattr(listener, "__module__", "")).startswith("outboxq.")


def is_listened_to(session: Session, events: Listeners) -> bool:
    """Return True if users' code listens to one of these events of the session, or of all sessions of its class.

    Args:
        events: Returns the listeners of the events in question from a `dispatch`, SQLAlchemy's object that holds
            listeners.
    """
    kind: Any = type(session)
    found = events(session.dispatch)
    # A listener of this session alone replaces the object that represents the listeners of all sessions.
    if found != _of_class(kind, events)[0]:
        return not all(map(is_ours, chain.from_iterable(found)))
    return is_class_listened_to(kind, events)


def is_class_listened_to(kind: Any, events: Listeners) -> bool:
    """Return True if users' code listens to one of these events for all sessions of the class `kind`.

    Args:
        events: Returns the listeners of the events in question from a `dispatch`, SQLAlchemy's object that holds
            listeners.
    """
    return not _are_ours(tuple(chain.from_iterable(_of_class(kind, events)[1])))


@lru_cache(64)
def _of_class(kind: Any, events: Listeners) -> tuple[tuple[object, ...], tuple[Iterable[object], ...]]:
    """Return the objects that hold the listeners of all sessions of a class, and the lists of these listeners."""
    found: tuple[Any, ...] = events(kind.dispatch._for_class(kind))  # noqa: SLF001  # nothing public makes one
    return found, tuple(each.parent_listeners for each in found)


# Only listeners of all sessions, which seldom change, are kept: those of one session would keep all that they refer to
# alive.
@lru_cache(64)
def _are_ours(listeners: tuple[object, ...]) -> bool:
    return all(map(is_ours, listeners))
