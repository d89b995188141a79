"""The thread that calls the registry's hooks, so that slow ones hold up no slot for long.

Each relay process has one. It calls the hooks one after the other, and owns an event loop for async ones. Events wait
in a queue of bounded length; those of one slot reach the hooks in their order.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from outboxq.emitter import forget
from outboxq.events import Event
from outboxq.forks import await_here, call_here, runs_here
from outboxq.handlers.function import name_of
from outboxq.handlers.hooks import EventHook
from outboxq.relay.limits import HookLimits
from outboxq.relay.threads import BoundedStart

logger = logging.getLogger("outboxq.relay")


class HookThread:
    """Calls the hooks of a registry with events, in its own thread, from `start` to `finish`.

    Without hooks there is no thread, and `put` accepts no event.

    Attributes:
        failures: The number of errors that hooks raised, those of the hooks given to `Relay` included.
        dropped: The number of events that did not reach the registry's hooks because the hooks were too slow.
    """

    def __init__(self, hooks: Sequence[EventHook], limits: HookLimits) -> None:
        self.failures = 0
        self.dropped = 0
        self._hooks = hooks
        self._wanted = frozenset(event for hook in hooks for event in hook.events)
        self._limits = limits
        self._thread = BoundedStart(self._run, "outboxq-hooks")
        # Its lock guards the fields below; it is notified of each change.
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._is_open = False
        self._is_telling = False
        # True after the queue was full: events are dropped until half of it is delivered.
        self._is_behind = False
        self._logged_at = float("-inf")
        self._ends_at: float | None = None

    def start(self) -> None:
        if self._hooks:
            self._is_open = True
            self._thread.start()

    def wants(self, kind: type[Event]) -> bool:
        return kind in self._wanted

    def put(self, event: Event) -> bool:
        """Queue an event for the hooks. Returns False if no hook wants the event, or if it is dropped.

        If the queue is full, the caller waits `hold_seconds` for room. If there is none by then, the event is dropped,
        and so are later ones, without waiting, until half of the queue is delivered, so that slow hooks do not delay a
        slot at each event.
        """
        if type(event) not in self._wanted:
            return False
        with self._changed:
            if not self._is_behind:
                self._changed.wait_for(
                    lambda: self._has_room() or self._is_behind or not self._is_open, self._limits.hold_seconds
                )
            if self._is_open and not self._is_behind and self._has_room():
                self._events.append(event)
                self._changed.notify_all()
                return True
            self._is_behind = True
            self.dropped += 1
            dropped = self.dropped
            is_due = self._is_open and time.monotonic() - self._logged_at >= self._limits.log_seconds
            if is_due:
                self._logged_at = time.monotonic()
        if is_due:
            logger.error(
                "hooks are too slow, so that they are not told all events: dropped=%d",
                dropped,
                extra={"outboxq_dropped": dropped},
            )
        return False

    def settle(self) -> None:
        """Wait until the hooks have received all queued events.

        All calls of `settle` and `finish` together wait for `finish_seconds` at most.
        """
        with self._changed:
            if self._ends_at is None:
                self._ends_at = time.monotonic() + self._limits.finish_seconds
            remaining = max(0.0, self._ends_at - time.monotonic())
            self._changed.wait_for(lambda: not (self._events or self._is_telling), remaining)

    def finish(self) -> None:
        """Deliver the last events and end the thread, or abandon it if a hook is slow. A second call does nothing."""
        if not self._is_open:
            return
        self.settle()
        with self._changed:
            self._is_open = False
            is_late, left = self._is_telling, tuple(self._events)
            self._events.clear()
            self.dropped += len(left)
            self._changed.notify_all()
        for event in left:
            forget(event)
        if is_late or left:
            logger.error(
                "hooks did not end within %g s, and are left behind: dropped=%d",
                self._limits.finish_seconds,
                len(left),
                extra={"outboxq_dropped": len(left)},
            )
        else:
            self._thread.join(self._limits.finish_seconds)

    def report(self, hook: Callable[..., object], event: Event) -> None:
        """Count and log the error that a hook raised. Called in the `except` block that caught the error."""
        with self._changed:
            self.failures += 1
        # By its name, because the object that it is bound to may be a secret, or refuse to be shown.
        name = name_of(hook)
        extra = {"outboxq_hook": name, "outboxq_hook_event": type(event).__name__}
        logger.exception("a hook failed: hook=%s event=%s", name, type(event).__name__, extra=extra)

    def _has_room(self) -> bool:
        return len(self._events) < self._limits.waiting_events

    def _run(self) -> None:
        # The event loop is made when a hook first needs one.
        runner = asyncio.Runner()
        try:
            while (event := self._take()) is not None:
                for hook in self._hooks:
                    if hook.wants(event):
                        self._call(hook, event, runner)
                forget(event)
                # Otherwise the event would live until the next one.
                del event
        finally:
            runner.close()

    def _take(self) -> Event | None:
        """Wait for the next event and return it; return None when the thread is to end."""
        with self._changed:
            self._is_telling = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._events or not self._is_open)
            if not self._events:
                return None
            self._is_telling = True
            event = self._events.popleft()
            self._is_behind = self._is_behind and len(self._events) > self._limits.waiting_events // 2
            self._changed.notify_all()
            return event

    def _call(self, hook: EventHook, event: Event, runner: asyncio.Runner) -> None:
        try:
            returned = call_here(hook.function, event)
            if inspect.isawaitable(returned):
                error = runner.run(_error_of(returned, self._limits.await_seconds))
                if error is not None:
                    raise error
        except BaseException:  # noqa: BLE001  # a hook may raise anything; signals reach the main thread only
            self.report(hook.function, event)


async def _error_of(awaitable: Awaitable[object], seconds: float) -> BaseException | None:
    """Await the coroutine of an async hook, for `seconds` at most; return the error that it raised, if any.

    The error is not raised, because a KeyboardInterrupt or SystemExit in a task would end the event loop.
    """
    runs_here(asyncio.get_running_loop())
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            await await_here(awaitable)
    except BaseException as error:  # noqa: BLE001  # raised again by the caller
        late = TimeoutError(f"the hook took longer than {seconds:g} s for one event")
        return late if deadline.expired() else error
    return None
