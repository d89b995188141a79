"""How often the driver waits for the server: the round trips of what runs meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest


@contextmanager
def driver_waits(
    driver: type[psycopg.Connection[Any] | psycopg.AsyncConnection[Any]] = psycopg.Connection,
) -> Iterator[list[threading.Thread]]:
    """The threads that have waited within the block, one for each time."""
    waits: list[threading.Thread] = []
    original = driver.wait

    def counting(self: object, *arguments: Any, **options: Any) -> object:
        waits.append(threading.current_thread())
        return original(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(driver, "wait", counting)
        yield waits
