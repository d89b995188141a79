"""A relay process for tests, which dies or loses its connections at a step of its way that the test has chosen.

`python -m outboxq.testing` runs it: one line of JSON on standard input is its order, the end of standard input the
death of its parent. Started by `outboxq.testing.crashes.RelayProcess`.
"""

import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import msgspec
import psycopg

from outboxq.config import RelayConfig
from outboxq.database.urls import psycopg_url
from outboxq.errors import ConfigError
from outboxq.fault_points import FaultPoint, fault_action
from outboxq.handlers.registry import Jobs
from outboxq.relay.relay import Relay
from outboxq.relay.signals import stop_when_parent_dies

_TERMINATE = (
    "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name = %s AND pid <> pg_backend_pid()"
)
_STILL_THERE = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY (%s)"
_TERMINATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOrder:
    """What a relay process is told; the URL's application_name is the relay's name."""

    target: str
    url: str = field(repr=False)
    config: RelayConfig
    kill_at: FaultPoint | None = None
    terminate_at: FaultPoint | None = None
    passing: int = 1
    log_level: str = "WARNING"


@contextmanager
def on_passing(point: FaultPoint, passing: int, act: Callable[[], None]) -> Iterator[None]:
    """Within the block, call `act` when this process passes `point` for the `passing`-th time (from 1), and only then.

    All slots of the process count together; the one that arrives last calls it.
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
    """Within the block, SIGKILL this process when it passes `point` for the `passing`-th time (from 1).

    Nothing is cleaned up and nobody is told: run it in a process of its own.
    """
    return on_passing(point, passing, lambda: os.kill(os.getpid(), signal.SIGKILL))


def terminate_backends(url: str) -> None:
    """End, in the server, the connections that have the application name of `url` now, and see them gone."""
    plain = psycopg_url(url)
    name = str(plain.query["application_name"])
    own = plain.set(drivername="postgresql").update_query_dict({"application_name": "outboxq terminator"})
    with psycopg.connect(own.render_as_string(hide_password=False), autocommit=True) as connection:
        pids = [pid for pid, _ in connection.execute(_TERMINATE, [name]).fetchall()]
        deadline = time.monotonic() + _TERMINATE_SECONDS
        while connection.execute(_STILL_THERE, [pids]).fetchone() != (0,) and time.monotonic() < deadline:
            time.sleep(0.01)


def load_target(target: str) -> Jobs:
    """Import the registry that `MODULE:ATTRIBUTE` names.

    Raises:
        ConfigError: something else stands there.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"expected MODULE:ATTRIBUTE, for example myapp.jobs:jobs, got {target!r}")
    found: object = importlib.import_module(module_name)
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, Jobs):
        raise ConfigError(f"{target} is a {type(found).__name__}, and a relay needs an outboxq.Jobs")
    return found


def main() -> None:
    """Obey the order on standard input, until SIGTERM or the parent's death."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=RelayOrder)
    logging.basicConfig(level=order.log_level, format="%(asctime)s %(levelname)s [%(process)d] %(message)s")
    relay = Relay(order.url, load_target(order.target), order.config)
    stop_when_parent_dies(sys.stdin.fileno(), relay.stop)
    with _fault(order):
        relay.run()


def _fault(order: RelayOrder) -> AbstractContextManager[None]:
    if order.kill_at is not None:
        return kill_process_at(order.kill_at, order.passing)
    if order.terminate_at is not None:
        return on_passing(order.terminate_at, order.passing, lambda: terminate_backends(order.url))
    return nullcontext()
