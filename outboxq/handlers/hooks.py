"""Hooks of a registry: functions of the application that receive the events of its jobs."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from outboxq.errors import RegistryError
from outboxq.events import CountedEvent, Event, ProducerEvent, SupervisorEvent
from outboxq.handlers.function import check_takes_one, name_of

E = TypeVar("E")
R = TypeVar("R")

_EVENTS: frozenset[type] = frozenset(get_args(Event))
_OF_SUPERVISOR: frozenset[type] = frozenset(get_args(SupervisorEvent))
_WANTED = "a hook is a function of an event, sync or async"
_OF_PRODUCERS: frozenset[type] = frozenset(get_args(ProducerEvent))
# The events that registry hooks can receive, and the events for a hook that names none.
HEARD = _EVENTS - _OF_SUPERVISOR - _OF_PRODUCERS
TOLD_TO_ALL = HEARD - frozenset(get_args(CountedEvent))


@dataclass(frozen=True, slots=True, eq=False)
class EventHook:
    """A function, sync or async, and the classes of the events that it receives."""

    function: Callable[[Any], object]
    events: frozenset[type]

    def wants(self, event: Event) -> bool:
        """Return True if the hook receives events of this class."""
        return type(event) in self.events


@dataclass(frozen=True, slots=True)
class On(Generic[E]):
    """The decorator that `jobs.on(...)` returns: it registers a hook through `add`, and returns it unchanged."""

    add: Callable[[EventHook], None]
    events: frozenset[type]

    def __call__(self, hook: Callable[[E], R], /) -> Callable[[E], R]:
        """Register `hook`."""
        self.add(checked_hook(hook, self.events))
        return hook


def checked_hook(hook: object, events: frozenset[type] = TOLD_TO_ALL) -> EventHook:
    """Check that a hook can be called with an event; return it with the classes of events that it receives.

    Raises:
        RegistryError: it is a generator function, or cannot be called with one argument.
    """
    if not callable(hook) or isinstance(hook, type):
        raise RegistryError(f"{_WANTED}, got {hook!r}")
    role = f"hook {name_of(hook)}"
    if inspect.isgeneratorfunction(hook) or inspect.isasyncgenfunction(hook):
        raise RegistryError(f"{role} yields, and its code would never run: {_WANTED}")
    check_takes_one(hook, role, "the event")
    return EventHook(hook, events)


def checked_events(events: Iterable[object]) -> frozenset[type]:
    """Check and return the classes of events that were passed to `jobs.on`.

    Raises:
        RegistryError: there are none, or one is no event class.
    """
    given = tuple(events)
    if not given:
        raise RegistryError("jobs.on() names no event: give it classes of outboxq.events, such as @jobs.on(JobDied)")
    return frozenset(map(_checked_event, given))


def _checked_event(event: object) -> type:
    if not isinstance(event, type) or event not in _EVENTS:
        raise RegistryError(
            f"jobs.on takes classes of outboxq.events, such as @jobs.on(JobDied, JobRetried), got {event!r}; for all "
            "events there is Jobs(hooks=[...])"
        )
    if event in _OF_SUPERVISOR:
        raise RegistryError(
            f"no hook of a registry receives {event.__name__}: it is an event of the process that keeps the relays "
            "running, which runs none of your code, and logs it"
        )
    if event in _OF_PRODUCERS:
        raise RegistryError(
            f"no hook of a registry receives {event.__name__}: it is an event of sessions and inboxes, which call the "
            "hooks of their engine: create_engine(..., execution_options={'outboxq_hooks': [hook]})"
        )
    return event
