"""The emitter: hands each event to the hooks, and keeps no traceback of an event's exception afterwards."""

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from outboxq.events import Event, Hook, JobDied, JobRetried

_LARGEST_FAILURE = 10_000
# A union that is written out is made anew at each call, which is made for each job.
_FAILURES = (JobRetried, JobDied)
_OF_EXCEPTIONS = vars(BaseException)


class EventQueue(Protocol):
    """Events that wait to be told in another thread."""

    def put(self, event: Event) -> bool:
        """Take an event, and call `forget` for it once it was told; False if the event is not taken."""
        ...


class Emitter:
    """Hands events to hooks; a hook that fails is reported to `on_failure` and never breaks a job.

    Args:
        later: Is given each event after the hooks.
    """

    def __init__(
        self, hooks: Iterable[Hook], on_failure: Callable[[Hook, Event], None], later: EventQueue | None = None
    ) -> None:
        self._hooks = tuple(hooks)
        self._on_failure = on_failure
        self._later = later

    def __call__(self, event: Event) -> None:
        """Hand `event` to every hook, in order; when all were told, drop the traceback of its exception."""
        for hook in self._hooks:
            try:
                hook(event)
            except BaseException as error:
                # User code: reported with its traceback, whatever it raises. Ctrl-C comes to the main thread alone.
                self._on_failure(hook, event)
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
        if self._later is None or not self._later.put(event):
            forget(event)


def forget(event: Event) -> None:
    """Drop the traceback of an event's exception, once all hooks were told the event."""
    if isinstance(event, _FAILURES) and event.exception is not None:
        drop_tracebacks(event.exception)


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an exception and of all that led to it.

    Their frames hold what the handler had in its variables, and, by way of the frames that called them, the exception
    itself: all of it would stay until the garbage collector comes to it.
    """
    pending, seen = [error], {id(error)}
    while pending and len(seen) < _LARGEST_FAILURE:
        each = pending.pop()
        # As Python itself does it: frozen classes refuse it, and users' can give these attributes other meanings.
        _OF_EXCEPTIONS["__traceback__"].__set__(each, None)
        before = [_OF_EXCEPTIONS[name].__get__(each) for name in ("__cause__", "__context__")]
        if issubclass(type(each), BaseExceptionGroup):
            before += vars(BaseExceptionGroup)["exceptions"].__get__(each)
        for one in before:
            if one is not None and id(one) not in seen:
                seen.add(id(one))
                pending.append(one)
