"""SIGTERM and SIGINT, and the death of a parent: what asks a process to stop."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Within the block SIGTERM and SIGINT call `stop`, in the main thread; elsewhere they are the program's own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def stop_when_parent_dies(read_end: int, stop: Callable[[], None]) -> None:
    """Call `stop` at the end of the pipe `read_end`, whose writer is the parent."""

    def watch() -> None:
        # Nothing is ever written: this returns when the last writer has died.
        os.read(read_end, 1)
        stop()

    threading.Thread(target=watch, name="outboxq-parent-watch", daemon=True).start()
