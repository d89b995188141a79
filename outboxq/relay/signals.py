"""Requests to stop a process: SIGTERM, SIGINT, and the death of its parent.

The first signal is a request; the second ends the process at once, by that signal. Then the database server rolls back
open transactions.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

from outboxq.handlers.loading import StoppedEarly

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None
# The former handlers of the signals that are taken over: children that users' code forks restore them.
_before: dict[int, Handler] = {}


# The signals that the calling thread had blocked before it forked.
_masks = threading.local()


def _block() -> None:
    # Otherwise a signal to a child that has just begun would stop the parent, through the pipe that they share, or be
    # lost.
    if _before:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _unblock() -> None:
    if (before := _masks.__dict__.pop("before", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _give_back() -> None:
    for number, handler in _before.items():
        # A handler that the application has installed since is kept.
        if getattr(signal.getsignal(number), "__module__", None) == __name__:
            signal.signal(number, handler)
    _before.clear()
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_give_back)


class _Early:
    """Handles a SIGTERM that arrives before the relay's work has begun: it ends the process with code 0."""

    was_asked = False

    @classmethod
    def end(cls, _number: int, _frame: FrameType | None) -> None:
        # If the imported code swallows the exception, the relay stops as soon as it begins.
        cls.was_asked = True
        # Not through sys.stderr, whose buffer may be in use.
        os.write(2, b"outboxq was told to stop before it had begun\n")
        raise StoppedEarly(0)


def end_in_order_until_begun() -> None:
    """Make SIGTERM end the process with code 0 until `stop_signals` is called, because imports may take a second."""
    _before[signal.SIGTERM] = signal.SIG_DFL
    signal.signal(signal.SIGTERM, _Early.end)


@contextmanager
def stop_signals(stop: Callable[[], None], *, before_death: Callable[[], None] | None = None) -> Iterator[None]:
    """Make the first SIGTERM or SIGINT in the block call `stop`, and the next one end the process by that signal.

    Only in the main thread; in other threads the handlers of the program stay. A signal handler that was installed from
    C (by a program that embeds Python, for example) stays too, because Python could not restore it.

    Args:
        before_death: Called at the second signal, before the process ends. Without it the kernel ends the process, even
            if Python code can no longer run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    read_end, write_end = os.pipe()

    def watch() -> None:
        byte = os.read(read_end, 1)
        os.close(read_end)
        # The buffer is empty if the pipe is closed.
        if byte:
            stop()

    # In a thread, because a signal handler interrupts the main thread, which may hold a lock that `stop` takes.
    threading.Thread(target=watch, name="outboxq-signal-watch", daemon=True).start()
    found = {number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) is not None}
    previous = {number: signal.SIG_DFL if handler == _Early.end else handler for number, handler in found.items()}
    taken_over = previous.keys() - _before.keys()
    _before.update((number, previous[number]) for number in taken_over)
    second = signal.SIG_DFL if before_death is None else _ending(before_death)

    def ask(_number: int, _frame: FrameType | None) -> None:
        for number in previous:
            signal.signal(number, second)
        os.write(write_end, b"!")

    try:
        for number in previous:
            signal.signal(number, ask)
        if _Early.was_asked:
            stop()
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in taken_over:
            _before.pop(number, None)
        os.close(write_end)


def _ending(before_death: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    """Make a signal handler that calls `before_death`, and then ends the process by the signal."""

    def end(number: int, _frame: FrameType | None) -> None:
        try:
            before_death()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return end


def stop_when_parent_dies(read_end: int, stop: Callable[[], None]) -> None:
    """Start a thread that calls `stop` when the pipe `read_end` ends, because the parent has died or closed its end."""

    def watch() -> None:
        # Nothing is ever written: this returns when the last writer has died, or has closed its end.
        os.read(read_end, 1)
        stop()

    threading.Thread(target=watch, name="outboxq-parent-watch", daemon=True).start()
