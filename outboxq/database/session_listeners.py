"""Session listeners: does users' code listen to events of a session?"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

from sqlalchemy.orm import Session

# Returns the listeners for several events, from a dispatch: an `attrgetter` of their names.
Listeners: TypeAlias = Callable[[object], tuple[Iterable[object], ...]]


def is_ours(listener: object) -> bool:
    """Return True if a listener is outboxq's own."""
    return str(getattr(listener, "__module__", "")).startswith("outboxq.")


def is_listened_to(session: Session, events: Listeners) -> bool:
    """Return True if users' code listens to one of these events of the session, or of all sessions."""
    kind: Any = type(session)
    found = events(session.dispatch)
    # A listener of this session alone takes the place of the object that stands for those of all sessions.
    if found != _of_class(kind, events)[0]:
        return not all(map(is_ours, chain.from_iterable(found)))
    return is_class_listened_to(kind, events)


def is_class_listened_to(kind: Any, events: Listeners) -> bool:
    """Return True if users' code listens to one of these events of all sessions of a class."""
    return not _are_ours(tuple(chain.from_iterable(_of_class(kind, events)[1])))


@lru_cache(64)
def _of_class(kind: Any, events: Listeners) -> tuple[tuple[object, ...], tuple[Iterable[object], ...]]:
    """The objects that stand for listeners of all sessions, and the lists of these, which stay the same objects."""
    found: tuple[Any, ...] = events(kind.dispatch._for_class(kind))  # noqa: SLF001  # nothing public makes one
    return found, tuple(each.parent_listeners for each in found)


# Listeners of all sessions, which change seldom; those of one session would be kept here with all that they hold.
@lru_cache(64)
def _are_ours(listeners: tuple[object, ...]) -> bool:
    return all(map(is_ours, listeners))
