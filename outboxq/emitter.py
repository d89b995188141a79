"""The emitter: passes each event to hooks, and after the last one drops the traceback of its exception."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeAlias, cast, get_args

from outboxq.events import CountedEvent, Event, Hook, JobDied, JobRetried
from outboxq.forks import call_here

logger = logging.getLogger("outboxq.hooks")

# The execution option of an engine whose sessions, inboxes and effects report to hooks.
HOOKS_OPTION = "outboxq_hooks"

_COUNTED = frozenset(get_args(CountedEvent))
_LARGEST_FAILURE = 10_000
_FAILURES = (JobRetried, JobDied)
_OF_EXCEPTIONS = vars(BaseException)


HasUse: TypeAlias = Callable[[], bool]


class EventQueue(Protocol):
    """The queue of events for hooks that run in another thread; `Emitter` puts events into it."""

    def wants(self, kind: type[Event]) -> bool:
        """Return True if events of this class are accepted."""
        ...

    def put(self, event: Event) -> bool:
        """Accept an event, or return False. The queue calls `forget` for an accepted event after its hooks have run."""
        ...


class Emitter:
    """Passes events to hooks; a hook that fails is reported to `on_failure` and never breaks a job.

    A hook with an attribute `events`, a set of classes, receives events of these classes; any other hook receives all
    but `CountedEvent`. If a hook has a method `use_of`, which takes a class and returns a function, events of that
    class may be left out while the function returns False.

    Args:
        later: The queue of hooks in another thread: receives each event after the hooks here were called.
    """

    def __init__(
        self, hooks: Iterable[Hook], on_failure: Callable[[Hook, Event], None], later: EventQueue | None = None
    ) -> None:
        self._hooks = tuple(hooks)
        self._on_failure = on_failure
        self._later = later
        # By class: the hooks that receive it, and True if the queue accepts it.
        self._receivers: dict[type[Event], tuple[tuple[Hook, ...], bool]] = {}

    def __call__(self, event: Event) -> None:
        """Pass `event` to every hook, in order; then drop the traceback of its exception."""
        hooks, is_wanted_later = self._receivers.get(type(event)) or self._find(type(event))
        for hook in hooks:
            try:
                call_here(hook, event)
            except BaseException as error:
                # User code: every error is reported with its traceback. Ctrl-C arrives in the main thread only.
                self._on_failure(hook, event)
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
        if not (is_wanted_later and self._later is not None and self._later.put(event)) and type(event) in _FAILURES:
            forget(event)

    def use_of(self, kind: type[Event]) -> HasUse:
        """Return a function to call before an event of this class is made; False means that no hook needs the event."""
        hooks, is_wanted_later = self._find(kind)
        uses_of = [getattr(hook, "use_of", None) for hook in hooks]
        if is_wanted_later or None in uses_of:
            return lambda: True
        uses: list[HasUse] = [use_of(kind) for use_of in uses_of if use_of]
        # A single function without nested calls, because it is called for each batch.
        return uses[0] if len(uses) == 1 else lambda: any(has_use() for has_use in uses)

    def _find(self, kind: type[Event]) -> tuple[tuple[Hook, ...], bool]:
        hooks = tuple(hook for hook in self._hooks if _receives(hook, kind))
        found = self._receivers[kind] = hooks, self._later is not None and self._later.wants(kind)
        return found


def _receives(hook: Hook, kind: type[Event]) -> bool:
    events: frozenset[type] | None = getattr(hook, "events", None)
    return kind not in _COUNTED if events is None else kind in events


def hand_to_hooks(options: Mapping[str, object], event: Event) -> None:
    """Pass an event to the hooks in the execution options of an engine or connection, in this thread."""
    for hook in cast("Iterable[Hook]", options.get(HOOKS_OPTION, ())):
        try:
            hook(event)
        except Exception:
            # User code: its errors do not affect the caller's work.
            logger.exception("a hook failed: event=%s", type(event).__name__)


def forget(event: Event) -> None:
    """Drop the traceback of an event's exception after all hooks have run, to free the handler's variables in it."""
    if isinstance(event, _FAILURES) and event.exception is not None:
        drop_tracebacks(event.exception)


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an exception, its causes and its contexts, to free memory.

    The frames of a traceback refer to the handler's variables and, through the calling frames, to the exception itself.
    So all of them would stay in memory until the garbage collector runs.
    """
    pending, seen = [error], {id(error)}
    while pending and len(seen) < _LARGEST_FAILURE:
        each = pending.pop()
        # As Python itself does it: frozen classes refuse assignment, and users' classes may give these attributes other
        # meanings.
        _OF_EXCEPTIONS["__traceback__"].__set__(each, None)
        before = [_OF_EXCEPTIONS["__cause__"].__get__(each), _OF_EXCEPTIONS["__context__"].__get__(each)]
        if issubclass(type(each), BaseExceptionGroup):
            before += vars(BaseExceptionGroup)["exceptions"].__get__(each)
        for one in before:
            if one is not None and id(one) not in seen:
                seen.add(id(one))
                pending.append(one)
