"""Waiting for a state instead of for a time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# How long a broken program holds its test up. Nothing is held to it: on a busy machine a process starts in half a
# minute.
PATIENCE = 120.0


def wait_until(condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Poll until `condition` is true; its value. Fails, naming what was waited for, after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {seconds} s in vain for: {what}")
        time.sleep(0.02)
