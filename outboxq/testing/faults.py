"""Faults that a process causes to itself at a chosen fault point (a named step of a job's life), for tests."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import psycopg

from outboxq.database.urls import psycopg_url
from outboxq.fault_points import FaultPoint, fault_action

_TERMINATE = (
    "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name = %s AND pid <> pg_backend_pid()"
)
_STILL_THERE = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY (%s)"
_TERMINATE_SECONDS = 10.0


@contextmanager
def on_passing(point: FaultPoint, passing: int, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` within the block when this process passes the fault point for the `passing`-th time, counted from 1.

    The passings of all threads and tasks of this process are counted together. The thread or task with this passing
    calls `act`, for example to kill the process there.
    """
    lock, passed = threading.Lock(), 0

    def count(name: FaultPoint) -> None:
        nonlocal passed
        if name != point:
            return
        with lock:
            passed += 1
            is_it = passed == passing
        if is_it:
            act()

    with fault_action(count):
        yield


def kill_process_at(point: FaultPoint, passing: int = 1) -> AbstractContextManager[None]:
    """Send SIGKILL to this process within the block when it passes the fault point for the `passing`-th time (from 1).

    Nothing is cleaned up and nothing is reported: use it in a process of its own.
    """
    return on_passing(point, passing, lambda: os.kill(os.getpid(), signal.SIGKILL))


def terminate_backends(url: str) -> None:
    """End, in the server, all connections with the application name of `url`; wait up to 10 s until they are gone."""
    plain = psycopg_url(url)
    name = str(plain.query["application_name"])
    own = plain.set(drivername="postgresql").update_query_dict({"application_name": "outboxq terminator"})
    with psycopg.connect(own.render_as_string(hide_password=False), autocommit=True) as connection:
        pids = [pid for pid, _ in connection.execute(_TERMINATE, [name]).fetchall()]
        deadline = time.monotonic() + _TERMINATE_SECONDS
        while connection.execute(_STILL_THERE, [pids]).fetchone() != (0,) and time.monotonic() < deadline:
            time.sleep(0.01)
